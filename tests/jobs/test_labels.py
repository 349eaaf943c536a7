"""One rank's lines of an output that many ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsgd_hpc.jobs.commands.jobs import Output


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "output.log"


def test_a_progress_bar_stays_in_its_line(
    log: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log.write_bytes(b"[0] 0%\r50%\r100%\n[1] other\n[0] \x0c\x1c\x85\xff end\n")
    Output(log, 0, 2).print_new()
    assert capfdbinary.readouterr().out == b"0%\r50%\r100%\n\x0c\x1c\x85\xff end\n"


def test_an_unfinished_line_is_printed_once_and_at_the_end_only(
    log: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = Output(log, 1, 2)
    log.write_bytes(b"[1] one\n[1] tw")
    output.print_new()
    assert capfdbinary.readouterr().out == b"one\n"
    log.write_bytes(b"[1] one\n[1] two, then kil")
    output.print_new(last=True)
    output.print_new(last=True)
    assert capfdbinary.readouterr().out == b"two, then kil"
