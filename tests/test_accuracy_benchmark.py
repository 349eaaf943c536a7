"""The benchmark of accuracies trains in every code there is, and says what it has measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from qsgd_hpc import _core
from qsgd_hpc.compression import KINDS

FOLDER = Path(__file__).parents[1] / "benchmarks" / "accuracy"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return a function that imports a script of the benchmark; all are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_every_code_that_the_core_knows_is_trained(module):
    assert {c.code.scheme for c in module("codes").ALL} == {None, *_core.SCHEMES}


@pytest.mark.filterwarnings("ignore:rounding='nearest' is biased")
def test_every_code_that_has_a_choice_is_trained_with_and_without_error_feedback(module):
    chosen, kinds = {}, set()
    for contestant in module("codes").ALL:
        if contestant.code.feeds_back:
            code = KINDS[contestant.code.kind](**contestant.settings)
            chosen.setdefault(contestant.code.name, set()).add(code.feeds_back)
            kinds.add(contestant.code.kind)
        else:
            assert contestant.error_feedback is None
    assert kinds == set(KINDS)
    assert all(choices == {False, True} for choices in chosen.values())


def test_names_are_unique_and_chosen_by_pattern(module):
    codes = module("codes")
    names = [contestant.name for contestant in codes.ALL]
    assert len(set(names)) == len(names)
    assert [c.name for c in codes.select(["fp16", "topk*"])] == [
        "fp16", "topk 1%", "topk 1%, feedback",
    ]  # fmt: skip
    assert codes.select([]) == codes.ALL


def test_over_a_small_w_the_formulas_are_those_of_the_docs(module):
    """1, 2, 3 and (p + 1) / 2, as p and the sides of its square grow."""
    over_w = {name: f(1e-9, 64) / 1e-9 for name, f in module("formulas").FORMULAS.items()}
    assert over_w == pytest.approx(
        {"allgather": 1, "sra": 2 - 1 / 64, "sra2d": 3 - 1 / 4, "requantizing_ring": 65 / 2},
        rel=1e-6,
    )


def row(what, accuracy, **more):
    feedback = True if "feedback" in what else None
    measured = {"wire_bytes": 1000.0, "nmse": None, "diverged": False, "steps": 9, **more}
    return {"what": what, "error_feedback": feedback, "test_accuracy": accuracy, **measured}


def test_a_line_has_both_trainings_of_a_code_and_tells_of_a_gradient_that_is_not_finite(module):
    rows = [
        row("fp32", 0.5),
        row("sign", 0.1, wire_bytes=40.0, nmse=0.375, diverged=True),
        row("sign, feedback", 0.4, wire_bytes=40.0, nmse=0.4),
        row("topk, feedback", 0.4),
    ]
    heading, *lines = module("report").lines({"rows": rows})
    assert [dict(zip(heading, line, strict=True)) for line in lines[1:]] == [
        {
            "code": "sign", "accuracy": "10.00% (not finite after 9 steps)",
            "with feedback": "40.00%", "sent KB": "0.0", "of fp32": "4.0%",
            "NMSE": "0.38", "NMSE with feedback": "0.4",
        },
        {
            "code": "topk", "accuracy": "", "with feedback": "40.00%", "sent KB": "1.0",
            "of fp32": "100.0%", "NMSE": "", "NMSE with feedback": "",
        },
    ]  # fmt: skip


def test_reductions_are_measured_against_their_code(module, capsys, monkeypatch, tmp_path):
    reductions = module("reductions")
    monkeypatch.setattr(reductions, "RANKS", (2, 3))
    path = tmp_path / "reductions.json"
    monkeypatch.setattr(sys, "argv", ["reductions.py", "--elements", "65536", "--json", str(path)])
    reductions.main()
    table = capsys.readouterr().out
    assert "1.00 (1.00)" in table
    monkeypatch.setattr(sys, "argv", ["reductions.py", "--markdown", str(path)])
    reductions.main()
    assert "| 2 | " in capsys.readouterr().out
