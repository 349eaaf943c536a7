"""Steps inside a job: the launcher of every shipped site is kept to the first nodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import JobRequest, sites
from qsgd_hpc.jobs.script import Step, first_nodes, host_lines, lines_per_host, step_scripts

HOSTS = Path("/scratch/{odd}/hosts")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("slurm", ("srun", "--nodes={nodes}", "--relative=0")),
        ("stampede3", ("ibrun", "-n", "{ranks}", "-o", "0")),
        ("polaris", ("mpiexec", "--hostfile", "/scratch/{{odd}}/hosts")),
        ("local", ("{qsgd_hpc}", "run", "-np")),
    ],
)
def test_a_launcher_gets_the_words_that_keep_it_to_its_nodes(name, words):
    assert first_nodes(sites.load(name), HOSTS)[: len(words)] == words


def test_a_launcher_that_cannot_be_kept_is_refused_with_the_remedy():
    odd = dataclasses.replace(sites.load("pbs"), launcher_argv=("aprun", "-n", "{ranks}"))
    with pytest.raises(UsageError, match=r"aprun.*--separate"):
        first_nodes(odd, HOSTS)


def test_a_host_file_has_the_first_nodes_as_the_scheduler_writes_them():
    twice = ["b", "b", "a", "a", "c", "c", ""]
    assert host_lines(twice, 2, None) == ["b", "b", "a", "a"]
    assert host_lines(["b", "a", "c"], 2, None) == ["b", "a"]
    assert host_lines(twice, 2, 3) == ["b"] * 3 + ["a"] * 3
    assert host_lines([], 2, 2) == []
    assert lines_per_host(sites.load("local"), 4) == 4
    assert lines_per_host(sites.load("polaris"), 4) is None


def test_a_step_may_be_smaller_than_its_queue_allows_and_keeps_the_sites_setup(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    job = JobRequest(
        script, nodes=10, site="polaris", queue="prod", account="me", walltime_min=60, alone=True,
        workdir=tmp_path,
    )  # fmt: skip
    asked = dataclasses.replace(job, nodes=2, env={"QSGD_BITS": "4"}, script_args=("a b",))
    (text,), _ = step_scripts(job, [Step(asked, tmp_path / "step", tmp_path / "hosts")])
    assert f"mpiexec --hostfile {tmp_path}/hosts -n 8 --ppn 4" in text
    assert "module load conda" in text and "export QSGD_BITS=4" in text and "'a b'" in text
    assert "stop_at" not in text.split("trap")[1]
