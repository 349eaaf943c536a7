"""A site profile as frozen data. Every fact about a machine is in here, none is in the code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qsgd_hpc.jobs.words import minutes

__all__ = ["Gpu", "Queue", "Site", "build"]

# Profile keys that are fields of Site under the same name: as they are, and lists as tuples.
_PLAIN = (
    "embedded_default",
    "shell",
    "python",
    "ranks_per_node",
    "queue_kind",
    "account_suffix",
    "proxy",
)
_WORDS = ("login_hosts", "filesystems", "required", "directives", "setup", "notes")


@dataclass(frozen=True)
class Queue:
    """What one queue (partition, QOS) takes; both ranges include their ends."""

    name: str
    nodes: tuple[int, int]
    walltime_min: tuple[float, float]
    routes: tuple[str, ...] = ()
    via: str | None = None
    auto: bool = True
    note: str = ""

    def takes(self, nodes: int, walltime_min: float | None) -> bool:
        """Tell whether the ranges allow a job of this size; no walltime fits every range."""
        if not self.nodes[0] <= nodes <= self.nodes[1]:
            return False
        return walltime_min is None or (
            self.walltime_min[0] <= walltime_min <= self.walltime_min[1]
        )


@dataclass(frozen=True)
class Gpu:
    """The order in which ranks see a node's GPUs, and who must set the variable for it."""

    variable: str
    order: tuple[int, ...]
    set_in: str = "script"


@dataclass(frozen=True)
class Site:
    """One machine. The meaning of each field is in jobs/schema.json."""

    name: str
    description: str
    scheduler: str
    launcher_argv: tuple[str, ...]
    launcher_env_argv: tuple[str, ...] = ()
    embedded_default: bool = False
    login_hosts: tuple[str, ...] = ()
    login_env: Mapping[str, str] = field(default_factory=dict)
    shell: str = "/bin/bash"
    python: str | None = None
    ranks_per_node: int | None = None
    cores: int | None = None
    hwthreads: int | None = None
    gpus: int = 0
    gpu: Gpu | None = None
    queue_kind: str = "queue"
    queues: Mapping[str, Queue] = field(default_factory=dict)
    filesystems: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    default_account: str | None = None
    default_queue: str | None = None
    default_walltime_min: float | None = None
    default_filesystems: tuple[str, ...] = ()
    account_suffix: str = ""
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    proxy: str | None = None
    notes: tuple[str, ...] = ()


def build(name: str, data: Mapping[str, Any]) -> Site:
    """Turn checked profile data (see check.py) into a :class:`Site`."""
    node, gpu, defaults = data.get("node", {}), data.get("gpu"), data.get("defaults", {})
    plain: dict[str, Any] = {key: data[key] for key in _PLAIN if key in data}
    words: dict[str, Any] = {key: tuple(data[key]) for key in _WORDS if key in data}
    return Site(
        name=name,
        description=data["description"],
        scheduler=data["scheduler"],
        launcher_argv=tuple(data["launcher"]["argv"]),
        launcher_env_argv=tuple(data["launcher"].get("env_argv", ())),
        login_env=_text(data.get("login_env", {})),
        cores=node.get("cores"),
        hwthreads=node.get("hwthreads"),
        gpus=node.get("gpus", 0),
        gpu=Gpu(gpu["variable"], tuple(gpu["order"]), gpu.get("set_in", "script")) if gpu else None,
        queues={key: _queue(key, value) for key, value in data.get("queues", {}).items()},
        default_account=defaults.get("account"),
        default_queue=defaults.get("queue"),
        default_walltime_min=minutes(defaults["walltime"]) if "walltime" in defaults else None,
        default_filesystems=tuple(defaults.get("filesystems", ())),
        env=_text(data.get("env", {})),
        **plain,
        **words,
    )


def _text(mapping: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in mapping.items()}


def _queue(name: str, data: Mapping[str, Any]) -> Queue:
    least, most = data["walltime"]
    return Queue(
        name=name,
        nodes=(data["nodes"][0], data["nodes"][1]),
        walltime_min=(minutes(least), minutes(most)),
        routes=tuple(data.get("routes", ())),
        via=data.get("via"),
        auto=data.get("auto", True),
        note=data.get("note", ""),
    )
