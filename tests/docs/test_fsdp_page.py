"""The table of docs/ddp.md is that of the raw measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks" / "results" / "fsdp-shakespeare.json").read_text())


def sent(row: dict[str, Any]) -> float:
    return float(row["gradient_bytes"] + row["weight_bytes"])


@pytest.mark.parametrize("row", RECORD["rows"], ids=lambda row: row["what"])
def test_losses_and_bytes_are_those_of_the_record(row: dict[str, Any]) -> None:
    cells = [row["what"], f"{row['validation_loss']:.3f}", f"{row['loss']:.3f}"]
    cells += [f"{row[part] / 1e3:,.0f}" for part in ("gradient_bytes", "weight_bytes")]
    cells.append(f"{sent(row) / sent(RECORD['rows'][0]):.1%}")
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "ddp.md").read_text(encoding="utf-8")
