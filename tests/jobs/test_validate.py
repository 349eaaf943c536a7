"""Requests are filled from the profile, and refused with every fault and its remedy at once."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from qsgd_hpc.cli import cli
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.commands.jobs import wait
from qsgd_hpc.jobs.commands.submit import submit
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.request.validate import (
    choice_faults,
    complete,
    fill,
    request_faults,
    site_faults,
    site_notes,
)
from qsgd_hpc.jobs.sites.queues import pick, queue_faults
from qsgd_hpc.jobs.words import clock, minutes


def faults(site_name: str, **fields: Any) -> str:
    """Return all faults of a request, one a line."""
    site = sites.load(site_name)
    filled = fill(JobRequest(Path("train.py"), **fields), site)
    return "\n".join([*request_faults(filled), *site_faults(filled, site)])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30m", 30),
        ("90s", 1.5),
        ("2h", 120),
        ("1:00:00", 60),
        ("1h30m", 90),
        ("1d", 1440),
        ("0:00:30", 0.5),
        ("30", 30),
        ("1.5", 1.5),
    ],
)
def test_walltimes_are_read(text: str, value: float) -> None:
    assert minutes(text) == value


@pytest.mark.parametrize(
    "text", ["", "0", "0m", "-5", "-5m", "5 5", ".", "1e3", "1:00", "1:99:00", "soon", "3 weeks"]
)
def test_other_walltimes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="30m, 90s, 2h"):
        minutes(text)


def test_a_plain_number_has_the_unit_that_the_option_says() -> None:
    for command, flag, unit, value in (
        (wait, "--timeout", "seconds", 5 / 60),
        (submit, "--walltime", "minutes", 5),
        (submit, "--stop-before", "minutes", 5),
    ):
        (option,) = (each for each in command.params if flag in each.opts)
        assert option.type.convert("5", option, None) == pytest.approx(value)
        assert f"plain number is {unit}" in option.help
        with pytest.raises(click.BadParameter, match=f"a plain number is {unit}"):
            option.type.convert("soon", option, None)


def test_clock_rounds_up_to_a_second() -> None:
    assert [clock(0.01), clock(90), clock(168 * 60)] == ["00:00:01", "01:30:00", "168:00:00"]


@pytest.mark.parametrize(
    ("nodes", "walltime_min", "queue"),
    [
        (1, 30, "debug"),
        (8, 60, "debug-scaling"),
        (10, 61, "prod"),
        (4, 300, "capacity"),
        (496, 1440, "prod"),
        (8, 61, None),
        (12, 300, None),
    ],
)
def test_polaris_queue_is_chosen_by_size(
    nodes: int, walltime_min: float, queue: str | None
) -> None:
    picked = pick(sites.load("polaris"), nodes, walltime_min)
    assert (picked and picked.name) == queue


def test_every_size_gets_a_fitting_queue_or_a_fault() -> None:
    site = sites.load("polaris")
    for nodes in range(1, 600, 7):
        for walltime_min in (1, 5, 60, 61, 180, 181, 360, 361, 1440, 1441, 10081):
            refused = queue_faults(site, None, nodes, walltime_min)
            assert bool(refused) == (pick(site, nodes, walltime_min) is None)


def test_job_that_prod_would_swallow_is_refused() -> None:
    text = faults("polaris", nodes=12, walltime_min=300, queue="prod", account="p")
    assert "drop the job silently" in text
    assert "--nodes 25 or --walltime 03:00:00 or less" in text


def test_queue_behind_a_route_is_refused() -> None:
    text = faults("polaris", nodes=12, walltime_min=60, queue="small", account="p")
    assert "Use --queue prod." in text


def test_queue_out_of_range_names_those_that_fit() -> None:
    text = faults("polaris", nodes=8, walltime_min=30, queue="prod", account="p")
    assert "accepts 10 to 496 nodes, not 8. It fits --queue debug-scaling" in text


def test_all_faults_come_at_once() -> None:
    text = faults(
        "polaris", nodes=8, ranks_per_node=5, filesystems=("hom",), queue="debg",
        name="my job", env={"1A": "x"},
    )  # fmt: skip
    for part in (
        "--name 'my job'",
        "Try --name my_job",
        "--env '1A'",
        "no queue 'debg'. Did you mean 'debug'?",
        "needs an account",
        "4 GPUs",
        "no filesystem 'hom'. Did you mean 'home'?",
    ):
        assert part in text
    assert len(text.splitlines()) == 6


@pytest.mark.parametrize("nodes", [0, -3])
def test_no_nodes_is_one_fault(nodes: int) -> None:
    assert faults("polaris", nodes=nodes, account="p").count("\n") == 0


def test_perlmutter_account_gets_its_suffix_once() -> None:
    site = sites.load("perlmutter")
    for account in ("m1234", "m1234_g"):
        assert fill(JobRequest(Path("t.py"), account=account), site).account == "m1234_g"


def test_argument_beats_environment_for_the_account() -> None:
    site = sites.load("polaris")
    assert fill(JobRequest(Path("t.py"), account="a"), site, "b").account == "a"
    assert fill(JobRequest(Path("t.py")), site, "b").account == "b"


def test_one_rank_per_gpu_and_one_without_gpus() -> None:
    assert fill(JobRequest(Path("t.py"), nodes=8), sites.load("polaris")).ranks == 32
    assert fill(JobRequest(Path("t.py"), nodes=8), sites.load("local")).ranks == 8


@pytest.mark.parametrize(
    "script", ["train.py", "1.py", "x y.py", "é.py", "---.py", "a" * 40 + ".py"]
)
def test_default_name_is_valid_everywhere(script: str) -> None:
    for site in map(sites.load, ("local", "polaris", "perlmutter")):
        name = fill(JobRequest(Path(script)), site).name or ""
        assert not [
            fault for fault in faults(site.name, name=name).splitlines() if "--name" in fault
        ]
        assert 1 <= len(name) <= (15 if site.scheduler == "pbs" else 40)


def test_slurm_takes_names_that_pbs_does_not() -> None:
    name = "project-subproject:test1"
    assert "--name" not in faults("perlmutter", name=name, account=name)
    assert "letters, digits and _ . + - after a letter here. Try --name project-subproj" in faults(
        "polaris", name=name
    )
    for bad in ("two words", "a'b", "$HOME", "é", "a#b"):
        assert f"--name {bad!r}" in faults("perlmutter", name=bad)


@pytest.mark.parametrize(
    ("nodes", "longest_min"), [(1, 120), (91, 120), (92, 360), (183, 360), (184, 720), (9472, 720)]
)
def test_walltime_limit_follows_the_number_of_nodes(nodes: int, longest_min: float) -> None:
    fields: dict[str, Any] = {"nodes": nodes, "account": "p", "queue": "batch"}
    assert faults("frontier", walltime_min=longest_min, **fields) == ""
    text = faults("frontier", walltime_min=longest_min + 1, **fields)
    assert f"to {clock(longest_min)} for {nodes} node" in text


def test_remedy_of_a_bin_names_both_the_walltime_and_the_nodes_that_help() -> None:
    text = faults("frontier", nodes=80, walltime_min=300, queue="batch", account="p")
    assert "It fits --queue extended" not in text
    assert "Use --nodes 92 or --walltime 02:00:00 or less." in text


def test_auto_chooses_by_size_though_the_profile_has_a_default_queue() -> None:
    home = Path(os.environ["QSGD_HOME"]) / "sites"
    home.mkdir()
    (home / "polaris.yaml").write_text("defaults: {queue: preemptable}\n")
    site = sites.load("polaris")
    filled = [
        fill(JobRequest(Path("t.py"), nodes=2, queue=queue), site).queue
        for queue in (None, "auto", "prod")
    ]
    assert filled == ["preemptable", "debug", "prod"]


def test_auto_without_a_fitting_queue_is_refused() -> None:
    text = faults("polaris", nodes=12, walltime_min=300, queue="auto", account="p")
    assert "no queue of polaris accepts 12 nodes for 05:00:00 by default" in text


@pytest.mark.parametrize(
    ("nodes", "walltime_min", "remedy"),
    [
        (497, 30, "Use --nodes 496."),
        (600, 180, "Use --nodes 496."),
        (600, 24 * 60, "Use --nodes 496."),
    ],
)
def test_remedy_counts_queues_that_a_routing_queue_leads_to(
    nodes: int, walltime_min: int, remedy: str
) -> None:
    text = faults("polaris", nodes=nodes, walltime_min=walltime_min, account="p")
    assert text.endswith(remedy)


def test_auto_leaves_the_choice_to_a_scheduler_whose_queues_are_unknown() -> None:
    assert faults("slurm", nodes=3, queue="auto") == ""


def test_queue_that_counts_gpus_is_refused_with_the_one_that_counts_nodes() -> None:
    text = faults("sophia", nodes=1, queue="by-gpu", account="p")
    assert "allocates parts of a node" in text
    assert "It fits --queue by-node or --queue bigmem (not available at present)." in text
    text = faults("sophia", nodes=9, queue="by-gpu", account="p")
    assert text.endswith("Remove --queue, and use --nodes 8.")


def test_queue_that_counts_gpus_is_never_chosen_unasked() -> None:
    home = Path(os.environ["QSGD_HOME"]) / "sites"
    home.mkdir()
    (home / "sophia.yaml").write_text("queues: {by-gpu: {auto: true}, by-node: {auto: false}}\n")
    assert pick(sites.load("sophia"), 1, 30) is None


def test_no_job_lands_on_nodes_without_gpu_because_it_is_large() -> None:
    text = faults("frontera", nodes=20, walltime_min=60)
    assert "no queue of frontera accepts 20 nodes for 01:00:00 by default" in text
    assert "--queue normal (nodes without GPU)" in text


def test_ranks_follow_the_gpus_of_the_queue() -> None:
    site = sites.load("stampede3")
    assert fill(JobRequest(Path("t.py"), queue="h100"), site).ranks_per_node == 4
    assert fill(JobRequest(Path("t.py"), queue="skx"), site).ranks_per_node == 1
    assert faults("stampede3", queue="skx", ranks_per_node=48) == ""
    assert (site.at("skx").gpu, site.at("skx").cores) == (None, 48)
    assert site.at("h100").gpu == site.gpu
    assert site.at(None) is site
    assert "in partition h100" not in faults("stampede3", queue="h100", ranks_per_node=4)
    assert "4 GPUs, one for each rank" in faults("stampede3", queue="h100", ranks_per_node=5)


def test_ranks_share_gpus_if_each_sees_one() -> None:
    fields: dict[str, Any] = {"account": "p", "ranks_per_node": 8}
    assert "or add --gpu-view one" in faults("polaris", **fields)
    assert faults("polaris", **fields, gpu_view="one") == ""


def test_array_on_a_throttled_queue_must_say_how_many_run_at_once() -> None:
    fields: dict[str, Any] = {
        "nodes": 10, "queue": "prod", "account": "p", "array": {"lr": ("1", "2")}
    }  # fmt: skip
    said = "queue 'prod' of polaris runs at most 10 tasks of an array at a time. Use --at-once 10."
    assert faults("polaris", **fields) == said
    assert faults("polaris", **fields, at_once=11) == said
    assert faults("polaris", **fields, at_once=10) == ""
    assert faults("polaris", **{**fields, "array": {}}) == ""


def test_an_array_value_that_mpiexec_takes_for_a_separator_is_refused() -> None:
    request = JobRequest(Path("train.py"), array={"sep": (":", "x")})
    assert "a value ':' would be mpiexec's separator" in "".join(choice_faults(request, "local"))


def test_a_queue_that_is_too_small_is_not_offered_instead() -> None:
    text = faults("frontier", account="p", queue="debug", nodes=80, chain=2)
    assert "or use --queue batch." in text, text


@pytest.mark.parametrize(("flag", "value"), [("chain", 3), ("after", ("polaris-1",))])
def test_queue_that_forbids_chains_refuses_them(flag: str, value: Any) -> None:
    text = faults("frontier", account="p", queue="debug", **{flag: value})
    assert f"does not allow job dependencies. Remove --{flag}, or use --queue batch" in text
    assert faults("frontier", account="p", queue="batch", **{flag: value}) == ""


def test_a_chain_that_its_queue_can_never_hold_is_refused() -> None:
    two: dict[str, Any] = {"account": "p", "queue": "debug-scaling", "nodes": 2}
    assert faults("polaris", **two, chain=2) == (
        "queue 'debug-scaling' of polaris accepts at most one job per user, but the 2 parts of a "
        "chain are submitted at once. Use --queue debug, --queue capacity (two jobs per user, one "
        "job running per user), --queue preemptable (its jobs are killed without warning; 20 jobs "
        "per project) or --queue demand (only by arrangement with the site); or continue after "
        "each end with `qsgd-hpc resubmit ID`."
    )
    assert faults("polaris", **two) == ""
    roomier: dict[str, Any] = {**two, "queue": "capacity"}
    assert "Use --chain 2, --queue debug, --queue pre" in faults("polaris", **roomier, chain=3)
    assert faults("polaris", **roomier, chain=2) == ""
    routed: dict[str, Any] = {"account": "p", "queue": "prod", "nodes": 16}
    assert faults("polaris", **routed, chain=100) == ""
    assert "100 jobs queued per project" in faults("polaris", **routed, chain=101)


def test_an_array_that_its_queue_can_never_hold_is_refused() -> None:
    two: dict[str, Any] = {"account": "p", "queue": "debug-scaling", "nodes": 2}
    assert faults("polaris", **two, array={"lr": ("1",)}) == ""
    assert faults("polaris", **two, array={"lr": ("1", "2")}).startswith(
        "queue 'debug-scaling' of polaris accepts at most one job per user, but the 2 tasks of an "
        "array are submitted at once. Use --queue debug, "
    )
    debug: dict[str, Any] = {"account": "p", "queue": "debug", "array": {"lr": ("1", "2")}}
    # Its other queues allow no dependencies, which an array does without.
    assert "at once. Use --queue batch" in faults("frontier", **debug)
    wide: dict[str, Any] = {"account": "p", "array": {"lr": tuple(map(str, range(21)))}}
    assert faults("sophia", **wide, nodes=1).endswith(
        "at once. Submit arrays of at most 20 tasks, one after the other."
    )


@pytest.mark.parametrize(
    ("site", "view", "said"),
    [
        ("polaris", "all", ""),
        ("polaris", "one", ""),
        ("polaris", "al", "--gpu-view 'al': use all or one. Did you mean 'all'?"),
        ("local", "one", "--gpu-view one: the profile lists no GPUs of local."),
        ("bound", "one", ""),
        ("bound", "all", "--gpu-view all: the launcher of bound shows each rank its own GPU"),
    ],
)
def test_gpu_view_that_cannot_be_had_is_refused(
    site: str, view: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "bound.yaml").write_text(
        "extends: frontier\ngpu: {view: one, bound_by: launcher}\n"
    )
    text = faults(site, gpu_view=view, account="p")
    assert text.startswith(said) if said else text == ""


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("polaris", "no library of the profile has this name. Did you mean 'nccl'?"),
        (
            "stampede3",
            "no library of the profile has this name. stampede3 has no settings for libraries.",
        ),
    ],
)
def test_a_library_that_the_profile_does_not_know_is_refused(site: str, said: str) -> None:
    assert faults(site, without=("ncl",), account="p") == f"--without ncl: {said}"


def notes(site_name: str, **fields: Any) -> str:
    site = sites.load(site_name)
    return "\n".join(site_notes(fill(JobRequest(Path("train.py"), **fields), site), site))


def test_limits_are_notes_and_no_faults() -> None:
    text = notes("polaris", nodes=4, walltime_min=600)
    assert "queue capacity: two jobs per user, one job running per user." in text
    assert "limits of polaris: 10 jobs running per project, 100 jobs queued per project." in text


def test_setup_that_runs_before_a_conda_environment_is_noted() -> None:
    text = notes("perlmutter", conda="mine")
    assert "before `conda activate mine`, the job runs the setup of perlmutter: module load" in text
    assert "conda activate" not in notes("perlmutter") + notes("slurm", conda="mine")


def test_guessed_and_retired_sites_say_so() -> None:
    assert "the generic profile for slurm" in notes("slurm")
    assert "was retired" in notes("stampede2-knl")
    assert notes("local") == ""


def test_a_queue_for_this_machine_which_has_none_is_noted() -> None:
    assert notes("local", queue="debug").startswith("--queue debug has no effect")
    assert "no effect" not in notes("polaris", queue="debug")


def test_an_account_for_this_machine_is_noted_unless_it_is_that_of_the_environment() -> None:
    assert notes("local", account="p").startswith("--account p has no effect")
    assert "no effect" not in notes("polaris", account="p")
    site = sites.load("local")
    filled = fill(JobRequest(Path("t.py")), site, "p")
    assert not list(site_notes(filled, site))


def test_file_systems_that_a_scheduler_cannot_be_asked_for_are_noted() -> None:
    assert notes("local", filesystems=("home",)).startswith("--filesystems home has no effect")
    assert "no effect" not in notes("polaris", filesystems=("home",))


@pytest.fixture(autouse=True)
def _no_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))


@pytest.mark.parametrize("nodes", [-1, 0, 1_000_001])
def test_numbers_of_nodes_out_of_range_are_answered_with_the_range(nodes: int) -> None:
    assert f"--nodes {nodes}: a job has 1 to 1000000 nodes" in faults("local", nodes=nodes)


@pytest.mark.parametrize(
    ("scheduler", "sets_it", "line"),
    [
        ("slurm", True, "#SBATCH --time=5"),
        ("slurm", True, "-t 5"),
        ("slurm", False, "#SBATCH --time-min=5"),
        ("pbs", True, "#PBS -l place=free,walltime=5"),
        ("pbs", False, "#PBS -l place=free"),
        ("lsf", True, "#BSUB -W 5"),
        ("lsf", False, "#BSUB -We 5"),
        ("cobalt", True, "#COBALT -t 5"),
    ],
)
def test_a_directive_does_not_set_a_walltime_that_should_stop_does_not_know(
    scheduler: str, sets_it: bool, line: str
) -> None:
    said = choice_faults(JobRequest(Path("train.py"), extra=(line,)), scheduler)
    assert ["use --walltime" in fault for fault in said] == [True] * sets_it


@pytest.mark.parametrize(
    ("scheduler", "line", "remedy"),
    [
        ("lsf", '#BSUB -R "span[ptile=4]"', "--extra '#BSUB -R span[ptile=4]'."),
        ("slurm", '#SBATCH -C "gpu&hbm80g"', "--extra '#SBATCH -C gpu&hbm80g'."),
        ("pbs", "-l 'place=free'", "--extra '-l place=free'."),
        ("slurm", '#SBATCH --comment="two words"', "Use --template"),
        ("pbs", "#PBS -o $HOME/log", "Use --template"),
    ],
)
def test_quotes_in_a_directive_are_refused_with_the_remedy(
    scheduler: str, line: str, remedy: str
) -> None:
    (said,) = choice_faults(JobRequest(Path("train.py"), extra=(line,)), scheduler)
    assert said.startswith(f"--extra {line!r}: ")
    assert remedy in said


def test_an_array_of_one_task_is_checked_like_any_other() -> None:
    for key in ("", "l r", "--lr"):
        request = complete(JobRequest(Path("train.py"), array={key: ("1",)}))
        (said,) = choice_faults(request, "local")
        assert "write the option without dashes" in said


def test_an_array_of_one_task_may_be_limited_like_any_other() -> None:
    request = complete(JobRequest(Path("train.py"), array={"lr": ("1",)}, at_once=2))
    assert request.script_args == ("--lr", "1")
    assert choice_faults(request, "local") == []


def refused(*words: str) -> str:
    """Return why ``qsgd-hpc submit WORDS`` is refused."""
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(cli, ["submit", *words], catch_exceptions=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["python", "train.py", "--lr", "1"], "leave out 'python', which submit adds"),
        (["python3.11", "-u", "train.py", "--lr", "1"], "leave out 'python3.11', which"),
        (["torchrun", "--nproc-per-node", "4", "train.py", "--lr", "1"], "leave out torchrun: "),
        (
            ["python", "-m", "torch.distributed.run", "--nnodes=2", "train.py", "--lr", "1"],
            "leave out torch.distributed.run: submit starts the ranks itself, and --ranks-per-node",
        ),
        (
            ["mpiexec", "-n", "4", "python", "train.py", "--lr", "1"],
            "leave out mpiexec: submit starts the ranks itself, and --ranks-per-node",
        ),
    ],
)
def test_a_program_that_starts_the_script_is_to_be_left_out(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = refused("--site", "local", "--nodes", "2", *words)
    assert text.startswith(said)
    assert text.endswith("qsgd-hpc submit --nodes 2 train.py --lr 1")
    Path(words[0]).write_text("#!/bin/sh\n")
    Path(words[0]).chmod(0o755)  # a script of this name is one
    done = CliRunner().invoke(cli, ["submit", "--site", "local", "--dry-run", *words])
    assert done.exit_code == 0, done.output


def test_what_horovodrun_starts_is_submitted_with_horovod() -> None:
    text = refused("--site", "local", "horovodrun", "-np", "4", "python", "train.py")
    assert text.startswith("leave out horovodrun: ")
    assert text.endswith("qsgd-hpc submit --nodes 1 --horovod train.py")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"script_args": "--lr 0.1"},
            "is '--lr 0.1'. Use a tuple of strings, also for one: ('a',)",
        ),
        ({"script_args": ("--lr", 0.1)}, "Use a tuple of strings"),
        ({"modules": "gcc"}, "modules is 'gcc'. Use a tuple"),
        ({"nodes": 2.0}, "nodes is 2.0. Use an integer"),
        ({"walltime_min": math.nan}, "walltime_min is nan. Use a finite number"),
        ({"workdir": "/tmp"}, "workdir is '/tmp'. Use a pathlib.Path"),
        ({"env": {"A": 1}}, "Use a dict of strings"),
        ({"array": {"lr": (0.1, 0.2)}}, "Use a dict of tuples of strings, such as {'lr': ('0.1',"),
    ],
)
def test_a_request_of_other_types_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        JobRequest(Path("train.py"), **values)
    assert said in str(caught.value)


def test_an_array_cannot_be_watched_as_one_output() -> None:
    assert "qsgd-hpc logs -f --task 0 ID" in refused("--watch", "--array", "lr=1,2", "train.py")


def test_a_python_is_one_program_for_which_a_container_needs_a_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for site in ("local", "slurm"):
        text = refused("--site", site, "--python", "apptainer exec x.sif python", "train.py")
        assert "--python 'apptainer exec x.sif python': use one program" in text
        assert '`exec apptainer exec x.sif python "$@"`' in text
    wrapper = tmp_path / "in container"
    wrapper.write_text("#!/bin/bash\n")
    for python in (str(wrapper), "/nodes only/python", "python3.11"):
        assert choice_faults(JobRequest(Path("train.py"), python=python), "slurm") == []


def test_a_python_that_a_local_job_would_not_find_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for python in ("pyhton3", "./python"):
        text = refused("--site", "local", "--python", python, "train.py")
        assert f"--python {python}: there is no such program here" in text
    # A module, or the submit host of another machine, may provide it.
    elsewhere = ["--site", "polaris", "--chain", "0", "--python", "pyhton3", "train.py"]
    assert "pyhton3" not in refused(*elsewhere)


def test_a_dry_run_prints_the_notes_of_a_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    words = ["--site", "polaris", "--account", "p", "--queue", "preemptable", "--dry-run"]
    done = CliRunner().invoke(cli, ["submit", *words, "train.py"])
    assert "note: queue preemptable: its jobs are killed without warning" in done.stderr
    assert done.stdout.startswith("#!/bin/bash")


def test_a_module_is_run_by_a_script() -> None:
    assert "runpy.run_module('package.train'" in refused("-m", "package.train")
    assert "runpy.run_module('package.train'" in refused("python", "-m", "package.train")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nproc_per_node", "4"], "--nproc_per_node is a flag of torchrun: use --ranks-per-node"),
        (["--nnodes=2"], "use --nodes"),
        (["--rdzv-backend", "c10d"], "leave it out: the job decides where its ranks meet"),
        (["--time", "30"], "--time is a flag of the scheduler: use --walltime"),
        (["--qos", "debug"], "use --queue"),
        (["--partition=gpu"], "use --queue"),
        (["-q", "debug"], "use --queue"),
        (["-J", "mine"], "use --name"),
        (["-N", "2"], "use --nodes; for the name of the job, --name"),
        (["--gpus-per-node=4"], "leave it out: the site's profile assigns GPUs and cores"),
        (["-C", "gpu"], "-C is a flag of the scheduler: use --extra, as in --extra '#SBATCH"),
        (["-o", "train.log"], "leave it out: `qsgd-hpc logs` shows the output"),
        (["-n", "2"], "-n is a flag of qsgd-hpc run: use --nodes, and --ranks-per-node"),
        (["-np", "2"], "use --nodes, and --ranks-per-node"),
    ],
)
def test_flags_of_other_programs_are_refused_with_those_of_submit(
    flags: list[str], said: str
) -> None:
    assert said in refused(*flags, "train.py")


def test_other_unknown_flags_are_answered_with_similar_ones() -> None:
    done = CliRunner().invoke(cli, ["submit", "--node", "2", "train.py"])
    assert done.exit_code == 2
    assert "--nodes" in done.output
