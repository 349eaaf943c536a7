"""The layers of csrc: a folder includes its own headers and those of the folders below it.

`make lint` checks those of Python (pyproject.toml, tool.importlinter); docs/design.md draws both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
LAYERS = (
    {"bindings"},
    {"jax", "tensorflow"},
    {"foreign"},
    {"engine"},
    {"planner", "gpu"},
    {"collectives"},
    {"quant", "transport"},
    {"common"},
)
# A library of its own, linked with nothing of the core: it reads one table of functions.
ONLY = {"tensorflow": {"foreign/table.h", "common"}}
MARKED = re.compile(r"^QSGD_CLONES\s+\w+ (\w+)\(", re.M)
INCLUDE = re.compile(r'^\s*#\s*include "(([a-z]+)/[^"]+)"', re.M)


def wrong(sources: Path) -> Iterator[str]:
    """Yield each include that reaches a folder beside or above its own."""
    level = {name: depth for depth, names in enumerate(LAYERS) for name in names}
    for file in sorted(sources.rglob("*")):
        folder = file.relative_to(sources).parts[0]
        if file.suffix not in (".cc", ".cu", ".h"):
            continue
        for header, other in INCLUDE.findall(file.read_text(encoding="utf-8")):
            allowed = ONLY.get(folder)
            if other == folder or (allowed and {header, other} & allowed):
                continue
            if allowed or level[other] <= level[folder]:
                yield f"{file.relative_to(sources)} includes {header}"


def test_no_folder_includes_one_beside_or_above_it():
    assert list(wrong(CSRC)) == []


@pytest.mark.parametrize(
    ("file", "header"),
    [
        ("quant/code.h", "engine/engine.h"),
        ("quant/code.h", "transport/transport.h"),
        ("tensorflow/ops.cc", "engine/engine.h"),
    ],
)
def test_an_include_that_goes_up_is_found(file, header, tmp_path):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(f'#include <vector>\n#include "{header}"\n')
    assert list(wrong(tmp_path)) == [f"{file} includes {header}"]


def test_function_clones_are_called_in_their_own_file_only():
    """Clang rejects a function that was declared and called before its definition is marked.

    The compiler of other tests, GCC, does not.
    """
    headers = "".join(file.read_text(encoding="utf-8") for file in CSRC.rglob("*.h"))
    marked = [
        (file.name, name)
        for file in CSRC.rglob("*.cc")
        for name in MARKED.findall(file.read_text(encoding="utf-8"))
    ]
    assert len(marked) > 5
    declared = re.compile(r"^(?:static )?[\w:]+\*? (\w+)\(", re.M)
    assert [each for each in marked if each[1] in declared.findall(headers)] == []
