"""What a rank reports of its place: true here, and never a failure anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qsgd_hpc.launch import place

STUBS = {
    "nvidia-smi": "#!/bin/sh\necho '00000000:C7:00.0, GPU-aa'\necho '00000000:07:00.0, GPU-bb'\n",
    "rocm-smi": """#!/bin/sh
echo '{"card1": {"Unique ID": "0x2", "PCI Bus": "0000:C6:00.0"},'
echo ' "card0": {"Unique ID": "0x1", "PCI Bus": "0000:C1:00.0"}}'
""",
}


def reported(*argv: str, path: str | None = None, **environ: str) -> dict[str, Any]:
    """Run the file as a rank does and return its one line."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", place.__file__, *argv],
        env={"PATH": path or os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line.startswith(place.MARK)
    result: dict[str, Any] = json.loads(line.removeprefix(place.MARK))
    return result


@pytest.mark.parametrize(
    ("text", "cpus"), [("", ()), ("3", (3,)), ("0-2,8", (0, 1, 2, 8)), ("0-1,3-4", (0, 1, 3, 4))]
)
def test_cpu_lists_are_the_kernels(text: str, cpus: tuple[int, ...]) -> None:
    assert place.cpu_list(cpus) == text
    assert place.cpus_of(text) == set(cpus)


def test_affinity_is_the_real_one() -> None:
    own = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {own})
        assert reported()["cpus"] == str(own)
    finally:
        os.sched_setaffinity(0, before)


def test_domains_are_those_of_this_machine() -> None:
    seen = reported()
    every: set[int] = set()
    for text in seen["domains"].values():
        every |= place.cpus_of(text)
    assert place.cpus_of(seen["cpus"]) <= every


@pytest.mark.parametrize("launcher", place.LAUNCHERS)
def test_ranks_are_those_of_the_launcher(launcher: str) -> None:
    names = place.LAUNCHERS[launcher]
    given = {name: str(n) for n, name in enumerate(names, 2) if name}
    seen = reported(**given)
    assert (seen["local_rank"], seen["rank"]) == (2, 3)


def test_the_launcher_that_is_named_comes_first() -> None:
    given = {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "SLURM_PROCID": "7", "SLURM_LOCALID": "3"}
    assert (seen := reported(**given))["rank"] == 0, seen
    seen = reported("--launcher", "slurm", **given)
    assert (seen["rank"], seen["local_rank"]) == (7, 3)
    assert reported("--local-rank", "MINE", MINE="5", **given)["local_rank"] == 5


def test_a_process_without_a_launcher_has_no_rank() -> None:
    seen = reported()
    assert (seen["rank"], seen["local_rank"]) == (None, None)


def test_further_variables_are_shown() -> None:
    assert reported("--show", "MY_NIC", MY_NIC="hsn0")["variables"] == {"MY_NIC": "hsn0"}


@pytest.mark.parametrize(
    ("tool", "buses"),
    [
        ("nvidia-smi", ["0000:c7:00.0", "0000:07:00.0"]),
        ("rocm-smi", ["0000:c1:00.0", "0000:c6:00.0"]),
    ],
)
def test_gpus_are_in_the_order_of_their_tool(tool: str, buses: list[str], tmp_path: Path) -> None:
    (tmp_path / tool).write_text(STUBS[tool])
    (tmp_path / tool).chmod(0o755)
    assert [gpu["bus"] for gpu in reported(path=str(tmp_path))["gpus"]] == buses


@pytest.mark.parametrize("body", ["exit 9", "echo nonsense", "echo '[]'", "echo '{\"card0\": 1}'"])
@pytest.mark.parametrize("tool", STUBS)
def test_a_tool_that_fails_does_no_harm(tool: str, body: str, tmp_path: Path) -> None:
    (tmp_path / tool).write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / tool).chmod(0o755)
    assert reported(path=str(tmp_path))["host"]
