"""The network of the hosts: rate and latency, their notation, and names and addresses; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qsgd_hpc.errors import UsageError

__all__ = [
    "LAUNCHER",
    "MOST_HOSTS",
    "NONE",
    "SHORT",
    "SUBNET",
    "Network",
    "address",
    "bits_per_s",
    "host_names",
    "hosts_file",
    "hosts_needed",
    "parse",
    "split",
]

NONE = "none"
"""Value that requests no emulated network."""

RATES = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
TIMES_US = {"us": 1.0, "ms": 1e3, "s": 1e6}
MOST_LATENCY_US = 1e6
# Least fraction of the requested rate: payload is 95.7% of a TCP stream, so a link at full rate
# measures a little less than 1.
SHORT = 0.9

_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z/]*)"


@dataclass(frozen=True)
class Network:
    """A network of equal links.

    Attributes:
        rate_bits_s: bits per second that each host can send.
        latency_us: delay of a packet in microseconds, in addition to its transmission time.
    """

    rate_bits_s: int
    latency_us: float = 0.0

    @classmethod
    def parse(cls, text: str, option: str = "--network") -> Network:
        """Read ``100mbit``, ``1gbit`` or ``10gbit,latency=50us``.

        Raises:
            UsageError: every faulty part, one per line.
        """
        faults: list[str] = []
        rate, *rest = (word.strip() for word in text.lower().split(","))
        rate_bits_s = _quantity(rate, RATES, f"{option} {text}: rate", "1gbit", faults)
        latency_us = 0.0
        for word in rest:
            name, _, value = word.partition("=")
            if name.strip() != "latency":
                faults.append(f"{option} {text}: {word!r} is unknown; write RATE,latency=TIME")
                continue
            what = f"{option} {text}: latency"
            latency_us = _quantity(value.strip(), TIMES_US, what, "50us", faults)
        if latency_us > MOST_LATENCY_US:
            faults.append(f"{option} {text}: the latency must be at most 1s")
        if faults:
            raise UsageError("\n".join(faults))
        return cls(max(1, round(rate_bits_s)), latency_us)

    @property
    def text(self) -> str:
        """The network in the notation of :meth:`parse`, in canonical form: ``1gbit``."""
        rate = _written(self.rate_bits_s, RATES)
        return f"{rate},latency={_written(self.latency_us, TIMES_US)}" if self.latency_us else rate

    @property
    def label(self) -> str:
        """The network for messages: ``1 Gb/s, 50 µs``."""
        text = bits_per_s(self.rate_bits_s)
        latency = re.sub(r"(?<=\d)(?=[a-z])", " ", _written(self.latency_us, TIMES_US))
        return f"{text}, {latency.replace('us', 'µs')}" if self.latency_us else text

    def falls_short(self, bits_s: float) -> bool:
        """Return whether a measured rate is less than the link should reach."""
        return bits_s < SHORT * self.rate_bits_s


def parse(text: str | None, option: str = "--network") -> Network | None:
    """Read a network; ``None`` and ``none`` return None.

    Raises:
        UsageError: every faulty part, one per line.
    """
    if text is None or text.strip().lower() == NONE:
        return None
    return Network.parse(text, option)


def split(text: str) -> list[str]:
    """Split a list of networks, each of which may contain a comma.

    >>> split("100mbit, 1gbit,latency=50us,none")
    ['100mbit', '1gbit,latency=50us', 'none']
    """
    found: list[str] = []
    for word in (word.strip() for word in text.split(",")):
        if "=" in word and found:
            found[-1] += f",{word}"
        else:
            found.append(word)
    return found


def bits_per_s(value: float) -> str:
    """Return a rate to three digits, such as ``958 Mb/s``."""
    for unit, name in ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s")):
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f} b/s"


def _quantity(
    text: str, units: dict[str, float] | dict[str, int], what: str, example: str, faults: list[str]
) -> float:
    found = re.fullmatch(_NUMBER, text)
    names = ", ".join(units)
    if found is None:
        faults.append(f"{what} {text!r} is not a number and a unit, such as {example}")
    elif found[2] not in units:
        has = f": the unit is {found[2]!r}" if found[2] else " has no unit"
        faults.append(f"{what} {text!r}{has}; expected {names}, such as {example}")
    elif float(found[1]) == 0:
        faults.append(f"{what} {text!r}: must be above 0")
    else:
        return float(found[1]) * units[found[2]]
    return 1.0


def _written(value: float, units: dict[str, float] | dict[str, int]) -> str:
    name, unit = next(
        ((n, u) for n, u in reversed(units.items()) if value >= u), next(iter(units.items()))
    )
    return f"{value / unit:.6g}{name}"


# Private to each cluster, so concurrent clusters can use the same addresses.
_PREFIX = "10.77.0"
SUBNET = f"{_PREFIX}.0/24"
MOST_HOSTS = 253
LAUNCHER = f"{_PREFIX}.254"
"""Address of the machine's side of the bridge, where mpiexec runs."""


def hosts_needed(ranks: int, ranks_per_node: int) -> int:
    """Return the number of hosts for a number of ranks."""
    return -(-ranks // ranks_per_node)


def host_names(count: int) -> list[str]:
    """Return the names of the hosts: node1, node2, ..."""
    return [f"node{number}" for number in range(1, count + 1)]


def address(number: int) -> str:
    """Return the address of a host by its number, from 1."""
    return f"{_PREFIX}.{number}"


def hosts_file(count: int, launcher_name: str) -> str:
    """Return the content of /etc/hosts in the cluster, which has no name server."""
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{LAUNCHER} {launcher_name}"]
    lines += [f"{address(i)} {name}" for i, name in enumerate(host_names(count), 1)]
    return "\n".join(lines) + "\n"
