"""Time the GPU kernels, compared with the device's copy and with equivalent torch operations.

All contestants take turns in one run, on more memory than fits into caches; times are medians,
measured by events. Bytes are the least that must be moved: elements and codes, each once.

Run: python benchmarks/gpu/kernels.py --json gpu-kernels.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from qsgd_hpc import _core
from qsgd_hpc.runtime import gpu

BUCKET = 512
WARM_UP = 5


@dataclass(frozen=True)
class Contestant:
    """One operation to time; ``moved_bytes`` is the least that it must read and write."""

    name: str
    bits: int | None
    moved_bytes: float
    run: Callable[[], object]


@dataclass(frozen=True)
class Row:
    """A contestant's times; ``of_copy`` is its bandwidth over that of the device's copy."""

    name: str
    bits: int | None
    samples: int
    min_ms: float
    median_ms: float
    gb_per_s: float
    of_copy: float


class Kernels:
    """The kernels of one code, as used by rank 0 of two, on ``count`` elements of each rank."""

    def __init__(self, library: str, scheme: str, bits: int, count: int, device: torch.device):
        self.count = count
        spec = _core.CodecSpec(scheme=scheme, bits=bits, bucket_size=BUCKET)
        tensors = [_core.BucketTensor(at=0, count=2 * count, id=0, spec=spec)]
        self._coder = _core.GpuBucket(library, tensors, dtype="float32", seed=1, rank=0, size=2)
        self._tables = [
            torch.from_numpy(table.view("int64")).to(device) for table in self._coder.tables()
        ]
        self._x = torch.randn(2 * count, device=device)
        self._out = torch.empty_like(self._x)
        self._messages = torch.zeros(2 * self._coder.stride, dtype=torch.uint8, device=device)
        self._result = torch.zeros(self._coder.stride, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        self.encode()
        self._messages[: self._coder.stride] = self._messages[self._coder.stride :]

    def encode(self) -> None:
        """Code the other rank's elements."""
        self._coder.encode(
            self._x.data_ptr(), table=self._tables[0].data_ptr(),
            messages=self._messages.data_ptr(), stream=self._stream,
        )  # fmt: skip

    def fused(self) -> None:
        """Decode the other rank's message, add this rank's elements, and code the mean."""
        self._coder.reduce(
            self._x.data_ptr(), table=self._tables[1].data_ptr(),
            messages=self._messages.data_ptr(), result=self._result.data_ptr(),
            stream=self._stream,
        )  # fmt: skip

    def decode(self) -> None:
        """Decode both ranks' messages."""
        self._coder.decode(
            self._messages.data_ptr(), table=self._tables[2].data_ptr(),
            out=self._out.data_ptr(), stream=self._stream,
        )  # fmt: skip


def quantise(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and packed codes of QSGD with the largest norm, by torch's operations."""
    levels = 2 ** (bits - 1) - 1
    rows = x.view(-1, BUCKET)
    norm = rows.abs().amax(dim=1, keepdim=True)
    codes = (rows * (levels / norm) + torch.rand_like(rows)).floor_().add_(levels).to(torch.uint8)
    if bits == 4:
        codes = codes[:, : BUCKET // 2] | codes[:, BUCKET // 2 :] << 4
    return norm, codes


def contestants(
    library: str, count: int, device: torch.device, *, peers: bool
) -> Iterator[Contestant]:
    """Yield the contestants: the copy first, then the kernels and, with `peers`, torch's."""
    x = torch.randn(count, device=device)
    target = torch.empty_like(x)
    yield Contestant("copy", None, 8 * count, lambda: target.copy_(x))
    compiled = torch.compile(quantise, dynamic=False)
    quantisers = (("torch, eager", quantise), ("torch.compile", compiled)) if peers else ()
    for bits in (8, 4):
        yield from of_kernels(library, "qsgd", bits, count, device)
        codes = count * bits / 8 + 4 * count / BUCKET
        for name, act in quantisers:
            yield Contestant(name, bits, 4 * count + codes, lambda act=act, bits=bits: act(x, bits))
    for bits in (4, 3):
        yield from of_kernels(library, "eden", bits, count, device)


def of_kernels(
    library: str, scheme: str, bits: int, count: int, device: torch.device
) -> Iterator[Contestant]:
    """Yield the three kernels of a code."""
    kernels = Kernels(library, scheme, bits, count, device)
    codes = count * bits / 8 + 4 * count / BUCKET
    prefix = "" if scheme == "qsgd" else f"{scheme} "
    yield Contestant(prefix + "encode", bits, 4 * count + codes, kernels.encode)
    yield Contestant(prefix + "fused", bits, 4 * count + 2 * codes, kernels.fused)
    yield Contestant(prefix + "decode", bits, 2 * (4 * count + codes), kernels.decode)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds that one run takes."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    run()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event))


def measure(all_: list[Contestant], samples: int, device: torch.device) -> list[Row]:
    """Run all contestants in turn and return their rows."""
    for each in all_:
        for _ in range(WARM_UP):
            each.run()
    times: list[list[float]] = [[] for _ in all_]
    for _ in range(samples):
        for each, its in zip(all_, times, strict=True):
            its.append(timed(each.run, device))
    medians = [statistics.median(its) for its in times]
    speeds = [each.moved_bytes / ms / 1e6 for each, ms in zip(all_, medians, strict=True)]
    return [
        Row(each.name, each.bits, samples, min(its), median, speed, speed / speeds[0])
        for each, its, median, speed in zip(all_, times, medians, speeds, strict=True)
    ]


def table(rows: list[Row]) -> str:
    """Return the rows as text, with the speed-up of encoding over each of torch's."""
    lines = [f"{'':14} bits  median ms    GB/s  of the copy  kernel is faster by"]
    encode_ms = {row.bits: row.median_ms for row in rows if row.name == "encode"}
    for row in rows:
        faster = f"{row.median_ms / encode_ms[row.bits]:.1f}" if "torch" in row.name else ""
        bits = "" if row.bits is None else str(row.bits)
        lines.append(
            f"{row.name:14} {bits:>4} {row.median_ms:10.3f} {row.gb_per_s:7.0f} "
            f"{row.of_copy:11.0%}  {faster}".rstrip()
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--elements", type=int, default=1 << 26, help="default 2^26, 256 MiB")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument(
        "--without-torch", action="store_true", help="leave out torch's operations, which compile"
    )
    parser.add_argument("--json", type=Path, help="where to write the rows")
    args = parser.parse_args()
    library = gpu.library()
    if library is None:
        sys.exit("no GPU kernels: install this package where nvcc is (docs/gpu.md)")
    device = torch.device(gpu.device_type(library))
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU, which is expected on a login node")
    all_ = list(contestants(library, args.elements, device, peers=not args.without_torch))
    rows = measure(all_, args.samples, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU, by the twin"
    print(f"{name}; kernels for {gpu.platform(library)}; {args.elements} elements")
    print(table(rows))
    if args.json:
        facts = {"schema": 1, "device": name, "kernels": gpu.platform(library)}
        facts |= {"torch": torch.__version__, "elements": args.elements}
        args.json.write_text(
            json.dumps(facts | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
