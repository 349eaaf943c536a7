"""The training that a point measures, without the point's number of ranks and bits."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.cluster.network import NONE

__all__ = ["AUTO", "Case"]

AUTO = "auto"


@dataclass(frozen=True, order=True)
class Case:
    """A training of a study; points of the same case are compared with one another.

    Attributes:
        workload: name of a workload of this package, or the stem of the user's script.
        framework: "torch" or "keras"; empty for a user's script.
        batch_size: samples per step: of all ranks together (strong) or of each rank (weak).
        algorithm: name of the allreduce algorithm; "auto" leaves the choice to the engine.
        network: the emulated network between the nodes, such as "1gbit"; "none": shared memory;
            empty: the site's network.
    """

    workload: str
    framework: str = ""
    batch_size: int = 128
    algorithm: str = AUTO
    network: str = ""

    @property
    def key(self) -> str:
        """A name for folders and files; unique in a study."""
        words = [self.workload, self.framework, f"batch{self.batch_size}"]
        if self.algorithm != AUTO:
            words.append(self.algorithm)
        if self.network:
            words.append(f"net-{re.sub('[,=]+', '-', self.network)}")
        return "-".join(word for word in words if word)

    @property
    def label(self) -> str:
        """Words for headings, such as 'resnet34 (torch), batch 128'."""
        name = f"{self.workload} ({self.framework})" if self.framework else self.workload
        algorithm = "" if self.algorithm == AUTO else f", {self.algorithm}"
        network = f", {self.network_label}" if self.network else ""
        return f"{name}, batch {self.batch_size}{algorithm}{network}"

    @property
    def network_label(self) -> str:
        """Words for the network, such as '1 Gb/s'; empty if it is the site's own."""
        found = parse_network(self.network) if self.network else None
        return found.label if found else "shared memory" if self.network else ""

    @property
    def network_place(self) -> str:
        """Words for sentences, such as 'at 1 Gb/s'; empty if it is the site's own."""
        label = self.network_label
        return f"{'in' if self.network == NONE else 'at'} {label}" if label else ""
