"""Reports about a run's links: messages for the user, and a record for QSGD_RECORDS."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from qsgd_hpc.launch.cluster.network import SHORT, Network, bits_per_s, host_names

__all__ = ["LinkLog"]


class LinkLog:
    """The measurements of the hosts' keeper before and after a run.

    Args:
        network: the requested network.
        hosts: number of hosts.
    """

    def __init__(self, network: Network, hosts: int) -> None:
        self.network, self.hosts = network, hosts
        self.before: list[int] = []

    def report(self, facts: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
        """Return messages about a measurement; after the run, also append the record.

        Args:
            facts: "when" ("before", "after"), "reached_bits_s" of each host's link, and after the
                run "sent_bytes" of each host.
            environ: the ranks' environment; QSGD_RECORDS is the file of the record.
        """
        reached = facts["reached_bits_s"]
        if facts["when"] == "before":
            self.before = reached
            return [self._opening(), *self._shortfall(reached, "")]
        sentences = [
            *self._closing(facts["sent_bytes"]),
            *self._shortfall(reached, " after the run"),
        ]
        if "why" in facts:
            sentences.append(f"warning: the links could not be probed again: {facts['why']}")
        return sentences + self._record(facts, environ)

    def _opening(self) -> str:
        name = f"network {self.network.label} (emulated)"
        if self.hosts == 1:
            return f"{name}: one host, so there is no communication"
        names, cores = host_names(self.hosts), len(os.sched_getaffinity(0))
        return (
            f"{name}: {names[0]} to {names[-1]} share the {cores} core{'s' if cores > 1 else ''} "
            f"of this machine; the links reach {bits_per_s(min(self.before))}"
        )

    def _closing(self, sent_bytes: list[int]) -> list[str]:
        if self.hosts == 1:
            return []
        most, name = max(zip(sent_bytes, host_names(self.hosts), strict=True))
        return [f"network: {most / 1e6:,.3g} MB sent by {name}, the most of any host"]

    def _shortfall(self, reached: list[int], when: str) -> list[str]:
        if not reached or not self.network.falls_short(min(reached)):
            return []
        return [
            f"warning: the links reach {bits_per_s(min(reached))}{when}, less than {SHORT:.0%} "
            f"of the {bits_per_s(self.network.rate_bits_s)} requested: this machine's cores "
            "cannot process more, or are busy; the results apply to the slower network"
        ]

    def _record(self, facts: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
        target = environ.get("QSGD_RECORDS")
        if not target:
            return []
        body = {
            "event": "network",
            "network": self.network.text,
            "rate_bits_s": self.network.rate_bits_s,
            "latency_us": self.network.latency_us,
            "hosts": self.hosts,
            "reached_before_bits_s": self.before,
            "reached_after_bits_s": facts["reached_bits_s"],
            "sent_bytes": facts["sent_bytes"],
        }
        try:
            with open(target, "a", encoding="utf-8") as file:  # noqa: PTH123 (one write, at its end)
                file.write(json.dumps(body) + "\n")
        except OSError as error:
            return [f"warning: QSGD_RECORDS={target}: {error.strerror}; the links are not recorded"]
        return []
