"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.ops import Sum
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops import allgather, allreduce

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm*`` over the batches of all ranks, as if they were one batch.

    Gradients are those of the sum of all ranks' losses. In evaluation mode it is plain batch
    normalisation and sends nothing.

    Args:
        num_features: number of channels: the second of the input's two or more dimensions.
        eps: added to the variance.
        momentum: momentum of the running statistics; None averages all batches equally.
        affine: whether there are a weight and a bias.
        track_running_stats: whether there are running statistics.
        process_set: the ranks whose batches are included; default: all. Batch sizes may differ.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_set = process_set
        self._number: int | None = None

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise UsageError(
                f"SyncBatchNorm of a tensor of shape {tuple(input.shape)}: at least two "
                "dimensions are required, batch and channels"
            )
        if input.shape[1] != self.num_features:
            raise UsageError(
                f"SyncBatchNorm({self.num_features}) of a tensor of shape {tuple(input.shape)}, "
                f"which has {input.shape[1]} channels"
            )

    @_disable_dynamo  # it would trace the collectives, once for each name
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input, normalised: mean 0 and variance 1 in each channel, then affine."""
        self._check_input_dim(input)
        if not self.training or self.process_set.size() == 1:
            return super().forward(input)
        if self._number is None:
            # All ranks call their modules in the same order. The name is kept, so that the engine
            # has it cached.
            self._number = basics.next_number("SyncBatchNorm")
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, f"batch_norm.{self._number}", self.process_set
        )
        if self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        normalised: torch.Tensor = output
        return normalised

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a loaded module gets a new name, in its own job.
        return {**vars(self), "_number": None}

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        tracked, means, variances = self.num_batches_tracked, self.running_mean, self.running_var
        assert tracked is not None and means is not None and variances is not None
        tracked.add_(1)
        share = 1 / tracked.item() if self.momentum is None else self.momentum
        means.lerp_(mean.to(means.dtype), share)
        variances.lerp_(variance.to(variances.dtype), share)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Return the module with every ``BatchNorm*`` in it replaced; parameters are shared."""
        if isinstance(module, _BatchNorm):
            new = cls(module.num_features, module.eps, module.momentum, process_set=process_set)
            # The same parameters and buffers, so that existing optimizers still refer to them.
            for attribute in ("affine", "track_running_stats", "training"):
                setattr(new, attribute, getattr(module, attribute))
            new._parameters, new._buffers = module._parameters, module._buffers
            return new
        for name, child in module.named_children():
            module.add_module(name, cls.convert_sync_batchnorm(child, process_set))
        return module


def _statistics(x: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    """Return mean, variance and count over all ranks, as float64 of shape (2 * channels + 1,).

    Each rank adds squares of deviations from its own mean, which avoids the cancellation of sums
    of squares; the ranks' sums are then combined (Chan, Golub, LeVeque 1979).
    """
    channels = x.shape[1]
    rows = x.transpose(0, 1).reshape(channels, -1)
    count = rows.shape[1]
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if count:
        variance, mean = torch.var_mean(rows, dim=1, correction=0)
        mine[:channels], mine[channels:-1], mine[-1] = mean, variance * count, count
    everyone = allgather(mine.unsqueeze(0), name, process_set)
    means, squares, counts = everyone[:, :channels], everyone[:, channels:-1], everyone[:, -1:]
    total = counts.sum()
    if total <= 1:
        raise UsageError(
            f"batch normalisation of {int(total)} values per channel over all ranks: training "
            "needs at least two; use larger batches, or module.eval()"
        )
    mean = (means * counts).sum(0) / total
    deviations = squares + counts * (means - mean).square()
    return torch.cat([mean, deviations.sum(0) / total, total.reshape(1)])


def _accurate(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, name: str, process_set: Any
    ) -> Any:
        precise = _accurate(x)
        statistics = _statistics(precise, name, process_set).to(precise.dtype)
        channels = x.shape[1]
        mean, variance, count = statistics[:channels], statistics[channels:-1], statistics[-1]
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt(), count)
        ctx.name, ctx.process_set = f"{name}.gradient", process_set
        w, b = (None if p is None else p.to(precise.dtype) for p in (weight, bias))
        output = functional.batch_norm(precise, mean, variance, w, b, False, 0.0, eps).to(x.dtype)
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor, *unused: Any) -> Any:  # type: ignore[override]
        x, weight, mean, scale, count = ctx.saved_tensors
        channel = [1, -1] + [1] * (x.dim() - 2)
        g = _accurate(gradient)
        normal = (_accurate(x) - mean.view(channel)) * scale.view(channel)
        others = [d for d in range(x.dim()) if d != 1]
        local = torch.stack([g.sum(others), (g * normal).sum(others)])
        means = allreduce(local, name=ctx.name, op=Sum, process_set=ctx.process_set) / count
        slope = scale if weight is None else scale * weight.to(scale.dtype)
        inner = g - means[0].view(channel) - normal * means[1].view(channel)
        inputs = (inner * slope.view(channel)).to(x.dtype)
        weights, biases = (
            total.to(x.dtype if weight is None else weight.dtype) if needed else None
            for total, needed in zip((local[1], local[0]), ctx.needs_input_grad[1:3], strict=True)
        )
        return inputs, weights, biases, None, None, None
