"""Real ranks under each MPI's launcher behind the wrapper: each finds its own place."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path

import pytest

from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.placement.seats import parse_places
from qsgd_hpc.jobs.request.validate import fill
from qsgd_hpc.jobs.script import render_wrapper
from qsgd_hpc.jobs.sites.profile import Cpu, Gpu, Site
from qsgd_hpc.launch import place

pytestmark = pytest.mark.gate

CORES = sorted(os.sched_getaffinity(0))
SITE = Site(
    name="here",
    description="this machine",
    scheduler="local",
    launcher_argv=("mpiexec",),
    gpu=Gpu("CUDA_VISIBLE_DEVICES", ("7", "5"), "one"),
    cpu=Cpu(tuple(map(str, CORES[:2])), "wrapper"),
)


@pytest.mark.skipif(len(CORES) < 2 or not shutil.which("taskset"), reason="two cores to bind to")
@pytest.mark.parametrize("view", ["one", "all"])
def test_two_ranks_get_a_gpu_and_a_core_each(run_ranks, tmp_path: Path, view: str) -> None:
    request = fill(JobRequest(Path("train.py"), ranks_per_node=2, gpu_view=view), SITE)
    wrapper = tmp_path / "pin.sh"
    wrapper.write_text(render_wrapper(request, SITE, omp_threads=1))
    program = (sys.executable, "-I", "-S", place.__file__)
    done = run_ranks(2, "bash", str(wrapper), *program)
    assert done.returncode == 0, done.stderr
    (node,) = parse_places(done.stdout, dataclasses.replace(SITE, numa=()))
    assert [(s.rank, s.gpu, s.cpus, s.omp_threads) for s in node.seats] == [
        (0, "7", {CORES[0]}, 1),
        (1, "5", {CORES[1]}, 1),
    ]
