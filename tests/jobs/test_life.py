"""Chains, arrays, dependencies, keys, stops and resubmission, with real jobs on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import registry, waiting
from qsgd_hpc.jobs.commands.jobs import follow
from qsgd_hpc.jobs.events import read_events
from tests.processes import until

pytestmark = pytest.mark.full

# Counts to 3 in a file, one number in each run, and then is done.
COUNTER = """
import pathlib, sys
seen = pathlib.Path("count")
n = int(seen.read_text()) + 1 if seen.exists() else 1
seen.write_text(str(n))
print("run", n)
sys.exit(0 if n == 3 else 85)
"""


def write(folder: Path, body: str) -> Path:
    script = folder / "job.py"
    script.write_text(body)
    return script


def states(*ids: str) -> list[str]:
    return [job.state.value for job in jobs.wait(ids, 120)]


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qsgd_hpc", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.gate
def test_a_chain_goes_on_after_each_stop_and_the_rest_has_nothing_to_do(place: Path) -> None:
    parts = jobs.submit_all(jobs.JobRequest(write(place, COUNTER), chain=5))
    waited = cli("wait", parts[0].id)
    assert waited.returncode == 0, waited
    ended = [jobs.get(part.id) for part in parts]
    assert [job.state.value for job in ended] == ["STOPPED"] * 2 + ["COMPLETED"] * 3
    assert [jobs.output(job.id).read_text() for job in ended[:3]] == [
        "run 1\n",
        "run 2\n",
        "run 3\n",
    ]
    assert (place / "count").read_text() == "3"
    assert "nothing was left to do" in ended[3].progress.why
    assert "nothing was left to do" in ended[4].progress.why


def test_a_chain_tells_each_part_how_many_came_before(place: Path) -> None:
    body = "import os, sys; print(os.environ.get('QSGD_ATTEMPT', '-')); sys.exit(85)"
    parts = jobs.submit_all(jobs.JobRequest(write(place, body), chain=3))
    assert states(*(part.id for part in parts)) == ["STOPPED"] * 3
    assert [jobs.output(part.id).read_text() for part in parts] == ["-\n", "1\n", "2\n"]
    assert cli("wait", parts[0].id).returncode == 85


def test_a_chain_does_not_go_on_from_a_failure(place: Path) -> None:
    parts = jobs.submit_all(
        jobs.JobRequest(write(place, "print('ran'); raise SystemExit(3)"), chain=3)
    )
    assert states(*(part.id for part in parts)) == ["FAILED"] * 3
    assert jobs.get(parts[0].id).exit_code == 3
    text = jobs.output(parts[2].id).read_text()
    assert "ran" not in text
    assert "failed, so there is nothing to go on from" in text
    assert jobs.get(parts[2].id).progress.why == f"not run, because {parts[1].id} failed"
    assert cli("wait", parts[0].id).returncode == 1


def test_a_chain_goes_on_after_a_part_that_its_walltime_has_ended(place: Path) -> None:
    body = """
import pathlib, sys, time
begun = pathlib.Path("begun")
if begun.exists():
    print("goes on")
else:
    begun.touch()
    time.sleep(600)
"""
    request = jobs.JobRequest(write(place, body), chain=2, walltime_min=0.05)
    parts = jobs.submit_all(request)
    assert states(*(part.id for part in parts)) == ["TIMEOUT", "COMPLETED"]
    assert jobs.output(parts[1].id).read_text() == "goes on\n"


def test_cancelling_a_part_cancels_what_continues_it(place: Path) -> None:
    body = "import time; time.sleep(300)"
    parts = jobs.submit_all(jobs.JobRequest(write(place, body), chain=3))
    jobs.cancel(parts[0].id)
    assert states(*(part.id for part in parts)) == ["CANCELLED"] * 3


def test_a_chain_is_stopped_at_a_checkpoint_once_its_later_parts_are_cancelled(place: Path) -> None:
    parts = jobs.submit_all(jobs.JobRequest(write(place, STOPS), ("x",), chain=3))
    log = jobs.output(parts[0].id)
    until(lambda: log.exists() and "ran" in log.read_text())
    jobs.cancel(parts[1].id)
    jobs.stop(parts[0].id)
    assert states(*(part.id for part in parts)) == ["STOPPED", "CANCELLED", "CANCELLED"]
    assert not any(jobs.output(part.id).exists() for part in parts[1:])


def test_no_part_of_a_chain_runs_after_the_failure_of_a_job_it_needs(place: Path) -> None:
    bad = jobs.submit(
        jobs.JobRequest(write(place, "import time; time.sleep(2); raise SystemExit(1)"))
    )
    (place / "next.py").write_text("print('ran')")
    parts = jobs.submit_all(jobs.JobRequest(Path("next.py"), after=(bad.id,), chain=3))
    assert states(bad.id, *(part.id for part in parts)) == ["FAILED"] + ["CANCELLED"] * 3


def test_a_job_runs_after_the_one_it_needs_and_not_after_its_failure(place: Path) -> None:
    bad = jobs.submit(
        jobs.JobRequest(write(place, "import time; time.sleep(2); raise SystemExit(1)"))
    )
    (place / "next.py").write_text("print('ran')")
    needs = jobs.submit(jobs.JobRequest(Path("next.py"), after=(bad.id,)))
    follows = jobs.submit(jobs.JobRequest(Path("next.py"), after=(f"any:{bad.id}",)))
    assert states(bad.id, needs.id, follows.id) == ["FAILED", "CANCELLED", "COMPLETED"]
    assert bad.id in jobs.get(needs.id).progress.why
    with pytest.raises(UsageError, match=f"--after {bad.id}: that job is FAILED"):
        jobs.submit(jobs.JobRequest(Path("next.py"), after=(bad.id,)))
    with pytest.raises(UsageError, match="--after local-99: no job 'local-99'"):
        jobs.submit(jobs.JobRequest(Path("next.py"), after=("local-99",)))


def test_an_array_runs_every_combination_with_its_own_output(place: Path) -> None:
    body = "import sys; print(sys.argv[1:]); sys.exit(sys.argv[-1] == 'b')"
    array = {"lr": ("0.1", "$(touch pwned)"), "mode": ("a", "b")}
    job = jobs.submit(jobs.JobRequest(write(place, body), ("--x", ":"), array=array))
    assert states(job.id) == ["FAILED"]
    job = jobs.get(job.id)
    assert job.progress.tasks == {"COMPLETED": 2, "FAILED": 2}
    seen = [job.task_log_path(n).read_text() for n in range(4)]
    assert seen == [
        f"{['--x', ':', '--lr', lr, '--mode', mode]}\n" for lr in array["lr"] for mode in "ab"
    ]
    assert not list(place.glob("pwned"))
    assert cli("logs", "--task", "2", job.id).stdout == seen[2]
    assert "--task 0 to 3" in cli("logs", job.id).stderr


STOPS = """
import pathlib, sys, time, qsgd_hpc
print("ran", flush=True)
if sys.argv[-1] == "1" or pathlib.Path("resumed").exists():
    sys.exit()
while not qsgd_hpc.should_stop():
    time.sleep(0.1)
qsgd_hpc.exit_for_resubmit()
"""


def test_an_array_that_is_asked_to_stop_starts_no_other_task_and_continues_from_there(
    place: Path,
) -> None:
    array = {"lr": ("1", "2", "3", "4")}
    first = jobs.submit(jobs.JobRequest(write(place, STOPS), array=array))
    log = first.task_log_path(1)
    until(lambda: log.exists() and "ran" in log.read_text())
    assert (
        "tasks that have not started will not run"
        in cli("cancel", "--at-checkpoint", first.id).stdout
    )
    assert states(first.id) == ["STOPPED"]
    ended = jobs.get(first.id)
    assert (ended.exit_code, ended.progress.tasks) == (85, {"COMPLETED": 1, "STOPPED": 3})
    assert [first.task_log_path(n).read_text()[:3] for n in range(4)] == ["ran"] * 2 + ["not"] * 2
    (place / "resumed").touch()
    second = jobs.resubmit(first.id)
    assert states(second.id) == ["COMPLETED"]
    assert jobs.get(second.id).progress.tasks == {"COMPLETED": 4}
    said = second.task_log_path(0).read_text()
    assert said == f"nothing left to do: this task has completed in {first.id}\n"
    assert [second.task_log_path(n).read_text() for n in (1, 2, 3)] == ["ran\n"] * 3
    again = jobs.resubmit(second.id, force=True)  # it has completed: all of it
    assert states(again.id) == ["COMPLETED"]
    assert again.task_log_path(0).read_text() == "ran\n"


def test_a_task_that_completed_in_any_resumed_array_does_not_run_again(place: Path) -> None:
    script = write(place, "import sys; sys.exit(int(sys.argv[-1]))")
    first = jobs.submit(jobs.JobRequest(script, array={"code": ("0", "3")}))
    assert states(first.id) == ["FAILED"]
    other = jobs.submit(jobs.JobRequest(write(place, "import time; time.sleep(600)")))
    second = jobs.resubmit(first.id)
    jobs.cancel(second.id)  # while it waits: its tasks record nothing
    assert states(second.id) == ["CANCELLED"]
    third = jobs.resubmit(second.id)
    (third.directory / "stop").touch()
    jobs.cancel(other.id)
    assert states(third.id) == ["STOPPED"]
    assert jobs.get(third.id).progress.tasks == {"COMPLETED": 1, "STOPPED": 1}
    said = third.task_log_path(0).read_text()
    assert said == f"nothing left to do: this task has completed in {first.id}\n"


@pytest.mark.parametrize(("codes", "state"), [("3 85", "FAILED"), ("85 0", "STOPPED")])
def test_an_array_with_a_stopped_task_hides_no_failure(place: Path, codes: str, state: str) -> None:
    script = write(place, "import sys; sys.exit(int(sys.argv[-1]))")
    job = jobs.submit(jobs.JobRequest(script, array={"code": tuple(codes.split())}))
    assert states(job.id) == [state]


def test_an_array_that_a_task_of_another_one_submits_runs_as_a_whole(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSGD_TASK", "1")
    job = jobs.submit(jobs.JobRequest(write(place, ""), array={"lr": ("1", "2")}))
    assert states(job.id) == ["COMPLETED"]
    assert jobs.get(job.id).progress.tasks == {"COMPLETED": 2}


def test_a_key_submits_once(place: Path) -> None:
    request = jobs.JobRequest(write(place, "print('ran')"), key="nightly 2026-11-22")
    first = jobs.submit(request)
    assert jobs.submit(request).id == first.id
    assert states(first.id) == ["COMPLETED"]
    assert jobs.submit(request).id == first.id
    assert registry.ids() == [first.id]


def test_racing_submissions_with_one_key_make_one_job(place: Path) -> None:
    request = jobs.JobRequest(write(place, "print('ran')"), key="race")
    found: list[str] = []
    start = threading.Barrier(8)

    known: list[str] = []

    def race() -> None:
        start.wait()
        parts = jobs.submit_all(request, known=lambda job: known.append(job.id))
        found.append(parts[0].id)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert known == found[:7]  # one has submitted it, the others say that the key has it
    assert registry.ids() == [found[0]]
    assert states(found[0]) == ["COMPLETED"]
    assert jobs.output(found[0]).read_text() == "ran\n"


def test_racing_submissions_with_one_key_reach_the_scheduler_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes while the first one's sbatch has not answered yet."""
    tools = tmp_path / "tools"
    tools.mkdir()
    said = {
        "sbatch": f"echo called >> {tools}/calls; sleep 4; echo 42",
        "squeue": "exit 0",
        "sacct": "exit 0",
        "scancel": "exit 0",
    }
    for name, body in said.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    write(place, "")
    command = [sys.executable, "-m", "qsgd_hpc", "submit", "--site", "slurm"]
    command += ["--key", "once", "job.py"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    until((tools / "calls").exists, process=first)
    second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert first.communicate(timeout=120)[0].startswith("slurm-1 submitted to slurm\n")
    assert second.stdout.startswith("slurm-1 has this key already; nothing was submitted\n")
    assert jobs.get("slurm-1").progress.scheduler_id == "42"
    assert (tools / "calls").read_text() == "called\n"
    assert registry.ids() == ["slurm-1"]


@pytest.mark.gate
def test_racing_submissions_lose_and_double_nothing(place: Path) -> None:
    write(place, "print('ran')")
    command = [sys.executable, "-m", "qsgd_hpc", "submit", "--json", "job.py"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    made = [json.loads(process.communicate(timeout=120)[0])["id"] for process in running]
    assert sorted(made) == sorted(registry.ids())
    assert len(set(made)) == 6
    assert states(*made) == ["COMPLETED"] * 6


def test_a_job_that_has_ended_is_resubmitted_with_changes(place: Path) -> None:
    body = f"import time; time.sleep(1)\n{COUNTER}"
    first = jobs.submit(jobs.JobRequest(write(place, body), walltime_min=5))
    with pytest.raises(UsageError, match="nothing to resubmit yet"):
        jobs.resubmit(first.id)
    assert states(first.id) == ["STOPPED"]
    done = cli("resubmit", "--json", "--walltime", "2m", first.id)
    second: dict[str, Any] = json.loads(done.stdout)
    assert second["resumes"] == first.id
    assert second["walltime_min"] == 2
    assert jobs.get(second["id"]).request.stop_before_min == 0.2  # of this walltime, not of 5 min
    assert states(second["id"]) == ["STOPPED"]
    assert jobs.output(second["id"]).read_text() == "run 2\n"
    assert "QSGD_ATTEMPT=1" in jobs.get(second["id"]).script_path.read_text()


def test_what_is_complete_or_goes_on_elsewhere_is_resubmitted_by_force_only(place: Path) -> None:
    done = jobs.submit(jobs.JobRequest(write(place, "print('ran')")))
    assert states(done.id) == ["COMPLETED"]
    with pytest.raises(UsageError, match="nothing is left to do"):
        jobs.resubmit(done.id)
    assert states(jobs.resubmit(done.id, force=True).id) == ["COMPLETED"]
    parts = jobs.submit_all(jobs.JobRequest(write(place, COUNTER), chain=3))
    assert states(*(part.id for part in parts)) == ["STOPPED", "STOPPED", "COMPLETED"]
    with pytest.raises(UsageError, match=rf"{parts[1].id} \(STOPPED\) continues {parts[0].id}"):
        jobs.resubmit(parts[0].id)
    assert f"qsgd-hpc status {parts[1].id}" in cli("status", parts[0].id).stdout


def test_what_goes_on_behind_a_failed_job_is_not_begun_a_second_time(place: Path) -> None:
    body = """
import pathlib, sys
file = pathlib.Path("runs")
runs = len(file.read_text()) if file.exists() else 0
file.write_text("x" * (runs + 1))
sys.exit((85, 1, 85)[runs])
"""
    first = jobs.submit(jobs.JobRequest(write(place, body), walltime_min=5))
    assert states(first.id) == ["STOPPED"]
    failed = jobs.resubmit(first.id)
    assert states(failed.id) == ["FAILED"]
    last = jobs.resubmit(failed.id)
    assert states(last.id) == ["STOPPED"]
    with pytest.raises(UsageError, match=rf"{last.id} \(STOPPED\) continues {first.id}"):
        jobs.resubmit(first.id)
    assert f"qsgd-hpc status {last.id}" in cli("status", first.id).stdout


def test_a_job_runs_in_the_folder_that_is_named(place: Path) -> None:
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "job.py").write_text("import os; print(os.getcwd())")
    submitted = cli("submit", "--workdir", "elsewhere", "--key", "k", "job.py")
    assert "submitted to local" in submitted.stdout, submitted
    assert states("local-1") == ["COMPLETED"]
    assert jobs.output("local-1").read_text() == f"{place / 'elsewhere'}\n"
    again = cli("submit", "--workdir", "elsewhere", "--key", "k", "job.py")
    assert "local-1 has this key already; nothing was submitted" in again.stdout


@pytest.mark.gate
def test_a_running_job_stops_at_its_checkpoint_when_asked(place: Path) -> None:
    body = """
import sys, time, qsgd_hpc
print("begun", flush=True)
while not qsgd_hpc.should_stop():
    time.sleep(0.1)
sys.exit(qsgd_hpc.EXIT_RESUBMIT)
"""
    job = jobs.submit(jobs.JobRequest(write(place, body)))
    until(lambda: jobs.output(job.id).exists() and "begun" in jobs.output(job.id).read_text())
    assert cli("cancel", "--at-checkpoint", job.id).returncode == 0
    assert states(job.id) == ["STOPPED"]
    assert [event["event"] for event in read_events(job.directory)] == ["start", "end"]
    with pytest.raises(UsageError, match="only a running job"):
        jobs.stop(job.id)


def test_a_job_stops_before_its_walltime(place: Path) -> None:
    body = """
import sys, time, qsgd_hpc
while not qsgd_hpc.should_stop():
    time.sleep(0.1)
sys.exit(qsgd_hpc.EXIT_RESUBMIT)
"""
    request = jobs.JobRequest(write(place, body), walltime_min=1, stop_before_min=58 / 60)
    job = jobs.submit(request)
    assert states(job.id) == ["STOPPED"]


def test_a_time_before_no_walltime_is_refused(place: Path) -> None:
    request = jobs.JobRequest(write(place, ""), stop_before_min=5)
    with pytest.raises(UsageError, match=r"--stop-before: the job has no walltime.*--walltime"):
        jobs.render(request)


def test_faults_of_all_choices_are_told_at_once(place: Path) -> None:
    request = jobs.JobRequest(
        write(place, ""),
        walltime_min=10,
        stop_before_min=20,
        chain=0,
        requeue=True,
        at_once=2,
        exclude=("a b",),
        venv=place / "none",
        extra=("#PBS -l x=y",),
    )
    with pytest.raises(UsageError) as raised:
        jobs.submit(request)
    text = str(raised.value)
    for part in (
        "--stop-before",
        "--chain 0",
        "--requeue",
        "--at-once",
        "--exclude",
        "--venv",
        "--extra",
    ):
        assert part in text
    assert not registry.ids()


def test_a_template_of_ones_own_replaces_the_schedulers(place: Path) -> None:
    (place / "mine.j2").write_text("#!/bin/bash\necho mine: {{ request.name }}\n")
    job = jobs.submit(jobs.JobRequest(write(place, ""), template=place / "mine.j2"))
    assert states(job.id) == ["COMPLETED"]
    assert jobs.output(job.id).read_text() == "mine: job\n"
    (place / "mine.j2").write_text("{{ reqest.name }}")
    with pytest.raises(UsageError, match=r"--template .*'reqest' is undefined.*request"):
        jobs.submit(jobs.JobRequest(place / "job.py", template=place / "mine.j2"))


def test_a_job_with_relative_folders_is_resubmitted_from_another_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "mine.j2").write_text(
        "#!/bin/bash\ncd {{ workdir }}; . {{ request.venv }}/bin/activate"
    )
    (place / "env" / "bin").mkdir(parents=True)
    (place / "env" / "bin" / "activate").write_text("echo activated; exit 85\n")
    write(place, "")
    monkeypatch.chdir(place.parent)
    wish = jobs.JobRequest(
        Path("job.py"), workdir=Path("work"), venv=Path("env"), template=Path("work/mine.j2")
    )
    job = jobs.submit(wish)
    assert states(job.id) == ["STOPPED"]
    monkeypatch.chdir("/")
    again = jobs.resubmit(job.id)
    assert states(again.id) == ["STOPPED"]
    assert jobs.output(again.id).read_text() == "activated\n"


def test_ctrl_c_ends_the_following_and_says_that_the_job_continues(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: waiting.Patience) -> bool:
        raise KeyboardInterrupt

    job = jobs.submit(jobs.JobRequest(write(place, "import time; time.sleep(60)")))
    monkeypatch.setattr(waiting.Patience, "over", interrupted)
    with pytest.raises(SystemExit) as caught:
        follow(job)
    assert caught.value.code == 130
    assert capsys.readouterr().err == f"stopped following; {job.id} continues\n"
    assert not jobs.get(job.id).state.ended


def test_ranks_of_an_output_without_labels_cannot_be_told_apart(place: Path) -> None:
    job = jobs.submit(jobs.JobRequest(write(place, "print('ran')"), nodes=2))
    assert states(job.id) == ["COMPLETED"]
    asked = cli("logs", "--rank", "1", job.id)
    assert asked.returncode == 2
    assert "are not labelled with ranks" in asked.stderr
    assert "the job has ranks 0 to 1" in cli("logs", "--rank", "2", job.id).stderr


@pytest.fixture
def small_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 1 MiB that holds the registry."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    disk = place / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.decode()}")
    (disk / "sites").mkdir()
    (disk / "sites" / "local.yaml").write_text("launcher: {argv: [env]}\n")
    monkeypatch.setenv("QSGD_HOME", str(disk))
    yield disk
    for job in jobs.list_jobs():
        jobs.cancel(job.id)
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.gate
def test_a_full_disk_loses_no_job_and_makes_no_half_one(place: Path, small_disk: Path) -> None:
    job = jobs.submit(jobs.JobRequest(write(place, "print('ran')")))
    assert states(job.id) == ["COMPLETED"]
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(b"x" * 512)
    refused = cli("submit", "job.py")
    assert refused.returncode == 2
    assert "Free some space" in refused.stderr
    assert registry.ids() == [job.id]
    assert not [p for p in (small_disk / "jobs").iterdir() if p.name.startswith(".draft")]
    listed = cli("list")
    assert listed.returncode == 0
    assert "COMPLETED" in listed.stdout
    (small_disk / "ballast").unlink()
    again = jobs.submit(jobs.JobRequest(place / "job.py"))
    assert states(again.id) == ["COMPLETED"]
