"""Variables of torch.distributed that ranks get, and conflicting ones in this shell."""

from __future__ import annotations

import os
from importlib.util import find_spec

from qsgd_hpc.checkup.finding import Finding, note, ok
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.meeting import meeting, taken_port
from qsgd_hpc.launch.options import RunOptions

__all__ = ["torchrun"]

TOPIC = "torchrun"
# Variables of one rank; a script started without `run` reads them from the shell.
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def torchrun() -> list[Finding]:
    """Find the address at which ranks would meet, and conflicting variables."""
    if find_spec("torch") is None:
        return []
    try:
        with meeting(RunOptions(2, ("script.py",)), os.environ) as place:
            where = f"{place.address}, port {place.port}" if place else ""
    except (OSError, UsageError) as error:
        return [note(TOPIC, f"no address at which ranks could meet: {error}")]
    text = "ranks of `run` and of jobs get RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ..., and meet"
    given = [f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT")
             if name in os.environ]  # fmt: skip
    if given:
        remedy = "Unset it, unless ranks should meet there: `run` chooses an address automatically."
        found = [note(TOPIC, f"{text} at this shell's {', '.join(given)}", remedy)]
    else:
        found = [ok(TOPIC, f"{text} at {where}")]
    if (taken := taken_port(os.environ)) is not None:
        found.append(note(TOPIC, taken, "Unset MASTER_PORT: `run` reserves a free port."))
    stale = [f"{name}={os.environ[name]}" for name in OF_A_RANK if name in os.environ]
    if stale:
        found.append(
            note(
                TOPIC,
                f"{', '.join(stale)} in this shell: `run` overwrites it, but a script started "
                "without `run` uses this rank and waits for the others",
                f"unset {' '.join(word.partition('=')[0] for word in stale)}",
            )
        )
    return found
