"""Emulation of a cluster on one machine: hosts joined by a network of a chosen speed.

Each host is a set of Linux namespaces: a separate network, connected to a bridge by one shaped
link, a hostname, and private System V and POSIX shared memory. For users other than root, they are
inside a user namespace. All of this belongs to the processes of one run and ends with them: nothing
has a name that outlives them, and the machine's own network is not changed.

=================  ==================================================================
network.py         rate and latency, their notation, and names and addresses of the hosts
namespaces.py      system calls: create namespaces, enter them, capabilities in them; for mpiexec,
                   it replaces ssh: ``enter.sh`` starts it to run a command on one of the hosts
links.py           bridge and links, through ``ip`` and ``tc``, and the rate that they reach
keeper.py          the process that owns the hosts while mpiexec runs on them
=================  ==================================================================
"""

from qsgd_hpc.launch.cluster.network import Network, parse

__all__ = ["Network", "parse"]
