"""Ranks as threads of the test, each with an engine of its own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from qsgd_hpc import _core

# The engine's tests hold whatever the tree in which the ranks agree; 0 is a star, and 1 a chain.
FAN_OUT = int(os.environ.get("QSGD_TEST_FAN_OUT", "0"))


class Rank:
    """One rank's engine and a little sugar."""

    def __init__(self, world, rank, ranks_per_node=None, **config):
        settings = _core.EngineConfig(**{"stall_warning_s": 0.0, "fan_out": FAN_OUT, **config})
        self.engine = _core.Engine.over_threads(world, rank, settings, ranks_per_node)
        self.rank = rank

    def start(
        self, kind, name, x, *, in_place, now=False, group="", group_size=0, device=-1, stream=0,
        **fields,
    ):  # fmt: skip
        described = {"shape": list(x.shape), "dtype": str(x.dtype), **fields}
        if group:
            described["group"] = _core.Group(group, group_size)
        pointer = x.ctypes.data
        operation = _core.Operation(kind=kind, name=name, **described)
        target = pointer if in_place else 0
        return self.engine.start(operation, pointer, target, x, now, device, stream)

    def allreduce(self, name, x, op="sum", coding=None, check_finite=False, **more):
        """``more`` may hold fields of the coding, which is a spec, and of the operation."""
        names = ("auto_bits", "auto_code", "error_feedback", "nmse_budget")
        choices = {key: more.pop(key) for key in names if key in more}
        if coding is not None:
            coding = _core.Coding(coding, **choices)
        fields = {"lasting": True, "check_finite": check_finite, **more}
        return self.start("allreduce", name, x, in_place=True, op=op, coding=coding, **fields)

    def broadcast(self, name, x, root=0, **more):
        return self.start("broadcast", name, x, in_place=True, root=root, **more)

    def allgather(self, name, x, **more):
        return self.start("allgather", name, x, in_place=False, **more)

    def alltoall(self, name, x, splits=(), **more):
        return self.start("alltoall", name, x, in_place=False, splits=splits, **more)

    def reducescatter(self, name, x, op="sum", **more):
        return self.start("reducescatter", name, x, in_place=False, op=op, **more)

    def barrier(self, name, **more):
        return self.engine.start(_core.Operation(kind="barrier", name=name, **more), now=True)

    def join(self):
        return self.engine.start(_core.Operation(kind="join"))

    def add_process_set(self, ranks):
        return self.engine.start(_core.Operation(kind="add_process_set", ranks=ranks))

    def remove_process_set(self, number):
        return self.engine.start(_core.Operation(kind="remove_process_set", ranks=[number]))


def device_output(handle, dtype):
    """Wait, and return a copy of the result of a tensor on a device."""
    handle.wait()
    made = np.empty(handle.shape(), dtype)
    handle.copy_output(made.ctypes.data, 0)
    return made


def output(handle, dtype):
    """Wait, and return the result that the core has made."""
    handle.wait()
    return handle.output().view(dtype).reshape(handle.shape())


def on_ranks(size, program, *, of_rank=lambda _: {}, **config):
    """Run program(rank) on every rank at once; return results or exceptions, by rank.

    Args:
        of_rank: settings of one rank alone.
    """
    world = _core.ThreadWorld(size)

    def run(rank):
        me = Rank(world, rank, **{**config, **of_rank(rank)})
        try:
            return program(me)
        except Exception as error:
            return error
        finally:
            me.engine.shutdown("the test ended")

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
