"""The figures of docs/compared.md and benchmarks/README.md are those of the raw measurements."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NETWORKS = {"lstm": "LSTM", "mnist": "MNIST", "resnet": "ResNet-34"}
SHOWN = (
    *("gloo DDP fp16", "gloo DDP PowerSGD 1", "gloo DDP PowerSGD 2"),
    *("engine 8 bit", "engine 4 bit", "engine top 1%", "DDP hook 4 bit"),
)
RESULTS = ROOT / "benchmarks" / "results"
RECORDS = sorted(RESULTS.glob("end-to-end-[lmr]*.json"))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "end_to_end_torch"))
    module = import_module("compare")
    sys.modules.pop("compare")
    return module


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_ratios_are_those_of_the_records(record: Path, compare: ModuleType) -> None:
    measured = read(record)
    rows = compare.by_name(measured)
    network = NETWORKS[record.stem.split("-")[3]]
    place = "shared memory" if "shared" in record.stem else measured["where"]
    cells = [f"{network}, batch {measured['batch']}, {place}", f"{compare.share(measured):.0%}"]
    cells += [f"{compare.ratio(rows[compare.BASE], rows[what]):.2f}" for what in SHOWN]
    line = f"| {' | '.join(cells)} |"
    assert line in (ROOT / "docs" / "compared.md").read_text(encoding="utf-8"), line


def test_the_benchmarks_tables_are_those_of_the_records(compare: ModuleType) -> None:
    records = [read(path) for path in RECORDS]
    assert compare.page(records) == (RESULTS / "end-to-end.md").read_text(encoding="utf-8")
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert compare.table(records, "ratios") in readme


def test_there_are_records_of_all_pieces() -> None:
    assert len(RECORDS) == 28
