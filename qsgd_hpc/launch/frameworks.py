"""The supported frameworks; none is imported."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FRAMEWORKS", "Framework"]


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        title: its name in messages.
        module: the module that its scripts import; also the name in ``qsgd_hpc`` and of the extra.
        distributions: its packages for `pip`; default: the module's name.
        binding: its own compiled library, below ``qsgd_hpc``; the others use the core.
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
