"""Check whether this machine can emulate hosts with links of a chosen rate."""

from __future__ import annotations

from qsgd_hpc.checkup.finding import Finding, note, ok
from qsgd_hpc.launch.cluster import Network
from qsgd_hpc.launch.cluster.keeper import trial
from qsgd_hpc.launch.cluster.obstacles import ClusterError

__all__ = ["emulated_network"]

TOPIC = "--network"
PLAIN = Network(rate_bits_s=10**9)
SLOW = Network(rate_bits_s=10**9, latency_us=50.0)


def emulated_network() -> list[Finding]:
    """Create two emulated hosts and remove them; then two with a latency between them."""
    try:
        trial(PLAIN, 2)
    except ClusterError as error:
        return [_note(str(error))]
    try:
        trial(SLOW, 2)
    except ClusterError as error:
        return [ok(TOPIC, "emulated hosts with a link rate are available"), _note(str(error))]
    return [ok(TOPIC, "emulated hosts with a link rate and a latency are available")]


def _note(text: str) -> Finding:
    why, _, remedy = text.removeprefix(TOPIC).lstrip(": ").rpartition("; ")
    return note(TOPIC, why or remedy, remedy if why else "")
