"""The entrants: ways to average gradients, each with its default settings."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "end_to_end_torch"))

from contestants import (
    POWERSGD_BUCKET_MB,
    Contestant,
    Make,
    bf16,
    ddp,
    engine,
    fp16,
    powersgd,
)

import qsgd_hpc.torch as hvd

__all__ = ["BASE", "ENTRANTS", "Contestant"]

BASE = "DDP bf16"
ENTRANTS: dict[str, Make] = {
    BASE: ddp(bf16),
    "DDP fp16": ddp(fp16),
    "DDP PowerSGD 1": ddp(powersgd(1), POWERSGD_BUCKET_MB),
    "DDP PowerSGD 2": ddp(powersgd(2), POWERSGD_BUCKET_MB),
    "QSGD 8 bit": engine(hvd.Compression.qsgd(bits=8)),
    "QSGD 4 bit": engine(hvd.Compression.qsgd(bits=4)),
    "EDEN 4 bit": engine(hvd.Compression.eden(bits=4)),
    "EDEN 3 bit": engine(hvd.Compression.eden(bits=3)),
    "EDEN 2 bit": engine(hvd.Compression.eden(bits=2)),
    "top 1%": engine(hvd.Compression.topk(ratio=0.01)),
}
