"""Where a study's numbers come from: provenance gathered from its attempts; pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsgd_hpc.scaling import words
from qsgd_hpc.scaling.attempts import Attempt, is_number

__all__ = ["Origins", "origins"]

NO_SCHEDULER = "local"


@dataclass(frozen=True)
class Origins:
    """Facts for the report, and what makes its points less comparable.

    Attributes:
        facts: (label, text) pairs: code, machine, software, times.
        jobs: one line per measurement: {"point", "job", "host", "command"}.
        one_machine: every job ran without a batch system, so on one machine.
        cautions: facts that differ between points although they should not.
    """

    facts: tuple[tuple[str, str], ...]
    jobs: tuple[Mapping[str, str], ...]
    one_machine: bool
    cautions: tuple[str, ...]


def origins(measured: Sequence[Attempt]) -> Origins:
    """Gather the provenance of the measurements that a report shows."""
    finals = [a.final for a in measured]
    commits = _distinct(_commit(a.provenance.get("git")) for a in measured)
    scripts = _distinct(a.provenance.get("script_sha256") for a in measured)
    hosts = _distinct(f.get("host") for f in finals)
    processors = _distinct(_processor(f) for f in finals)
    software = _distinct(_software(f.get("versions")) for f in finals)
    libraries = _distinct(f.get("mpi") for f in finals)
    times = sorted(str(r["time"]) for a in measured for r in a.records if r.get("time"))
    facts = [
        ("Code", "; ".join(commits)),
        ("Script", "; ".join(f"sha256 {s[:16]}" for s in scripts)),
        ("Host", ", ".join(hosts)),
        ("Processor", "; ".join(processors)),
        ("Load", _load(finals)),
        ("Software", "; ".join(software)),
        ("MPI", "; ".join(libraries) or "not loaded by mpi4py in the script"),
        ("Site", ", ".join(_distinct(_job(a).get("site") for a in measured))),
        ("Measured", " to ".join(_distinct([times[0][:19], times[-1][:19]])) if times else ""),
    ]
    kinds = {
        "commit of the code": commits,
        "script": scripts,
        "processor": processors,
        "software": software,
        "MPI library": libraries,
    }
    cautions = []
    if mixed := [f"{name} ({len(v)} versions)" for name, v in kinds.items() if len(v) > 1]:
        cautions.append(
            f"Mixed points: Not all were measured with the same {', '.join(mixed)}, so differences "
            "between points may come from that."
        )
    if any((a.provenance.get("git") or {}).get("dirty") for a in measured):
        cautions.append(
            "Uncommitted changes: The script's repository differed from its commit when at least "
            "one point was measured, so the commit alone does not reproduce it."
        )
    jobs = tuple(
        {
            "point": f"{a.point.label}, repeat {a.point.repeat}",
            "job": str(_job(a).get("id", words.MISSING)),
            "host": str(a.final.get("host", words.MISSING)),
            "command": _command(a),
        }
        for a in sorted(measured, key=lambda a: (a.point.ranks, -a.point.bits, a.point.repeat))
    )
    return Origins(
        facts=tuple((k, v) for k, v in facts if v),
        jobs=jobs,
        one_machine=all(_job(a).get("scheduler") == NO_SCHEDULER for a in measured),
        cautions=tuple(cautions),
    )


def _distinct(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(v) for v in values if v))


def _job(attempt: Attempt) -> Mapping[str, Any]:
    return attempt.provenance.get("job") or {}


def _commit(git: Mapping[str, Any] | None) -> str | None:
    if not git:
        return None
    return f"{git['commit'][:12]}{' with uncommitted changes' if git['dirty'] else ''}"


def _processor(final: Mapping[str, Any]) -> str | None:
    cpu, cores = final.get("cpu"), final.get("cores")
    return f"{cpu}, {cores} logical cores" if cpu and cores else cpu


def _load(finals: Sequence[Mapping[str, Any]]) -> str:
    loads = sorted(float(f["load"]) for f in finals if is_number(f.get("load")))
    if not loads:
        return ""
    span = f"{loads[0]:.1f}" if loads[0] == loads[-1] else f"{loads[0]:.1f} to {loads[-1]:.1f}"
    return f"{span} runnable processes and threads (1-minute average at the end of each run)"


def _software(versions: Mapping[str, str] | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in (versions or {}).items())


def _command(attempt: Attempt) -> str:
    env = attempt.provenance.get("env") or {}
    bits = f"QSGD_BITS={env['QSGD_BITS']} " if "QSGD_BITS" in env else ""
    return bits + shlex.join(str(word) for word in attempt.provenance.get("command") or ())
