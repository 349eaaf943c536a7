"""The frameworks of a script, and the modules that make it a distributed one."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from qsgd_hpc.launch.frameworks import FRAMEWORKS

__all__ = [
    "DISTRIBUTED",
    "Framework",
    "api_name",
    "compresses_ddp",
    "frameworks",
    "is_distributed",
]

# The longest first: a name belongs to the first module that is a prefix of it.
DISTRIBUTED = tuple(
    f"{package}.{module}"
    for package in ("horovod", "qsgd_hpc")
    for module in ("tensorflow.keras", *(each.module for each in FRAMEWORKS))
)

# Modules for scripts that torch.distributed makes distributed.
_OF_DDP = tuple(
    f"qsgd_hpc.torch.{module}"
    for module in ("accelerate", "ddp", "fsdp", "lightning", "transformers")
)


class Framework(Enum):
    """A framework with its own form of the eight steps."""

    TORCH = "PyTorch"
    KERAS = "Keras"  # model.fit
    TF2 = "TensorFlow 2"  # a custom loop with GradientTape
    TF1 = "TensorFlow 1"  # graphs and sessions
    JAX = "JAX"


def is_distributed(module: str) -> bool:
    """Return whether importing this module makes a script distributed."""
    return _is_in(module, DISTRIBUTED) and not compresses_ddp(module)


def compresses_ddp(module: str) -> bool:
    """Return whether this module compresses DDP or FSDP2, without Horovod's API."""
    return _is_in(module, _OF_DDP)


def _is_in(module: str, packages: Iterable[str]) -> bool:
    return any(module == known or module.startswith(f"{known}.") for known in packages)


def api_name(qualified: str) -> str:
    """Return the name within Horovod's API: "init" for "horovod.torch.init", "" for all others."""
    for known in DISTRIBUTED:
        if qualified == known:
            return ""
        if qualified.startswith(f"{known}."):
            return qualified[len(known) + 1 :]
    return ""


TF1_NAMES = (
    "tensorflow.compat.v1.", "tensorflow.Session", "tensorflow.InteractiveSession",
    "tensorflow.placeholder", "tensorflow.global_variables_initializer",
    "tensorflow.train.MonitoredTrainingSession", "tensorflow.train.MonitoredSession",
    "tensorflow.layers.", "tensorflow.estimator.", "tensorflow.app.run",
)  # fmt: skip
TF1_EITHER = (  # names of TensorFlow 1 that scripts for TensorFlow 2 use, too
    "tensorflow.compat.v1.logging.",
    "tensorflow.compat.v1.config.",
    "tensorflow.compat.v1.enable_",
)


def is_tf1(name: str) -> bool:
    return name.startswith(TF1_NAMES) and not name.startswith(TF1_EITHER)


def frameworks(modules: Iterable[str], calls: Iterable[str]) -> frozenset[Framework]:
    """Return the frameworks of a script that imports these modules and calls these names."""
    modules, calls = set(modules), list(calls)
    tops = {module.partition(".")[0] for module in modules}
    seconds = {module.split(".")[1] for module in modules if is_distributed(module)}
    found = set()
    if "torch" in tops | seconds:
        found.add(Framework.TORCH)
    if any(call.endswith("tensorflow.GradientTape") for call in calls):
        found.add(Framework.TF2)
    if any(is_tf1(call) for call in calls):
        found.add(Framework.TF1)
    keras = {"keras", "tensorflow", "tf_keras"} & (tops | seconds)
    if keras and any(call.rpartition(".")[2] in ("fit", "fit_generator") for call in calls):
        found.add(Framework.KERAS)
    if "jax" in tops | seconds:
        found.add(Framework.JAX)
    return frozenset(found)
