"""Look after scripts of torch.distributed that say nothing of this package.

Python imports this file when it starts, in all that `qsgd-hpc run` and jobs start as torchrun does.
It waits for modules of torch and imports nothing before they are there:

- models of DistributedDataParallel compress, where QSGD_BITS asks for it, and what FSDP2 has
  sharded, where QSGD_WEIGHT_BITS does;
- a rank that trains separately, though others were started with it, is reported;
- steps are timed for a study, where QSGD_RECORDS asks for it.

And where a script ends by an error that has a usual cause in how ranks were started, it names that.

The sitecustomize that this one hides, of an environment or of a system, runs as it would have.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing itself takes longer to import than all else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib is slow)
# Scripts that load one of these connect by other means than torch.distributed.
_OTHER_WAYS = ("qsgd_hpc._core", "horovod", "mpi4py.MPI", "jax", "tensorflow")
_BITS = os.environ.get("QSGD_BITS", "") not in ("", "32", "auto")
_WEIGHT_BITS = os.environ.get("QSGD_WEIGHT_BITS", "") != ""
_RECORDS = os.environ.get("QSGD_RECORDS", "") != "" and "WORLD_SIZE" in os.environ
_STARTED = os.environ.get("WORLD_SIZE", "1")  # scripts may write over it
_MANY = _STARTED != "1"


class _Waiter:
    """Finds the awaited modules as the others would, and changes each once it is there."""

    def __init__(self, awaited: dict[str, Callable[[Any], None]]) -> None:
        self.awaited = awaited

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = self.awaited.pop(name, None)
        if change is None:
            return None
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(module: Any) -> None:
    """Have every model that is made of torch's DDP compress, or be timed."""
    import functools

    ddp = module.DistributedDataParallel
    construct = ddp.__init__

    @functools.wraps(construct)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        # Not before: torch is not yet whole when its module of this class is.
        if _BITS:
            from qsgd_hpc.torch.unchanged import compress_unasked

            compress_unasked(self)
        if _RECORDS:
            from qsgd_hpc.torch.ddp.measured import watch

            watch(self)

    ddp.__init__ = made


def _collect(module: Any) -> None:
    """Keep a list of the scalers of float16 gradients: error feedback follows a model's."""
    import functools
    import weakref

    construct = module.GradScaler.__init__
    module.qsgd_scalers = weakref.WeakSet()

    @functools.wraps(construct)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        module.qsgd_scalers.add(self)

    module.GradScaler.__init__ = made


def _wrap_shards(module: Any) -> None:
    """Have every module that is sharded send codes, or be timed."""
    import functools

    shard = module.fully_shard

    @functools.wraps(shard)
    def sharded(target: Any, *args: Any, **kwargs: Any) -> Any:
        made = shard(target, *args, **kwargs)
        for each in made if isinstance(made, list) else [made]:
            if _RECORDS:
                from qsgd_hpc.torch.ddp.measured import watch_shards

                watch_shards(each)
            if _WEIGHT_BITS and _MANY:  # before its collectives are timed
                from qsgd_hpc.torch.unchanged import quantize_unasked

                quantize_unasked(each)
        return made

    module.fully_shard = sharded


def _watch(module: Any) -> None:
    """Have the steps of optimizers looked at: the first one, and for a study all."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        return
    told = not _MANY or os.environ.get("RANK") != "0"

    def stepped(optimizer: Any, *_: Any) -> None:
        nonlocal told
        import torch

        if torch.compiler.is_compiling():
            return
        if not told:
            told = True  # the hook stays: torch may be going through all of them
            if not any(name in sys.modules for name in _OTHER_WAYS):
                _tell(_joined(torch.distributed))
        if _RECORDS:
            from qsgd_hpc.torch.ddp.measured import stepped

            stepped(optimizer)

    register(stepped)
    if _RECORDS:
        import atexit

        atexit.register(_leave)


def _leave() -> None:
    measured = sys.modules.get("qsgd_hpc.torch.ddp.measured")
    if measured is not None:
        measured.leave()


def _joined(group: Any) -> tuple[int, str]:
    """Return how many ranks train together with this one, and what joins the others to them."""
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is not None and accelerate.PartialState._shared_state:
        remedy = "without GPUs Accelerate joins them only as Accelerator(cpu=True), and the"
        return accelerate.PartialState().num_processes, f"{remedy} Trainer with use_cpu=True"
    if group.is_available() and group.is_initialized():
        return group.get_world_size(), "remove world_size from init_process_group()"
    remedy = "call torch.distributed.init_process_group()"
    return 1, f"{remedy}; scripts for Horovod need --horovod"


def _tell(joined: tuple[int, str]) -> None:
    many, remedy = joined
    if str(many) == _STARTED:
        return
    alone = "each trains separately" if many == 1 else f"this one trains with {many - 1} others"
    sys.stderr.write(
        f"qsgd-hpc: {_STARTED} ranks were started, but {alone}: {remedy}. "
        "If this is intended, use --no-torchrun\n"
    )
    sys.stderr.flush()


def _explain(kind: Any, value: Any, traceback: Any) -> None:
    """Print an error that ends the script, and what may be done about it."""
    _print_error(kind, value, traceback)
    text, environ = str(value), os.environ
    seen = [
        f"{n}={environ[n]}" for n in environ if n.endswith(("_VISIBLE_DEVICES", "_AFFINITY_MASK"))
    ]
    if "invalid device ordinal" in text:
        sys.stderr.write(
            f"qsgd-hpc: LOCAL_RANK={environ.get('LOCAL_RANK')} is not a GPU that this rank "
            f"sees{' (' + ', '.join(seen) + ')' if seen else ''}: start at most one rank per "
            "GPU on a node (--ranks-per-node), and make all GPUs visible to each rank "
            "(--gpu-view all)\n"
        )
    elif "EADDRINUSE" in text or "address already in use" in text.lower():
        sys.stderr.write(
            f"qsgd-hpc: MASTER_PORT={environ.get('MASTER_PORT')} is in use by another process "
            f"on {environ.get('MASTER_ADDR')}: unset it, and the run reserves a port\n"
        )


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


_print_error = sys.excepthook
if _MANY:
    sys.excepthook = _explain
_awaited = {"torch.optim.optimizer": _watch} if _MANY or _RECORDS else {}
if (_BITS and _MANY) or _RECORDS:
    _awaited["torch.nn.parallel.distributed"] = _wrap
if _BITS and _MANY:
    _awaited["torch.amp.grad_scaler"] = _collect
if (_WEIGHT_BITS and _MANY) or _RECORDS:
    _awaited["torch.distributed.fsdp._fully_shard._fully_shard"] = _wrap_shards
if _awaited:
    sys.meta_path.insert(0, _Waiter(_awaited))  # type: ignore[arg-type]
_run_the_next()
