"""Profile of a training: the input of every prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qsgd_hpc.errors import UsageError

__all__ = ["TrainingProfile"]


@dataclass(frozen=True)
class TrainingProfile:
    """One rank's step and its gradients.

    Attributes:
        name: description of the training.
        compute_s: seconds of a step without communication and waiting for data.
        backward_s: seconds from the first gradient's submission to the last one's, at the end of
            compute_s.
        layers: (elements, ready_s) of each gradient in order of submission; ready_s counts from the
            first one.
        batch: samples of a rank in that step.
        unit: what throughput counts.
        data_s: seconds of waiting for data in each step.
        jitter: standard deviation of a rank's compute time divided by its mean.
        coding_s: seconds per element of coding and summing on one rank, by bits; 32: summing only.
        staged: whether compute_s includes the copies of gradients between GPU and host memory.
        ranks: number of ranks in the measurement.
        source: origin of the values, as text.
        assumptions: values assumed instead of measured, as text.
    """

    name: str
    compute_s: float
    backward_s: float
    layers: tuple[tuple[int, float], ...]
    batch: float
    unit: str = "samples"
    data_s: float = 0.0
    jitter: float = 0.0
    coding_s: Mapping[int, float] = field(default_factory=dict)
    staged: bool = True
    ranks: int = 1
    source: str = "given by hand"
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = []
        if not self.compute_s > 0:
            faults.append(f"compute_s {self.compute_s!r}: expected seconds above 0")
        if not 0 <= self.backward_s <= self.compute_s:
            faults.append(
                f"backward_s {self.backward_s!r}: expected 0 to compute_s, {self.compute_s!r}"
            )
        if not self.layers or any(count < 0 or ready < 0 for count, ready in self.layers):
            faults.append("layers: expected (elements, ready_s) of one gradient or more, from 0 on")
        if not self.batch > 0:
            faults.append(f"batch {self.batch!r}: expected samples per rank and step, above 0")
        if faults:
            raise UsageError(f"training profile '{self.name}':\n" + "\n".join(faults))

    @property
    def parameters(self) -> int:
        """Elements of all gradients."""
        return sum(count for count, _ in self.layers)

    def throughput(self, speedup: float) -> float:
        """Return the samples per second of one rank that does not wait for others.

        Args:
            speedup: speed of computing relative to the measurement; input takes as long.
        """
        return self.batch / (self.compute_s / speedup + self.data_s)

    def coding_of(self, bits: int) -> tuple[float, str]:
        """Return the seconds per element at these bits, and the assumption made, "" if none."""
        if bits in self.coding_s:
            return self.coding_s[bits], ""
        coded = {b: s for b, s in self.coding_s.items() if b < 32}
        if bits < 32 and coded:
            nearest = min(coded, key=lambda b: abs(b - bits))
            return coded[nearest], f"coding with {bits} bits takes as long as with {nearest} bits"
        if bits == 32:
            return 0.0, "summing float32 gradients is hidden by their transfer"
        return 0.0, f"coding with {bits} bits takes no time, because no compressed run was measured"
