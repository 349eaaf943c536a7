"""The log that docs/autotune.md shows has the columns that autotuning writes."""

from __future__ import annotations

from pathlib import Path

from qsgd_hpc.runtime import autotune
from tests.docs.pages import BLOCK

PAGE = Path(__file__).parents[2] / "docs" / "autotune.md"


def test_the_log_has_the_columns_that_are_written() -> None:
    texts = [text for _, text in BLOCK.findall(PAGE.read_text("utf-8"))]
    (log,) = [text.splitlines() for text in texts if text.startswith("trial,")]
    assert log[0].split(",") == list(autotune._COLUMNS)
    assert {line.count(",") for line in log} == {len(autotune._COLUMNS) - 1}
