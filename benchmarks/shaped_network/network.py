"""Hosts made of network namespaces, joined by a bridge, each uplink shaped to a bandwidth."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

PREFIX = "qsgd"
BRIDGE = f"br-{PREFIX}"
SUBNET = "10.88.0"
LAUNCHER = f"{SUBNET}.254"
QUEUE = "50ms"  # packets that would wait longer are dropped
# Tokens that may be saved up: a kernel timer that fires late on a busy machine must not cost
# bandwidth. A message below the burst passes unshaped.
BURST_S = 0.002
LEAST_BURST_BYTES = 64 << 10
UNITS = {"mbit": 10**6, "gbit": 10**9}


class NetworkError(Exception):
    """The network cannot be built here; the message has the remedy."""


@dataclass(frozen=True)
class Rate:
    """A bandwidth as tc spells it."""

    text: str
    bits_per_s: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Parse ``1gbit`` or ``100mbit``."""
        found = re.fullmatch(r"(\d+)(mbit|gbit)", text)
        if found is None or int(found[1]) == 0:
            raise NetworkError(f"--rate {text}: expected such as 100mbit, 1gbit or 10gbit")
        return cls(text, int(found[1]) * UNITS[found[2]])

    @property
    def burst_bytes(self) -> int:
        """How much may pass at once."""
        return max(LEAST_BURST_BYTES, int(self.bits_per_s / 8 * BURST_S))


def check_machine() -> None:
    """Raise a NetworkError when namespaces cannot be made here."""
    if os.geteuid() != 0:
        raise NetworkError("network namespaces need root; run this with sudo, or in a container")
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"{', '.join(missing)} not found; install iproute2 and util-linux")
    probe = f"{PREFIX}-probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    if done.returncode != 0:
        raise NetworkError(
            f"namespaces are forbidden here ({done.stderr.strip()}); a container needs "
            "--privileged, or --cap-add SYS_ADMIN,NET_ADMIN"
        )


def host_name(number: int) -> str:
    """Return the name of host 0, 1, ..., which is its namespace's, too."""
    return f"{PREFIX}{number}"


def address(number: int) -> str:
    """Return a host's address."""
    return f"{SUBNET}.{number + 1}"


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(words)}: {done.stderr.strip()}")


def _add_host(number: int, rate: Rate) -> None:
    name, link = host_name(number), f"v-{host_name(number)}"
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    _run("ip", "link", "set", link, "master", BRIDGE, "up")
    for words in (["link", "set", "lo", "up"], ["link", "set", "eth0", "up"]):
        _run("ip", "-n", name, *words)
    _run("ip", "-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
    # Programs ask for the interface of the default route to learn their own address.
    _run("ip", "-n", name, "route", "add", "default", "via", LAUNCHER)
    # bbr, some machines' default, is slower and burstier on so short a wire.
    _run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
    shape = ["rate", rate.text, "burst", str(rate.burst_bytes), "latency", QUEUE]
    _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *shape)


def remove() -> None:
    """Kill what runs on the hosts, and remove them; harmless when there are none."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name in re.findall(rf"^({PREFIX}\d+)\b", listed, re.MULTILINE):
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        # Explicitly: with the namespace alone the kernel frees the link late.
        subprocess.run(["ip", "link", "del", f"v-{name}"], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


@contextlib.contextmanager
def network(hosts: int, rate: Rate) -> Iterator[list[str]]:
    """Bring the hosts up and yield their addresses; removes them whatever happens.

    Raises:
        NetworkError: it cannot be built; nothing is left behind.
    """
    check_machine()
    remove()
    try:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "link", "set", BRIDGE, "up")
        _run("ip", "addr", "add", f"{LAUNCHER}/24", "dev", BRIDGE)
        for number in range(hosts):
            _add_host(number, rate)
        time.sleep(0.2)  # the bridge learns its ports
        yield [address(number) for number in range(hosts)]
    finally:
        remove()
