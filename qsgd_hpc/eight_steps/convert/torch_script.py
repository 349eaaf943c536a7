"""Conversion of PyTorch scripts: loops over loaders or over slices of tensors."""

from __future__ import annotations

from qsgd_hpc.eight_steps.convert import opening, torch_data, torch_loop
from qsgd_hpc.eight_steps.convert.arrays import shard_arrays
from qsgd_hpc.eight_steps.convert.downloads import download_once
from qsgd_hpc.eight_steps.convert.loops import reaching, train_loops
from qsgd_hpc.eight_steps.convert.metrics import average_metrics
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.convert.rank0 import guard_outputs
from qsgd_hpc.eight_steps.convert.torch_optimizer import distribute_optimizers, optimizers
from qsgd_hpc.eight_steps.convert.warmup import steps_of
from qsgd_hpc.errors import UsageError

__all__ = ["convert_torch"]


def convert_torch(plan: Plan) -> None:
    """Add the eight steps to a PyTorch script."""
    script = plan.script
    steps = [c for c in script.calls if script.called(c).endswith(".backward")]
    loops = train_loops(script, steps)
    if not loops:
        raise UsageError(
            f"{script.path}: PyTorch, but no training loop: looked for a call of backward() that a "
            "for or while repeats"
        )
    made = optimizers(script)
    loaders = torch_data.find_loaders(script, loops)
    torch_data.shard_loaders(plan, loaders)
    for loop in loops:
        if not loaders.train and not shard_arrays(plan, loop):
            plan.todo(loop.loop, "shard the data: a rank's part of it, of equal size on all ranks.")
    torch_data.set_epochs(plan, loaders)
    torch = opening.torch_name(script) or "torch"
    names = loaders.names(script)
    known = steps_of(script, loops, names, torch, loaded=bool(loaders.train))
    distribute_optimizers(plan, loops, known)
    if not made:
        plan.todo(loops[0].loop, "wrap the optimizer: hvd.DistributedOptimizer(optimizer).")
        plan.todo(loops[0].loop, "broadcast parameters and optimizer state before the first step.")
    torch_loop.name_other_optimizers(plan)
    for loop, calls in loaders.fed:
        average_metrics(plan, loop, len(calls) > 1)
    torch_loop.share_running_averages(plan, loops)
    torch_loop.average_before_clipping(plan)
    torch_loop.any_gpu(plan)
    opening.numpy_seeds(plan)
    download_once(plan, "hvd.barrier()")
    training = reaching(script, (*steps, *made))
    guard_outputs(plan, training, opening.import_line(script))
    _open(plan, torch)


def _open(plan: Plan, torch: str) -> None:
    script = plan.script
    seeded = any(script.called(c).endswith("torch.manual_seed") for c in script.calls)
    pin = [
        f"if {torch}.cuda.is_available():",
        f"    {torch}.cuda.set_device(hvd.local_rank() % {torch}.cuda.device_count())",
    ]
    if not seeded:
        pin += [
            "# All ranks draw the same numbers, so that they split and shuffle data equally.",
            f"{torch}.manual_seed(hvd.broadcast_object({torch}.initial_seed()))",
        ]
    more = [] if opening.torch_name(script) else ["import torch"]
    opening.open_script(plan, "qsgd_hpc.torch", more, pin)
