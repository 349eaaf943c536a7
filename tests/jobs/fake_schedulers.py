"""Commands of schedulers that replay recorded answers, hang or die, and remember how they ran."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qsgd_hpc import cli as main
from qsgd_hpc import jobs
from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.model import Job
from qsgd_hpc.jobs.schedulers import common
from qsgd_hpc.jobs.schedulers.common import Answer

FIXTURES = Path(__file__).parent.parent / "fixtures"
COMMANDS = (
    *("qsub", "qstat", "qselect", "qdel"),
    *("sbatch", "squeue", "sacct", "scancel", "sinfo", "srun"),
    *("bsub", "bjobs", "bkill"),
)
SERVER = "polaris-login-bed"  # in the names of its jobs
# Calls are numbered by how many there were: schedulers are asked one question after another.
FAKE = """#!/bin/bash
here=$(dirname "$0")/.. name=$(basename "$0")
calls=("$here"/calls/*)
printf -v number '%06d' "${#calls[@]}"
printf '%s\\0' "$name" "$PWD" "$@" > "$here/calls/$number"
[ -t 0 ] || cat > "$here/stdin.$name"
. "$here/$name.before"
cat "$here/$name.out"
cat "$here/$name.err" >&2
exit "$(cat "$here/$name.rc")"
"""


@dataclass(frozen=True)
class Call:
    """One run of a command."""

    name: str
    cwd: str
    args: tuple[str, ...]


def recorded(path: str) -> Answer:
    """Return a recorded answer, such as ``slurm/squeue_running``."""
    base = FIXTURES / path
    out, err, code = (base.with_name(f"{base.name}.{p}").read_text() for p in ("out", "err", "rc"))
    return Answer(out, err, int(code))


def recorded_names(system: str) -> list[str]:
    """Return the names of all recorded answers of a scheduler, sorted."""
    return sorted(f"{system}/{path.stem}" for path in (FIXTURES / system).glob("*.out"))


def cli(*words: str) -> Result:
    """Run ``qsgd-hpc WORDS`` in this process."""
    return CliRunner().invoke(main.cli, words)


class Fakes:
    """All commands of all schedulers, each failing until it is told what to answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in ("bin", "calls"):
            (folder / part).mkdir(parents=True)
        (folder / "calls" / "none").touch()  # so that the pattern in the fake has a match
        for name in COMMANDS:
            (folder / "bin" / name).write_text(FAKE)
            (folder / "bin" / name).chmod(0o755)
            self.says(name, err=f"{name}: not expected here", rc=99)

    def says(self, name: str, out: str = "", err: str = "", rc: int = 0, before: str = "") -> None:
        """Make a command answer so from now on, after running the bash line ``before``."""
        for part, text in (("out", out), ("err", err), ("rc", str(rc)), ("before", before)):
            (self.folder / f"{name}.{part}").write_text(text)

    def replays(self, name: str, path: str) -> None:
        """Make a command give a recorded answer from now on."""
        answer = recorded(path)
        self.says(name, answer.out, answer.err, answer.code)

    def hangs(self, name: str) -> None:
        """Make a command sleep for longer than anybody waits for it."""
        self.says(name, before="exec sleep 600")

    def dies(self, name: str) -> None:
        """Make a command end by SIGKILL before it has printed anything."""
        self.says(name, before="kill -9 $$")

    def remove(self, name: str) -> None:
        """Take a command off PATH."""
        (self.folder / "bin" / name).unlink()

    def calls(self, name: str | None = None) -> list[Call]:
        """Return the calls so far, in order: of one command, or of all."""
        logs = sorted(path for path in (self.folder / "calls").iterdir() if path.name != "none")
        found = [path.read_text().split("\0")[:-1] for path in logs]
        return [Call(n, cwd, tuple(rest)) for n, cwd, *rest in found if name in (None, n)]

    def args(self, name: str) -> tuple[str, ...]:
        """Return the arguments of the last call of a command."""
        return self.calls(name)[-1].args

    def stdin(self, name: str) -> str:
        """Return what the last call of a command read from its standard input."""
        return (self.folder / f"stdin.{name}").read_text()


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """Put fake schedulers on PATH, and a registry and a script into the current directory."""
    made = Fakes(tmp_path / "fakes")
    monkeypatch.setenv("PATH", f"{tmp_path / 'fakes' / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("QSGD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QSGD_ACCOUNT", "myproject")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    yield made


def request(site: str) -> jobs.JobRequest:
    return jobs.JobRequest(Path("train.py"), nodes=8, site=site)


def submitted(fakes: Fakes, site: str, scheduler_id: str) -> Job:
    """Submit a job that gets this id."""
    fakes.says("qsub" if site == "polaris" else "sbatch", out=f"{scheduler_id}\n")
    return jobs.submit(request(site))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the schedulers' time to learn of a new job be over."""
    monkeypatch.setattr(common, "SETTLE_S", 0.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a hanging command only briefly."""
    monkeypatch.setattr(common, "TIMEOUT_S", 0.5)


def unconfirmed(fakes: Fakes, site: str) -> Job:
    """Submit a job whose submit command ends without a word, and return what is registered."""
    name = "qsub" if site == "polaris" else "sbatch"
    fakes.dies(name)
    with pytest.raises(LaunchError, match=f"{name} did not confirm the job"):
        jobs.submit(request(site))
    (job_id,) = registry.ids()
    return registry.load(job_id)
