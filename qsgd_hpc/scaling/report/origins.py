"""Provenance of a study's numbers, from its attempts; pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsgd_hpc.launch.cluster import Network
from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.report.cautions import Machine
from qsgd_hpc.scaling.store import Attempt, is_number

__all__ = ["Origins", "origins"]

NO_SCHEDULER = "local"
# A machine with a load above this per logical core is overloaded.
BUSY = 1.5

Fact = Callable[[Attempt], Any]


@dataclass(frozen=True)
class Origins:
    """Facts for the report, and differences that make its points less comparable.

    Attributes:
        facts: (label, text) pairs of the known facts: code, machine, software, times.
        jobs: one line per measurement: {"point", "job", "host", "command"}.
        machine: the kind of nodes if every job ran without a batch system, so on one machine; None
            if there was a batch system.
        cautions: facts that should not differ between points, but do.
    """

    facts: tuple[tuple[str, str], ...]
    jobs: tuple[Mapping[str, str], ...]
    machine: Machine | None
    cautions: tuple[str, ...]


def origins(measured: Sequence[Attempt]) -> Origins:
    """Return the provenance of the measurements in a report."""
    return Origins(
        facts=tuple((label, text) for label, text in _facts(measured) if text),
        jobs=_jobs(measured),
        machine=_machine(measured),
        cautions=(*_mixed(measured), *_uncommitted(measured), *_busy(measured)),
    )


def _machine(measured: Sequence[Attempt]) -> Machine | None:
    if any(_job(a).get("scheduler") != NO_SCHEDULER for a in measured):
        return None
    if any(a.network for a in measured):
        return Machine.EMULATED
    # Namespaces and containers have host names of their own.
    apart = any(len(_hosts(a)) > 1 for a in measured)
    return Machine.PARTS if apart else Machine.ONE


def _facts(measured: Sequence[Attempt]) -> list[tuple[str, str]]:
    def known(fact: Fact, between: str = "; ") -> str:
        return between.join(_distinct(fact(a) for a in measured))

    times = sorted(str(r["time"]) for a in measured for r in a.records if r.get("time"))
    return [
        ("Code", known(_commit)),
        ("Script", known(lambda a: _short(a.provenance.get("script_sha256")))),
        ("Nodes", ", ".join(_distinct(host for a in measured for host in _hosts(a)))),
        ("Processor", known(_processor)),
        ("Clock", known(_clock)),
        ("GPU", known(_gpu)),
        ("Network", known(_network)),
        ("Threads", known(_threads)),
        ("Load", _load([a.final for a in measured])),
        ("Modules", known(_modules)),
        ("Software", known(_software)),
        ("MPI", known(_mpi) or "not loaded by mpi4py in the script"),
        ("Site", known(lambda a: _job(a).get("site"), ", ")),
        ("Measured", " to ".join(_distinct([times[0][:19], times[-1][:19]])) if times else ""),
    ]


def _mixed(measured: Sequence[Attempt]) -> Iterator[str]:
    """Yield a caution if the machine differs between points, or the code within one program."""
    machine: dict[str, Fact] = {
        "processor": _processor,
        # A script that records no GPU differs from a script that trained on one.
        "GPU": lambda a: _gpu(a) or ("none" if "gpu" in a.final else None),
        "clock governor": lambda a: _place(a).get("governor"),
        "MPI library": _mpi,
        "modules": _modules,
    }
    code: dict[str, Fact] = {
        "commit of the code": _commit,
        "script": lambda a: a.provenance.get("script_sha256"),
        "software": _software,
    }
    programs: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in measured:
        case = attempt.point.case
        programs.setdefault((case.workload, case.framework), []).append(attempt)
    versions = {
        name: max(len(_distinct(fact(a) for a in own)) for own in programs.values())
        for name, fact in code.items()
    }
    versions |= {name: len(_distinct(fact(a) for a in measured)) for name, fact in machine.items()}
    mixed = [f"{name} ({count} versions)" for name, count in versions.items() if count > 1]
    if mixed:
        yield (
            f"Mixed points: Not all were measured with the same {', '.join(mixed)}, which may "
            "cause differences between points."
        )


def _uncommitted(measured: Sequence[Attempt]) -> Iterator[str]:
    if any((a.provenance.get("git") or {}).get("dirty") for a in measured):
        yield (
            "Uncommitted changes: The script's repository differed from its commit when at least "
            "one point was measured, so the commit alone does not reproduce it."
        )


def _busy(measured: Sequence[Attempt]) -> Iterator[str]:
    loads = [(a.final.get("load"), a.final.get("cores")) for a in measured]
    known = [(load, cores) for load, cores in loads if is_number(load) and is_number(cores)]
    crowded = [(load, cores) for load, cores in known if load > BUSY * cores]
    if crowded:
        load, cores = max(crowded)
        yield (
            f"Busy machine: At the end of {len(crowded)} of {len(known)} runs the load exceeded "
            f"the number of cores (load {load:.1f} on {cores} logical cores at worst). Other work "
            "may have slowed down some points more than others; measure again on a quiet machine."
        )


def _jobs(measured: Sequence[Attempt]) -> tuple[Mapping[str, str], ...]:
    several = len({a.point.case for a in measured}) > 1
    order = sorted(
        measured, key=lambda a: (a.point.case, a.point.ranks, -a.point.bits, a.point.repeat)
    )
    return tuple(
        {
            "point": (f"{a.point.case.label}, " if several else "") + a.point.name(False),
            "job": str(_job(a).get("id", units.MISSING)),
            "host": ", ".join(_hosts(a)) or units.MISSING,
            "command": _command(a),
        }
        for a in order
    )


def _distinct(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(v) for v in values if v))


def _job(attempt: Attempt) -> Mapping[str, Any]:
    return attempt.provenance.get("job") or {}


def _place(attempt: Attempt) -> Mapping[str, Any]:
    return attempt.final.get("place") or {}


def _short(sha256: Any) -> str:
    return f"sha256 {sha256[:16]}" if sha256 else ""


def _commit(attempt: Attempt) -> str | None:
    git = attempt.provenance.get("git")
    if not git:
        return None
    return f"{git['commit'][:12]}{' with uncommitted changes' if git['dirty'] else ''}"


def _hosts(attempt: Attempt) -> list[str]:
    """Return the nodes of a run: all of them if the script recorded them, else rank 0's."""
    final = attempt.final
    hosts = final.get("hosts")  # a script's own field may be a number or a text
    return _distinct(hosts if hosts and isinstance(hosts, list) else [final.get("host")])


def _processor(attempt: Attempt) -> str | None:
    cpu, cores = attempt.final.get("cpu"), attempt.final.get("cores")
    return f"{cpu}, {cores} logical cores" if cpu and cores else cpu


def _gpu(attempt: Attempt) -> str | None:
    """Return the GPU that the script recorded, else the GPUs of the node."""
    if "gpu" in attempt.final:
        return attempt.final["gpu"] or None
    return ", ".join(_distinct(_place(attempt).get("gpus") or ())) or None


def _network(attempt: Attempt) -> str:
    """Return the name of an emulated network; empty if the network was not emulated."""
    found = attempt.network
    if found.get("hosts", 0) < 2:
        return ""
    return f"{Network.parse(found['network']).label}, emulated"


def _clock(attempt: Attempt) -> str:
    """Return the range and the governor of the processor's clock, not a momentary frequency."""
    khz, governor = _place(attempt).get("clock_khz") or [], _place(attempt).get("governor")
    span = f"{khz[0] / 1e6:.2f} to {khz[1] / 1e6:.2f} GHz" if len(khz) >= 2 else ""
    return ", ".join(word for word in (span, f"governor {governor}" if governor else "") if word)


def _modules(attempt: Attempt) -> str:
    found = _place(attempt).get("modules") or attempt.provenance.get("modules") or ()
    return ", ".join(str(name) for name in found)


def _threads(attempt: Attempt) -> str:
    threads = attempt.final.get("threads")
    return f"{units.count(threads, 'thread')} per rank" if isinstance(threads, int) else ""


def _mpi(attempt: Attempt) -> str | None:
    # MPICH's description goes on with the options and compilers of its build.
    return (attempt.final.get("mpi") or "").partition(" MPICH configure:")[0] or None


def _load(finals: Sequence[Mapping[str, Any]]) -> str:
    loads = sorted(float(f["load"]) for f in finals if is_number(f.get("load")))
    if not loads:
        return ""
    span = f"{loads[0]:.1f}" if loads[0] == loads[-1] else f"{loads[0]:.1f} to {loads[-1]:.1f}"
    return f"{span} runnable processes and threads (1-minute average at the end of each run)"


def _software(attempt: Attempt) -> str:
    versions = attempt.final.get("versions") or {}
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _command(attempt: Attempt) -> str:
    env = attempt.provenance.get("env") or {}
    settings = [f"{name}={env[name]}" for name in ("QSGD_BITS", "QSGD_ALGORITHM") if name in env]
    command = attempt.provenance.get("command") or ()
    return " ".join([*settings, shlex.join(str(word) for word in command)])
