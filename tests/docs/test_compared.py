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


def test_the_tables_are_those_of_the_records(compare: ModuleType) -> None:
    records = [read(path) for path in RECORDS]
    assert compare.page(records) == (RESULTS / "end-to-end.md").read_text(encoding="utf-8")
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert compare.table(records, "ratios") in readme
    compared = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    assert compare.brief(records) in compared


@pytest.mark.parametrize("network", ["mnist", "resnet", "lstm"])
def test_one_networks_records_give_its_table_alone(compare: ModuleType, network: str) -> None:
    table = compare.brief([read(path) for path in RECORDS if network in path.name])
    assert table in compare.brief([read(path) for path in RECORDS]).split("\n\n")


def test_there_are_records_of_all_pieces() -> None:
    assert len(RECORDS) == 28
