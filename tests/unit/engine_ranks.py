"""Ranks as threads of the test, each with an engine of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from qsgd_hpc import _core


class Rank:
    """One rank's engine and a little sugar."""

    def __init__(self, world, rank, ranks_per_node=None, **config):
        settings = _core.EngineConfig(**{"stall_warning_s": 0.0, **config})
        self.engine = _core.Engine.over_threads(world, rank, settings, ranks_per_node)
        self.rank = rank

    def allreduce(self, name, x, op="sum", coding=None, check_finite=False, **more):
        arguments = {"dtype": str(x.dtype), "prescale": 1.0, "postscale": 1.0, **more}
        return self.engine.allreduce(
            name=name, source=x.ctypes.data, target=x.ctypes.data, shape=list(x.shape),
            op=op, coding=coding, check_finite=check_finite, keep=x, **arguments,
        )  # fmt: skip

    def broadcast(self, name, x, root=0, **more):
        return self.engine.broadcast(
            name=name, target=x.ctypes.data, shape=list(x.shape), dtype=str(x.dtype), root=root,
            keep=x, **more,
        )  # fmt: skip

    def allgather(self, name, x, **more):
        return self.engine.allgather(name=name, **source(x), **more)

    def alltoall(self, name, x, splits=(), **more):
        return self.engine.alltoall(name=name, splits=splits, **source(x), **more)

    def reducescatter(self, name, x, op="sum", **more):
        arguments = {"prescale": 1.0, "postscale": 1.0, **more}
        return self.engine.reducescatter(name=name, op=op, **source(x), **arguments)


def source(x):
    """Return the arguments that describe an input."""
    return {"source": x.ctypes.data, "shape": list(x.shape), "dtype": str(x.dtype), "keep": x}


def output(handle, dtype):
    """Wait, and return the result that the core has made."""
    handle.wait()
    return handle.output().view(dtype).reshape(handle.shape())


def on_ranks(size, program, **config):
    """Run program(rank) on every rank at once; return results or exceptions, by rank."""
    world = _core.ThreadWorld(size)

    def run(rank):
        me = Rank(world, rank, **config)
        try:
            return program(me)
        except Exception as error:
            return error
        finally:
            me.engine.shutdown("the test ended")

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
