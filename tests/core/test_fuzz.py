"""The decoders against hostile messages, for a few seconds; `make fuzz` takes ten minutes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.serial

ROOT = Path(__file__).parents[2]


def test_no_message_makes_a_decoder_read_or_write_beyond_its_buffers(tmp_path):
    # The variables of an outer make would reach the inner one.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        [
            *("make", "--no-print-directory", f"-j{os.cpu_count()}", "fuzz", "FUZZ_SECONDS=4"),
            *(f"FUZZ={tmp_path}/fuzz_decoder", f"FUZZ_OBJECTS={tmp_path}"),
        ],
        cwd=ROOT, env=clean, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"(\d+) messages, (\d+) decoded, (\d+) refused, seed 1: ok", done.stdout)
    assert found, done.stdout
    _, decoded, refused = map(int, found.groups())
    assert min(decoded, refused) > 100, "the messages must exercise both ways out"
