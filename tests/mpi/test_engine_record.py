"""What every rank leaves of a script that knows nothing of records."""

from __future__ import annotations

import json

PROGRAM = """
import sys, torch
import qsgd_hpc.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(80, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
for step in range(24):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 80)).square().mean()
    loss.backward()
    optimizer.step()
    if step % 8 == 7:
        hvd.allreduce(loss.detach(), name="loss")
if "fail" in sys.argv:
    raise ValueError("the script is at fault")
"""
SHAPES = {"0.weight": 80 * 400, "0.bias": 400, "2.weight": 400 * 10, "2.bias": 10}


def test_a_plain_training_loop_leaves_a_record_per_rank(run_ranks, python, tmp_path):
    records = tmp_path / "records.jsonl"
    done = run_ranks(2, python, "-c", PROGRAM, QSGD_RECORDS=str(records), QSGD_BITS="4")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in records.read_text().splitlines()]
    assert [r["event"] for r in found] == ["engine", "engine"]
    assert sorted(r["rank"] for r in found) == [0, 1]
    for r in found:
        assert (r["ranks"], r["steps"], r["warmup_steps"]) == (2, 24, 10)
        assert 0 < r["coding_s"] < r["comm_s"] < r["comm_time_s"]
        assert 0 < r["step_s"] < 60
        assert 0 < r["exposed_s"] < r["step_mean_s"]
        assert 0 < r["nmse"] < 0.5
        # A few numbers beside the gradients, which travel in half a byte or a little more.
        gradient_bytes = 4 * 24 * sum(SHAPES.values())
        assert gradient_bytes < r["gradient_bytes"] < gradient_bytes + 1000
        assert r["wire_bytes"] < r["gradient_bytes"] / 2
    first = next(r for r in found if r["rank"] == 0)
    assert sorted(elements for elements, _ in first["layers"]) == sorted(SHAPES.values())
    assert 0 < first["backward_s"] == first["layers"][-1][1]
    assert all("layers" not in r for r in found if r["rank"] != 0)


def test_a_script_that_fails_leaves_none(run_ranks, python, tmp_path):
    records = tmp_path / "records.jsonl"
    done = run_ranks(2, python, "-c", PROGRAM, "fail", QSGD_RECORDS=str(records))
    assert done.returncode != 0
    assert not records.exists()


def test_records_that_cannot_be_written_are_a_warning(run_ranks, python, tmp_path):
    path = str(tmp_path / "not there" / "records.jsonl")
    done = run_ranks(2, python, "-c", PROGRAM, QSGD_RECORDS=path)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "'engine' record" in line]
    assert len(warnings) == 2
    assert all(path in line and "folder that exists" in line for line in warnings)
