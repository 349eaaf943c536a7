"""Operations that the calling thread carries out itself, and when it leaves them to the engine."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import HorovodInternalError, RankFailedError
from tests.engine.ranks import Rank, on_ranks
from tests.processes import until

DEADLINE_S = 120


@pytest.mark.parametrize("coding", (None, _core.CodecSpec(bits=4)))
@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_replicas_are_those_of_the_engines_thread(size, coding):
    def program(me, now):
        x = np.random.default_rng(me.rank).standard_normal(3000).astype(np.float32)
        for _ in range(10):
            me.allreduce("x", x, "average", coding, now=now).wait()
        return x.tobytes()

    assert len({*on_ranks(size, lambda me: program(me, True))}) == 1
    assert on_ranks(size, lambda me: program(me, True)) == on_ranks(
        size, lambda me: program(me, False)
    )


def test_the_calling_thread_does_the_work():
    def worked_here(**when):
        workers = []  # the first warning of NaN comes from whoever carries out the operation
        log = lambda _: workers.append(threading.get_ident())  # noqa: E731
        me = Rank(_core.ThreadWorld(1), 0, nonfinite="warn", log=log)
        x = np.full(10, np.nan, np.float32)
        me.allreduce("x", x, check_finite=True, **when).wait()
        me.engine.shutdown("the test ended")
        return workers == [threading.get_ident()]

    assert not worked_here()
    # Unless the engine's thread is just looking whether it has something to do.
    until(lambda: worked_here(now=True))


def test_every_kind_of_operation_can_be_now():
    def program(me):
        rows = np.full((2 * (me.rank + 1), 3), me.rank, np.int32)
        gathered = me.allgather("rows", rows, now=True)
        gathered.wait()
        word = np.full(5, me.rank, np.float64)
        me.broadcast("word", word, root=2, now=True).wait()
        swapped = me.alltoall("swap", np.arange(3.0) + 10 * me.rank, (1, 1, 1), now=True)
        swapped.wait()
        share = me.reducescatter("share", np.ones(3, np.float32), now=True)
        share.wait()
        me.barrier("all").wait()
        return [
            gathered.shape(), word[0], list(swapped.output().view(np.float64)),
            list(share.output().view(np.float32)),
        ]  # fmt: skip

    for rank, made in enumerate(on_ranks(3, program)):
        assert made == [[12, 3], 2, [rank, 10 + rank, 20 + rank], [3]]


def test_a_late_rank_is_waited_for_while_others_are_served():
    may_come, came = threading.Event(), threading.Event()

    def program(me):
        late, prompt = np.ones(10, np.float32), np.ones(20, np.float32)
        if me.rank == 1:
            for _ in range(5):
                me.allreduce("prompt", prompt, now=True).wait()
            came.set()
            assert may_come.wait(DEADLINE_S)
            me.allreduce("late", late, now=True).wait()
            return late[0], prompt[0]

        def others():
            for _ in range(5):
                me.allreduce("prompt", prompt, now=True).wait()
            assert came.wait(DEADLINE_S)
            before = me.engine.stats()["wait_time_s"]
            until(lambda: me.engine.stats()["wait_time_s"] > before + 0.05)
            may_come.set()

        beside = threading.Thread(target=others)
        beside.start()
        me.allreduce("late", late, now=True).wait()
        beside.join()
        return late[0], prompt[0]

    assert on_ranks(2, program) == [(2, 32)] * 2


def test_threads_of_a_program_may_all_do_so_beside_what_runs_in_the_background():
    def program(me):
        behind = [np.ones(50_000, np.float32) for _ in range(4)]
        handles = [me.allreduce(f"behind{i}", x) for i, x in enumerate(behind)]
        sums = []

        def some(number):
            for i in range(10):
                x = np.full(100, i, np.float32)
                me.allreduce(f"thread{number}", x, now=True).wait()
                sums.append(x[0] - 3 * i)

        threads = [threading.Thread(target=some, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for handle in handles:
            handle.wait()
        return sums == [0] * 30 and all((x == 3).all() for x in behind)

    assert on_ranks(3, program) == [True] * 3


def test_disagreement_raises_on_every_rank():
    def program(me):
        with pytest.raises(HorovodInternalError, match="shape"):
            me.allreduce("w", np.ones(10 + me.rank, np.float32), now=True).wait()
        x = np.ones(10, np.float32)
        me.allreduce("w", x, now=True).wait()
        return x[0]

    assert on_ranks(3, program) == [3] * 3


def test_a_rank_that_dies_ends_it():
    def program(me):
        if me.rank == 0:
            me.allreduce("w", np.ones(10, np.float32), now=True).wait()
        else:
            me.engine.abort("rank 1 was killed")

    error, _ = on_ranks(2, program)
    assert isinstance(error, RankFailedError)
    assert "rank 1 was killed" in str(error)


REFUSALS = """
    import threading
    from qsgd_hpc import _core

    engine = _core.Engine.over_threads(_core.ThreadWorld(1), 0, _core.EngineConfig())
    engine.shutdown("the test ended")
    operation = _core.Operation(kind="allreduce", name="x", shape=[1])

    def submit(now):
        for _ in range(5000):
            try:
                engine.start(operation, 64, 64, object(), now)
            except ValueError:
                continue

    threads = [threading.Thread(target=submit, args=(now,)) for now in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_refused_operations_of_several_threads_do_not_block_each_other():
    # In a process of its own, which nothing in Python could end: the GIL was one of the two locks.
    command = [sys.executable, "-c", textwrap.dedent(REFUSALS)]
    subprocess.run(command, check=True, timeout=DEADLINE_S)


# Rank 1 is ready for "second", but stands still, so that rank 0 waits in the midst of it.
STRUCK = """
    import os, signal, threading
    import numpy as np
    from qsgd_hpc import _core
    from tests.engine.ranks import Rank

    world = _core.ThreadWorld(2)
    me, other = Rank(world, 0), Rank(world, 1)
    go_on = threading.Event()
    theirs = np.ones(10, np.float32)
    second = other.allreduce("second", theirs)
    first = other.allreduce("first", np.ones(10, np.float64))
    first.add_done_callback(go_on.wait)
    me.allreduce("first", np.ones(10, np.float64)).wait()

    def strike():
        before = me.engine.stats()["wait_time_s"]
        ready.set()
        while me.engine.stats()["wait_time_s"] == before:
            pass
        os.kill(os.getpid(), SIGNAL)

    ready = threading.Event()
    threading.Thread(target=strike, daemon=True).start()
    ready.wait()
    mine = np.ones(10, np.float32)
"""


def struck(program, number):
    """Return what the program said, once the operation was its own thread's.

    The engine's thread may be about to fall asleep, or look for a moment whether there is work;
    then it keeps the operation, and the program says "elsewhere".
    """
    script = (textwrap.dedent(STRUCK) + textwrap.dedent(program)).replace(
        "SIGNAL", f"signal.{number}"
    )
    for _ in range(20):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if "elsewhere" not in done.stdout:
            return done.stdout
    raise AssertionError("the engine's thread took every one of 20 operations")


def test_ctrl_c_ends_a_wait_in_the_midst_of_it():
    said = struck(
        """
        try:
            me.allreduce("second", mine, now=True).wait()
        except KeyboardInterrupt:
            print("stopped:", me.engine.aborted() or "elsewhere", flush=True)
        os._exit(0)
        """,
        "SIGINT",
    )
    assert said.startswith("stopped: the program was interrupted during an operation")


def test_a_handler_of_signals_may_look_but_not_wait():
    said = struck(
        """
        def handle(*_):
            for call in (
                lambda: me.allreduce("third", np.ones(10, np.float32)),
                lambda: second.wait(),
                lambda: me.engine.shutdown("the handler said so"),
            ):
                try:
                    call()
                    print("elsewhere")
                    break
                except Exception as error:
                    print(type(error).__name__, error)
            go_on.set()

        signal.signal(signal.SIGUSR1, handle)
        me.allreduce("second", mine, now=True).wait()
        second.wait()
        print(mine[0], theirs[0], flush=True)
        os._exit(0)
        """,
        "SIGUSR1",
    )
    *refused, sums = said.splitlines()
    assert sums == "2.0 2.0"
    assert [line.split(" by a signal handler")[0] for line in refused] == [
        "UsageError an operation was submitted",
        "UsageError an operation was waited for",
        "UsageError shutdown() was called",
    ]
