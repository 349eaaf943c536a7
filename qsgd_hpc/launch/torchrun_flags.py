"""What torchrun's flags are in ``qsgd-hpc run``, for those who type them from habit."""

from __future__ import annotations

__all__ = ["remedy"]

_MEETING = "leave it out: run decides where the ranks meet"
_REMEDIES = {
    "--nproc-per-node": "-np takes the number of all ranks, and -H h1:2,h2:2 those of each host",
    "--nnodes": "name the hosts with -H h1:2,h2:2, or use `qsgd-hpc submit --nodes`",
    "--node-rank": "start run once, on any host: it starts the ranks of all hosts",
    "--max-restarts": "leave it out: failed ranks are not restarted",
    "-m": "put python -m MODULE after the options",
    "--module": "put python -m MODULE after the options",
    "--standalone": _MEETING,
    "--master-addr": _MEETING,
    "--master-port": _MEETING,
    "--rdzv-backend": _MEETING,
    "--rdzv-endpoint": _MEETING,
    "--rdzv-id": _MEETING,
}


def remedy(flag: str) -> str | None:
    """Return what to use in place of a flag of torchrun; None if it has no such flag."""
    return _REMEDIES.get(flag.replace("_", "-"))
