"""Timelines of real ranks: by environment, by call, and merged."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsgd_hpc.timeline import traces
from tests.timeline.test_timeline import check_format

PROGRAM = """
import sys
import numpy as np
import qsgd_hpc.arrays as hvd
from qsgd_hpc.runtime.basics import start_timeline, stop_timeline
hvd.init()
for path in sys.argv[1:]:
    start_timeline(file_path=path)
    hvd.allreduce(np.ones(1000, np.float32), name="w")
    stop_timeline()
hvd.allreduce(np.ones(1000, np.float32), name="last")
"""


def events_of(path: Path) -> list[traces.Event]:
    events = traces.load(path)
    check_format(events)
    return events


def ranks_in(events: list[traces.Event]) -> set[int]:
    return {event["pid"] for event in events}


def test_the_environment_starts_rank_0_alone_or_all_ranks(run_ranks, python, tmp_path):
    for all_ranks, ranks in (("0", {0}), ("1", {0, 1})):
        folder = tmp_path / all_ranks
        folder.mkdir()
        result = run_ranks(
            2, python, "-c", PROGRAM,
            QSGD_TIMELINE=str(folder / "t.json"), QSGD_TIMELINE_ALL_RANKS=all_ranks,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        events = events_of(folder / "t.json")
        assert ranks_in(events) == ranks
        assert any("last" in event.get("args", {}).get("name", "") for event in events)
        assert len(list(folder.iterdir())) == (3 if len(ranks) == 2 else 1)


def test_each_engine_of_a_process_has_a_file_of_its_own(run_ranks, python, tmp_path):
    again = PROGRAM.replace("hvd.init()", "hvd.init(); hvd.shutdown(); hvd.init()")
    result = run_ranks(2, python, "-c", again, QSGD_TIMELINE=str(tmp_path / "t.json"))
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.2.json", "t.json"]
    names = [e.get("args", {}).get("name", "") for e in events_of(tmp_path / "t.2.json")]
    assert any("last" in name for name in names)


@pytest.mark.gate
def test_calls_start_and_stop_it_and_ranks_share_a_time_axis(run_ranks, python, tmp_path):
    paths = [str(tmp_path / "alone.json"), str(tmp_path / "rank{rank}.json")]
    result = run_ranks(2, python, "-c", PROGRAM, *paths)
    assert result.returncode == 0, result.stderr
    assert ranks_in(events_of(tmp_path / "alone.json")) == {0}
    events = events_of(tmp_path / "rankall.json")
    assert ranks_in(events) == {0, 1}
    first, second = (
        next(e for e in events if e["name"] == "ALLREDUCE" and e["pid"] == rank) for rank in (0, 1)
    )
    # Both reduce together: neither can end before the other has begun.
    assert first["ts"] < second["ts"] + second["dur"]
    assert second["ts"] < first["ts"] + first["dur"]
    assert {e["args"]["rank"] for e in events if e["ph"] == "i" and e["pid"] == 0} == {0, 1}


def test_a_path_that_rank_0_cannot_write_is_an_error_on_all_ranks(run_ranks, python, tmp_path):
    path = tmp_path / "missing" / "t.json"
    result = run_ranks(2, python, "-c", PROGRAM, QSGD_TIMELINE=str(path))
    assert result.returncode != 0
    assert result.stderr.count("choose a path in a folder that exists") == 2
