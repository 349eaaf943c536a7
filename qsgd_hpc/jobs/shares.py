"""The number of a node's cores for each rank. Pure."""

from __future__ import annotations

from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.profile import Site

__all__ = ["cores_per_rank"]


def cores_per_rank(request: JobRequest, site: Site) -> int:
    """Return the cores of one rank, at least 1.

    A node that is not full has the shares of a full one, so that each rank stays near its GPU.
    """
    return max(1, (site.cores or 1) // max(request.ranks_per_node or 1, site.gpus, 1))
