"""A cluster on one machine: ranks on hosts of their own, joined by a network of a chosen speed.

Each host is a set of Linux namespaces: a network of its own, whose only way out is a shaped link to
a bridge, a hostname, System V and POSIX shared memory that no other host sees. A user without root
gets them inside a user namespace. All of it belongs to the processes of one run and ends with them:
nothing has a name that outlives them, and the machine's own network is not touched.

=================  ==================================================================
network.py         what the user asks for: rate and latency, and how they are written
hosts.py           names and addresses of the hosts, and which ranks each gets
namespaces.py      the system calls: new namespaces, entering them, rights in them
links.py           bridge, links, rate and latency, through ``ip`` and ``tc``
probe.py           what rate the links reach
keeper.py          the process that owns the hosts while mpiexec runs among them
enter.py           what mpiexec starts instead of ssh: a command on one of the hosts
obstacles.py       what stands in the way here, and how to get it out
=================  ==================================================================
"""

from qsgd_hpc.launch.cluster.network import Network, parse

__all__ = ["Network", "parse"]
