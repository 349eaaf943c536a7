"""A study on disk: its attempts with their records and provenance, and the folder that has them."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import JobRequest
from qsgd_hpc.jobs.registry import write_file
from qsgd_hpc.launch.cluster.network import NONE
from qsgd_hpc.recording.records import RESERVED
from qsgd_hpc.scaling.define.study import PLAIN_BITS, Point, Study, differences

__all__ = [
    "RECORD_HINT",
    "Attempt",
    "AttemptFolder",
    "JobFolder",
    "PackFolder",
    "StudyFolder",
    "finished",
    "is_number",
    "parse_attempts",
    "parse_records",
    "throughput",
    "usable",
    "writing",
]

FORMAT = 2
COMPLETED = "COMPLETED"
MOST = 1e15  # no speed or time is larger; axes of larger numbers cannot be drawn
RECORD_HINT = (
    "A script that trains with qsgd_hpc is measured without a change. To any other script, add "
    "one line at the end, and `from qsgd_hpc.scaling import record` at the top:\n  if "
    'hvd.rank() == 0: record("final", ranks=hvd.size(), throughput=..., unit="images")'
)

# Means over the timed steps of a rank; a run's value is their mean over the ranks.
_MEANS = (
    *("step_s", "step_mean_s", "exposed_s", "hidden_s", "coding_s"),
    *("comm_s", "comm_time_s", "fused_reductions", "nmse"),
)
# Measured times; those left over after others, such as exposed_s, may be slightly below 0.
_TIMES = ("step_s", "step_mean_s", "coding_s", "comm_s", "comm_time_s", "data_s")
_SUMS = ("wire_bytes", "gradient_bytes")
_FIRST = ("steps", "warmup_steps", "warmup_rule", "layers", "backward_s")


@dataclass(frozen=True)
class Attempt:
    """An ended job with the unchanged records of its script and their provenance.

    Attributes:
        state: final state of the job, or of the part of it that measured this point.
        global_batch: samples of all ranks in a step, as the study requested.
    """

    point: Point
    number: int
    state: str
    exit_code: int | None
    records: tuple[Mapping[str, Any], ...] = ()
    torn_lines: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)
    global_batch: int | None = None

    @cached_property
    def final(self) -> Mapping[str, Any]:
        """The last "final" record, else one computed from "engine" records, else an empty one."""
        own = next((r for r in reversed(self.records) if r.get("event") == "final"), None)
        if own and self.global_batch:
            speed, unit = throughput(own)
            if unit == "steps" and is_number(speed):  # a Meter without a batch; the study knows it
                return {**own, "throughput": speed * self.global_batch, "unit": "samples"}
        return own or _final_of_engines(self.engines, self.global_batch)

    @property
    def engines(self) -> Mapping[Any, Mapping[str, Any]]:
        """The last "engine" record of each rank, by its number."""
        return {r.get("rank"): r for r in self.records if r.get("event") == "engine"}

    @property
    def network(self) -> Mapping[str, Any]:
        """The launcher's records of an emulated network; empty without one."""
        return next((r for r in reversed(self.records) if r.get("event") == "network"), {})

    @property
    def used_bits(self) -> int | None:
        """The bits that torch.distributed's gradients had on every rank; None if unknown."""
        told = [r.get("gradient_bits") for r in self.engines.values()]
        found = {bits if is_number(bits) else None for bits in told}
        bits = found.pop() if len(found) == 1 else None
        return None if bits is None else int(bits)

    @property
    def has_other_bits(self) -> bool:
        """Whether it ran on several ranks and did not use the bits of its point."""
        if self.point.ranks == 1:
            return False
        used = self.used_bits
        if used is not None:
            return used != self.point.bits
        return self._coded is (self.point.bits == PLAIN_BITS)

    @property
    def _coded(self) -> bool | None:
        """Whether it compressed gradients; None if its records do not tell."""
        nmse, bits = self.final.get("nmse"), self.final.get("bits")
        if is_number(nmse) and nmse > 0:
            return True
        asked = [r.get("asked_tensors") for r in self.engines.values()]
        known = [n for n in asked if is_number(n)]
        if not known or len(known) < len(asked):
            return bits != PLAIN_BITS if is_number(bits) else None
        return any(n > 0 for n in known)

    @property
    def seconds(self) -> float | None:
        """Time for which its nodes were allocated; None if unknown."""
        value = self.provenance.get("seconds")
        return float(value) if is_number(value) else None

    @property
    def held_nodes(self) -> int:
        """Nodes that its job had: in a packed job, possibly more than the point's own."""
        return int(self.provenance.get("held_nodes", self.point.nodes))

    @property
    def epochs(self) -> tuple[Mapping[str, Any], ...]:
        """The "epoch" records in the order in which they were written."""
        return tuple(r for r in self.records if r.get("event") == "epoch")

    @property
    def silent(self) -> bool:
        """Whether the script succeeded without a record of its result."""
        return self.state == COMPLETED and not self.final

    @property
    def fault(self) -> str | None:
        """The reason why this attempt is no measurement, as text; None if it is one."""
        if self.state != COMPLETED:
            code = "" if self.exit_code is None else f", exit code {self.exit_code}"
            return f"the job ended as {self.state}{code}"
        if self.silent:
            return 'there is no "final" record, and no record of the engine for every rank'
        speed, _ = throughput(self.final)
        if not is_number(speed) or not 0 < speed <= MOST:
            old = "images_per_s" in self.final and "throughput" not in self.final
            name = "images_per_s" if old else "throughput"
            above = f"above 0, up to {MOST:g}"
            return f'the "final" record has {name} {speed!r}; expected a number {above}'
        for name in _TIMES:
            if is_number(value := self.final.get(name)) and not 0 <= value <= MOST:
                return f'the "final" record has {name} {value!r}; expected seconds from 0 on'
        ranks = self.final.get("ranks", self.point.ranks)
        if ranks != self.point.ranks:
            return (
                f"planned for {self.point.ranks} ranks, but the script saw {ranks}: "
                "does it call hvd.init() under the launcher?"
            )
        wanted = self.point.case.network
        if wanted not in ("", NONE) and self.point.nodes > 1:
            found = self.network.get("network", "the machine's own memory")
            if found != wanted:
                return f"planned for a network of {wanted}, but the ranks ran on {found}"
        return None

    def to_line(self) -> bytes:
        """Return the attempt as one line of JSON, its newline included."""
        body = {
            "format": FORMAT,
            "point": self.point.to_json(),
            "attempt": self.number,
            "state": self.state,
            "exit_code": self.exit_code,
            "global_batch": self.global_batch,
            "provenance": dict(self.provenance),
            "torn_lines": self.torn_lines,
            "records": [dict(r) for r in self.records],
        }
        return (json.dumps(body, ensure_ascii=False) + "\n").encode()


def parse_attempts(text: str) -> tuple[list[Attempt], list[int]]:
    """Read records.jsonl; return its attempts and the numbers (from 1) of unreadable lines."""
    attempts: list[Attempt] = []
    torn: list[int] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            body = _object(json.loads(line))
            if body.get("format", FORMAT) > FORMAT:
                raise ValueError(body["format"])
            attempts.append(
                Attempt(
                    point=Point.from_json(body["point"]),
                    number=body["attempt"],
                    state=body["state"],
                    exit_code=body["exit_code"],
                    records=tuple(_event(record) for record in body["records"]),
                    torn_lines=body["torn_lines"],
                    provenance=_object(body["provenance"]),
                    global_batch=body.get("global_batch"),
                )
            )
        except (ValueError, KeyError, TypeError):
            torn.append(number)
    return attempts, torn


def _event(value: Any) -> Mapping[str, Any]:
    record = _object(value)
    _object(record.get("place") or {})
    return record


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"not an object: {value!r}")
    return value


def parse_records(text: str) -> tuple[tuple[Mapping[str, Any], ...], int]:
    """Read a script's records; return the events and the number of lines that are not JSON."""
    records: list[Mapping[str, Any]] = []
    torn = 0
    for line in (ln for ln in text.split("\n") if ln.strip()):
        try:
            body = json.loads(line)
        except ValueError:
            body = None
        if isinstance(body, dict):
            records.append(body)
        else:
            torn += 1
    return tuple(records), torn


def finished(attempts: Iterable[Attempt]) -> dict[str, Attempt]:
    """Return the measurement of each finished point by its key: its first attempt without fault."""
    done: dict[str, Attempt] = {}
    for attempt in attempts:
        if attempt.fault is None:
            done.setdefault(attempt.point.key, attempt)
    return done


def usable(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Return the measurements of the finished points that used the bits of their point."""
    return [a for a in finished(attempts).values() if not a.has_other_bits]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a recorded value can be computed with: a number that a finite float holds."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def throughput(record: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the recorded throughput, unchecked, and the unit that it counts.

    Older scripts record a throughput in images as ``images_per_s``.
    """
    if "throughput" in record:
        return record["throughput"], str(record.get("unit") or "samples")
    return record.get("images_per_s"), "images"


def _final_of_engines(
    ranks: Mapping[Any, Mapping[str, Any]], global_batch: int | None
) -> dict[str, Any]:
    """Make a "final" record from the "engine" records of all ranks; empty if one is missing.

    Throughput is the global batch divided by the median step time of the slowest rank, or steps per
    second if the batch is unknown. The mean is not used: the engine does not see epochs, so a test
    between two of them is part of a step. Values that the engine cannot measure, such as the wait
    for data and the accuracy, stay absent.
    """
    first = ranks.get(0)
    if first is None or set(ranks) != set(range(first.get("ranks", 0))):
        return {}
    own = [ranks[rank] for rank in sorted(ranks)]
    steps = [r.get("step_s") for r in own]
    if not all(is_number(s) and s > 0 for s in steps):
        return {}
    count, unit = (1, "steps") if global_batch is None else (global_batch, "samples")
    means = {name: _mean([r.get(name) for r in own]) for name in _MEANS}
    sums = {name: _sum([r.get(name) for r in own]) for name in _SUMS}
    return {
        "event": "final",
        "source": "engine",
        "ranks": len(own),
        "throughput": count / max(s for s in steps if s is not None),
        "unit": unit,
        **means,
        **sums,
        **{name: first[name] for name in (*_FIRST, *RESERVED) if name in first},
        "global_batch_size": global_batch,
        "hosts": list(dict.fromkeys(r["host"] for r in own if "host" in r)),
    }


def _mean(values: Sequence[Any]) -> float | None:
    """Return the mean of the numbers among values: a rank that compressed nothing has no nmse."""
    numbers = [v for v in values if is_number(v)]
    return sum(numbers) / len(numbers) if numbers else None


def _sum(values: Sequence[Any]) -> float | None:
    return sum(values) if values and all(is_number(v) for v in values) else None


@dataclass(frozen=True)
class JobFolder:
    """The folder of a submitted job, with a note on the job."""

    path: Path
    note_file: ClassVar[str]

    def is_of(self, request: JobRequest) -> bool:
        """Return whether this request is the one of its job: it names a file in the folder."""
        raise NotImplementedError

    def note(self) -> dict[str, Any] | None:
        """Return the values stored when the job was submitted; None before that."""
        return _read(self.path / self.note_file)

    def write_note(self, body: Mapping[str, Any]) -> None:
        """Store the job's id and provenance; the write is atomic."""
        _write(self.path / self.note_file, body)


@dataclass(frozen=True)
class AttemptFolder(JobFolder):
    """points/<key>/attempt-N: the script's raw records, the job's id and a copy of its log."""

    number: int
    note_file = "attempt.json"

    def is_of(self, request: JobRequest) -> bool:
        return request.env.get("QSGD_RECORDS") == str(self.records)

    @property
    def records(self) -> Path:
        """The file that the script appends to."""
        return self.path / "records.jsonl"

    @property
    def log(self) -> Path:
        """A copy of the job's output, made when it ended."""
        return self.path / "output.log"

    @property
    def step(self) -> Path:
        """The file in which a step of a packed job records its start and end."""
        return self.path / "step"

    def outcome(self) -> dict[str, Any] | None:
        """Return how the step of a packed job ended; None before that, and for a separate job."""
        return _read(self.path / "outcome.json")

    def write_outcome(self, body: Mapping[str, Any]) -> None:
        """Store how the step ended; the write is atomic."""
        _write(self.path / "outcome.json", body)


@dataclass(frozen=True)
class PackFolder(JobFolder):
    """packs/pack-N: the plan of a packed job, its scripts, and its id after submission."""

    note_file = "pack.json"

    def is_of(self, request: JobRequest) -> bool:
        return request.script_args == (str(self.plan),)

    @property
    def plan(self) -> Path:
        """The plan that the job's driver reads."""
        return self.path / "plan.json"

    @property
    def closed(self) -> bool:
        """Whether all measurements of its job are in the collection."""
        return (self.path / "closed").exists()

    def close(self) -> None:
        """Record that nothing is left to collect."""
        (self.path / "closed").touch()


@dataclass(frozen=True)
class StudyFolder:
    """One study on disk. Raw records are appended and never edited."""

    path: Path

    @property
    def collection(self) -> Path:
        """records.jsonl: one line per attempt that ended."""
        return self.path / "records.jsonl"

    def study(self) -> Study:
        """Read the definition.

        Raises:
            UsageError: the folder has no study, or its study.json cannot be read.
        """
        file = self.path / "study.json"
        try:
            body = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(
                f"{str(self.path)!r} contains no study (no study.json). Use the folder that "
                "`qsgd-hpc scale` printed."
            ) from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{str(file)!r}: cannot be read: {error}.") from None
        try:
            return Study.from_json(body)
        except UsageError as error:
            raise UsageError(f"{str(file)!r}: {error}") from None

    def agree(self, asked: Study) -> None:
        """Raise a UsageError if the folder holds another definition; write nothing.

        The definition of a study of which every point has failed may be replaced: it was at fault.
        """
        if not (self.path / "study.json").exists():
            return
        attempts = self.attempts()[0]
        if attempts and not finished(attempts):
            return
        if found := differences(self.study(), asked):
            head = f"{str(self.path)!r} already holds a study with another definition."
            raise UsageError(
                "\n".join([head, *found, "Use another folder with -o, or the same options."])
            )

    def create(self, study: Study) -> None:
        """Store the definition unless the folder has the same one already.

        Raises:
            UsageError: the folder holds another definition, or cannot be written.
        """
        self.agree(study)
        file = self.path / "study.json"
        with writing("study folder", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not file.exists() or self.study() != study:  # other limits of its jobs
                with self.locked() if self.collection.exists() else nullcontext():
                    if file.exists() and differences(self.study(), study):
                        self._abandon()
                    _write(file, study.to_json())
            # Detect a read-only file now, not after the first hour of measuring.
            with self.collection.open("ab"):
                pass

    def _abandon(self) -> None:
        """Forget the jobs of a replaced definition that are not collected: they measure it."""
        had = self.collected()
        for each in self._attempts_at("*"):
            if (each.path.parent.name, each.number) not in had:
                each.write_note({})
        for pack in self.packs():
            pack.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock on the folder that excludes another `qsgd-hpc scale`."""
        # On the collection, because study.json may be replaced.
        with self.collection.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another qsgd-hpc scale is running in {str(self.path)!r}. Wait for it or stop "
                    "it; its finished points will be skipped."
                ) from None
            except OSError:
                pass  # file systems without locks, such as some Lustre mounts
            yield

    def attempts(self) -> tuple[list[Attempt], list[int]]:
        """Return the collected attempts and the numbers of torn lines.

        Raises:
            UsageError: the collection exists but cannot be read.
        """
        try:
            return parse_attempts(self.collection.read_text(encoding="utf-8", errors="replace"))
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        except OSError as error:
            raise UsageError(
                f"{str(self.collection)!r}: cannot be read: {error.strerror}."
            ) from None

    def collected(self) -> set[tuple[str, int]]:
        """Return the key and the number of each attempt in the collection."""
        return {(a.point.key, a.number) for a in self.attempts()[0]}

    def append(self, attempt: Attempt) -> None:
        """Append one attempt and flush it to disk, after a newline if the last line lacks one.

        An attempt that the collection already has is not added again: an interrupt can arrive
        after the write, before the caller has recorded it.
        """
        if (attempt.point.key, attempt.number) in self.collected():
            return
        line = attempt.to_line()
        with self.collection.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def attempt_folders(self, point: Point) -> list[AttemptFolder]:
        """Return the attempts at a point, first to last."""
        return sorted(self._attempts_at(glob.escape(point.key)), key=lambda a: a.number)

    def _attempts_at(self, key: str) -> Iterator[AttemptFolder]:
        for number, path in _numbered(self.path / "points", f"{key}/attempt-"):
            yield AttemptFolder(path, number)

    def packs(self) -> list[PackFolder]:
        """Return the packed jobs, first to last."""
        return [PackFolder(path) for _, path in sorted(_numbered(self.path / "packs", "pack-"))]

    def new_pack(self) -> PackFolder:
        """Make the folder of the next packed job."""
        path = self.path / "packs" / f"pack-{len(self.packs()) + 1}"
        path.mkdir(parents=True)
        return PackFolder(path.resolve())

    def next_attempt(self, point: Point) -> AttemptFolder:
        """Return the folder of the next attempt at a point, without making it."""
        number = max((a.number for a in self.attempt_folders(point)), default=0) + 1
        path = self.path / "points" / point.key / f"attempt-{number}"
        return AttemptFolder(path.resolve(), number)

    def new_attempt(self, point: Point) -> AttemptFolder:
        """Make the folder of the next attempt at a point."""
        place = self.next_attempt(point)
        place.path.mkdir(parents=True)
        return place


def _numbered(folder: Path, start: str) -> Iterator[tuple[int, Path]]:
    """Yield the folders `start`N of a folder, with their numbers."""
    # Absolute, because a job writes its records to this path.
    for path in folder.resolve().glob(f"{start}*"):
        number = path.name.removeprefix(Path(start).name)
        if number.isdigit():
            yield int(number), path


def _read(path: Path) -> dict[str, Any] | None:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def _write(path: Path, body: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(body, indent=1) + "\n")


@contextmanager
def writing(kind: str, folder: Path) -> Iterator[None]:
    """Report failures to write a folder that the user has chosen.

    Args:
        kind: name of the folder in the message.
        folder: the folder.

    Raises:
        UsageError: what the block writes there cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{kind} {str(folder)!r} cannot be written: {error.strerror}. "
            "Choose another with -o DIR."
        ) from None
