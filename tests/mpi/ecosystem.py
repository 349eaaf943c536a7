"""A script of each kind that users of torch.distributed have, and what it prints by torchrun."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.processes import without_settings

__all__ = ["KINDS", "SCRIPT", "STEPS", "WRAPPED", "by_torchrun", "printed", "under_torchrun"]

SCRIPT = str(Path(__file__).with_name("ecosystem_script.py"))
WRAPPED = ("lightning", "fabric", "accelerate", "trainer")  # under DDP
KINDS = ("ddp", "fsdp", "titan", "lightning-fsdp", "lightning-bf16", *WRAPPED)
STEPS = "12"


def printed(text: str, ranks: int) -> list[Any]:
    """Return what a rank has printed, but for its rank; all have printed the same."""
    # Processes may print on one line.
    lines = sorted(map(json.loads, re.findall(r'\[\d+, \d+, [^\[\]]*"[^\[\]]*\]', text)))
    assert [line[0] for line in lines] == [*range(ranks)], text
    assert all(line[1:] == lines[0][1:] for line in lines), "the replicas differ"
    return lines[0][1:]


def by_torchrun(*command: str) -> str:
    """Return what two ranks of a script print that torchrun has started."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *command],
        env={**without_settings(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@functools.cache
def under_torchrun(kind: str, bits: str) -> list[Any]:
    """Return what a rank of the script prints under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        return printed(by_torchrun(SCRIPT, kind, bits, STEPS, f"{folder}/saved"), 2)
