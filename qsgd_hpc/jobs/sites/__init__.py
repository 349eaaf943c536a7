"""Site profiles: the queues, nodes, launcher and settings of each machine, as data."""

from qsgd_hpc.jobs.sites.choice import Host, choose, find_host, is_login_host, load, serves
from qsgd_hpc.jobs.sites.sources import names

__all__ = ["Host", "choose", "find_host", "is_login_host", "load", "names", "serves"]
