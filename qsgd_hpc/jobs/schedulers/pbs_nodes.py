"""Which node's death ended a job of PBS, read from the job's own output.

The MoM of the first node notices that another one no longer answers, writes that into the job's
output and ends the job by SIGTERM: to qstat, the script failed by a signal.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["dead_node"]

TAIL_BYTES = 65_536
# OpenPBS and Torque write "job die" or "job terminate". Code 1000 is a sister's own wish to end the
# job, for a limit that it has exceeded on that node.
_DEAD = re.compile(
    r"=>> PBS: job killed: node \d+ \(([^()\s]+)\) requested job (?:die|terminate)\b"
    r"(?!.{0,40}?code 1000\b)"
)


def dead_node(log: Path) -> str | None:
    """Return the node whose loss PBS has noted at the end of a job's output, or None."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
            found = _DEAD.findall(stream.read().decode("utf-8", "replace"))
    except OSError:
        return None
    return found[-1] if found else None
