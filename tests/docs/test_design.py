"""What docs/design.md shows of the sources is what stands in them."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
EXCERPTS = re.findall(r"```cpp\n(.*?)```", PAGE, flags=re.DOTALL)
SOURCES = [
    " ".join(path.read_text(encoding="utf-8").split()) for path in (ROOT / "csrc").rglob("*.[ch]*")
]


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda text: text.split()[0])
def test_excerpts_are_of_the_sources(excerpt: str) -> None:
    wanted = " ".join(excerpt.split())
    assert any(wanted in source for source in SOURCES), excerpt


def test_there_are_excerpts() -> None:
    assert len(EXCERPTS) == 4


def test_calls_of_a_gradients_way_and_files_of_the_page_exist() -> None:
    rows = re.findall(r"^\|[^|]*\| (`[^|]*) \| `([^`|]*)` \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) > 15
    for calls, file in rows:
        text = (ROOT / file).read_text(encoding="utf-8")
        for call in re.findall(r"`([\w.:]+)`", calls):
            name = re.escape(re.split(r"\.|::", call)[-1])
            scope = call.rpartition("::")[0]
            pattern = rf"\b{scope}::{name}\(" if scope else rf"\b{name}\("
            assert re.search(pattern, text), f"{file} has no {call}"
    for file in re.findall(r"`((?:csrc|docs|qsgd_hpc|templates|tests)/[\w/.]+\.\w+)`", PAGE):
        assert re.search(r"\bX\b", file) or (ROOT / file).exists(), file


@pytest.mark.parametrize("site", ["polaris", "frontier"])
def test_times_to_agree_are_those_of_the_simulation(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "agreement"))
    simulate = import_module("simulate")
    sys.modules.pop("simulate")
    assert all(simulate.row(site, ranks) in PAGE for ranks in (64, 512))
