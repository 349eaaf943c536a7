"""The timeline: what the engine writes, and what is read out of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner

from qsgd_hpc import _core
from qsgd_hpc.errors import HorovodInternalError, UsageError
from qsgd_hpc.timeline import traces
from qsgd_hpc.timeline.cli import timeline as verbs
from qsgd_hpc.timeline.writing import Files
from tests.engine.ranks import on_ranks

CODING = _core.CodecSpec(bits=4)
PHASES = {"B": set(), "E": set(), "X": {"dur"}, "i": {"s"}, "M": {"args"}}


def check_format(events):
    """The rules of the Trace Event Format that viewers depend on."""
    open_spans = {}
    for event in events:
        assert PHASES[event["ph"]] <= event.keys()
        row = event["pid"], event["tid"]
        assert all(isinstance(number, int) for number in row)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        spans = open_spans.setdefault(row, [])
        if event["ph"] == "B":
            spans.append(event["name"])
        if event["ph"] == "E":
            assert spans.pop() == event["name"]
    assert not any(open_spans.values())


def traced(tmp_path, program, ranks=2, mark_cycles=False, **config):
    """Run program(rank) with a timeline on every rank; return each rank's events."""

    def run(me):
        me.engine.start_timeline(str(tmp_path / f"{me.rank}.json"), mark_cycles)
        program(me)
        me.engine.stop_timeline()

    assert on_ranks(ranks, run, **config) == [None] * ranks
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for events in found:
        check_format(events)
    return found


def row(events, tensor):
    """Return the events of one tensor, in order of time."""
    tid = next(e["tid"] for e in events if e["ph"] == "M" and e["args"].get("name") == tensor)
    events = [e for e in events if e["tid"] == tid and e["ph"] != "M"]
    return sorted(events, key=lambda event: event["ts"])


def names(events):
    return [event["name"] for event in events if event["ph"] != "E"]


def test_a_row_shows_who_came_when_and_what_was_done(tmp_path):
    def program(me):
        time.sleep(0.05 * me.rank)
        me.allreduce("allreduce.w", np.ones(5120, np.float32), coding=CODING).wait()

    first, second = (row(events, "allreduce.w") for events in traced(tmp_path, program))
    assert names(first) == ["NEGOTIATE_ALLREDUCE", "rank 0", "rank 1", "QUEUE", "ALLREDUCE", "SRA"]
    assert names(second) == ["NEGOTIATE_ALLREDUCE", "rank 1", "QUEUE", "ALLREDUCE", "SRA"]
    by_name = {event["name"]: event for event in first}
    assert by_name["rank 1"]["ts"] - by_name["rank 0"]["ts"] > 40_000
    assert by_name["ALLREDUCE"]["ts"] >= by_name["QUEUE"]["ts"] >= by_name["rank 1"]["ts"]


def test_who_came_last_is_known_through_other_ranks(tmp_path):
    """In a chain, rank 1 tells rank 0 of all others at once."""

    def program(me):
        for late_s in (0, 0.3):  # less than what is told apart
            me.barrier("all are here").wait()
            time.sleep(late_s if me.rank == 2 else 0)
            me.allreduce("allreduce.w", np.ones(4)).wait()

    first, *_ = traced(tmp_path, program, ranks=4, fan_out=1)
    marks = [e["args"]["rank"] for e in row(first, "allreduce.w") if e["name"].startswith("rank ")]
    assert sorted(marks[4:]) == [0, 1, 2, 3]
    assert marks[-1] == 2


def test_an_operation_tells_bytes_bits_and_error(tmp_path):
    def program(me):
        x = np.random.default_rng(me.rank).standard_normal(51200).astype(np.float32)
        me.allreduce("w", x, coding=CODING).wait()

    for events in traced(tmp_path, program):
        (args,) = [e["args"] for e in row(events, "w") if e["name"] == "ALLREDUCE"]
        assert args["elements"] == 51200
        assert args["bits"] == pytest.approx(4 + 32 / 512)
        assert 51200 // 2 < args["wire_bytes"] < 51200
        assert 0.005 < args["nmse"] < 0.1
        assert args["algorithm"] == "sra"
        assert (args["fused"], args["process_set"]) == (1, 0)


def test_fused_tensors_share_the_bytes(tmp_path):
    def program(me):
        me.allreduce("hold", np.ones(3_000_000, np.float32)).wait()
        handles = [me.allreduce(f"t{i}", np.ones(1000, np.float32)) for i in range(20)]
        for handle in handles:
            handle.wait()

    events = traced(tmp_path, program)[0]
    spans = [e for i in range(20) for e in row(events, f"t{i}") if e["name"] == "ALLREDUCE"]
    assert len(spans) == 20
    assert sum(e["args"]["wire_bytes"] for e in spans) == pytest.approx(20 * 1000 * 4, rel=0.01)


def test_adasum_and_other_operations_have_their_names(tmp_path):
    def program(me):
        me.allreduce("a", np.ones(10, np.float32), "adasum").wait()
        me.broadcast("b", np.ones(10, np.float32)).wait()

    events = traced(tmp_path, program)[0]
    assert names(row(events, "a"))[-2:] == ["ALLREDUCE", "ADASUM"]
    assert names(row(events, "b"))[0] == "NEGOTIATE_BROADCAST"
    assert names(row(events, "b"))[-1] == "BROADCAST"


def test_what_ranks_disagree_on_ends_its_negotiation_with_the_reason(tmp_path):
    def program(me):
        with pytest.raises(HorovodInternalError):
            me.allreduce("w", np.ones(3 + me.rank, np.float32)).wait()

    for events in traced(tmp_path, program):
        assert "shape" in row(events, "w")[-1]["args"]["error"]


def test_cycles_are_marked_on_request_alone(tmp_path):
    def program(me):
        me.allreduce("w", np.ones(3, np.float32)).wait()

    for marked in (True, False):
        events = traced(tmp_path, program, mark_cycles=marked)[0]
        assert ("CYCLE_START" in [event["name"] for event in events]) == marked


def test_the_program_waits_are_shown(tmp_path):
    def program(me):
        time.sleep(0.1 * me.rank)
        me.allreduce("w", np.ones(3, np.float32)).wait()

    events = traced(tmp_path, program)[0]
    (wait,) = [event for event in row(events, "program") if event["name"] == "WAIT"]
    assert wait["dur"] > 80_000


def test_names_may_hold_any_characters(tmp_path):
    name = 'a "quoted\\ name\n\tof größe'

    def program(me):
        me.allreduce(name, np.ones(3, np.float32)).wait()

    assert row(traced(tmp_path, program)[0], name)


def test_a_timeline_may_be_written_again_after_it_was_stopped(tmp_path):
    stopped = threading.Barrier(2)  # else one rank's "second" reaches the other's first timeline

    def program(me):
        for name in ("first", "second"):
            me.engine.start_timeline(str(tmp_path / f"{name}{me.rank}.json"))
            with pytest.raises(UsageError, match="stop_timeline"):
                me.engine.start_timeline(str(tmp_path / "no.json"))
            me.allreduce(name, np.ones(3, np.float32)).wait()
            me.engine.stop_timeline()
            stopped.wait()

    assert on_ranks(2, program) == [None, None]
    for name, other in (("first", "second"), ("second", "first")):
        text = (tmp_path / f"{name}0.json").read_text()
        assert f'"{name}"' in text
        assert f'"{other}"' not in text


def test_a_path_that_cannot_be_written_is_a_usage_error(tmp_path):
    def program(me):
        me.engine.start_timeline(str(tmp_path / "missing" / "t.json"))

    (error,) = on_ranks(1, program)
    assert isinstance(error, UsageError)
    assert "missing" in str(error)


KILLED = """
import os, signal, sys, time
import numpy as np
from tests.engine.ranks import Rank
from qsgd_hpc import _core
me = Rank(_core.ThreadWorld(1), 0)
me.engine.start_timeline(sys.argv[1])
for i in range(50):
    me.allreduce(f"t{i}", np.ones(10, np.float32)).wait()
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_file_of_a_killed_process_holds_what_was_done(tmp_path):
    path = tmp_path / "killed.json"
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(path.read_text())
    events = traces.load(path)
    check_format(events)
    assert len(traces.summarise(events).tensors) == 50
    path.write_text(path.read_text()[:-20])  # in the midst of an event
    assert len(traces.load(path)) == len(events) - 1


def test_ranks_files_merge_into_one_that_still_follows_the_rules(tmp_path):
    def program(me):
        me.allreduce("w", np.ones(3, np.float32)).wait()

    found = traced(tmp_path, program)
    files = [str(tmp_path / f"{rank}.json") for rank in range(2)]
    merged = tmp_path / "all.json"
    result = CliRunner().invoke(verbs, ["merge", *files, "-o", str(merged)])
    assert result.exit_code == 0, result.output
    events = json.loads(merged.read_text())
    check_format(events)
    assert len(events) == sum(map(len, found))
    with pytest.raises(UsageError, match="both belong to rank 0"):
        traces.merge([tmp_path / "0.json", merged], tmp_path / "no.json")


def span(name, tid, ts, dur, **args):
    return {"ph": "X", "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}


def named(tid, name):
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}


WORK = {"wire_bytes": 400, "elements": 100, "bits": 32}
SAMPLE = [
    named(1, "program"),
    named(3, "w"),
    named(4, "v"),
    {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "pid": 0, "tid": 3, "ts": 0},
    {"ph": "E", "name": "NEGOTIATE_ALLREDUCE", "pid": 0, "tid": 3, "ts": 30},
    span("QUEUE", 3, 30, 10),
    span("ALLREDUCE", 3, 40, 60, **WORK),
    span("DIRECT", 3, 40, 60),
    span("ALLREDUCE", 4, 80, 20, **WORK),
    span("WAIT", 1, 70, 20),
    span("WAIT", 1, 95, 5),
]


def test_exposed_time_is_where_the_program_waited_for_the_work():
    summary = traces.summarise(SAMPLE)
    assert (summary.span_us, summary.waiting_us, summary.busy_us) == (100, 25, 60)
    w, v = summary.tensors["w"], summary.tensors["v"]
    assert (w.negotiating_us, w.queued_us, w.working_us, w.exposed_us) == (30, 10, 60, 25)
    assert (v.working_us, v.exposed_us) == (20, 15)
    assert (w.operations, w.wire_bytes, w.elements) == (1, 400, 100)


def test_show_lists_the_busiest_tensors_first(tmp_path):
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"traceEvents": SAMPLE}))
    result = CliRunner().invoke(verbs, ["show", str(file), "--top", "1"])
    lines = result.output.splitlines()
    assert lines[1].split() == ["w", "1", "100", "32", "0.000", "0.03", "0.01", "0.06", "42%"]
    assert "2 tensors, 1 rank(s)" in result.output
    assert "programs waiting 25%" in " ".join(result.output.split())


def test_names_of_tensors_are_shown_whole_and_as_they_are(tmp_path):
    name = "gradient." + 20 * "layer." + "[head][/tail]"
    file = tmp_path / "t.json"
    file.write_text(json.dumps(SAMPLE).replace('"w"', json.dumps(name)))
    result = CliRunner().invoke(verbs, [str(file)])
    assert name in result.output, result.output


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("no timeline\n")
    with pytest.raises(UsageError, match="not a timeline"):
        traces.load(file)
    for text in (
        '{"traceEvents": 5}',
        '[{"ph": "X"}, {"ph": "B", "ts": "soon"}]',
        '[{"ph": "i", "pid": [0]}, {"ph": "i", "args": null}]',
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match="not a timeline"):
            traces.load(file)


def test_the_trace_of_a_profiler_is_no_traceback(tmp_path):
    # PyTorch's profiler names its own process "Spans", and has metadata without arguments.
    events = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": 7,
            "tid": 0,
            "ts": 1,
            "args": {"name": "python"},
        },
        {"ph": "M", "name": "process_labels", "pid": "Spans", "tid": 0},
        {"ph": "X", "name": "aten::add", "pid": 7, "tid": 7, "ts": 1.5, "dur": 2},
        {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "T", "ts": 1, "dur": 9},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 10},
    ]
    file = tmp_path / "torch.json"
    file.write_text(json.dumps({"traceEvents": [*events, *SAMPLE]}))
    result = CliRunner().invoke(verbs, ["show", str(file)])
    assert result.exit_code == 0
    assert "2 tensors, 1 rank(s), 0.000 s" in result.output
    file.write_text(json.dumps(events))
    result = CliRunner().invoke(verbs, ["show", str(file)])
    assert "trace of another program" in str(result.exception)


def test_a_file_is_not_merged_into_itself(tmp_path):
    file, same = tmp_path / "t.json", tmp_path / "same.json"
    file.write_text(json.dumps(SAMPLE))
    same.symlink_to(file)
    for target in (file, same):
        with pytest.raises(UsageError, match="one of the files to merge"):
            traces.merge([file], target)
    assert json.loads(file.read_text()) == SAMPLE


def test_a_merged_file_that_cannot_be_written_is_a_usage_error(tmp_path):
    file = tmp_path / "t.json"
    file.write_text(json.dumps(SAMPLE))
    with pytest.raises(UsageError, match="No such file or directory"):
        traces.merge([file], tmp_path / "missing" / "all.json")


@pytest.mark.parametrize(
    ("path", "all_ranks", "of_rank_3", "merged"),
    [
        ("t.json", False, "t.json", "t.json"),
        ("t.json", True, "t.rank3.json", "t.json"),
        ("a/t{rank}.json", True, "a/t3.json", "a/tall.json"),
    ],
)
def test_files_of_ranks_are_named_by_rank(path, all_ranks, of_rank_3, merged):
    files = Files(path, all_ranks)
    assert (str(files.of_rank(3)), str(files.merged)) == (of_rank_3, merged)
