"""The factors between the errors of codes in docs/compression.md are those of the measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def errors() -> dict[tuple[str, int, str, float], float]:
    """Return the error by network, ranks, code and bits."""
    text = (ROOT / "benchmarks" / "results" / "bits.json").read_text(encoding="utf-8")
    return {
        (row["network"], row["ranks"], row["what"], row["bits"]): row["nmse"]
        for row in json.loads(text)["rows"]
    }


def factors(larger: tuple[str, float], smaller: tuple[str, float]) -> str:
    found = errors()
    places = sorted({key[:2] for key in found})
    ratios = [found[(*place, *larger)] / found[(*place, *smaller)] for place in places]
    return f"{min(ratios):.2g} to {max(ratios):.2g}"


@pytest.mark.parametrize(
    ("sentence", "larger", "smaller"),
    [
        (
            "`eden` is smaller than that of `qsgd` by a factor of",
            ("QSGD", 4.0625),
            ("EDEN", 4.0625),
        ),
        ("and than that of MXFP4 by", ("MXFP4", 4.25), ("EDEN", 4.0625)),
        ("it is smaller than that of fp8 by a factor of", ("fp8", 8.0625), ("EDEN", 8.0625)),
        ("smaller than that of `qsgd(bits=4)` by a factor of", ("QSGD", 4.0625), ("MXFP4", 4.25)),
        ("that of `qsgd` is smaller than that of fp8 by", ("fp8", 8.0625), ("QSGD", 8.0625)),
        ("and than that of MXFP8 by", ("MXFP8", 8.25), ("QSGD", 8.0625)),
    ],
)
def test_factors_are_those_of_the_record(
    sentence: str, larger: tuple[str, float], smaller: tuple[str, float]
) -> None:
    page = (ROOT / "docs" / "compression.md").read_text(encoding="utf-8")
    shown = re.search(re.escape(sentence) + r" ([\d.]*\d to [\d.]*\d)", page)
    assert shown is not None, sentence
    assert shown[1] == factors(larger, smaller)
