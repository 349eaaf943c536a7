"""The job toolkit on a real Slurm of four nodes: real ranks, real ends, real faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs import JobRequest, JobState, registry
from qsgd_hpc.jobs.events import read_events
from tests.mpi.ecosystem import KINDS, SCRIPT, STEPS, printed, under_torchrun
from tests.processes import until
from tests.slurm.bed import Bed

pytestmark = pytest.mark.timeout(1800)
WAIT_S = 240.0
SLEEP = "import time; print('begun', flush=True); time.sleep(600)"

# Trains a small network with 4-bit gradients; saves itself when told to stop; goes on from there.
TRAINING = """
import hashlib, os, pathlib, sys, time
import torch
import qsgd_hpc
import qsgd_hpc.torch as hvd

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    sgd, named_parameters=model.named_parameters(), compression=hvd.Compression.qsgd(bits=4)
)
checkpoint = pathlib.Path(sys.argv[1])
stop_at = [int(step) for step in sys.argv[2:]]
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=False)
    step = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    hvd.load_rounding_state(saved["rounding"])
while step < 60:
    data = torch.Generator().manual_seed(1000 * step + hvd.rank())
    x = torch.randn(32, 64, generator=data)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    step += 1
    if step in stop_at and hvd.rank() == 0:
        pathlib.Path(os.environ["QSGD_JOB_DIR"], "stop").touch()
        time.sleep(2.5)
    if qsgd_hpc.should_stop():
        if hvd.rank() == 0:
            torch.save(
                {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                 "rounding": hvd.rounding_state()},
                checkpoint,
            )
        print("stopped at", step, flush=True)
        qsgd_hpc.exit_for_resubmit()
assert all(p.isfinite().all() for p in model.parameters())
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest(), hvd.size(), hvd.cross_size(), flush=True)
"""

DDP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(64, 32))  # large enough to be compressed
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    own = torch.Generator().manual_seed(100 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(8, 64, generator=own)).square().mean().backward()
    optimizer.step()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
print("ddp", *(os.environ[n] for n in names), model.module.weight.sum().item(), flush=True)
del model, optimizer
dist.destroy_process_group()
"""


def said(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def write(name: str, body: str) -> Path:
    path = Path(name)
    path.write_text(body)
    return path


def ended(*ids: str) -> list[jobs.Job]:
    found = jobs.wait(ids, WAIT_S)
    assert all(job.state.ended for job in found), found
    return found


def running(job: jobs.Job) -> None:
    """Wait until the job's script has printed something."""
    until(lambda: job.log_path.exists() and "begun" in job.log_path.read_text())


def weights(job: jobs.Job) -> set[str]:
    return {
        line.split("weights ")[1]
        for line in job.log_path.read_text().splitlines()
        if "weights " in line
    }


def cli(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qsgd_hpc", *words],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, **(env or {})},
    )


@pytest.mark.parametrize("site", ["bed", "mpiexec"])
def test_eight_ranks_on_two_nodes_train_to_equal_weights(bed: Bed, site: str) -> None:
    script = write("train.py", TRAINING)
    job = jobs.submit(JobRequest(script, ("none.pt",), nodes=2, site=site))
    (done,) = ended(job.id)
    assert done.state is JobState.COMPLETED, job.log_path.read_text()
    assert len(weights(done)) == 1
    assert next(iter(weights(done))).endswith(" 8 2")
    assert done.log_path.read_text().count("weights") == 8


def test_a_training_over_three_jobs_ends_with_the_weights_of_an_uninterrupted_one(bed: Bed) -> None:
    script = write("train.py", TRAINING)
    whole = jobs.submit(JobRequest(script, ("whole.pt",), nodes=2, ranks_per_node=2))
    parts = jobs.submit_all(
        JobRequest(script, ("parts.pt", "20", "41"), nodes=2, ranks_per_node=2, chain=4)
    )
    done = ended(whole.id, *(part.id for part in parts))
    assert [job.state.value for job in done] == ["COMPLETED"] + ["STOPPED"] * 2 + ["COMPLETED"] * 2
    assert "stopped at 20" in done[1].log_path.read_text()
    assert "stopped at 41" in done[2].log_path.read_text()
    assert len(weights(done[0])) == 1
    assert weights(done[3]) == weights(done[0])
    assert "nothing was left to do" in done[4].progress.why


@pytest.mark.parametrize("site", ["bed", "mpiexec"])
def test_a_script_for_torchrun_trains_on_two_nodes(bed: Bed, site: str) -> None:
    script = write("train.py", DDP)
    at_once = [
        jobs.submit(JobRequest(script, nodes=2, site=site, env=env))
        for env in ({}, {"QSGD_BITS": "4"})
    ]
    for done in ended(*(job.id for job in at_once)):
        text = done.log_path.read_text()
        assert done.state is JobState.COMPLETED, text
        compressed = "DDP sends gradients in 4 bits, with error feedback" in text
        assert compressed == ("QSGD_BITS" in done.request.env)
        ranks = sorted(line.split("ddp ")[1] for line in text.splitlines() if "ddp " in line)
        assert [line.split()[:5] for line in ranks] == [
            [str(rank), "8", str(rank % 4), "4", str(rank // 4)] for rank in range(8)
        ]
        assert len({line.split()[5] for line in ranks}) == 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_of_each_kind_trains_on_two_nodes_as_under_torchrun(bed: Bed, kind: str) -> None:
    for library in ("lightning", "transformers", "accelerate"):
        pytest.importorskip(library, reason="make ecosystem")
    env = {"OMP_NUM_THREADS": "1"}  # as torchrun has it: sums on more threads end otherwise
    at_once = {
        bits: jobs.submit(
            JobRequest(Path(SCRIPT), (kind, bits, STEPS, bits), nodes=2, ranks_per_node=1, env=env)
        )
        for bits in ("32", "4")
    }
    for bits, job in at_once.items():
        (done,) = ended(job.id)
        text = done.log_path.read_text()
        assert done.state is JobState.COMPLETED, text
        assert printed(text, 2) == under_torchrun(kind, bits)


def test_arguments_reach_the_script_as_given_and_execute_nothing(bed: Bed) -> None:
    body = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['V']]))"
    script = write('it\'s a "dump" $(touch pwned).py', body)
    words = ("", "a b", "$(touch pwned)", "`touch pwned`", "line\nbreak", "日本", "'", '"', ":")
    value = "x $(touch pwned)\n`y`"
    job = jobs.submit(JobRequest(script, words, env={"V": value}, name="hostile"))
    (done,) = ended(job.id)
    assert done.state is JobState.COMPLETED, done.log_path.read_text()
    line = next(line for line in done.log_path.read_text().splitlines() if "[[" in line)
    assert json.loads(line[line.index("[[") :]) == [list(words), value]
    assert not list(Path().glob("*pwned"))[1:]


def test_ranks_have_the_script_s_variables_although_the_job_was_submitted_without_any(
    bed: Bed,
) -> None:
    script = write("shown.py", "import os; print('seen', os.environ['V'])")
    request = JobRequest(script, env={"V": "7"}, extra=("#SBATCH --export=NONE",))
    (done,) = ended(jobs.submit(request).id)
    text = done.log_path.read_text()
    assert done.state is JobState.COMPLETED and "seen 7" in text, text


def test_an_array_is_one_job_with_a_log_for_each_task(bed: Bed) -> None:
    script = write("task.py", "import sys; print(sys.argv[1:]); sys.exit(sys.argv[2] == '3')")
    request = JobRequest(script, array={"n": ("1", "2", "3")}, at_once=2, ranks_per_node=1)
    (done,) = ended(jobs.submit(request).id)
    assert done.state is JobState.FAILED
    assert done.progress.tasks == {"COMPLETED": 2, "FAILED": 1}
    seen = [cli("logs", "--task", str(n), done.id).stdout for n in range(3)]
    assert [str(["--n", str(n + 1)]) in seen[n] for n in range(3)] == [True] * 3


def test_dependencies_hold_and_a_failed_one_cancels_what_needs_it(bed: Bed) -> None:
    waits = "while not pathlib.Path('go').exists():\n    time.sleep(0.1)\n"
    fails = write("fails.py", f"import pathlib, time\n{waits}raise SystemExit(3)")
    runs = write("runs.py", "print('ran')")
    first = jobs.submit(JobRequest(fails, ranks_per_node=1))
    needs = jobs.submit(JobRequest(runs, ranks_per_node=1, after=(first.id,)))
    follows = jobs.submit(JobRequest(runs, ranks_per_node=1, after=(f"any:{first.id}",)))
    Path("go").touch()
    done = ended(first.id, needs.id, follows.id)
    assert [job.state.value for job in done] == ["FAILED", "CANCELLED", "COMPLETED"]
    assert done[0].exit_code == 3


def test_cancelled_jobs_end_with_all_their_ranks(bed: Bed) -> None:
    job = jobs.submit(JobRequest(write("sleep.py", SLEEP), nodes=2, ranks_per_node=2))
    running(job)
    jobs.cancel(job.id)
    (done,) = ended(job.id)
    assert done.state is JobState.CANCELLED
    until(lambda: "sleep.py" not in said("ps", "ax"))


def test_a_job_past_its_walltime_is_a_timeout(bed: Bed) -> None:
    job = jobs.submit(JobRequest(write("sleep.py", SLEEP), ranks_per_node=1, walltime_min=1))
    (done,) = ended(job.id)
    assert done.state is JobState.TIMEOUT


def test_a_requeued_job_runs_again_and_says_how_often(bed: Bed) -> None:
    body = """
import os, sys, pathlib
again = pathlib.Path("again")
if not again.exists():
    again.touch()
    sys.exit(85)
print("second run")
"""
    job = jobs.submit(JobRequest(write("again.py", body), ranks_per_node=1, requeue=True))
    (done,) = ended(job.id)  # Slurm holds a requeued job back for two minutes
    assert done.state is JobState.COMPLETED
    assert done.progress.restarts == 1
    assert "second run" in done.log_path.read_text()


def test_a_job_whose_node_dies_is_marked_and_goes_on_without_that_node(bed: Bed) -> None:
    body = """
import pathlib, time
state = pathlib.Path("checkpoint")
if state.exists():
    print("goes on from", state.read_text())
else:
    state.write_text("step 7")
    print("begun", flush=True)
    time.sleep(600)
"""
    job = jobs.submit(JobRequest(write("train.py", body), ranks_per_node=1))
    running(job)
    node = read_events(job.directory)[0]["host"]
    bed.kill_node(node)
    try:
        (done,) = ended(job.id)
        assert done.state is JobState.NODE_FAIL
        assert done.progress.bad_nodes == (node,)
        again = json.loads(cli("resubmit", "--json", job.id).stdout)
        (second,) = ended(again["id"])
        assert second.state is JobState.COMPLETED
        assert second.request.exclude == (node,)
        assert "goes on from step 7" in second.log_path.read_text()
        assert read_events(second.directory)[0]["host"] != node
    finally:
        bed.start_node(node)
        until(lambda: bed._idle() == bed.nodes)


def test_nodes_that_are_not_there_are_the_reason_for_waiting(bed: Bed) -> None:
    subprocess.run(
        ["scontrol", "update", "NodeName=nid0004", "State=DOWN", "Reason=test"], check=True
    )
    try:
        job = jobs.submit(JobRequest(write("runs.py", "print('ran')"), nodes=4, queue="regular"))
        until(lambda: "nid0004" in jobs.get(job.id).progress.why)
        assert jobs.get(job.id).state is JobState.QUEUED
    finally:
        subprocess.run(["scontrol", "update", "NodeName=nid0004", "State=RESUME"], check=True)
    (done,) = ended(job.id)
    assert done.state is JobState.COMPLETED


def test_a_scheduler_that_is_down_changes_no_state_and_loses_no_job(bed: Bed) -> None:
    job = jobs.submit(JobRequest(write("sleep.py", SLEEP), ranks_per_node=1))
    running(job)
    until(lambda: jobs.get(job.id).state is JobState.RUNNING)
    bed.stop("controller")
    try:
        shown = jobs.get(job.id)
        assert shown.state is JobState.RUNNING
        assert "does not answer" in shown.progress.silence
        for words in (["list"], ["status", job.id], ["wait", job.id, "--timeout", "1s"]):
            told = cli(*words)
            assert told.returncode == 4, told
            assert "RUNNING" in told.stdout
            assert "Slurm does not answer" in told.stdout
        refused = cli("cancel", job.id)
        assert refused.returncode == 4, refused
        assert f"{job.id} is not cancelled: scancel did not end the job" in refused.stderr
        assert f"qsgd-hpc cancel {job.id}" in refused.stderr
        assert jobs.get(job.id).known_at == shown.known_at
        with pytest.raises(LaunchError):
            jobs.submit(JobRequest(Path("sleep.py"), ranks_per_node=1))
    finally:
        bed.start_controller()
    until(lambda: not jobs.get(job.id).progress.silence)
    assert jobs.get(job.id).state is JobState.RUNNING
    jobs.cancel(job.id)
    assert ended(job.id)[0].state is JobState.CANCELLED


def test_an_end_is_known_after_squeue_has_forgotten_it(bed: Bed) -> None:
    job = jobs.submit(JobRequest(write("fails.py", "raise SystemExit(7)"), ranks_per_node=1))
    listed = ["squeue", "-h", "-t", "all", "-j", str(job.progress.scheduler_id)]
    until(lambda: not said(*listed).strip())
    done = jobs.get(job.id)
    assert (done.state, done.exit_code) == (JobState.FAILED, 7)


@pytest.mark.parametrize("key", [None, "once"])
def test_a_submission_cut_off_after_sbatch_is_found_again(
    bed: Bed, tmp_path: Path, key: str | None
) -> None:
    """The command dies between sbatch's answer and the record; nothing is lost or doubled."""
    write("runs.py", "print('ran')")
    tools = tmp_path / "tools"
    tools.mkdir()
    sbatch = shutil.which("sbatch")
    (tools / "sbatch").write_text(f'#!/bin/bash\n{sbatch} "$@"\nkill -KILL $PPID\n')
    (tools / "sbatch").chmod(0o755)
    named = ["--key", key] if key else []
    words = ["submit", "--json", "--ranks-per-node", "1", *named, "runs.py"]
    cut = cli(*words, env={"PATH": f"{tools}:{os.environ['PATH']}"})
    assert cut.returncode == -signal.SIGKILL
    (job_id,) = registry.ids()
    assert registry.load(job_id).progress.scheduler_id is None
    if key:
        assert json.loads(cli(*words).stdout)["id"] == job_id
    (done,) = ended(job_id)
    assert done.state is JobState.COMPLETED
    assert done.progress.scheduler_id
    assert registry.ids() == [job_id]
    query = ("sacct", "-X", "-n", "-P", "-S", "now-1hour", "-o", "JobID,SubmitLine")
    until(lambda: str(done.script_path) in said(*query))
    time.sleep(2)  # for a second job, if there were one, to reach the accounting
    assert said(*query).count(str(done.script_path)) == 1


def test_what_slurm_refuses_is_told_with_a_remedy_and_leaves_no_record(bed: Bed) -> None:
    write("runs.py", "")
    refused = cli("submit", "--account", "nobody", "runs.py")
    assert refused.returncode != 0
    assert "Use --account" in refused.stderr
    refused = cli("submit", "--nodes", "3", "--queue", "debug", "runs.py")
    assert "accepts 1 to 2 nodes, not 3" in refused.stderr
    assert not registry.ids()
