"""The frameworks that have an API here; none is imported."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FRAMEWORKS", "Framework"]


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        title: its name for people.
        module: what its scripts import, and the name of its module in ``qsgd_hpc`` and its extra.
        distributions: what `pip` installs it by; default: as the module.
        binding: what is compiled for it alone, below ``qsgd_hpc``; the core serves the others.
    """

    title: str
    module: str
    distributions: tuple[str, ...] = ()
    binding: str = ""


FRAMEWORKS = (
    Framework("PyTorch", "torch"),
    Framework(
        "TensorFlow",
        "tensorflow",
        ("tensorflow", "tensorflow-cpu", "tensorflow-rocm"),
        "tensorflow/_ops",
    ),
    Framework("Keras", "keras"),
    Framework("JAX", "jax"),
    Framework("MXNet", "mxnet"),
)
