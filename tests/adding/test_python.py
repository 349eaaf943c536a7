"""A scheduler and a framework are added by the steps of docs/design.md, and by nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.adding.scratch import Scratch, Toy, before, documented

TOYQ = Toy(
    "toyq",
    (
        before(
            "qsgd_hpc/launch/schedulers.py",
            '    "local": SchedulerTraits(',
            '    "toyq": SchedulerTraits("#TOYQ", "tqsub", "TOYQ_JOB", requeues=True),\n',
        ),
        before("docs/jobs.md", "| Cobalt, this machine |", "| Toyq | `tqsignal SCHEDULER_ID` |\n"),
    ),
)
IN_THE_CONTRACT = """class Toyframe:
    has_handles = False

    def __init__(self) -> None:
        import toyframe

        import qsgd_hpc.toyframe as hvd

        self.hvd = hvd
        self.dtypes = ("bool", "uint16", "uint32", *INTEGERS, "float16", "float32", "float64")
        self.tensor = toyframe.Tensor

    def array(self, tensor: Any) -> np.ndarray:
        return np.array(tensor.tolist(), dtype=tensor.dtype).reshape(tensor.shape)

    def dtype(self, tensor: Any) -> str:
        return tensor.dtype


"""
ADAPTERS, INDEX = "tests/contract/adapters.py", "docs/index.md"
TOYFRAME = Toy(
    "toyframe",
    (
        before(
            "qsgd_hpc/launch/frameworks.py",
            '    Framework("MXNet"',
            '    Framework("Toyframe", "toyframe"),\n',
        ),
        before("pyproject.toml", "autotune = [", 'toyframe = ["toyframe>=1.0"]\n'),
        before(ADAPTERS, "ADAPTERS = {\n", IN_THE_CONTRACT),
        before(ADAPTERS, "if has_device():\n", 'ADAPTERS["toyframe"] = Toyframe\n'),
        before(INDEX, "- [MXNet](", "- [Toyframe](toyframe.md): does not exist.\n"),
        before(
            INDEX,
            "- [qsgd_hpc.mxnet](",
            "- [qsgd_hpc.toyframe](reference/toyframe.rst)\n",
        ),
    ),
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """Return a copy with the compiled modules of this tree, to which both have been added."""
    made = Scratch(tmp_path_factory.mktemp("adding") / "scratch")
    assert made.add(TOYQ) == documented("Adding a scheduler", "toyq")
    assert made.add(TOYFRAME) == {
        *documented("Adding a framework", "toyframe"),
        "qsgd_hpc/toyframe/_calls.py",
        "qsgd_hpc/toyframe/_tensors.py",
    }
    made.install()
    return made


# Answers of commands that do not exist, in the order of the calls.
IN_A_JOB = """
import json, pathlib
from click.testing import CliRunner
from qsgd_hpc.cli import cli
from qsgd_hpc.recording.records import place

def said(*words):
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.stdout

found = {"script": said("submit", "--site", "toy", "--nodes", "2", "--dry-run", "train.py")}
said("submit", "--site", "toy", "--nodes", "2", "--requeue", "train.py")
for row in ("7 Q - out", "7 R - out", "7 E 3 out"):
    pathlib.Path("tqstat").write_text(row + "\\n")
    (job,) = json.loads(said("list", "--json"))
    found[row] = job["state"], job["exit_code"], job["scheduler_id"]
found["place"] = place({"TOYQ_JOB": "7"})["scheduler_job"]
print(json.dumps(found))
"""
PROFILE = """
description: a machine with a scheduler that does not exist
scheduler: toyq
launcher: {argv: [toyrun, -n, "{ranks}"]}
directives: ["--switches={nodes}"]
"""


def test_a_scheduler_is_added_by_the_documented_steps(
    scratch: Scratch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("home/sites/toy.yaml", PROFILE), ("train.py", ""), ("tqsub", "7")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin").mkdir()
    for name in ("tqsub", "tqstat"):
        command = tmp_path / "bin" / name
        command.write_text(f"#!/bin/sh\nexec cat '{tmp_path / name}'\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    found = json.loads(scratch.run("-c", IN_A_JOB, cwd=tmp_path, QSGD_HOME=str(tmp_path / "home")))
    lines = found["script"].splitlines()
    assert lines[:4] == ["#!/bin/bash", "#TOYQ -J train", "#TOYQ -n 2", "#TOYQ --switches=2"]
    assert "toyrun -n 2 \\" in lines
    assert found["7 Q - out"] == ["QUEUED", None, "7"]
    assert found["7 R - out"] == ["RUNNING", None, "7"]
    assert found["7 E 3 out"] == ["FAILED", 3, "7"]
    assert found["place"] == "7"


ON_ONE_RANK = """
from toyframe import Tensor
import qsgd_hpc.toyframe as hvd
from qsgd_hpc.checkup.installation import frameworks
from qsgd_hpc.eight_steps.reading import is_distributed
from qsgd_hpc.launch.cli import build_table

hvd.init()
x = Tensor([[1, -3], [5, 8]], "int32")
print(hvd.allreduce(x).tolist(), hvd.allreduce(x).dtype)
y = Tensor([[0.5] * 64] * 32, "float16")
print(hvd.allreduce(y, op=hvd.Sum, compression=hvd.Compression.qsgd(bits=8)).tolist() == y.tolist())
print(hvd.broadcast(Tensor([True, False]), 0).tolist())
print("[X] Toyframe" in build_table(), is_distributed("qsgd_hpc.toyframe"))
print(*(each for each in frameworks() if "1.0, supported" in each.text))
"""


def test_a_framework_is_added_by_the_documented_steps(scratch: Scratch) -> None:
    *lines, doctor = scratch.run("-c", ON_ONE_RANK).splitlines()
    assert lines == ["[[1, -3], [5, 8]] int32", "True", "[True, False]", "True True"]
    assert "Toyframe" in doctor


@pytest.mark.full
def test_an_added_framework_keeps_the_contract(scratch: Scratch) -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "toyframe")
    said = scratch.run(*words, "tests/contract/test_collectives.py")
    assert " passed" in said
