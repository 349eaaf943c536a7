"""The figures of docs/compared.md are those of the raw measurements."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NETWORKS = {"lstm": "LSTM", "resnet": "ResNet-34"}
SHOWN = ("gloo DDP fp16", "gloo DDP PowerSGD 2", "engine 4 bit", "DDP hook 4 bit")
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("end-to-end-[lr]*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_ratios_are_those_of_the_records(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "end_to_end_torch"))
    compare = import_module("compare")
    sys.modules.pop("compare")
    measured = json.loads(record.read_text(encoding="utf-8"))
    rows = compare.by_name(measured)
    network = NETWORKS[record.stem.split("-")[3]]
    place = "shared memory" if "shared" in record.stem else measured["where"]
    cells = [f"{network}, batch {measured['batch']}, {place}", f"{compare.share(measured):.0%}"]
    cells += [f"{compare.ratio(rows[compare.BASE], rows[what]):.2f}" for what in SHOWN]
    line = f"| {' | '.join(cells)} |"
    assert line in (ROOT / "docs" / "compared.md").read_text(encoding="utf-8"), line


def test_there_are_records() -> None:
    assert len(RECORDS) == 8
