"""Analyses made up to have everything that a report can show; no measurement."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pandas as pd

from qsgd_hpc.scaling.analysis.compute import UNCODED
from qsgd_hpc.scaling.analysis.results import (
    COLUMNS,
    Analysis,
    BreakEven,
    CaseAnalysis,
    Estimate,
    Fit,
    LinkFit,
)
from qsgd_hpc.scaling.define.study import Case
from qsgd_hpc.scaling.report.cautions import Machine
from qsgd_hpc.scaling.report.findings import findings
from qsgd_hpc.scaling.report.origins import Origins
from qsgd_hpc.scaling.report.report import Report
from tests.scaling.samples import study

PARAMETERS = 400_000
NODES = (1, 2, 4, 8)
BITS = (32, 8, 4)
EPOCHS = 5


def analysis(*cases: CaseAnalysis) -> Analysis:
    """Return these cases as a study's analysis."""
    return Analysis(cases=cases)


def case_analysis(
    name: str = "train",
    *,
    quality: str = "test_accuracy",
    nodes: tuple[int, ...] = NODES,
    bits: tuple[int, ...] = BITS,
    repeats: int = 3,
    full: bool = True,
    unit: str = "images",
) -> CaseAnalysis:
    """Return a case; without `full` it has only what the oldest scripts record."""
    table = pd.DataFrame(
        [
            _row(n, b, repeats, quality, full)
            for n in nodes
            for b in bits
            if n > 1 or b == max(bits)
        ],
        columns=list(COLUMNS),
    )
    first = table.iloc[0]
    for name_ in ("speedup", "efficiency"):
        for end in ("", "_lo", "_hi"):
            ratio = table[f"throughput{end}"] / first["throughput"]
            share = 1.0 if name_ == "speedup" else table["ranks"] / first["ranks"]
            table[f"{name_}{end}"] = ratio / share
    return CaseAnalysis(
        case=Case(name, "torch" if full else "", batch_size=128),
        unit=unit,
        quality=quality,
        target=None if not (full and quality) else 0.9 if quality == "test_accuracy" else 130.0,
        table=table,
        runs=_runs(table, repeats),
        curves=_curves(table, repeats, quality) if full else pd.DataFrame(),
        reference=(int(first["ranks"]), int(first["bits"])),
        dataset="mnist",
        fits=_fits(bits) if full and len(nodes) > 2 else (),
        link=LinkFit(Estimate(2e-5, 1e-5, 4e-5), Estimate(1.1e9, 0.9e9, 1.4e9), 0.08, 9)
        if full
        else None,
        break_even=_verdicts(bits) if full else (),
    )


def _row(nodes: int, bits: int, repeats: int, quality: str, full: bool) -> dict[str, Any]:
    compute, data = 0.080 / nodes, 0.001
    wire = 0.0 if nodes == 1 else 2 * (nodes - 1) * PARAMETERS * (4 if bits == 32 else bits / 8)
    communication = wire / 3e8
    exposed, hidden = 0.7 * communication, 0.3 * communication
    step = compute + exposed + data
    speed = 256 / step
    several = repeats > 1
    row: dict[str, Any] = {
        "nodes": nodes,
        "ranks": nodes,
        "bits": bits,
        "repeats": repeats,
        "throughput": speed,
        "throughput_lo": 0.97 * speed if several else None,
        "throughput_hi": 1.03 * speed if several else None,
        "wire_bytes_per_step": wire,
        "wire_bytes_total": 702 * wire,
        "compression_ratio": 32 / bits if wire else None,
        "comm_time_share": communication / step,
        "steps": 702,
        "global_batch_size": 256,
    }
    if quality:
        value = 0.985 - 0.001 * (8 / bits) if quality == "test_accuracy" else 112 + 8 / bits
        row |= {quality: value, f"{quality}_lo": 0.999 * value, f"{quality}_hi": 1.001 * value}
    if full:
        row |= {
            "step_s": step,
            "compute_s": compute,
            "exposed_s": exposed,
            "data_s": data,
            "hidden_s": hidden,
            "coding_s": 0.0 if bits == 32 else 0.002,
            "exposed_share": exposed / step,
            "nmse": None if bits == 32 else 4.0**-bits,
            "time_to_target_s": 60 * step / 0.08,
        }
    return row


def _runs(table: pd.DataFrame, repeats: int) -> pd.DataFrame:
    rows = []
    for row in table.to_dict("records"):
        for repeat in range(1, repeats + 1):
            wobble = 1 + 0.01 * (repeat - (repeats + 1) / 2)
            told = {"repeat": repeat, "throughput": wobble * row["throughput"]}
            rows.append({**row, **dict.fromkeys(UNCODED, math.nan), **told})
    return pd.DataFrame(rows)


def _curves(table: pd.DataFrame, repeats: int, quality: str) -> pd.DataFrame:
    rows = []
    for row in table.to_dict("records"):
        for repeat in range(1, repeats + 1):
            for epoch in range(1, EPOCHS + 1):
                gone = math.exp(-epoch) * (1 + 0.05 * repeat + 0.2 / row["bits"])
                rows.append(
                    {
                        "nodes": row["nodes"],
                        "ranks": row["ranks"],
                        "bits": row["bits"],
                        "repeat": repeat,
                        "epoch": epoch,
                        "elapsed_s": 234 * epoch * row["step_s"],
                        "train_loss": 2 * gone,
                        "test_accuracy": 0.985 - 0.3 * gone if quality == "test_accuracy" else None,
                        "perplexity": 112 + 300 * gone if quality == "perplexity" else None,
                    }
                )
    return pd.DataFrame(rows)


def _fits(bits: tuple[int, ...]) -> tuple[Fit, ...]:
    found = []
    for b in bits:
        serial = 0.02 + 0.002 * b
        found.append(
            Fit("amdahl", b, {"serial": Estimate(serial, 0.9 * serial, 1.1 * serial)}, 0.02, 4)
        )
        usl = {"contention": Estimate(0.9 * serial, 0.0, serial), "coherency": Estimate(0.001)}
        found.append(Fit("usl", b, usl, 0.01, 4, "Three sizes leave the coherency uncertain."))
    return tuple(found)


def _verdicts(bits: tuple[int, ...]) -> tuple[BreakEven, ...]:
    fewer = [b for b in bits if b != 32]
    return tuple(
        BreakEven(
            b,
            2.4e9 / b,
            3e8,
            "yes" if b == 4 else "undecided",
            f"Its coding pays on links below {19.2 / b:.1f} Gbit/s.",
        )
        for b in fewer
    )


def report_of(*cases: CaseAnalysis, commit: str = "0123456789ab") -> Report:
    """Return the report of these cases, its words as the analysis finds them."""
    whole = analysis(*cases)
    return Report(
        study=study(nodes=NODES, repeats=3),
        analysis=whole,
        findings=findings(study(), whole, machine=Machine.ONE),
        origins=Origins(
            facts=(("Code", commit), ("Host", "bench-01"), ("MPI", "MPICH Version: 5.0.2")),
            jobs=(
                {
                    "point": "1 node, fp32, repeat 1",
                    "job": "local-1",
                    "host": "bench-01",
                    "command": "QSGD_BITS=32 /home/ada/train.py --global-batch-size 256",
                },
            ),
            machine=Machine.ONE,
            cautions=(),
        ),
        incidents=("2 nodes, 4 bit, repeat 1, attempt 1: the job ended as TIMEOUT; not used.",),
    )


def without_repeats(case: CaseAnalysis) -> CaseAnalysis:
    """Return the case as if every point had been measured once."""
    table = case.table.copy()
    for column in (c for c in COLUMNS if c.endswith(("_lo", "_hi"))):
        table[column] = None
    return dataclasses.replace(case, table=table.assign(repeats=1))
