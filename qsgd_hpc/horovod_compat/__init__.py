"""Resolve ``import horovod.torch as hvd`` in unchanged scripts to this package.

``qsgd-hpc run --horovod`` puts the folder ``on_path`` of this package in front of the ranks'
PYTHONPATH. The ``horovod`` package in it calls ``install()``, so this works for scripts, ``-m``,
``-c`` and the processes that a rank starts. ``python -m qsgd_hpc.horovod_compat train.py`` does the
same under any other launcher. A script that can be changed may call ``install()`` itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from qsgd_hpc._notices import report
from qsgd_hpc.errors import UsageError
from qsgd_hpc.horovod_compat.keras2 import allow_keras2_calls
from qsgd_hpc.launch.supervise import launched_rank

__all__ = ["FOLDER", "install", "installed"]

FOLDER = Path(__file__).with_name("on_path")
"""Folder for PYTHONPATH, with a package ``horovod``."""

# Counterparts of Horovod's modules. Submodules of these names are resolved to submodules of the
# counterparts; all other modules are in FOLDER.
_ALIASES = {
    "horovod.common.basics": "horovod.common",
    "horovod.common.elastic": "qsgd_hpc.elastic",
    "horovod.common.exceptions": "qsgd_hpc.errors",
    "horovod.common.process_sets": "qsgd_hpc.runtime.process_sets",
    "horovod.common.util": "horovod.common",
    "horovod.runner": "qsgd_hpc.launch.function",
    "horovod.torch": "qsgd_hpc.torch",
    "horovod.torch.elastic.sampler": "qsgd_hpc.torch.elastic",
    "horovod.torch.elastic.state": "qsgd_hpc.torch.elastic",
    "horovod.torch.mpi_ops": "qsgd_hpc.torch",
    "horovod.tensorflow": "qsgd_hpc.tensorflow",
    "horovod.tensorflow.keras": "qsgd_hpc.keras",
    "horovod.tensorflow.mpi_ops": "qsgd_hpc.tensorflow",
    "horovod.keras": "qsgd_hpc.keras",
    "horovod.mxnet": "qsgd_hpc.mxnet",
    "horovod.mxnet.mpi_ops": "qsgd_hpc.mxnet",
}


def _counterpart(name: str) -> str | None:
    """Return the module for a horovod name, whether or not it exists; None: see FOLDER."""
    head, tail = name, ""
    while head:
        if head in _ALIASES:
            return _ALIASES[head] + tail
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return None


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent does not exist
        return False


class _Alias(Loader):
    """Loads a counterpart and binds the horovod name to the same module object."""

    def __init__(self, target: str) -> None:
        self.target = target

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        name, target = module.__spec__.name, importlib.import_module(self.target)
        if self.target.startswith(("qsgd_hpc.keras", "qsgd_hpc.tensorflow")):
            allow_keras2_calls()
        if not hasattr(target, "__path__"):
            target.__path__ = []  # as of a package: the finder is asked for, and refuses, others
        # The import system uses the module that a loader leaves in sys.modules.
        sys.modules[name] = target


class HorovodFinder(MetaPathFinder):
    """Finds every name that is ``horovod`` or begins with ``horovod.``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "horovod":
            return None
        home = _counterpart(name)
        if home is None:
            place = FOLDER.joinpath(*name.split(".")[:-1])
            spec = PathFinder.find_spec(name, [str(place)])
        else:
            spec = ModuleSpec(name, _Alias(home)) if _exists(home) else None
        if spec is None:
            # After None, an installed Horovod would be found.
            message = f"{name} is not part of qsgd-hpc; docs/horovod.md lists what is"
            raise ModuleNotFoundError(message, name=name)
        return spec


def other_horovod() -> str | None:
    """Return the folder of another Horovod that is installed; None on ranks other than 0."""
    if launched_rank() != 0:  # only one rank prints the notice
        return None
    places = [each for each in sys.path if Path(each).resolve() != FOLDER.resolve()]
    spec = PathFinder.find_spec("horovod", places)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def install() -> None:
    """Make ``horovod`` and its modules resolve to this package, in this process.

    Raises:
        UsageError: another Horovod has been imported already.
    """
    if installed():
        return
    origin = getattr(sys.modules.get("horovod"), "__file__", None)
    if origin is not None and not origin.startswith(str(FOLDER)):
        raise UsageError(
            f"{origin} is already imported; call qsgd_hpc.horovod_compat.install() before "
            "horovod is imported"
        )
    sys.meta_path.insert(0, HorovodFinder())
    hidden = other_horovod()
    if hidden:
        report(f"notice: `import horovod` loads qsgd-hpc, not the Horovod in {hidden}")


def installed() -> bool:
    """Return whether ``horovod`` resolves to this package in this process."""
    return any(isinstance(finder, HorovodFinder) for finder in sys.meta_path)
