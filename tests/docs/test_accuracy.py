"""The tables of accuracies and errors in benchmarks/README.md are those of the raw measurements."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECORDS = {
    "accuracy-mnist": "report",
    "accuracy-resnet34": "report",
    "reductions-nmse": "reductions",
}


@pytest.mark.parametrize(("record", "script"), RECORDS.items(), ids=RECORDS)
def test_a_table_is_that_of_its_record(record, script, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "accuracy"))
    tell = import_module(script)
    table = import_module("tables").markdown
    for path in (BENCHMARKS / "accuracy").glob("*.py"):
        sys.modules.pop(path.stem, None)
    measured = json.loads((BENCHMARKS / "results" / f"{record}.json").read_text(encoding="utf-8"))
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert table(tell.title(measured), tell.lines(measured)) in page
