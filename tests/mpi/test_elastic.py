"""A job that loses a rank ends, and the next one resumes at its last commit."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gate

SCRIPT = """
import os, signal, sys
import torch, qsgd_hpc.torch as hvd

hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
inner = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(60), shuffle=False)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=0)

@hvd.elastic.run
def train(state):
    print("begin", hvd.rank(), state.batch, float(model.weight.detach()), len(sampler), flush=True)
    for batch in range(state.batch, 6):
        if batch == 4 and hvd.rank() == 1 and sys.argv[1] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        sampler.record_batch(batch, 2)
        state.batch = batch + 1
        state.commit()
    print("end", hvd.rank(), float(model.weight.detach()), flush=True)

with torch.no_grad():
    model.weight.fill_(100.0 + hvd.rank())
train(state)
"""


def lines(done, word):
    return sorted(line for line in done.stdout.splitlines() if line.startswith(word))


def test_a_job_that_lost_a_rank_is_resumed_on_fewer(run_ranks, python, tmp_path):
    script, file = tmp_path / "train.py", tmp_path / "state.pt"
    script.write_text(SCRIPT)
    command = [python, str(script)]
    lost = run_ranks(3, *command, "die", QSGD_ELASTIC_CHECKPOINT=str(file))
    assert lost.returncode != 0
    assert lines(lost, "begin") == [f"begin {r} 0 100.0 20" for r in range(3)]
    assert f"The last commit is in {file}" in lost.stderr
    # Three ranks processed four batches of two each: 36 samples are left to two ranks.
    again = run_ranks(2, *command, "live", QSGD_ELASTIC_CHECKPOINT=str(file))
    assert again.returncode == 0, again.stderr
    assert lines(again, "begin") == [f"begin {r} 4 96.0 18" for r in range(2)]
    assert lines(again, "end") == [f"end {r} 94.0" for r in range(2)]
    assert again.stderr.count(f"resuming from the commit in {file}") == 1
