"""The definition of a study: what is measured, checked once and stored in study.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from qsgd_hpc.errors import UsageError

__all__ = ["BITS", "MODES", "Study", "differences", "parse_counts"]

BITS = (2, 4, 8, 32)
MODES = ("strong", "weak")
FORMAT = 1

# The study sets these for every point; a second one after the script would win silently.
_OWN_OPTIONS = ("--batch-size", "--global-batch-size")


@dataclass(frozen=True)
class Study:
    """One scaling study. Two studies are the same when all these values are.

    Attributes:
        script: absolute path of the training script.
        script_args: what follows the script on the command line, untouched.
        mode: "strong" holds the global batch fixed, "weak" the batch of each rank.
        nodes: node counts to measure, ascending.
        bits: bits per gradient element, descending; 32 is uncompressed float32.
        repeats: measurements of each point.
        batch_size: images per step: of all ranks together (strong) or of each rank (weak).
        epochs: passed to the script as --epochs; None leaves the script's own default.
        ranks_per_node: ranks on each node.
        site: name of the site profile.
        workdir: absolute path of the folder that the jobs run in.
        walltime_min: limit of each job; None takes the site's default.
        threads: OMP_NUM_THREADS of every rank where all nodes are one machine; None: the site's.
    """

    script: Path
    mode: str
    nodes: tuple[int, ...]
    bits: tuple[int, ...]
    ranks_per_node: int
    site: str
    workdir: Path
    script_args: tuple[str, ...] = ()
    repeats: int = 1
    batch_size: int = 128
    epochs: int | None = None
    walltime_min: float | None = None
    queue: str | None = None
    account: str | None = None
    filesystems: tuple[str, ...] = ()
    threads: int | None = None

    def check(self) -> None:
        """Raise a UsageError that names every fault of the definition, one per line."""
        faults = [*self._script_faults(), *self._number_faults()]
        if faults:
            raise UsageError("\n".join(faults))

    def _script_faults(self) -> list[str]:
        faults = []
        if not self.script.is_file():
            faults.append(f"script {str(self.script)!r}: no such file. Check the path.")
        for option in _OWN_OPTIONS:
            if any(a == option or a.startswith(option + "=") for a in self.script_args):
                faults.append(
                    f"{option} stands after the script, but the study sets the batch of every "
                    "point. Give --batch-size B before the script."
                )
        return faults

    def _number_faults(self) -> list[str]:
        faults = []
        if self.mode not in MODES:
            faults.append(f"--mode {self.mode!r}: expected strong or weak.")
        for name, value in (
            ("--repeats", self.repeats),
            ("--batch-size", self.batch_size),
            ("--ranks-per-node", self.ranks_per_node),
            ("--epochs", 1 if self.epochs is None else self.epochs),
        ):
            if value < 1:
                faults.append(f"{name} {value}: expected at least 1.")
        if self.mode == "strong" and self.ranks_per_node >= 1:
            for count in self.nodes:
                ranks = count * self.ranks_per_node
                if count >= 1 and self.batch_size % ranks:
                    faults.append(
                        f"--batch-size {self.batch_size} cannot be shared by {ranks} ranks "
                        f"({count} nodes x {self.ranks_per_node}). Use a multiple of {ranks}."
                    )
        return faults

    def to_json(self) -> dict[str, Any]:
        """Return the definition as JSON values, with the number of its format."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        paths = {"script": str(self.script), "workdir": str(self.workdir)}
        return {"format": FORMAT, **plain, **paths}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Study:
        """Rebuild a definition that :meth:`to_json` wrote.

        Raises:
            UsageError: another format, or a key that is missing or unknown.
        """
        if body.get("format") != FORMAT:
            raise UsageError(
                f"format {body.get('format')!r} is not {FORMAT}: the study was written by another "
                "version of qsgd-hpc. Read it with that version, or start a new folder."
            )
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in body.items()
        }
        del values["format"]
        try:
            paths = {name: Path(values[name]) for name in ("script", "workdir")}
            return cls(**{**values, **paths})
        except (KeyError, TypeError) as error:
            raise UsageError(f"not a study definition: {error}. Start a new folder.") from None


def differences(stored: Study, asked: Study) -> list[str]:
    """Name the values in which two definitions differ, one line each."""
    return [
        f"{f.name}: the folder has {_show(getattr(stored, f.name))}, "
        f"this command asks for {_show(getattr(asked, f.name))}"
        for f in fields(Study)
        if getattr(stored, f.name) != getattr(asked, f.name)
    ]


def parse_counts(text: str, option: str, allowed: tuple[int, ...] | None = None) -> list[int]:
    """Read a list such as '1,2,4': whole numbers from 1, each once, order kept.

    Raises:
        UsageError: an empty list, or every word that is no number or not allowed.
    """
    faults, counts = [], []
    for word in (w.strip() for w in text.split(",")):
        value = int(word) if word.isascii() and word.isdigit() else None
        if allowed is not None and value not in allowed:
            faults.append(f"{option} {word!r}: expected {', '.join(map(str, allowed))}.")
        elif value is None or value < 1:
            faults.append(f"{option} {word!r}: expected whole numbers from 1, such as 1,2,4.")
        elif value not in counts:
            counts.append(value)
    if faults:
        raise UsageError("\n".join(faults))
    return counts


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)
