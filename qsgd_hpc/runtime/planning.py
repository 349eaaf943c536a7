"""Measurements of machines for the planner, stored for later jobs on the same site.

A file per site, MPI, layout of ranks and version of this package, under ``$QSGD_HOME/machines``.
The same machine gives the same plans, so a job that finds the file sends the same bytes as the one
that wrote it.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsgd_hpc import __version__, env
from qsgd_hpc._notices import warn
from qsgd_hpc.errors import UsageError

if TYPE_CHECKING:
    from qsgd_hpc._core import CodecSpec, Machine

__all__ = [
    "Key", "from_json", "keep", "key_of", "load", "machine", "recall", "save", "store", "to_json",
]  # fmt: skip

SCHEMA = 3
TIMES = ("add_s_per_byte",)
LINKS = ("within", "across", "shared")
COSTS = ("encode_s", "decode_s", "decode_add_s")


@dataclass(frozen=True)
class Key:
    """The conditions for which a measurement is valid."""

    site: str
    """The site profile's name, else the host's without its number: nid001234 is "nid"."""
    mpi: str
    ranks: int
    ranks_per_node: int
    threads: int
    version: str = __version__

    @property
    def path(self) -> Path:
        """Path of the measurement."""
        words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.site} {self.mpi}").strip("-")
        layout = f"{self.ranks // self.ranks_per_node}x{self.ranks_per_node}x{self.threads}"
        return env.home() / "machines" / f"{words}-{layout}-{self.version}.json"


def site_name() -> str:
    """Return QSGD_SITE, or this host's name without its domain and number."""
    host = socket.gethostname().partition(".")[0]
    return env.get("QSGD_SITE") or re.sub(r"[-_]?\d+$", "", host) or host


def key_of(mpi: Any, nodes: Sequence[Sequence[int]] | None, ranks: int, threads: int) -> Key:
    """Return the conditions of a measurement with these ranks.

    Args:
        mpi: the MPI module (mpi4py.MPI).
        nodes: ranks that share memory with each other, as _core.NodeFacts has them, or None.
        ranks: number of ranks.
        threads: number of coding threads per rank.
    """
    name, version = mpi.get_vendor()
    each = len(nodes[0]) if nodes else 1
    regular = [list(range(first, first + each)) for first in range(0, ranks, each)]
    per_node = each if nodes and [list(node) for node in nodes] == regular else 1
    text = f"{name} {'.'.join(map(str, version))}"
    return Key(site_name(), text, ranks, per_node, threads)


def to_json(measured: Machine) -> dict[str, Any]:
    """Return a machine in its JSON form; times in seconds, per message, byte or element."""
    found: dict[str, Any] = {
        "ranks": measured.ranks,
        "ranks_per_node": measured.ranks_per_node,
        "exact": measured.exact,
        "coded": measured.coded,
        **{name: getattr(measured, name) for name in TIMES},
    }
    for name in LINKS:
        alpha_s, beta_s_per_byte = getattr(measured, name)
        found[name] = {"alpha_s": alpha_s, "beta_s_per_byte": beta_s_per_byte}
    found["codecs"] = [
        {**_code_json(cost[0]), **dict(zip(COSTS, cost[1:], strict=True))}
        for cost in measured.codecs
    ]
    found["observed"] = [
        {"algorithm": algorithm, **_code_json(spec), "count": count, "seconds": seconds}
        for algorithm, spec, count, seconds in measured.observed
    ]
    return found


def _code_json(spec: CodecSpec | None) -> dict[str, Any]:
    fields = ("scheme", "bits")
    return {name: None if spec is None else getattr(spec, name) for name in fields}


def from_json(found: Mapping[str, Any]) -> Machine:
    """Return the machine that :func:`to_json` wrote.

    Raises:
        UsageError: a value is missing or invalid.
    """
    from qsgd_hpc._core import CodecSpec, Machine

    try:
        fields: dict[str, Any] = {
            name: found[name] for name in ("ranks", "ranks_per_node", "exact", "coded", *TIMES)
        }
        for name in LINKS:
            fields[name] = found[name]["alpha_s"], found[name]["beta_s_per_byte"]
        costs = [
            (CodecSpec(scheme=c["scheme"], bits=c["bits"]), *(c[name] for name in COSTS))
            for c in found["codecs"]
        ]
        specs = {(spec.scheme, spec.bits): spec for spec, *_ in costs} | {(None, None): None}
        observed = [
            (o["algorithm"], specs[o["scheme"], o["bits"]], o["count"], o["seconds"])
            for o in found["observed"]
        ]
        return Machine(codecs=costs, observed=observed, **fields)
    except (KeyError, TypeError) as error:
        raise UsageError(f"measurement of the machine: {type(error).__name__} {error}") from None


def save(key: Key, measured: Machine) -> Path:
    """Store a measurement for :func:`load`, atomically."""
    record = {
        "schema": SCHEMA,
        "key": asdict(key),
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": to_json(measured),
    }
    return store(key.path, record)


def store(path: Path, record: Mapping[str, Any]) -> Path:
    """Write a record to a file of its own, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(record, indent=2) + "\n")
    part.replace(path)
    return path


def load(key: Key) -> Machine | None:
    """Return the measurement of an earlier job, or None if there is none for this key.

    Raises:
        UsageError: the file is damaged; the message names it and the remedy.
    """
    try:
        text = key.path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{key.path}: {error}; remove it, it is measured again") from None
    try:
        record = json.loads(text)
        if record["schema"] != SCHEMA or record["key"] != asdict(key):
            return None
        return from_json(record["machine"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{key.path} is damaged ({error}); remove it, it is measured again"
        ) from None


def recall(comm: Any, key: Key) -> Machine | None:
    """Return the measurement of an earlier job, the same on every rank, or None; collective.

    A damaged file is ignored, with a warning.

    Args:
        comm: an mpi4py communicator.
        key: conditions of the measurement; rank 0's is used. QSGD_PLAN_CACHE=0 ignores all.
    """
    found: Any = None
    if comm.Get_rank() == 0 and env.get("QSGD_PLAN_CACHE"):
        try:
            kept = load(key)
            found = None if kept is None else to_json(kept)
        except UsageError as error:
            warn(str(error))
    found = comm.bcast(found)
    return None if found is None else from_json(found)


def keep(key: Key, measured: Machine) -> None:
    """Store a measurement for the next job, as `keep_by`."""
    keep_by(lambda: save(key, measured), "the machine will be measured again by the next job")


def keep_by(save: Callable[[], Path], lost: str) -> None:
    """Store a result for the next job, unless QSGD_PLAN_CACHE=0; warn if that fails.

    Args:
        save: stores it.
        lost: the consequence of a failure, for the warning.
    """
    if not env.get("QSGD_PLAN_CACHE"):
        return
    try:
        save()
    except UsageError as error:  # there is no folder
        warn(str(error))
    except OSError as error:
        warn(f"{error}; {lost}; set QSGD_HOME to a folder that can be written")


def machine(communicator: Any, comm: Any, key: Key, more: Iterable[CodecSpec] = ()) -> Machine:
    """Measure the machine of this job and store the result; collective, equal on every rank.

    Args:
        communicator: qsgd_hpc.runtime.direct.Communicator.
        comm: the mpi4py communicator of the same ranks.
        key: conditions of the measurement.
        more: further codes to measure, of other schemes than the usual ones.
    """
    from qsgd_hpc import _core

    usual = _core.usual_codes()
    known = {spec.scheme for spec in usual}
    asked = [*usual, *(spec for spec in more if spec.scheme not in known)]
    untried = [spec for spec in _core.rotated_codes() if spec not in asked]
    measured: Machine = communicator.measure(
        asked, untried=untried, ranks_per_node=key.ranks_per_node
    )
    if comm.Get_rank() == 0:
        keep(key, measured)
    return measured
