"""Host memory of a bucket while it is coded: the bucket itself, or a pinned copy of a device's."""

from __future__ import annotations

from typing import Any

import torch

from qsgd_hpc.torch._groups import HOST

__all__ = ["InPlace", "PinnedCopy", "future_for", "staged"]


def future_for(bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that can complete with the bucket."""
    return torch.futures.Future(devices=None if bucket.is_cpu else [bucket.device])


class PinnedCopy:
    """A device's bucket on the host; copies run on a separate stream.

    Args:
        bucket: on a device with streams (CUDA's and ROCm's "cuda", Intel's "xpu"); the current
            stream computes its gradients.
        host: pinned memory of the same shape and type.
    """

    def __init__(self, bucket: torch.Tensor, host: torch.Tensor, stream: Any) -> None:
        self.host = host
        self._bucket = bucket
        self._stream = stream
        self._streams = torch.get_device_module(bucket.device)
        self._complete = self._streams.current_stream(bucket.device).record_event()

    def fetch(self) -> None:
        """Wait for the gradients and copy them to the host."""
        with self._streams.stream(self._stream):
            self._stream.wait_event(self._complete)
            self.host.copy_(self._bucket, non_blocking=True)
            self._bucket.record_stream(self._stream)
        self._stream.synchronize()

    def deliver(self, future: torch.futures.Future[torch.Tensor]) -> None:
        """Copy the result back and complete the future, which waits for the copy's stream."""
        with self._streams.stream(self._stream):
            self._bucket.copy_(self.host, non_blocking=True)
            future.set_result(self._bucket)


class InPlace:
    """A bucket that is already on the host."""

    def __init__(self, bucket: torch.Tensor) -> None:
        self.host = bucket

    def fetch(self) -> None:
        """Do nothing: the gradients are already on the host."""

    def deliver(self, future: torch.futures.Future[torch.Tensor]) -> None:
        """Complete the future."""
        future.set_result(self.host)


def staged(bucket: torch.Tensor, pinned: dict[torch.Size, Any]) -> InPlace | PinnedCopy:
    """Return the bucket's memory on the host.

    Args:
        pinned: the plan's pinned memory and stream, created at the first call.
    """
    if bucket.is_cpu:
        return InPlace(bucket)
    if bucket.shape not in pinned:
        host = torch.empty(bucket.shape, dtype=bucket.dtype, device=HOST, pin_memory=True)
        streams = torch.get_device_module(bucket.device)
        pinned[bucket.shape] = (host, streams.Stream(bucket.device))
    return PinnedCopy(bucket, *pinned[bucket.shape])
