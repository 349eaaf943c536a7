#!/usr/bin/env python3
"""Train a GPT and a ResNet-50 on GPUs by ``hvd.DistributedOptimizer`` and by DDP over NCCL.

    qsgd-hpc run -np 2 benchmarks/gpu/training.py --json training.jsonl
    qsgd-hpc run -np 2 benchmarks/gpu/training.py --device cpu --tiny      # no GPU: gloo for NCCL

Ranks share GPUs if there are fewer GPUs than ranks; NCCL then treats each rank as a separate host
and uses sockets. Contestants train one after another in the same processes, with random data on
the device. A step's time is the slowest rank's and includes the device's work. The exposed time is
the difference to a step without communication. Waits and copies are counted by torch's profiler in
a step that is not timed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from networks import TASKS, Task
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import qsgd_hpc
import qsgd_hpc.torch as hvd
from qsgd_hpc.torch.ddp import QSGDState, qsgd_hook

WARM_UP = 3
LEAST_SAMPLES = 3
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
GRADIENTS, STEP = "first gradient", "optimizer.step"  # names of regions in the profile


@dataclass
class Run:
    """A contestant in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clock: HookClock


@dataclass
class HookClock:
    """The host's time in a contestant's hooks on gradients."""

    seconds: float = 0.0
    calls: int = 0
    marks_first: bool = False
    _marked: bool = field(default=False, repr=False)

    def restart(self) -> None:
        """Reset the measurements."""
        self.seconds, self.calls, self._marked = 0.0, 0, False

    def timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook with its calls measured."""

        @functools.wraps(hook)  # DDP checks its hooks' annotations
        def run(*args: Any) -> Any:
            if self.marks_first and not self._marked:
                self._marked = True
                with record_function(GRADIENTS):
                    pass
            began = time.perf_counter()
            result = hook(*args)
            self.seconds += time.perf_counter() - began
            self.calls += 1
            return result

        return run


@dataclass(frozen=True)
class Row:
    """The results of a contestant; times are medians over steps.

    `us_per_gradient` is the host's time in the hooks on the slowest rank; None if not measured.
    Waits and copies are those of rank 0 in one step, before `step()` and in it.
    """

    task: str
    what: str
    ranks: int
    samples: int
    step_ms: float
    exposed_ms: float | None
    us_per_gradient: float | None
    hook_calls: int
    waits_before_step: int | None
    pageable_before_step: int | None
    waits_in_step: int | None
    pageable_in_step: int | None
    identical: bool
    loss: float


def start_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    """Train without communication."""
    clock = HookClock()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clock.timed(lambda _: None))
    return Run(model, optimizer, clock)


def start_hvd(
    model: nn.Module, optimizer: torch.optim.Optimizer, bits: int, nccl: str = "auto"
) -> Run:
    """Train by DistributedOptimizer, timing the hooks that it registers with parameters."""
    if os.environ.get("QSGD_NCCL", "auto") != nccl:
        os.environ["QSGD_NCCL"] = nccl
        hvd.shutdown()
        hvd.init()
    clock = HookClock()
    register = Tensor.register_post_accumulate_grad_hook
    compression = hvd.Compression.none if bits == 32 else hvd.Compression.qsgd(bits=bits)
    timed = mock.patch.object(
        Tensor,
        "register_post_accumulate_grad_hook",
        lambda parameter, hook: register(parameter, clock.timed(hook)),
    )
    with timed:
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
    return Run(model, wrapped, clock)


def start_ddp(model: nn.Module, optimizer: torch.optim.Optimizer, hook: str) -> Run:
    """Train by DDP with a hook of torch, of this package, or none."""
    clock = HookClock()
    wrapped = DistributedDataParallel(model)
    if hook == "bf16":
        wrapped.register_comm_hook(None, clock.timed(bf16_compress_hook))
    elif hook:
        names = model.named_parameters()
        state = QSGDState(wrapped.process_group, int(hook), named_parameters=names)
        wrapped.register_comm_hook(state, clock.timed(qsgd_hook))
    return Run(wrapped, optimizer, clock)


Start = Callable[[nn.Module, torch.optim.Optimizer], Run]
ALONE = "no communication"
OF_NCCL = "ddp bf16"  # gloo has no sum of bfloat16
CONTESTANTS: dict[str, Start] = {
    ALONE: start_alone,
    "hvd 32 host": lambda m, o: start_hvd(m, o, 32, "none"),
    **{f"hvd {bits}": lambda m, o, bits=bits: start_hvd(m, o, bits) for bits in (32, 8, 4)},
    "ddp": lambda m, o: start_ddp(m, o, ""),
    OF_NCCL: lambda m, o: start_ddp(m, o, "bf16"),
    "ddp 4": lambda m, o: start_ddp(m, o, "4"),
}


class Trainer:
    """The ranks that train contestants of one task, in turn."""

    def __init__(self, name: str, task: Task, device: torch.device, args: argparse.Namespace):
        self._name, self._task, self._device, self._args = name, task, device, args
        torch.manual_seed(100 + hvd.rank())
        self._batch = task.batch(device)
        self._alone_ms: float | None = None

    def row(self, what: str) -> Row:
        """Train a contestant and return its results, equal on all ranks except for the counts."""
        torch.manual_seed(1)
        model = self._task.build().to(self._device)
        inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        run = CONTESTANTS[what](model, inner)
        for _ in range(WARM_UP):
            loss = self._step(run)
        self._synchronize()
        run.clock.restart()
        seconds = self._timed(run)
        calls = run.clock.calls // len(seconds)
        gradients = len(list(model.parameters())) * len(seconds)
        host_us = _slowest(run.clock.seconds / gradients) * 1e6 if calls else None
        counts = self._profiled(run) if self._device.type == "cuda" else [None] * 4
        median_ms = 1e3 * statistics.median(seconds)
        if what == ALONE:
            self._alone_ms, host_us = median_ms, None
        exposed = None if self._alone_ms is None else median_ms - self._alone_ms
        return Row(
            self._name, what, hvd.size(), len(seconds), median_ms, exposed, host_us, calls,
            *counts, what == ALONE or _identical(model), float(loss),
        )  # fmt: skip

    def _step(self, run: Run) -> Tensor:
        x, y = self._batch
        run.optimizer.zero_grad()
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(run.model(x).float(), y)
        loss.backward()
        with record_function(STEP):
            run.optimizer.step()
        return loss.detach()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _timed(self, run: Run) -> list[float]:
        """Return the seconds of each step; stop early if all steps would take too long."""
        seconds: list[float] = []
        limit_s = self._args.seconds
        while len(seconds) < self._args.steps:
            began = time.perf_counter()
            self._step(run)
            self._synchronize()
            seconds.append(_slowest(time.perf_counter() - began))  # also a barrier
            if sum(seconds) > limit_s and len(seconds) >= LEAST_SAMPLES:
                break
        return seconds

    def _profiled(self, run: Run) -> list[int]:
        run.clock.restart()
        run.clock.marks_first = True
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self._step(run)
            self._synchronize()
        run.clock.marks_first = False
        if self._args.trace and hvd.rank() == 0:
            profiler.export_chrome_trace(str(self._args.trace))
        return counted([(e.name, e.time_range.start, e.time_range.end) for e in profiler.events()])


def counted(events: list[tuple[str, float, float]]) -> list[int]:
    """Return waits and pageable copies from the first gradient to step(), and those in step().

    Without a hook the first gradient is unknown; then the counts begin with the profile.
    """
    begin, end = min((b, e) for name, b, e in events if name == STEP)
    first = min((b for name, b, _ in events if name == GRADIENTS), default=0.0)

    def within(low: float, high: float) -> list[str]:
        return [name for name, at, _ in events if low <= at < high]

    return [
        sum(is_it(name) for name in names)
        for names in (within(first, begin), within(begin, end))
        for is_it in (WAITS.__contains__, lambda name: "Memcpy" in name and "Pageable" in name)
    ]


def _slowest(value: float) -> float:
    """Return the largest of all ranks' values."""
    return float(hvd.allreduce(torch.tensor(value, dtype=torch.float64), op=hvd.Max))


def _identical(model: nn.Module) -> bool:
    """Return whether the parameters of all ranks have the same bits."""
    mine = []
    for parameter in model.parameters():
        bits = parameter.detach().flatten().view(torch.int32).long()
        mine.append((bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum())
    sums = torch.stack(mine).cpu()
    same = torch.equal(sums, hvd.broadcast(sums, 0))
    return bool(hvd.allreduce(torch.tensor(int(same)), op=hvd.Min))


@contextmanager
def joined(args: argparse.Namespace) -> Iterator[torch.device]:
    """Start the job and torch's process group; yield this rank's device."""
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; --device cpu --tiny runs this script without one")
    hvd.init()
    device, backend = torch.device("cpu"), "gloo"
    if args.device == "cuda":
        count = torch.cuda.device_count()
        device, backend = torch.device("cuda", hvd.local_rank() % count), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        if count < hvd.local_size():
            # NCCL rejects a GPU used twice on one host. With separate host ids, it uses sockets.
            host = f"host-{hvd.rank()}"
            os.environ.update(NCCL_HOSTID=host, NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    else:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = hvd.broadcast_object(f"file://{folder}/store", 0)
        dist.init_process_group(backend, init_method=store, rank=hvd.rank(), world_size=hvd.size())
        yield device
        dist.destroy_process_group()
        hvd.barrier()


HEADER = (
    f"{'':9} {'':17} ranks   step ms  exposed  us/gradient  "
    "waits, pageable copies: before step()  in it  replicas"
)


def line(row: Row) -> str:
    """Return a row as text."""

    def pair(*counts: int | None) -> str:
        return "" if None in counts else ", ".join(map(str, counts))

    exposed = "" if row.exposed_ms is None else f"{row.exposed_ms:.1f}"
    host = "" if row.us_per_gradient is None else f"{row.us_per_gradient:.0f}"
    before = pair(row.waits_before_step, row.pageable_before_step)
    within = pair(row.waits_in_step, row.pageable_in_step)
    return (
        f"{row.task:9} {row.what:17} {row.ranks:5} {row.step_ms:9.1f} {exposed:>8} {host:>12}  "
        f"{before:>37} {within:>6}  {'equal' if row.identical else 'DIFFER'}"
    )


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="networks that a CPU can train")
    parser.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=8, help="timed steps (8)")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help=f"limit after {LEAST_SAMPLES} steps (6)"
    )
    parser.add_argument("--json", type=Path, help="where to append a line for each contestant")
    parser.add_argument("--trace", type=Path, help="where to write rank 0's last profile")
    args = parser.parse_args()
    for option, known in (("tasks", TASKS), ("contestants", CONTESTANTS)):
        chosen = [word.strip() for word in getattr(args, option).split(",")]
        if unknown := [word for word in chosen if word not in known]:
            parser.error(f"--{option}: {unknown[0]!r} is none of {', '.join(known)}")
        setattr(args, option, chosen)
    if args.device == "cpu":
        args.contestants = [what for what in args.contestants if what != OF_NCCL]
    return args


def main() -> None:
    """Train all, and print each result on rank 0 immediately."""
    args = parse_args()
    facts = {"schema": 1, "section": "training", "version": qsgd_hpc.__version__}
    with joined(args) as device:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
        facts |= {"device": name, "torch": torch.__version__}
        if hvd.rank() == 0:
            print(f"{name}; torch {torch.__version__}; {hvd.size()} ranks\n{HEADER}", flush=True)
        equal = True
        for task_name in args.tasks:
            task = TASKS[task_name](args.tiny)
            trainer = Trainer(task_name, task, device, args)
            for what in args.contestants:
                row = trainer.row(what)
                equal = equal and row.identical
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                if hvd.rank() == 0:
                    print(line(row), flush=True)
                    if args.json:
                        with args.json.open("a") as file:
                            record = facts | {"batch": task.sizes} | asdict(row)
                            file.write(json.dumps(record) + "\n")
    if not equal:
        sys.exit("training.py: replicas differ")


if __name__ == "__main__":
    main()
