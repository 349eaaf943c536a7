"""The definition of a study, checked once and stored in study.json; its cases and its points.

Pure functions; nothing is started here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.cluster.network import NONE
from qsgd_hpc.scaling import units

__all__ = [
    "BITS",
    "MODES",
    "PLAIN_BITS",
    "Case",
    "Point",
    "Program",
    "Study",
    "counts_for",
    "differences",
    "environment",
    "equal_threads",
    "global_batch",
    "parse_counts",
    "plan",
    "script_args",
]

AUTO = "auto"


@dataclass(frozen=True, order=True)
class Case:
    """A training of a study; points of the same case are compared with one another.

    Attributes:
        workload: name of a workload of this package, or the stem of the user's script.
        framework: "torch" or "keras"; empty for a user's script.
        batch_size: samples per step: of all ranks together (strong) or of each rank (weak).
        algorithm: name of the allreduce algorithm; "auto" leaves the choice to the engine.
        network: the emulated network between the nodes, such as "1gbit"; "none": shared memory;
            empty: the site's network.
    """

    workload: str
    framework: str = ""
    batch_size: int = 128
    algorithm: str = AUTO
    network: str = ""

    @property
    def key(self) -> str:
        """A name for folders and files; unique in a study."""
        words = [self.workload, self.framework, f"batch{self.batch_size}"]
        if self.algorithm != AUTO:
            words.append(self.algorithm)
        if self.network:
            words.append(f"net-{re.sub('[,=]+', '-', self.network)}")
        return "-".join(word for word in words if word)

    @property
    def label(self) -> str:
        """Words for headings, such as 'resnet34 (torch), batch 128'."""
        name = f"{self.workload} ({self.framework})" if self.framework else self.workload
        algorithm = "" if self.algorithm == AUTO else f", {self.algorithm}"
        network = f", {self.network_label}" if self.network else ""
        return f"{name}, batch {self.batch_size}{algorithm}{network}"

    @property
    def network_label(self) -> str:
        """Words for the network, such as '1 Gb/s'; empty if it is the site's own."""
        found = parse_network(self.network) if self.network else None
        return found.label if found else "shared memory" if self.network else ""

    @property
    def network_place(self) -> str:
        """Words for sentences, such as 'at 1 Gb/s'; empty if it is the site's own."""
        label = self.network_label
        return f"{'in' if self.network == NONE else 'at'} {label}" if label else ""


# The study sets these for every point; a second one after the script would silently override it.
_OWN_OPTIONS = ("--batch-size", "--global-batch-size")
_BATCH_ARGS = {
    "strong": ("--global-batch-size", "{global_batch}"),
    "weak": ("--batch-size", "{rank_batch}"),
}


@dataclass(frozen=True)
class Program:
    """A script and its arguments.

    Attributes:
        workload: name of the shipped workload, or the stem of the user's script.
        script: absolute path.
        framework: "torch" or "keras" for a shipped workload; empty for a user's script.
        args: the script's arguments.
        batch_sizes: samples per step to measure: of all ranks (strong) or of each rank (weak).
        epochs: passed to the script as --epochs; None leaves the script's own default.
        steps: passed to the script as --steps; None: no limit.
        batch_args: the script's arguments for its batch, with {global_batch} and {rank_batch}
            for the samples of all ranks and of one; empty: no arguments. None: by the mode, as
            scripts of this package expect.
        target: the quality for the reported time to target: a perplexity above 1, else a test
            accuracy. None: the quality that all fp32 runs at the largest size reach.
    """

    workload: str
    script: Path
    framework: str = ""
    args: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = (128,)
    epochs: int | None = None
    steps: int | None = None
    batch_args: tuple[str, ...] | None = None
    target: float | None = None

    @property
    def name(self) -> str:
        """A unique name within the study, such as 'resnet34 (torch)'."""
        return f"{self.workload} ({self.framework})" if self.framework else self.workload

    def trains(self, case: Case) -> bool:
        """Return whether a case belongs to this program."""
        return (self.workload, self.framework) == (case.workload, case.framework)

    def cases(self, algorithms: tuple[str, ...], networks: tuple[str, ...]) -> tuple[Case, ...]:
        """Return the combinations of its batch sizes with the algorithms and the networks."""
        return tuple(
            Case(self.workload, self.framework, batch, algorithm, network)
            for batch in self.batch_sizes
            for algorithm in algorithms
            for network in networks
        )

    def batch_words(self, mode: str, *, global_batch: int, ranks: int) -> list[str]:
        """Return the script's arguments for its batch."""
        words = _BATCH_ARGS[mode] if self.batch_args is None else self.batch_args
        fields = {"global_batch": global_batch, "rank_batch": global_batch // ranks}
        return [word.format(**fields) for word in words]

    @property
    def limits(self) -> dict[str, int]:
        """The script's options that limit a run, as far as the study sets them."""
        given = {"--epochs": self.epochs, "--steps": self.steps}
        return {option: value for option, value in given.items() if value is not None}

    def limit_words(self) -> list[str]:
        """Return the script's arguments for the limits of a run."""
        return [word for option, value in self.limits.items() for word in (option, str(value))]

    def unknown_batch_option(self, mode: str) -> str | None:
        """Return the option for the batch if the script's text does not have it.

        A script that parses its arguments elsewhere may know it, and one that parses none ignores
        it: its speed would be computed from a batch that it does not use.
        """
        if self.batch_args is not None or not self.script.is_file():
            return None
        option = _BATCH_ARGS[mode][0]
        text = self.script.read_bytes().replace(b"_", b"-")
        return None if option.lstrip("-").encode() in text else option

    def faults(self, mode: str, ranks: tuple[int, ...]) -> Iterator[str]:
        """Yield every fault, each with its remedy; `ranks` are those of the sizes to measure."""
        if not self.script.is_file():
            yield f"script {str(self.script)!r}: no such file. Check the path."
        try:
            self.batch_words("strong", global_batch=1, ranks=1)
        except (KeyError, IndexError, ValueError):
            yield (
                f"--batch-args {' '.join(self.batch_args or ())!r}: only {{global_batch}} and "
                "{rank_batch} can stand in braces, such as '--bs {rank_batch}'."
            )
        if self.target is not None and not 0 < self.target < math.inf:
            yield f"--target {self.target:g}: expected a number above 0."
        for option in _OWN_OPTIONS if self.batch_args is None else ():
            if any(a == option or a.startswith(option + "=") for a in self.args):
                yield (
                    f"{option} follows the script, but the study sets the batch of every point. "
                    "Put --batch-size B before the script."
                )
        for option, value in self.limits.items():
            if value < 1:
                yield f"{option} {value}: expected at least 1."
        for batch in self.batch_sizes:
            if batch < 1:
                yield f"--batch-size {batch}: expected at least 1."
            uneven = [n for n in ranks if n >= 1 and batch >= 1 and batch % n]
            if mode == "strong" and uneven:
                several = " and ".join(str(n) for n in uneven)
                yield (
                    f"--batch-size {batch} cannot be shared by {several} ranks ({self.name}). "
                    f"Use a multiple of {uneven[-1]}."
                )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "script": str(self.script)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Program:
        """Create it from the values of :meth:`to_json`; raises KeyError or TypeError for others."""
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in body.items()
        }
        values["script"] = Path(values["script"])
        return cls(**values)


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
        faults += self._own_faults()
        if faults:
            raise UsageError("\n".join(dict.fromkeys(faults)))

    def _own_faults(self) -> Iterator[str]:
        names = [p.name for p in self.programs]
        if not names:
            yield "nothing to train. Give a SCRIPT, or --workload NAME."
        for name in sorted({n for n in names if names.count(n) > 1}):
            yield f"{name} is given {names.count(name)} times. Rename one of the scripts."
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
    before, now = _settings_of(stored), _settings_of(asked)
    return [
        f"{name}: the folder has {_show(before.get(name))}, this command has {_show(now.get(name))}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def _settings_of(study: Study) -> dict[str, Any]:
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


_ORDER_SEED = "qsgd-hpc scaling order 1"
PLAIN_BITS = 32


@dataclass(frozen=True)
class Point:
    """One measurement: a case with its number of nodes and ranks, bits, and repeat (from 1)."""

    case: Case
    nodes: int
    ranks: int
    bits: int
    repeat: int

    @property
    def key(self) -> str:
        """Name of the point's folder; unique in a study."""
        return f"{self.case.key}-nodes{self.nodes}-bits{self.bits}-repeat{self.repeat}"

    @property
    def label(self) -> str:
        """Words for progress lines, such as '2 nodes, 4 bit'."""
        return f"{units.nodes_name(self.nodes)}, {units.bits_name(self.bits)}"

    def name(self, several: bool) -> str:
        """Return the label with the repeat and, in a study of several cases, with the case."""
        case = f"{self.case.label}: " if several else ""
        return f"{case}{self.label}, repeat {self.repeat}"

    def to_json(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Point:
        """Create a point from the values of :meth:`to_json`, else raise KeyError or TypeError."""
        values: dict[str, Any] = {**body, "case": Case(**body["case"])}
        return cls(**values)


def plan(study: Study) -> tuple[Point, ...]:
    """Return the points of a study in the order of measurement.

    Cases are combined with nodes, bits and repeats. One rank sends nothing, so a point of one rank
    is measured once per program, batch size and repeat: it is labelled 32 bit and with the first
    algorithm, whatever bits and algorithms the study compares. A point of one node is labelled
    with the first network, because it uses none (see :func:`counts_for`). Each repeat is a complete
    round in its own shuffled order: a machine that becomes slower (heat, other users) then affects
    all sizes equally and does not look like scaling. The order depends only on the points, so a
    resumed study continues in the same order.
    """
    points: list[Point] = []
    for repeat in range(1, study.repeats + 1):
        sizes = {
            _measured(study, Point(case, nodes, nodes * study.ranks_per_node, bits, repeat))
            for case in study.cases
            for nodes in study.nodes
            for bits in study.bits
        }
        points += sorted(sizes, key=_shuffled)
    return tuple(points)


def counts_for(case: Case, point: Point) -> bool:
    """Return whether a point belongs to a case, as its own or as a shared point.

    Points of one rank are shared by all algorithms, points of one node by all networks.
    """
    own = point.case
    if point.nodes == 1:
        own = replace(own, network=case.network)
    if point.ranks == 1:
        own = replace(own, algorithm=case.algorithm)
    return own == case


def script_args(study: Study, point: Point) -> tuple[str, ...]:
    """Return the script's arguments at a point: the user's first, then the study's.

    The convention for scripts (scaling/README.md): ``--global-batch-size B`` is the batch of all
    ranks together, ``--batch-size B`` the batch of each rank, unless ``batch_args`` replaces both;
    ``--epochs E`` is the number of passes over the data, ``--steps N`` ends after N steps.
    """
    program = study.program(point.case)
    total = global_batch(study.mode, point.case, point.ranks)
    batch = program.batch_words(study.mode, global_batch=total, ranks=point.ranks)
    return (*program.args, *batch, *program.limit_words())


def global_batch(mode: str, case: Case, ranks: int) -> int:
    """Return the number of samples of all ranks in a step."""
    return case.batch_size * (ranks if mode == "weak" else 1)


def environment(study: Study, point: Point, records: str) -> dict[str, str]:
    """Return the variables of a point's job; `records` is the file for its records.

    Code and algorithm are always set, so that the caller's values do not affect a point. The
    planner is off unless the caller sets it, because the report shows the effect of compression.
    """
    threads = {} if study.threads is None else {"OMP_NUM_THREADS": str(study.threads)}
    return {
        "QSGD_BITS": str(point.bits),
        "QSGD_SCHEME": "qsgd",
        "QSGD_ALGORITHM": point.case.algorithm,
        "QSGD_RECORDS": records,
        "QSGD_PLANNER": env.get("QSGD_PLANNER") if env.is_set("QSGD_PLANNER") else "off",
        **threads,
    }


def equal_threads(cores: int, study: Study) -> int:
    """Return the threads of a rank if all nodes of a study are one machine with these cores.

    A rank has the same number of threads at every size as at the largest. Otherwise a single rank
    would use all cores, and more ranks could only divide them: no study would show any speed-up.
    """
    return max(1, cores // (max(study.nodes) * study.ranks_per_node))


def _measured(study: Study, point: Point) -> Point:
    if point.nodes == 1 and study.networks:
        point = replace(point, case=replace(point.case, network=study.networks[0]))
    if point.ranks > 1:
        return point
    case = replace(point.case, algorithm=study.algorithms[0])
    return replace(point, case=case, bits=PLAIN_BITS)


def _shuffled(point: Point) -> str:
    # A hash, not `random`, gives the same order under every Python version.
    return hashlib.sha256(f"{_ORDER_SEED} {point.key}".encode()).hexdigest()
