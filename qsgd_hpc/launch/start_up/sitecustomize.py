"""Let DistributedDataParallel compress where QSGD_BITS asks for it, in scripts that say nothing.

Python imports this file when it starts, in all that `qsgd-hpc run --bits B` starts. It waits for
torch's module of that class, and imports nothing until a model of that class is made. The
sitecustomize that this one hides, of an environment or of a system, runs as it would have.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing itself takes longer to import than all else here
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_AWAITED = "torch.nn.parallel.distributed"
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib is slow)


class _Waiter:
    """Finds the awaited module as the others would, and changes it once it is there."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _AWAITED:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _watch(module.DistributedDataParallel)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _watch(ddp: Any) -> None:
    """Have every model that is made of the class looked at."""
    import functools

    construct = ddp.__init__

    @functools.wraps(construct)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        # Not before: torch is not yet whole when its module of this class is.
        from qsgd_hpc.torch.ddp.unchanged import compress_unasked

        compress_unasked(self)

    ddp.__init__ = made


def _run_the_next() -> None:
    """Import the sitecustomize that stands behind this one on the path, if there is one."""
    finders: list[Any] = [f for f in sys.meta_path if getattr(f, "__name__", "") == "PathFinder"]
    places = [place for place in sys.path if os.path.abspath(place) != _HERE]  # noqa: PTH100
    spec = finders[0].find_spec("sitecustomize", places) if finders else None
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _Waiter())  # type: ignore[arg-type]
_run_the_next()
