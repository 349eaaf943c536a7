"""The definition of a study, checked once and stored in study.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.define.case import AUTO, Case
from qsgd_hpc.scaling.define.program import Program

__all__ = ["BITS", "MODES", "Study", "differences", "parse_counts"]

BITS = (2, 4, 8, 32)
MODES = ("strong", "weak")
FORMAT = 2

# Settings that affect how the jobs run, not what they measure: these may change when a study is
# resumed, like the target of a program, which only the report uses.
_HOW = ("walltime_min", "account", "filesystems", "python", "pack", "max_node_hours")


@dataclass(frozen=True)
class Study:
    """One scaling study.

    Attributes:
        programs: the trainings.
        mode: "strong" keeps the global batch constant, "weak" the batch of each rank.
        nodes: node counts to measure, ascending.
        bits: bits per gradient element, descending; 32 is uncompressed float32.
        ranks_per_node: ranks on each node.
        site: name of the site profile.
        workdir: absolute path of the folder that the jobs run in.
        algorithms: allreduce algorithms to compare; "auto" leaves the choice to the engine.
        networks: networks to emulate between the nodes, in normal form ("1gbit"); empty: the site's
            network.
        repeats: measurements of each point.
        walltime_min: limit of each job; None takes the site's default.
        python: interpreter of the scripts on the nodes; None: the site's, or this one.
        max_node_hours: limit for all jobs together; None: no limit.
        pack: run many points inside one job of the largest size, instead of one job for each.
        threads: OMP_NUM_THREADS of every rank if all nodes are one machine; None: the site's.
    """

    programs: tuple[Program, ...]
    mode: str
    nodes: tuple[int, ...]
    bits: tuple[int, ...]
    ranks_per_node: int
    site: str
    workdir: Path
    algorithms: tuple[str, ...] = (AUTO,)
    networks: tuple[str, ...] = ()
    repeats: int = 1
    walltime_min: float | None = None
    queue: str | None = None
    account: str | None = None
    filesystems: tuple[str, ...] = ()
    python: str | None = None
    max_node_hours: float | None = None
    pack: bool = False
    threads: int | None = None

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases: programs x batches x algorithms x networks, in this order."""
        networks = self.networks or ("",)
        return tuple(c for each in self.programs for c in each.cases(self.algorithms, networks))

    @property
    def title(self) -> str:
        """Name the study for headings: 'train.py', or 'resnet34 (torch), mnist (torch)'."""
        return ", ".join(p.name if p.framework else p.script.name for p in self.programs)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of each size, ascending."""
        return tuple(n * self.ranks_per_node for n in self.nodes)

    def program(self, case: Case) -> Program:
        """Return the program of a case."""
        return next(p for p in self.programs if p.trains(case))

    def check(self) -> None:
        """Raise a UsageError that names every fault of the definition, one per line."""
        faults = [f for p in self.programs for f in p.faults(self.mode, self.ranks)]
        faults += [*self._name_faults(), *self._number_faults()]
        if faults:
            raise UsageError("\n".join(dict.fromkeys(faults)))

    def _name_faults(self) -> Iterator[str]:
        names = [p.name for p in self.programs]
        if not names:
            yield "nothing to train. Give a SCRIPT, or --workload NAME."
        for name in sorted({n for n in names if names.count(n) > 1}):
            yield f"{name} is given {names.count(name)} times. Rename one of the scripts."

    def _number_faults(self) -> Iterator[str]:
        if self.mode not in MODES:
            yield f"--mode {self.mode!r}: expected strong or weak."
        for name, value in (
            ("--repeats", self.repeats),
            ("--ranks-per-node", self.ranks_per_node),
        ):
            if value < 1:
                yield f"{name} {value}: expected at least 1."
        if self.max_node_hours is not None and not 0 < self.max_node_hours < math.inf:
            yield f"--max-node-hours {self.max_node_hours:g}: expected a number above 0."

    def to_json(self) -> dict[str, Any]:
        """Return the definition as JSON values, with the number of the format."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        programs = [p.to_json() for p in self.programs]
        return {"format": FORMAT, **plain, "programs": programs, "workdir": str(self.workdir)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Study:
        """Create a definition from the values of :meth:`to_json`.

        Raises:
            UsageError: another format, or a key that is missing or unknown.
        """
        number = body.get("format") if isinstance(body, Mapping) else None
        if number != FORMAT:
            raise UsageError(
                f"format {number!r} is not {FORMAT}: the study was written by another "
                "version of qsgd-hpc. Read it with that version, or start a new folder."
            )
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in body.items()
        }
        del values["format"]
        try:
            values["programs"] = tuple(Program.from_json(p) for p in values["programs"])
            values["workdir"] = Path(values["workdir"])
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"not a study definition: {error}. Start a new folder.") from None


def differences(stored: Study, asked: Study) -> list[str]:
    """Return the differences between the definitions of two studies, one line each."""
    before, now = _measured(stored), _measured(asked)
    return [
        f"{name}: the folder has {_show(before.get(name))}, this command has {_show(now.get(name))}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def _measured(study: Study) -> dict[str, Any]:
    """Return the values of a study's definition, with the user's names for them."""
    values: dict[str, Any] = {}
    for program in study.programs:
        prefix = "" if len(study.programs) == 1 else f"{program.name} "
        for f in (f for f in fields(Program) if f.name != "target"):
            values[prefix + f.name] = getattr(program, f.name)
    names = (f.name for f in fields(Study) if f.name not in ("programs", *_HOW))
    return {**values, **{name: getattr(study, name) for name in names}}


def parse_counts(text: str, option: str, allowed: tuple[int, ...] | None = None) -> list[int]:
    """Read a list such as '1,2,4': integers from 1, each once, in order.

    Raises:
        UsageError: an empty list, or all invalid words.
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
