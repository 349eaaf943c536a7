"""What Python does in a rank before the script: launch/start_up."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from qsgd_hpc.launch.command import START_UP

# The parts of torch that are wrapped.
TORCH = {
    "__init__.py": "",
    "nn/__init__.py": "",
    "nn/parallel/__init__.py": "",
    "nn/parallel/distributed.py": """
class DistributedDataParallel:
    def __init__(self): pass
    def _pre_forward(self): pass
    def join_hook(self): pass
""",
    "distributed/__init__.py": "",
    "distributed/fsdp/__init__.py": "",
    "distributed/fsdp/_fully_shard/__init__.py": "",
    "distributed/fsdp/_fully_shard/_fully_shard.py": "def fully_shard(target): return target",
}
DDP = """
from torch.nn.parallel.distributed import DistributedDataParallel
print("loads data", flush=True)
DistributedDataParallel()
print("trains")
"""
FSDP = """
from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard
print("loads data", flush=True)
fully_shard(object())
print("trains")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without this package, beside a torch of its own."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "env", symlinks=True)
    for name, text in TORCH.items():
        path = folder / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "env" / "bin" / "python"


def trained(python: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {name: text for name, text in os.environ.items() if not name.startswith("QSGD_")}
    given["PYTHONPATH"] = os.pathsep.join([str(START_UP), str(python.parents[2])])
    return subprocess.run(
        [str(python), "-c", script],
        env={**given, **variables},
        cwd=START_UP,  # not a checkout, from which a Python without the package imports it
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("script", "variables", "what"),
    [
        (DDP, {"QSGD_BITS": "4"}, "--bits 4"),
        (FSDP, {"QSGD_WEIGHT_BITS": "8"}, "--weight-bits 8"),
        (DDP, {"QSGD_RECORDS": "records", "WORLD_SIZE": "2"}, "a scaling study"),
    ],
)
def test_bits_for_a_python_without_the_package_end_the_rank_before_it_trains(
    bare: Path, script: str, variables: dict[str, str], what: str
) -> None:
    done = trained(bare, script, **variables)
    assert (done.returncode, done.stdout) == (1, "loads data\n")
    assert done.stderr == (
        f"qsgd-hpc: {what} needs qsgd-hpc, which is not installed for {bare}: "
        f"{bare} -m pip install qsgd-hpc, or start the script by another Python\n"
    )


def test_a_python_without_the_package_trains_without_bits(bare: Path) -> None:
    done = trained(bare, DDP, QSGD_BITS="32", WORLD_SIZE="2")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_python_with_the_package_trains(bare: Path) -> None:
    script = DDP + "print(DistributedDataParallel.__init__.__name__)"
    torch = str(bare.parents[2])
    path = os.pathsep.join([str(START_UP), torch, str(Path(__file__).parents[2])])
    done = trained(Path(sys.executable), script, QSGD_BITS="4", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
