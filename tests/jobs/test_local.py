"""Real jobs on this machine, through the command line, with real processes."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from qsgd_hpc import jobs
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import JobRequest, JobState, local_runner, registry
from qsgd_hpc.jobs.model import Job, Progress
from qsgd_hpc.jobs.processes import identity
from tests.processes import until

CLI = [sys.executable, "-m", "qsgd_hpc"]


def cli(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run qsgd-hpc, expect its exit code, and expect no traceback."""
    done = subprocess.run([*CLI, *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    return done


def submit(folder: Path, body: str, *flags: str, args: tuple[str, ...] = ()) -> dict[str, Any]:
    """Submit a Python script with this body and return its record.

    Each has a folder of its own: an earlier job may not have read its script yet.
    """
    script = Path(tempfile.mkdtemp(dir=folder)) / "job.py"
    script.write_text(body)
    record: dict[str, Any] = json.loads(cli("submit", "--json", *flags, str(script), *args).stdout)
    return record


def test_a_job_lives_through_the_whole_command_line(place: Path) -> None:
    (place / "job.py").write_text("import sys, os; print(sys.argv[1:], os.environ['KEY'])")
    shown = cli("submit", "--env", "KEY=a b", "job.py", "--nodes", "5", "x y").stdout
    assert "local-1 submitted to local" in shown
    for command in ("logs -f local-1", "status local-1", "cancel local-1"):
        assert f"qsgd-hpc {command}" in shown
    assert cli("wait", "local-1").stdout.endswith("local-1 COMPLETED\n")
    assert cli("logs", "local-1").stdout == "['--nodes', '5', 'x y'] a b\n"
    status = cli("status", "local-1").stdout
    for words in ("COMPLETED", "exit code    0", "output.log", "qsgd-hpc logs local-1"):
        assert words in status
    assert "COMPLETED" in cli("list").stdout
    assert [job["id"] for job in json.loads(cli("list", "--json").stdout)] == ["local-1"]


def test_a_failed_job_tells_its_exit_code(place: Path) -> None:
    job = submit(place, "raise SystemExit(7)")
    assert "exit code 7" in cli("wait", job["id"], code=1).stdout
    assert jobs.get(job["id"]).exit_code == 7
    assert cli("logs", "-f", job["id"]).returncode == 0


@pytest.mark.full
def test_a_job_that_kills_itself_names_the_signal(place: Path) -> None:
    job = submit(place, "import os; os.kill(os.getpid(), 11)")
    assert "SIGSEGV" in cli("wait", job["id"], code=1).stdout


def test_following_prints_all_output_and_ends_with_the_job(place: Path) -> None:
    body = "import time\nfor i in range(5): print('line', i, flush=True); time.sleep(0.2)"
    job = submit(place, body)
    assert cli("logs", "-f", job["id"]).stdout.splitlines() == [f"line {i}" for i in range(5)]


WAITS = """
import subprocess, sys
cli = [sys.executable, "-m", "qsgd_hpc"]
def call(*words):
    done = subprocess.run([*cli, *words], capture_output=True, text=True)
    print(done.returncode, done.stdout + done.stderr, flush=True)
call("submit", "job.py")
call("wait", "local-2")
call("logs", "-f", "local-2")
call("wait", "local-1")
call("submit", "--watch", "job.py")
call("scale", "--nodes", "1", "--bits", "32", "job.py")
call("submit", "--after", "local-2", "job.py")
"""


def test_a_job_does_not_wait_for_a_job_that_waits_for_its_end(place: Path) -> None:
    (place / "job.py").write_text("print('ran')")
    (place / "first.py").write_text(WAITS)
    cli("submit", "first.py")
    assert "local-1 COMPLETED" in cli("wait", "local-1").stdout
    said = cli("logs", "local-1").stdout
    refused = "2 qsgd-hpc: waiting for local-2 here would never end: "
    assert said.count(refused) == 2, said
    assert "let local-1 end" in said.lower()
    assert "`qsgd-hpc submit --after local-2 SCRIPT`" in said
    assert "2 qsgd-hpc: local-1 is the job that runs this command" in said
    assert "2 qsgd-hpc: following the new job here would never end: " in said
    assert "\nqsgd-hpc: a study here would never end: " in said
    assert "local-3 COMPLETED" in cli("wait", "local-2", "local-3").stdout


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
time.sleep(300)
"""


def test_cancel_ends_every_process_even_stubborn_and_detached_ones(place: Path) -> None:
    job = submit(place, STUBBORN)
    log = Path(job["log"])
    until(lambda: log.exists() and len(log.read_text().split()) == 2)
    assert "CANCELLED" in cli("cancel", job["id"]).stdout
    assert not any(psutil.pid_exists(int(pid)) for pid in log.read_text().split())
    assert "had already ended" in cli("cancel", job["id"]).stdout


SAVES = """
import signal, sys, time
def save(*_):
    time.sleep(7)
    print("saved", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(300)
"""


@pytest.mark.full
def test_a_rank_that_handles_sigterm_has_the_time_to_save(place: Path) -> None:
    job = submit(place, SAVES)
    log = Path(job["log"])
    until(lambda: log.exists() and "ready" in log.read_text())
    assert "CANCELLED" in cli("cancel", job["id"]).stdout
    assert "saved" in log.read_text()


@pytest.mark.full
def test_a_waiting_job_can_be_cancelled(place: Path) -> None:
    first = submit(place, "import time; time.sleep(300)")
    second = submit(place, "print('never')")
    until(lambda: "waits for local-1" in jobs.get(second["id"]).progress.why)
    assert jobs.cancel(second["id"]).state is jobs.JobState.CANCELLED
    assert jobs.get(first["id"]).state is jobs.JobState.RUNNING
    assert not Path(second["log"]).exists()


def test_walltime_ends_the_job(place: Path) -> None:
    job = submit(place, "import time; time.sleep(300)", "--walltime", "1s")
    assert "TIMEOUT (ended at its walltime of 00:00:01)" in cli("wait", job["id"], code=1).stdout


@pytest.mark.full
def test_waiting_can_give_up(place: Path) -> None:
    job = submit(place, "import time; time.sleep(300)")
    cli("wait", job["id"], "--timeout", "1s", code=3)


def test_a_job_survives_its_terminal(place: Path) -> None:
    script = place / "job.py"
    script.write_text(
        "import pathlib, time\n"
        "while not pathlib.Path('terminal_is_gone').exists(): time.sleep(0.05)\n"
        "print('still here')"
    )
    master, slave = os.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = f"{sys.executable} -m qsgd_hpc submit job.py; exec sleep 300"
    shell = subprocess.Popen(
        ["bash", "-c", command], stdin=slave, stdout=slave, stderr=slave, preexec_fn=own_terminal
    )
    os.close(slave)
    # bash itself would first wait for its command.
    until(lambda: Path(f"/proc/{shell.pid}/comm").read_text() == "sleep\n")
    until(lambda: jobs.get("local-1").state is jobs.JobState.RUNNING)
    os.close(master)
    assert shell.wait(60) == -signal.SIGHUP
    (place / "terminal_is_gone").touch()
    assert jobs.wait(["local-1"], 120)[0].state is jobs.JobState.COMPLETED
    assert jobs.output("local-1").read_text() == "still here\n"


@pytest.mark.full
def test_a_job_whose_owner_was_killed_is_lost_and_can_be_cleaned_up(place: Path) -> None:
    job = submit(place, "import time; time.sleep(300)")
    until(lambda: jobs.get(job["id"]).progress.pid)
    owner = registry.read_json(Path(job["directory"]) / "runner.json")
    assert owner is not None
    script_pid = jobs.get(job["id"]).progress.pid
    assert script_pid is not None
    os.kill(owner["pid"], signal.SIGKILL)
    until(lambda: identity(owner["pid"]) is None)
    lost = jobs.get(job["id"])
    assert lost.state is jobs.JobState.LOST
    assert f"qsgd-hpc cancel {job['id']}" in lost.progress.why
    with pytest.raises(UsageError, match=f"still runs.*qsgd-hpc cancel {job['id']}"):
        jobs.resubmit(job["id"])
    jobs.cancel(job["id"])
    assert identity(script_pid) is None


def test_an_end_on_a_full_disk_is_recorded_when_there_is_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = registry.create(JobRequest(Path("train.py"), site="local"), "local", lambda _: "")
    save, tries = registry.save, itertools.count()

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    def freed(job: Job, progress: Progress) -> Job:
        return save(job, progress) if next(tries) else full()

    monkeypatch.setattr(local_runner, "FULL_DISK_PAUSE_S", 0)
    monkeypatch.setattr(registry, "save", freed)
    monkeypatch.setattr("builtins.print", full)  # to runner.log, in the same folder
    local_runner._record_end(job, Progress(JobState.COMPLETED, exit_code=0))
    assert registry.load(job.id).state is JobState.COMPLETED


def test_a_number_that_another_process_got_is_not_the_owner(place: Path) -> None:
    job = submit(place, "import time; time.sleep(300)")
    until(lambda: jobs.get(job["id"]).progress.pid)
    file = Path(job["directory"]) / "runner.json"
    owner = json.loads(file.read_text())
    file.write_text(json.dumps({**owner, "pid": os.getpid()}))
    assert jobs.get(job["id"]).state is jobs.JobState.LOST
    file.write_text(json.dumps(owner))
    assert jobs.get(job["id"]).state is jobs.JobState.RUNNING


SPAN = "import time; a = time.time(); time.sleep(0.3); print(a, time.time())"


@pytest.mark.full
def test_racing_submissions_lose_and_double_nothing_and_run_one_by_one(place: Path) -> None:
    (place / "job.py").write_text(SPAN)
    racers = [
        subprocess.Popen([*CLI, "submit", "--json", "job.py"], stdout=subprocess.PIPE)
        for _ in range(5)
    ]
    got = sorted(json.loads(racer.communicate(timeout=120)[0])["id"] for racer in racers)
    assert got == [f"local-{i}" for i in range(1, 6)]
    ended = jobs.wait(got, 60)
    assert {job.state for job in ended} == {jobs.JobState.COMPLETED}
    spans = sorted(tuple(map(float, job.log_path.read_text().split())) for job in ended)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_nothing_is_registered_when_the_request_is_wrong(place: Path) -> None:
    (place / "train.py").write_text("")
    shown = cli("submit", "--nodes", "0", "trian.py", code=2).stderr
    assert "Did you mean 'train.py'?" in shown
    assert "--nodes 0" in shown
    assert registry.ids() == []


def test_dry_run_prints_the_script_and_notes_on_stderr(place: Path) -> None:
    (place / "train.py").write_text("")
    flags = ["--site", "polaris", "--account", "p", "--nodes", "8", "--dry-run"]
    shown = cli("submit", *flags, "train.py")
    assert shown.stdout.startswith("#!/bin/bash -l\n#PBS -N train\n#PBS -A p\n")
    assert all(line.startswith("note: ") for line in shown.stderr.splitlines())
    assert registry.ids() == []


def test_pinning_and_resubmission_print_the_notes_of_a_submission(place: Path) -> None:
    (place / "train.py").write_text("raise SystemExit(1)")
    flags = ["--site", "polaris", "--account", "p", "--nodes", "8", "--dry-run"]
    assert "note: limits" in cli("submit", *flags, "--verify-pinning", "train.py").stderr
    noted = "note: --queue debug has no effect"
    assert noted in cli("submit", "--queue", "debug", "train.py").stderr
    cli("wait", "local-1", code=1)
    assert noted in cli("resubmit", "local-1").stderr


@pytest.mark.full
def test_unknown_job_suggests_the_nearest(place: Path) -> None:
    submit(place, "")
    assert "Did you mean 'local-1'?" in cli("status", "locl-1", code=2).stderr
    cli("status", "../../etc-1", code=2)


def test_script_with_spaces_and_quotes_in_its_path_runs(place: Path) -> None:
    script = place / 'it\'s "my" $(touch pwned) scrípt.py'
    script.write_text("print(__file__)")
    cli("submit", script.name)
    jobs.wait(["local-1"], 120)
    assert jobs.output("local-1").read_text() == f"{script}\n"
    assert not list(place.glob("pwned"))


def test_unwritable_home_is_one_clear_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "job.py").write_text("")
    (place / "file").write_text("")
    monkeypatch.setenv("QSGD_HOME", str(place / "file"))
    assert "set QSGD_HOME to a writable folder" in cli("submit", "job.py", code=2).stderr


def test_the_default_profile_starts_real_ranks_and_cancel_leaves_none(place: Path) -> None:
    (registry.jobs_dir().parent / "sites" / "local.yaml").unlink()
    body = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    job = submit(place, body, "--nodes", "2")
    log = Path(job["log"])
    until(lambda: log.exists() and log.read_text().count("\n") == 2)
    of_rank = [cli("logs", "--rank", str(rank), job["id"]).stdout for rank in (0, 1)]
    ranks = [int(text) for text in of_rank]
    assert ranks[0] != ranks[1]
    assert all(psutil.pid_exists(pid) for pid in ranks)
    assert jobs.cancel(job["id"]).state is jobs.JobState.CANCELLED
    assert not any(psutil.pid_exists(pid) for pid in ranks)


def test_a_horovod_script_runs_compressed_as_it_is(place: Path) -> None:
    (registry.jobs_dir().parent / "sites" / "local.yaml").unlink()
    (place / "train.py").write_text(
        "import horovod.torch as hvd, multiprocessing, os\n"
        "hvd.init()\n"
        "print(hvd.__name__, hvd.size(), os.environ['QSGD_BITS'], multiprocessing.__name__)\n"
    )
    cli("submit", "--nodes", "2", "--horovod", "--bits", "4", "train.py", "--epochs", "3")
    (job,) = jobs.wait(["local-1"], 120)
    assert job.state is jobs.JobState.COMPLETED, jobs.output("local-1").read_text()
    lines = jobs.output("local-1").read_text().splitlines()
    assert len(lines) == 2
    assert all(line.endswith("qsgd_hpc.torch 2 4 multiprocessing") for line in lines)


def test_a_job_that_a_rank_submits_outlives_it(place: Path) -> None:
    (registry.jobs_dir().parent / "sites" / "local.yaml").unlink()
    child = place / "child.py"
    child.write_text("import time; time.sleep(2); print('done')")
    words = ["submit", "--site", "local", str(child)]
    body = f"import subprocess, sys; subprocess.run([*{CLI!r}, *{words!r}], check=True)"
    parent = submit(place, body)
    ended = jobs.wait([parent["id"]], 120)
    ended += jobs.wait(["local-2"], 120)
    assert [job.state for job in ended] == [jobs.JobState.COMPLETED] * 2
    assert jobs.output("local-2").read_text() == "done\n"


def test_what_cannot_be_meant_is_refused(place: Path) -> None:
    (place / "train.sh").write_text("#!/bin/sh\n")
    (place / "train.sh").chmod(0o755)
    assert "is executed directly" in cli("submit", "--horovod", "train.sh", code=2).stderr
    assert "choose 1 to 8, 32" in cli("submit", "--bits", "9", "train.sh", code=2).stderr
    twice = ("--array", "lr=0.1", "--array", "lr=0.2")
    assert "a key is repeated" in cli("submit", *twice, "train.sh", code=2).stderr
    assert registry.ids() == []


@pytest.mark.full
def test_sites_are_listed_and_shown() -> None:
    assert "polaris" in cli("sites", "list").stdout
    assert "debug-scaling" in cli("sites", "show", "polaris").stdout
