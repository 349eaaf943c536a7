"""Trainings and machines whose predictions can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qsgd_hpc.scaling.define.study import plan
from qsgd_hpc.scaling.predict.fabric import Fabric, flat_fabric
from qsgd_hpc.scaling.predict.inputs import TrainingProfile
from qsgd_hpc.scaling.store import Attempt, StudyFolder
from tests.scaling.samples import study

# Two gradients of 4 MiB, one ready at once, one at the end of the backward pass.
LAYERS = ((1 << 20, 0.0), (1 << 20, 0.02))
GIGABIT: Fabric = flat_fabric("a gigabit switch", 1.0, 50.0, 20.0)


def training(**changes: Any) -> TrainingProfile:
    """Return a training of 30 ms a step, the last 20 of which are backward."""
    values: dict[str, Any] = {
        "name": "two layers",
        "compute_s": 0.03,
        "backward_s": 0.02,
        "layers": LAYERS,
        "batch": 32,
        "unit": "images",
        **changes,
    }
    return TrainingProfile(**values)


def study_folder(path: Path, step_s: Any, **changes: Any) -> StudyFolder:
    """Write a strong-scaling study of 128 images whose steps take step_s(point)."""
    folder = StudyFolder(path)
    folder.create(study(nodes=(1, 2, 4), **changes.pop("study", {})))
    for point in plan(folder.study()):
        seconds = step_s(point)
        compute_s = 0.12 / point.ranks
        final = {
            "event": "final",
            "ranks": point.ranks,
            "images_per_s": 128 / seconds,
            "throughput": 128 / seconds,
            "unit": "images",
            "steps": 100,
            "step_s": seconds,
            "step_mean_s": seconds,
            "compute_s": compute_s,
            "exposed_s": seconds - compute_s,
            "data_s": 0.0,
            "coding_s": 0.002 if point.ranks > 1 else 0.0,
            "step_jitter": 0.0,
            "backward_s": 0.08,
            "layers": [list(layer) for layer in LAYERS],
            "global_batch_size": 128,
            "gpu": None,
            **changes,
        }
        records = ({k: v for k, v in final.items() if v is not ...},)
        folder.append(Attempt(point, 1, "COMPLETED", 0, records))
    return folder
