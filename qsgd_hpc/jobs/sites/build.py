"""Convert a profile's checked data to frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from qsgd_hpc.jobs.sites.profile import (
    LIMITS,
    Bin,
    Cpu,
    Dragonfly,
    FatTree,
    Gpu,
    Library,
    Network,
    Nic,
    Numa,
    Queue,
    Site,
)
from qsgd_hpc.jobs.words import minutes
from qsgd_hpc.launch.cluster import parse as parse_network

__all__ = ["build"]


def build(name: str, data: Mapping[str, Any]) -> Site:
    """Convert checked profile data (see schema.py) to a :class:`Site`."""
    node, defaults = data.get("node", {}), data.get("defaults", {})
    gpu, nic, cpu, limits = (
        {key: value for key, value in data.get(part, {}).items() if key != "verify"}
        for part in ("gpu", "nic", "cpu", "limits")
    )
    if gpu:
        gpu["order"] = _strings(gpu["order"])
    return Site(
        name=name,
        launcher_argv=tuple(data["launcher"]["argv"]),
        launcher_label=tuple(data["launcher"].get("label", ())),
        launcher_mpi=data["launcher"].get("mpi", ""),
        login_env=_text(data.get("login_env", {})),
        cores=node.get("cores"),
        hwthreads=node.get("hwthreads"),
        gpus=node.get("gpus", 0),
        gpu=Gpu(**gpu) if gpu else None,
        cpu=Cpu(_strings(cpu.get("lists", ())), cpu.get("bound_by", "launcher")),
        nic=Nic(nic["variable"], _strings(nic["order"])) if nic else None,
        **_networks(data.get("network")),
        numa=tuple(
            Numa(domain["cpus"], _strings(domain.get("gpus", ())), _strings(domain.get("nics", ())))
            for domain in node.get("numa", ())
        ),
        queues={key: _queue(key, value) for key, value in data.get("queues", {}).items()},
        limits=limits,
        default_account=defaults.get("account"),
        default_queue=defaults.get("queue"),
        default_walltime_min=minutes(defaults["walltime"]) if "walltime" in defaults else None,
        default_filesystems=tuple(defaults.get("filesystems", ())),
        env=_text(data.get("env", {})),
        libraries=tuple(
            Library(
                key,
                _text(value.get("env", {})),
                tuple(value.get("path", ())),
                tuple(value.get("directives", ())),
                value.get("use", True),
            )
            for key, value in data.get("libraries", {}).items()
        ),
        **_plain(data, Site, "network"),
    )


def _plain(data: Mapping[str, Any], kind: type[Site | Queue], left_out: str) -> dict[str, Any]:
    """Return the texts, numbers and lists whose keys are fields of a dataclass, except one."""
    fields = {field.name for field in dataclasses.fields(kind)} - {left_out}
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in data.items()
        if key in fields and not isinstance(value, dict)
    }


def _strings(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(str, values))


def _text(mapping: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in mapping.items()}


def _networks(data: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the network of the nodes: hardware, or an emulated one on this machine."""
    if not isinstance(data, str):
        return {"network": None if data is None else _network(data)}
    emulated = parse_network(data, "network:")
    if emulated is None:
        return {}
    return {
        "emulated_network": emulated.text,
        "network": Network(
            topology="none",
            nics=1,
            nic_gbps=emulated.rate_bits_s / 1e9,
            source=f"emulated on this machine: network: {data}",
            across_us=emulated.latency_us or None,
        ),
    }


def _network(data: Mapping[str, Any]) -> Network:
    def part(key: str) -> dict[str, Any]:
        return {k: v for k, v in data.get(key, {}).items() if k not in ("source", "verify")}

    return Network(
        topology=data["topology"],
        nics=data["nics"],
        nic_gbps=data["nic_gbps"],
        source=data["source"],
        dragonfly=Dragonfly(**part("dragonfly")) if "dragonfly" in data else None,
        fat_tree=FatTree(**part("fat_tree")) if "fat_tree" in data else None,
        **part("latency"),
        **part("within"),
    )


def _queue(name: str, data: Mapping[str, Any]) -> Queue:
    least, most = data["walltime"]
    return Queue(
        name=name,
        walltime_min=(minutes(least), minutes(most)),
        bins=tuple(Bin((low, high), minutes(most)) for low, high, most in data.get("bins", ())),
        limits={key: data[key] for key in LIMITS if key in data},
        **_plain(data, Queue, "bins"),
    )
