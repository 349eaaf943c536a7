"""The figures of docs/gpu.md are those of the raw measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {
    "encode": "code",
    "fused": "decode, add, code the mean (fused)",
    "decode": "decode (two messages)",
    "torch.compile": "torch's operations, compiled",
    "torch, eager": "torch's operations, eager",
}


EDEN = {
    "eden encode": "`eden`: code",
    "eden fused": "`eden`: fused",
    "eden decode": "`eden`: decode",
}
TRAINED = {
    "no communication": "no communication",
    **{f"hvd {bits}": f"`hvd`, {bits} bits" for bits in (32, 8, 4)},
    "ddp": "DDP, NCCL",
    "ddp bf16": "DDP, NCCL, bf16 hook",
    "ddp 4": "DDP, NCCL, our hook at 4 bits",
}


def measured() -> dict[tuple[str, int | None], dict[str, float]]:
    text = (ROOT / "benchmarks" / "results" / "gpu-kernels.json").read_text(encoding="utf-8")
    return {(row["name"], row["bits"]): row for row in json.loads(text)["rows"]}


def page() -> str:
    return (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_that_of_the_record(name: str) -> None:
    rows = [measured()[name, bits] for bits in (8, 4)]
    cells = [f"{row['median_ms']:.3f} ms | {row['of_copy']:.0%}" for row in rows]
    assert f"| {NAMES[name]} | {' | '.join(cells)} |" in page()


def test_how_much_faster_than_a_compiler() -> None:
    rows = measured()
    ratios = [
        rows["torch.compile", bits]["median_ms"] / rows["encode", bits]["median_ms"]
        for bits in (8, 4)
    ]
    assert f"{ratios[0]:.1f} and {ratios[1]:.1f} times as fast" in page()


@pytest.mark.parametrize("name", EDEN)
def test_eden_s_rows_are_those_of_the_record(name: str) -> None:
    row = measured()[name, 4]
    assert f"| {EDEN[name]} | | | {row['median_ms']:.3f} ms | {row['of_copy']:.0%} |" in page()


CARRIED = {
    "no communication": "no communication",
    "hvd 32 host": "`hvd`, 32 bits, by the host",
    "hvd 32": "`hvd`, 32 bits, by NCCL",
    "hvd 4": "`hvd`, 4 bits",
    "ddp": "DDP, NCCL",
}


@pytest.mark.parametrize(
    ("record", "what", "name"),
    [
        *(("gpu-training", what, name) for what, name in TRAINED.items()),
        *(("gpu-nccl", what, name) for what, name in CARRIED.items()),
    ],
)
def test_the_training_s_rows_are_those_of_the_record(record: str, what: str, name: str) -> None:
    text = (ROOT / "benchmarks" / "results" / f"{record}.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    cells = []
    for task in ("gpt", "resnet50"):
        (row,) = (
            row for row in rows if (row["task"], row["what"], row["ranks"]) == (task, what, 2)
        )
        exposed = f"{row['exposed_ms']:.1f}" if what != "no communication" else ""
        cells += [f"{row['step_ms']:.1f}", exposed]
    line = f"| {name} | {' | '.join(cells)} |".replace("  ", " ")
    assert line in page()
