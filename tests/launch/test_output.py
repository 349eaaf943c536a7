"""Frames survive any cutting; lines of two ranks never mix; the message names the first cause."""

from __future__ import annotations

import io
import os
import random
import resource
from pathlib import Path

import pytest

from qsgd_hpc.launch.command import Command
from qsgd_hpc.launch.mpi import Family, Launcher
from qsgd_hpc.launch.options import RunOptions
from qsgd_hpc.launch.output import (
    HELD_BYTES,
    Decoder,
    Ended,
    Ledger,
    LineSink,
    Output,
    RankFiles,
    Raw,
    Started,
    explain,
    list_ranks,
)
from qsgd_hpc.launch.run import Session, _raw
from qsgd_hpc.launch.supervise import END, ERR, OUT, START, encode

TOKEN = "0a1b2c3d"


def _frames() -> bytes:
    token = TOKEN.encode()
    return (
        b"ssh: warning\n"
        + encode(token, START, 3, b"42 nid0001")
        + encode(token, OUT, 3, bytes(range(256)))
        + b"\x1enot ours\x1e"
        + encode(token, ERR, 12, b"oops\n")
        + encode(token, END, 3, b"-9")
        + b"tail\x1e0a"
    )


@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
def test_frames_decode_alike_however_the_stream_is_cut(size: int) -> None:
    data, decoder = _frames(), Decoder(TOKEN)
    events = [e for i in range(0, len(data), size) for e in decoder.feed(data[i : i + size])]
    events += decoder.finish()
    assert [e for e in events if not isinstance(e, Raw)] == [
        Started(3, "nid0001", 42),
        Output(3, False, bytes(range(256))),
        Output(12, True, b"oops\n"),
        Ended(3, -9),
    ]
    raw = b"".join(e.data for e in events if isinstance(e, Raw))
    assert raw == b"ssh: warning\n\x1enot ours\x1etail\x1e0a"


class _Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_lines_of_two_ranks_never_mix_and_no_byte_is_lost() -> None:
    random.seed(1)
    stream, left = io.BytesIO(), {}
    sink = LineSink(stream)
    for rank in range(3):
        left[rank] = b"".join(
            b"%d" % rank * random.choice([1, 50, 3 * HELD_BYTES]) + b"\n" for _ in range(9)
        )
    sent = dict(left)
    while any(left.values()):
        rank = random.choice([r for r in left if left[r]])
        size = random.choice([1, 10, HELD_BYTES // 2])
        sink.write(rank, left[rank][:size])
        left[rank] = left[rank][size:]
    for rank in sent:
        sink.close(rank)
    sink.finish()
    lines = stream.getvalue().splitlines(keepends=True)
    assert all(len(set(line.strip())) == 1 for line in lines)
    for rank, text in sent.items():
        assert b"".join(line for line in lines if line[:1] == b"%d" % rank) == text


def test_a_last_line_without_newline_is_kept_apart_from_the_next_rank() -> None:
    stream = io.BytesIO()
    sink = LineSink(stream)
    sink.write(0, b"zero")
    sink.write(1, b"one")
    sink.close(1)
    sink.close(0)
    sink.finish()
    assert stream.getvalue() == b"one\nzero"


def test_ranks_that_have_written_whole_lines_cost_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flushed: list[int] = []
    flush = LineSink._flush

    def counted(sink: LineSink, owner: int) -> bool:
        flushed.append(owner)
        return flush(sink, owner)

    monkeypatch.setattr(LineSink, "_flush", counted)
    sink = LineSink(io.BytesIO())
    for rank in range(100):
        sink.write(rank, b"line\n")
        sink.close(rank)
    assert flushed == list(range(100))


def test_every_line_gets_its_rank_once() -> None:
    stream = io.BytesIO()
    sink = LineSink(stream, prefix=True)
    sink.write(1, b"a\n\nb\rc")
    sink.write(1, b"d\n")
    sink.finish()
    assert stream.getvalue() == b"[1] a\n[1] \n[1] b\rcd\n"


def test_a_prompt_is_shown_on_a_terminal_after_a_pause() -> None:
    now_s = 0.0
    stream = _Terminal()
    sink = LineSink(stream, clock=lambda: now_s)
    sink.write(0, b"50%")
    sink.tick()
    assert stream.getvalue() == b""
    now_s = 0.3
    sink.tick()
    assert stream.getvalue() == b"50%"
    now_s = 2.0
    sink.write(1, b"hi\n")
    assert stream.getvalue() == b"50%\nhi\n"


def _ledger(*ends: Ended, ranks: int = 4) -> Ledger:
    started = {r: Started(r, f"nid{r}", 100 + r) for r in range(ranks)}
    ledger = Ledger(ranks, started)
    for end in ends:
        ledger.record(end, now_s=0.0)
    return ledger


def test_the_first_failure_is_named_with_host_pid_and_signal() -> None:
    ledger = _ledger(Ended(1, 0), Ended(2, -9), Ended(0, 1), Ended(3, 1))
    text = explain(ledger, 0, 25)
    assert text is not None
    assert text.startswith("rank 2 on host nid2 (pid 102) was killed by SIGKILL (out of memory")
    assert text.endswith("; ranks 0, 3 ended after it")
    assert ledger.exit_code(0) == 137


@pytest.mark.parametrize(("late_s", "named"), [(0.5, 2), (2.0, 0)])
def test_a_crash_heard_right_after_a_failure_is_its_cause(late_s: float, named: int) -> None:
    """Rank 0 saw rank 2's connection close, and its own end was reported first."""
    ledger = _ledger(Ended(0, 1))
    ledger.record(Ended(2, -9), now_s=late_s)
    ledger.record(Ended(3, -11), now_s=late_s)
    text = explain(ledger, 0, 25)
    assert text is not None
    assert text.startswith(f"rank {named} on host nid{named}")


@pytest.mark.parametrize(
    ("before", "after"), [((Ended(2, 1),), (Ended(1, 3), Ended(0, -11))), ((), (Ended(1, 3),))]
)
def test_the_rank_that_others_name_as_the_first_to_leave_is_the_cause(
    before: tuple[Ended, ...], after: tuple[Ended, ...]
) -> None:
    """Rank 1 called sys.exit(3), and waited for the others before it exited."""
    ledger = _ledger(*before)
    ledger.note(b"RankFailedError: rank 1 left the job (its script ended) without")
    for end in after:
        ledger.record(end, now_s=30.0)
    text = explain(ledger, 0, 25)
    assert text is not None
    assert text.startswith("rank 1 on host nid1 (pid 101) exited with code 3")
    assert ledger.exit_code(0) == 3


def test_ranks_that_outlive_their_grace_are_named() -> None:
    ledger = _ledger(Ended(1, 3))
    ledger.overdue = (0, 2, 3)
    assert explain(ledger, 0, 25) == (
        "rank 1 on host nid1 (pid 101) exited with code 3; "
        "ranks 0, 2, 3 were still running 25 s later and were ended"
    )
    assert ledger.exit_code(255) == 3


def test_success_says_nothing() -> None:
    ledger = _ledger(*(Ended(r, 0) for r in range(4)))
    assert explain(ledger, 0, 25) is None
    assert ledger.exit_code(0) == 0


def test_a_lost_host_is_no_success() -> None:
    ledger = _ledger(Ended(0, 0), ranks=2)
    text = explain(ledger, 0, 25)
    assert text is not None
    assert "rank 1 ran on nid1" in text
    assert ledger.exit_code(0) == 1


def test_long_lists_of_ranks_are_shortened() -> None:
    assert list_ranks(range(1000)) == "1000 ranks (0, 1, 2, 3, 4, 5, 6, 7, ...)"


def test_ranks_that_do_not_start_in_time_are_named(capfd):
    options = RunOptions(2, ("true",), start_timeout_s=0.5)
    launcher = Launcher(Family.HYDRA, Path("sleep"), "")
    session = Session(options, launcher, "token", grace_s=1, warning_s=60)
    assert session.run(Command(("sleep", "60"), {}), dict(os.environ)) == 1
    said = capfd.readouterr().err
    assert "ranks 0, 1 had not started 0.5 s after mpiexec (--start-timeout)" in said


def test_many_ranks_have_files_below_a_low_limit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        files = RankFiles(tmp_path, 100)
        files.write(99, False, b"up")
        files.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (tmp_path / "rank.99" / "stdout").read_bytes() == b"up"


def test_text_printed_before_the_run_precedes_the_ranks_output(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        print("before", file=log)
        _raw(log).write(b"rank\n")
    assert (tmp_path / "log").read_text() == "before\nrank\n"
