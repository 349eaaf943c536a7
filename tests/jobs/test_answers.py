"""Whatever a scheduler answers, a job is shown as it is, or as it was last known to be and why.

The servers here hold the truth; what they say of it is drawn: jobs left out or in another order,
cut off, with numbers, names and bytes that JSON does not allow, of another cluster, with a head and
no jobs, with any exit code. They are asked by the modules that ask the real ones.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.model import Job, JobRequest, Progress
from qsgd_hpc.jobs.model import JobState as S
from qsgd_hpc.jobs.schedulers import pbs, slurm
from qsgd_hpc.jobs.schedulers.common import Answer

# What a job may be for its server; None: the server does not know it.
TRUTHS = (None, "Q", "R", "done", "failed", "timeout")
SEEN = {"Q": (S.QUEUED, None), "R": (S.RUNNING, None), "done": (S.COMPLETED, 0),
        "failed": (S.FAILED, 3), "timeout": (S.TIMEOUT, None), None: (S.LOST, None)}  # fmt: skip
SLURM = {"Q": "PENDING", "R": "RUNNING", "done": "COMPLETED", "failed": "FAILED",
         "timeout": "TIMEOUT"}  # fmt: skip
KNOWN = Progress(S.RUNNING, started_at=1.0)
BROKEN = '"he said "hi""'
VALUES = ('"x"', "005", ".01", "1.", "+5", "inf", "nan", "-inf", "1e400", "", "0x1F", r'"\u@\h"',
          '"\t\r\x01"', BROKEN, '"\ufffd"', r'"\"7.s\":{"')  # fmt: skip
DOWN = "Connection refused\nqstat: cannot connect to server s (errno=15010)\n"


@dataclasses.dataclass(frozen=True)
class Mood:
    """How one answer is changed."""

    order: Sequence[int]
    dropped: frozenset[int]
    first_only: bool
    cut: float  # the share that is kept; 1: all
    value: str
    code: int | None  # None: the right one
    manner: str  # "jobs", "head", "down", "elsewhere"

    @property
    def is_kind(self) -> bool:
        """Whether all that is asked for can be read, in one answer or in several."""
        readable = self.value != BROKEN and self.code is None and self.manner == "jobs"
        return readable and self.cut == 1 and not self.dropped

    def picked(self, rows: Sequence[str]) -> list[str]:
        """Return the rows that are shown, in the order in which they are."""
        kept = [rows[i % len(rows)] for i in self.order if rows] or list(rows)
        kept = [row for i, row in enumerate(dict.fromkeys([*kept, *rows])) if i not in self.dropped]
        return kept[:1] if self.first_only else kept

    def shortened(self, text: str) -> str:
        return text[: max(1, int(len(text) * self.cut))]


def moods() -> st.SearchStrategy[Mood]:
    whole = st.just(1.0)
    return st.builds(
        Mood,
        order=st.lists(st.integers(0, 5), max_size=6),
        dropped=st.frozensets(st.integers(0, 5), max_size=2),
        first_only=st.booleans(),
        cut=st.one_of(whole, whole, st.floats(0.0, 1.0)),
        value=st.sampled_from(VALUES),
        code=st.one_of(st.none(), st.none(), st.integers(-15, 255)),
        manner=st.sampled_from(["jobs", "jobs", "jobs", "head", "down", "elsewhere"]),
    )


def job_of(number: int, scheduler: str, scheduler_id: str | None, folder: Path) -> Job:
    known = dataclasses.replace(KNOWN, scheduler_id=scheduler_id) if scheduler_id else Progress()
    directory = folder / f"j-{number}"
    directory.mkdir(exist_ok=True)
    return Job(f"j-{number}", "x", scheduler, JobRequest(Path("t.py")), directory, 1.0, known)


class Server:
    """Answers each question in the next mood, and in the last one when there are no more."""

    def __init__(self, moods: Sequence[Mood]) -> None:
        self._moods = list(moods)

    def mood(self) -> Mood:
        return self._moods.pop(0) if len(self._moods) > 1 else self._moods[0]


class Pbs(Server):
    """qstat and qselect of a server with these jobs, by id: (truth, output file)."""

    def __init__(self, moods: Sequence[Mood], jobs: dict[str, tuple[str | None, str]]) -> None:
        super().__init__(moods)
        self.jobs = jobs

    def __call__(self, argv: Sequence[str], **_: object) -> Answer:
        mood = self.mood()
        if mood.manner == "down":
            head = '{\n\t"timestamp":\t1,\n\t"pbs_server":\t"s"\n}\n' if argv[0] == "qstat" else ""
            return Answer(head, DOWN, 255)
        if argv[0] == "qselect":
            ids = [key for key, (truth, _) in self.jobs.items() if truth]
            return Answer("".join(f"{key}\n" for key in ids), "", 0)
        asked = [word for word in argv[1:] if word.endswith(".s")] or list(self.jobs)
        entries = mood.picked([self._entry(key, mood) for key in asked if self.jobs[key][0]])
        body = "" if mood.manner != "jobs" or not entries else ",\n".join(entries)
        jobs = f',\n\t"Jobs":\t{{\n{body}\n\t}}' if body else ""
        absent = [key for key in asked if not self.jobs[key][0]]
        err = "".join(f"qstat: Unknown Job Id {key}\n" for key in absent)
        code = mood.code if mood.code is not None else 153 if absent else 0
        out = f'{{\n\t"timestamp":\t1,\n\t"pbs_server":\t"s"{jobs}\n}}\n'
        return Answer(mood.shortened(out), err, code)

    def _entry(self, key: str, mood: Mood) -> str:
        truth, output = self.jobs[key]
        ends = {"done": (0, 92), "failed": (3, 93), "timeout": (-29, 93)}
        fields = [
            f'"Job_Name":\t{mood.value}',
            f'"job_state":\t"{truth if truth in "QR" else "F"}"',
        ]
        if truth in ends:
            fields += [f'"Exit_status":\t{ends[truth][0]}', f'"substate":\t{ends[truth][1]}']
        fields += [f'"Output_Path":\t"s:{output}"']
        fields += [
            f'"Variable_List":\t{{\n\t\t\t\t"RUN":\t{mood.value}\n\t\t\t}}',
            '"run_count":\t1',
        ]
        lines = ",\n".join(f"\t\t\t{field}" for field in fields)
        return f'\t\t"{key}":\t{{\n{lines}\n\t\t}}'


class Slurm(Server):
    """squeue and sacct of clusters with these jobs: truth by cluster and number."""

    def __init__(self, moods: Sequence[Mood], jobs: dict[tuple[str, str], str | None]) -> None:
        super().__init__(moods)
        self.jobs = jobs

    def __call__(self, argv: Sequence[str], **_: object) -> Answer:
        mood = self.mood()
        if mood.manner == "down":
            return Answer("", "slurm_load_jobs error: Unable to contact slurm controller", 1)
        named = [word.partition("=")[2] for word in argv if word.startswith("--clusters=")]
        cluster = named[0] if named else "here"
        asked = argv[argv.index("-j") + 1].split(",") if "-j" in argv else None
        if argv[0] == "sacct":
            return self._sacct(mood, cluster, asked or [])
        if mood.manner == "elsewhere":
            cluster, named = "elsewhere", ["elsewhere"]
        ends = ("done", "failed", "timeout")
        mine = {n: t for (c, n), t in self.jobs.items() if c == cluster and t and t not in ends}
        mine = {n: t for n, t in mine.items() if asked is None or n in asked}
        if asked is not None and not mine:
            return Answer("", "slurm_load_jobs error: Invalid job id specified", 1)
        rows = [f"{n}|{SLURM[t]}|None|n1|N/A||/x/script.sh\n" for n, t in mine.items()]
        head = f"CLUSTER: {cluster}\nJOBID|STATE|REASON\n" if named else ""
        if mood.manner == "head":
            rows = []
        return Answer(mood.shortened(head + "".join(mood.picked(rows))), "", mood.code or 0)

    def _sacct(self, mood: Mood, cluster: str, asked: Sequence[str]) -> Answer:
        known = {n: self.jobs.get((cluster, n)) for n in asked}
        rows = [
            f"{n}|{SLURM[t]}|{3 * (t == 'failed')}:0|Unknown|Unknown|0|1|n1|None\n"
            for n, t in known.items()
            if t
        ]
        # Nothing about one job alone is how sacct says that it knows none.
        shown = mood.picked(rows) if len(asked) > 1 else rows
        return Answer(mood.shortened("".join(shown)), "", mood.code or 0)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def assert_true_or_silent(job: Job, new: Progress, truth: str | None, said: list[Mood]) -> None:
    if new.silence:
        assert not all(mood.is_kind for mood in said), new
        assert dataclasses.replace(new, silence="") == job.progress
    else:
        assert (new.state, new.exit_code) == SEEN[truth], (job.id, truth, new)


def asked(module: object, server: Server, call: Callable[[], object]) -> object:
    with mock.patch.object(module, "ask", server):
        return call()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(TRUTHS), min_size=1, max_size=5), st.lists(moods(), min_size=1))
def test_jobs_of_pbs_are_as_they_are_or_as_they_were(
    folder: Path, truths: list[str | None], said: list[Mood]
) -> None:
    listed = {f"{n}.s": (truth, f"/out/{n}") for n, truth in enumerate(truths, 5)}
    jobs = [job_of(n, "pbs", f"{n}.s", folder) for n in range(5, 5 + len(truths))]
    news = asked(pbs, Pbs(said, listed), lambda: pbs.refresh(jobs))
    assert isinstance(news, dict)
    for job in jobs:
        truth = listed[str(job.progress.scheduler_id)][0]
        assert_true_or_silent(job, news[job.id], truth, said)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(TRUTHS), min_size=1, max_size=5), st.lists(moods(), min_size=1))
def test_a_submission_that_pbs_has_is_found_or_nothing_is_said(
    folder: Path, truths: list[str | None], said: list[Mood]
) -> None:
    job = job_of(1, "pbs", None, folder)
    outputs = [f"/out/{n}" for n in range(len(truths) - 1)] + [str(job.log_path)]
    listed = {f"{n}.s": pair for n, pair in enumerate(zip(truths, outputs, strict=True), 5)}
    there = f"{4 + len(truths)}.s" if truths[-1] else None
    server = Pbs(said, listed)
    try:
        found = asked(pbs, server, lambda: pbs.find(job))
    except LaunchError:
        assert not all(mood.is_kind for mood in said)
        return
    assert found == there
    (new,) = asked(pbs, server, lambda: pbs.refresh([job])).values()  # type: ignore[attr-defined]
    assert new.silence or new.state is (SEEN[truths[-1]][0])


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["here", "gpu", "elsewhere"]), st.sampled_from(["6", "65", "7"])),
        st.sampled_from(TRUTHS),
        min_size=1,
    ),
    st.lists(moods(), min_size=1),
)
def test_jobs_of_slurm_are_as_they_are_or_as_they_were(
    folder: Path, listed: dict[tuple[str, str], str | None], said: list[Mood]
) -> None:
    keys = [number if name == "here" else f"{number};{name}" for name, number in listed]
    jobs = {pair: job_of(n, "slurm", keys[n], folder) for n, pair in enumerate(listed)}
    server = Slurm(said, listed)
    news = asked(slurm, server, lambda: slurm.refresh(list(jobs.values())))
    assert isinstance(news, dict)
    for pair, job in jobs.items():
        assert_true_or_silent(job, news[job.id], listed[pair], said)
