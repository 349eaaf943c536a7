"""The study's folder on disk: definition, attempts, and the append-only collection."""

from __future__ import annotations

import fcntl
import glob
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.define.plan import Point
from qsgd_hpc.scaling.define.study import Study, differences
from qsgd_hpc.scaling.store.attempts import Attempt, finished, parse_attempts

__all__ = ["AttemptFolder", "JobFolder", "PackFolder", "StudyFolder", "write_whole", "writing"]


@dataclass(frozen=True)
class JobFolder:
    """The folder of a submitted job, with a note on the job."""

    path: Path
    note_file: ClassVar[str]

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
    write_whole(path, json.dumps(body, indent=1) + "\n")


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


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old or the new content, also after a crash."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
