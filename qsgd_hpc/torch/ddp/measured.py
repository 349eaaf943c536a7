"""Time the steps of a torch.distributed script for a study, and write its "engine" record.

The script needs no change: ``launch/start_up`` calls this at each step of an optimizer if
QSGD_RECORDS is set. Steps are those of the optimizer that stepped first. The time of DDP's
exchange, and the part hidden by the backward pass, are measured by DDP in every step. FSDP2's
collectives are timed on hosts, where they are not hidden.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from typing import Any

import torch.distributed as dist

from qsgd_hpc.errors import UsageError
from qsgd_hpc.recording.engine_record import warmup_steps
from qsgd_hpc.recording.records import record
from qsgd_hpc.rules import PLAIN_BITS
from qsgd_hpc.torch._distributed import hook_states
from qsgd_hpc.torch.ddp.state import QSGDState

__all__ = ["stepped", "watch", "watch_shards", "write_record"]

NS = 1e-9


class _Steps:
    """Measurements of this process's steps."""

    def __init__(self) -> None:
        self.optimizer: Any = None
        self.ends_s: list[float] = []
        self.exchanges: list[tuple[float, float]] = []
        """For each step: time in exchanges, and the part hidden by the backward pass; seconds."""
        self.coded_s: list[float] = []
        """Until the end of each step: time of the hooks' coding."""
        self.arrivals: list[tuple[float, int]] = []
        """Of each bucket of the latest step: when it was ready, and its elements."""
        self.models: list[tuple[Any, int]] = []
        """Each model, and the bytes of its gradients, which are fixed when DDP is constructed."""
        self.shards: list[tuple[float, int]] = []
        """FSDP2's collectives since the last step: seconds, and bytes of gradients reduced."""
        self.rank, self.ranks = 0, 0
        self.gradient_bytes = 0
        self.wire_bytes: float | None = 0
        self.bits: set[int | None] = set()
        """Bits of gradients; 32 is uncompressed, None is a hook that does not say."""

    def note_shard(self, seconds: float, sent: int, gradients: int, bits: int | None) -> None:
        """Record one of FSDP2's collectives."""
        self.shards.append((seconds, gradients))
        self.wire_bytes = (self.wire_bytes or 0) + sent
        if gradients:
            self.bits.add(bits)


_steps = _Steps()


def watch(model: Any) -> None:
    """Make DDP time every step of a model, instead of one in a hundred."""
    model._set_ddp_runtime_logging_sample_rate(1)
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    _steps.models.append((weakref.ref(model), size))


def watch_shards(module: Any) -> None:
    """Time FSDP2's collectives, in versions of torch with separate collectives."""
    with contextlib.suppress(ImportError, UsageError):
        from qsgd_hpc.torch.fsdp.collectives import time_shards

        time_shards(module, _steps.note_shard)


def stepped(optimizer: Any) -> None:
    """Record a step of an optimizer."""
    if _steps.optimizer is None or _steps.optimizer() is None:
        _steps.optimizer = weakref.ref(optimizer)
    if _steps.optimizer() is not optimizer or not dist.is_initialized():
        return
    _steps.ends_s.append(time.perf_counter())
    _steps.rank, _steps.ranks = dist.get_rank(), dist.get_world_size()
    models = [(model, size) for each, size in _steps.models if (model := each()) is not None]
    if models:
        _steps.exchanges.append(_exchanged([model for model, _ in models]))
        _steps.gradient_bytes = sum(size for _, size in models)
        _steps.wire_bytes = _sent(models)
        hooks = [s for model, _ in models for s in hook_states(model) if isinstance(s, QSGDState)]
        _steps.coded_s.append(sum(hook.coding_s for hook in hooks))
        _steps.arrivals = [each for hook in hooks for each in hook.arrivals]
        _steps.bits.update(_bits_of(model) for model, _ in models)
    elif _steps.shards:
        seconds, gradients = zip(*_steps.shards, strict=True)
        _steps.exchanges.append((sum(seconds), 0.0))
        _steps.gradient_bytes = sum(gradients)
        _steps.shards.clear()


def _exchanged(models: list[Any]) -> tuple[float, float]:
    logged = [model._get_ddp_logging_data() for model in models]
    names = ("backward_comm_time", "backward_compute_comm_overlap_time")
    comm, hidden = (sum(int(each.get(name, 0)) for each in logged) * NS for name in names)
    return comm, min(comm, hidden)


def _bits_of(model: Any) -> int | None:
    states = hook_states(model)
    if not states:
        return PLAIN_BITS
    return states[-1].bits if isinstance(states[-1], QSGDState) else None


def _sent(models: list[tuple[Any, int]]) -> float | None:
    """Return the bytes that this rank has sent so far; None if a hook does not count them.

    For DDP without a hook: the bytes that a ring sends per step.
    """
    sent = 0.0
    for model, size in models:
        states = hook_states(model)
        if not states:
            sent += 2 * (_steps.ranks - 1) / _steps.ranks * size * len(_steps.ends_s)
        elif isinstance(states[-1], QSGDState) and (own := states[-1].sent_bytes) is not None:
            sent += own
        else:
            return None
    return sent


def write_record() -> None:
    """Append the record of this rank, if there were steps and a process group."""
    count = len(_steps.ends_s)
    if count < 2:
        return
    warmup = warmup_steps(count)
    # The beginning of the first step was not recorded.
    took = [b - a for a, b in zip(_steps.ends_s, _steps.ends_s[1:], strict=False)]
    timed = took[max(0, warmup - 1) :]
    fields: dict[str, Any] = {
        "rank": _steps.rank,
        "ranks": _steps.ranks,
        "steps": count,
        "warmup_steps": warmup,
        "step_s": statistics.median(timed),
        "step_mean_s": statistics.fmean(timed),
        "timed_by": "torch.distributed",
    }
    alone, wire = _steps.ranks == 1, _steps.wire_bytes
    if _steps.exchanges or alone:
        # DDP reports a step's times in the next step.
        exchanges = _steps.exchanges[max(1, warmup) :] or [(0.0, 0.0)]
        comm, hidden = (0.0, 0.0) if alone else map(statistics.fmean, zip(*exchanges, strict=True))
        fields |= {
            "comm_s": comm,
            "hidden_s": hidden,
            "exposed_s": comm - hidden,
            "coding_s": 0.0 if alone else _coding_s(warmup),
            "comm_time_s": 0.0 if alone else sum(comm for comm, _ in _steps.exchanges),
            "gradient_bytes": _steps.gradient_bytes * count,
            "gradient_bits": next(iter(_steps.bits)) if len(_steps.bits) == 1 else None,
            "wire_bytes": 0 if alone else None if wire is None else round(wire),
        }
        arrived = sorted(_steps.arrivals)
        if _steps.rank == 0 and not alone and arrived:
            layers = [(count, round(at - arrived[0][0], 6)) for at, count in arrived]
            fields |= {"layers": layers, "backward_s": layers[-1][1]}
    record("engine", **fields)


def _coding_s(warmup: int) -> float | None:
    """Return the mean of the timed steps; None if a hook does not tell, or there is no DDP."""
    coded_s = _steps.coded_s[max(0, warmup - 1) :]
    known = _steps.wire_bytes is not None and len(coded_s) > 1
    return (coded_s[-1] - coded_s[0]) / (len(coded_s) - 1) if known else None
