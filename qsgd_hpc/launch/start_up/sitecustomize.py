"""Support unchanged scripts of torch.distributed.

Python imports this file when it starts, in ranks that `qsgd-hpc run` and jobs start with torchrun's
variables. It hooks the import of modules of torch, and imports nothing earlier:

- with QSGD_BITS, models of DistributedDataParallel compress; with QSGD_WEIGHT_BITS, modules that
  FSDP2 has sharded do;
- ranks that train separately although they were started together are reported;
- with QSGD_RECORDS, steps are timed for a study.

If a script ends by an error that is usually caused by the way ranks were started, it prints that
cause.

Another sitecustomize, of an environment or of the system, which this file hides, is run as well.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would take longer than all other imports here
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib is slow)
# Scripts that import one of these may connect their ranks by it instead of torch.distributed.
_OTHER_TRANSPORTS = ("qsgd_hpc._core", "horovod", "mpi4py.MPI", "jax", "tensorflow")
_BITS = os.environ.get("QSGD_BITS", "") not in ("", "32", "auto")
_WEIGHT_BITS = os.environ.get("QSGD_WEIGHT_BITS", "") != ""
_RECORDS = os.environ.get("QSGD_RECORDS", "") != "" and "WORLD_SIZE" in os.environ
_STUDY = "a scaling study"
_STARTED = os.environ.get("WORLD_SIZE", "1")  # read now, because scripts may overwrite it
_MANY = _STARTED != "1"
_BESIDE = os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"  # whether this node has other ranks


class _ImportHook:
    """A finder that delegates to the others, and patches the awaited modules after their import."""

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


def _require_package(what: str) -> None:
    """End this rank if its Python does not have this package, which is found by the launcher's."""
    from importlib.util import find_spec

    spec = find_spec("qsgd_hpc")
    if spec is None or spec.origin is None:  # without an origin, it is any folder of this name
        sys.exit(
            f"qsgd-hpc: {what} needs qsgd-hpc, which is not installed for {sys.executable}: "
            f"{sys.executable} -m pip install qsgd-hpc, or start the script by another Python"
        )


def _wrap_ddp(module: Any) -> None:
    """Make every DDP model compress its gradients, or time its steps."""
    import functools
    import weakref

    ddp = module.DistributedDataParallel
    undecided = module.qsgd_undecided = weakref.WeakSet()
    # Import in the functions, because torch is not yet fully imported when this class's module is.
    if _BITS:
        # A forward_pre_hook would not run if forward() is called directly, or in replicate().
        begin, join_hook = ddp._pre_forward, ddp.join_hook

        @functools.wraps(begin)
        def beginning(self: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            # torch would trace a hook, and _report_uncompressed takes a loaded core for its use.
            if not torch.compiler.is_compiling():
                from qsgd_hpc.torch.unchanged import compress_unasked

                compress_unasked(self)
            return begin(self, *args, **kwargs)

        @functools.wraps(join_hook)
        def joining(self: Any, **kwargs: Any) -> Any:
            from qsgd_hpc.torch.unchanged import compress_unasked

            # A rank without inputs makes no forward pass.
            compress_unasked(self)
            return join_hook(self, **kwargs)

        ddp._pre_forward, ddp.join_hook = beginning, joining
    construct = ddp.__init__

    @functools.wraps(construct)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        _require_package(f"--bits {os.environ['QSGD_BITS']}" if _BITS else _STUDY)
        construct(self, *args, **kwargs)
        if _BITS:
            undecided.add(self)
        if _RECORDS:
            from qsgd_hpc.torch.ddp.measured import watch

            watch(self)

    ddp.__init__ = made


def _collect_scalers(module: Any) -> None:
    """Keep a list of GradScalers, because error feedback must follow changes of the scale."""
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
    """Make every sharded module send codes, or time its collectives."""
    import functools

    shard = module.fully_shard

    @functools.wraps(shard)
    def sharded(target: Any, *args: Any, **kwargs: Any) -> Any:
        bits = os.environ.get("QSGD_WEIGHT_BITS")
        _require_package(f"--weight-bits {bits}" if _WEIGHT_BITS else _STUDY)
        made = shard(target, *args, **kwargs)
        for each in made if isinstance(made, list) else [made]:
            if _RECORDS:
                from qsgd_hpc.torch.ddp.measured import watch_shards

                watch_shards(each)
            if _WEIGHT_BITS:  # before its collectives are timed
                from qsgd_hpc.torch.unchanged import quantize_unasked

                quantize_unasked(each)
        return made

    module.fully_shard = sharded


def _hook_steps(module: Any) -> None:
    """Check at the first step of an optimizer whether ranks are connected; time all for a study."""
    if _BITS:
        _note_loading(module)
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        return
    reports, checked = os.environ.get("RANK", "0") == "0", False

    def stepped(optimizer: Any, *_: Any) -> None:
        nonlocal checked
        import torch

        if torch.compiler.is_compiling():
            return
        # The hook is not removed, because torch may be iterating over hooks.
        if reports and (_BITS or not checked):
            checked = _check(optimizer, torch.distributed, checked)
        if _RECORDS:
            from qsgd_hpc.torch.ddp.measured import stepped

            stepped(optimizer)

    register(stepped)
    if _RECORDS:
        import atexit

        atexit.register(_write_record)


def _check(optimizer: Any, group: Any, checked: bool) -> bool:
    """Report at a step what is wrong with the ranks; return whether this has been checked."""
    spawned = _is_spawned(group)
    first = not (spawned and group.get_rank() > 0)
    told = _BITS and first and _report_compiled(optimizer)
    if checked or not _trains(optimizer):  # scripts may step once without any gradients
        return checked
    if _BESIDE and spawned:
        _report_spawned(group.get_rank())
    elif first and not any(name in sys.modules for name in _OTHER_TRANSPORTS):
        many, remedy = _joined(group)
        told = _report_unless_joined(many, remedy) or told
        if many > 1 and not told:
            _report_uncompressed(optimizer)
    return True


def _note_loading(module: Any) -> None:
    """Note whether the script has loaded the state of an optimizer that has stepped."""
    import functools

    load = module.Optimizer.load_state_dict

    @functools.wraps(load)
    def loading(self: Any, *args: Any, **kwargs: Any) -> Any:
        load(self, *args, **kwargs)
        if self.state:  # Accelerate loads that of every new optimizer
            module.Optimizer.qsgd_loaded = True

    module.Optimizer.load_state_dict = loading


def _write_record() -> None:
    if measured := sys.modules.get("qsgd_hpc.torch.ddp.measured"):
        measured.write_record()


def _joined(group: Any) -> tuple[int, str]:
    """Return the number of ranks that train together, and the remedy if that is not all ranks."""
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is not None and accelerate.PartialState._shared_state:
        remedy = "without GPUs Accelerate joins them only as Accelerator(cpu=True), and the"
        return accelerate.PartialState().num_processes, f"{remedy} Trainer with use_cpu=True"
    if group.is_available() and group.is_initialized():
        return group.get_world_size(), "remove world_size from init_process_group()"
    remedy = "call torch.distributed.init_process_group()"
    return 1, f"{remedy}; scripts for Horovod need --horovod"


def _is_spawned(group: Any) -> bool:
    """Return whether a rank has started this process, which trains in a group with others."""
    from multiprocessing import parent_process

    return parent_process() is not None and group.is_available() and group.is_initialized()


def _report(text: str) -> None:
    sys.stderr.write(f"qsgd-hpc: {text}\n")
    sys.stderr.flush()


def _report_spawned(rank: int) -> None:
    """Report, on one of the processes that a rank has started, that the other ranks do so, too."""
    if rank == 0:
        _report(
            f"{_STARTED} ranks were started, and the script starts its ranks itself, on each of "
            "them: start it with -np 1"
        )


def _report_unless_joined(many: int, remedy: str) -> bool:
    """Report ranks that train separately; return whether they do."""
    if many >= int(_STARTED):  # more, if each rank has started several processes, one rank per node
        return False
    alone = "each trains separately" if many == 1 else f"this one trains with {many - 1} others"
    _report(
        f"{_STARTED} ranks were started, but {alone}: {remedy}. If this is intended, use "
        "--no-torchrun"
    )
    return True


def _trains(optimizer: Any) -> bool:
    """Return whether an optimizer has gradients and a rate.

    torch.distributed.checkpoint steps without a rate, before training, to allocate the state.
    """
    groups = [group for group in optimizer.param_groups if group.get("lr") != 0]
    return any(p.grad is not None for group in groups for p in group["params"])


def _report_compiled(optimizer: Any) -> bool:
    """Report models that have gradients, but made no pass in which the hook could be registered."""
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    told = False
    for model in list(getattr(module, "qsgd_undecided", ())):
        decided = getattr(model, "_qsgd_decided", False) or getattr(model, "_comm_hooks", ())
        if decided or (any(p.grad is not None for p in model.parameters()) and _trains(optimizer)):
            module.qsgd_undecided.discard(model)
            told = told or (not decided and model.process_group.size() > 1)
    if told:
        _report(
            f"--bits {os.environ['QSGD_BITS']} does not compress a DDP model that is compiled, or "
            "whose module is called directly: call compress(model, bits) before its first pass, "
            "or compile it before DDP wraps it"
        )
    return told


def _report_uncompressed(optimizer: Any) -> None:
    """Report that --bits has done nothing: the core, which codes every gradient, is not loaded."""
    bits = os.environ.get("QSGD_BITS", "")
    ddp: Any = sys.modules.get("qsgd_hpc.torch.unchanged")
    # A study records the bits that were used; a model that is not compressed has been reported.
    if bits in ("", "32") or _RECORDS or (ddp is not None and ddp.reported):
        return
    kinds = {type(p).__name__ for group in optimizer.param_groups for p in group["params"]}
    if bits == "auto":
        reason = "auto chooses for scripts of the Horovod API; with torch.distributed use 1 to 8"
    elif "DTensor" in kinds:
        reason = "FSDP2 sends codes with --weight-bits 8, too, or by quantize_fsdp(model)"
    else:
        reason = (
            "it compresses what DistributedDataParallel averages, not all_reduce() or "
            "FullyShardedDataParallel"
        )
    _report(f"--bits {bits} compressed nothing on rank 0 up to the first optimizer step: {reason}")


def _explain(kind: Any, value: Any, traceback: Any) -> None:
    """Print an error that ends the script, and a remedy if its usual cause is known."""
    _print_error(kind, value, traceback)
    text, environ = str(value), os.environ
    spawned = kind.__name__ == "ProcessRaisedException"
    seen = [
        f"{n}={environ[n]}" for n in environ if n.endswith(("_VISIBLE_DEVICES", "_AFFINITY_MASK"))
    ]
    if "invalid device ordinal" in text:
        _report(
            f"LOCAL_RANK={environ.get('LOCAL_RANK')} is not a GPU that this rank sees"
            f"{' (' + ', '.join(seen) + ')' if seen else ''}: start at most one rank per GPU on a "
            "node (--ranks-per-node), and make all GPUs visible to each rank (--gpu-view all)"
        )
    elif _BITS and "register_comm_hook" in text and "only be called once" in text:
        _report(
            "--bits has registered a hook at the model's first forward pass: register the script's "
            "hook before that pass, or omit --bits"
        )
    elif "doesn't have MPI built in" in text:
        _report(
            'PyTorch needs no MPI to connect these ranks: use backend="gloo" on CPUs, "nccl" on '
            "GPUs, or leave the backend out"
        )
    elif spawned and _BESIDE and "distributed" in text:
        _report_spawned(0)
    elif _is_meeting_port(text, environ.get("MASTER_PORT", "")):
        _report(
            "this rank has started processes that read its RANK and MASTER_PORT, and each opened "
            "that port: add --no-torchrun, or, with Lightning, start one rank per process and use "
            'strategy="ddp"'
            if spawned
            else f"MASTER_PORT={environ.get('MASTER_PORT')} is in use by another process on "
            f"{environ.get('MASTER_ADDR')}: unset it, and the run reserves a port"
        )


def _is_meeting_port(text: str, port: str) -> bool:
    """Return whether torch says that MASTER_PORT is taken; a script may open other ports."""
    import re

    return "EADDRINUSE" in text and re.search(rf"\bport: {port}\b", text) is not None


def _run_next() -> None:
    """Import the next sitecustomize on the path after this one, if there is one."""
    finders: list[Any] = [f for f in sys.meta_path if getattr(f, "__name__", "") == "PathFinder"]
    places = [place for place in sys.path if os.path.abspath(place) != _HERE]  # noqa: PTH100
    spec = finders[0].find_spec("sitecustomize", places) if finders else None
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


# With one rank, too: it may start those of torch.multiprocessing.spawn.
_print_error = sys.excepthook
sys.excepthook = _explain
_awaited = {"torch.optim.optimizer": _hook_steps} if _MANY or _BITS or _RECORDS else {}
if _BITS or _RECORDS:
    _awaited["torch.nn.parallel.distributed"] = _wrap_ddp
if _BITS:
    _awaited["torch.amp.grad_scaler"] = _collect_scalers
if _WEIGHT_BITS or _RECORDS:
    _awaited["torch.distributed.fsdp._fully_shard._fully_shard"] = _wrap_shards
if _awaited:
    sys.meta_path.insert(0, _ImportHook(_awaited))  # type: ignore[arg-type]
_run_next()
