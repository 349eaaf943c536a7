"""Predictions: the engine's step, closed forms beside SimGrid, and what the command says."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from qsgd_hpc.cli import cli
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.sites.profile import Dragonfly, FatTree
from qsgd_hpc.scaling.predict import cli as predict_cli
from qsgd_hpc.scaling.predict import simgrid
from qsgd_hpc.scaling.predict.fabric import Fabric, fabric_of_site
from qsgd_hpc.scaling.predict.inputs import measured, training_of
from qsgd_hpc.scaling.predict.model import (
    ClosedForm,
    Gradient,
    Setting,
    expected_maximum,
    fused,
    phase_s,
    predict,
    timeline,
)
from qsgd_hpc.scaling.predict.output import LABEL, Result, as_lines, write_folder
from qsgd_hpc.scaling.predict.schedules import Coding, Layout, schedule
from qsgd_hpc.scaling.predict.simgrid import SimGrid, platform_line
from tests.scaling.predict_samples import GIGABIT, study_folder, training
from tests.scaling.samples import CASE

ROOT = Path(__file__).parents[2]


def simgrid_fault() -> str:
    try:
        simgrid.simulator()
    except UsageError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def needs_simgrid():
    if fault := simgrid_fault():
        pytest.skip(fault)


def crossbar(nodes: int) -> Fabric:
    return Fabric(f"{nodes} nodes", 2, 25e9, 2e-6, 5e-7, 200e9)


# The engine's step


def test_gradients_fuse_as_the_engine_fuses_them():
    plain = [Gradient(10, 0.0), Gradient(20, 0.0), Gradient(5, 0.0)]
    assert [[g.count for g in b] for b in fused(plain, 4 * 30)] == [[10, 20], [5]]
    # One that does not fit ends the batch, though a later one would.
    assert [[g.count for g in b] for b in fused(plain, 4 * 15)] == [[10], [20], [5]]
    mixed = [Gradient(10, 0, True), Gradient(1, 0), Gradient(20, 0, True)]
    assert [[g.count for g in b] for b in fused(mixed, 1000)] == [[10, 20], [1]]


def test_reductions_hide_behind_the_backward_pass():
    gradients = [Gradient(1, 0.0), Gradient(1, 1.0), Gradient(2, 1.5)]
    step = timeline(gradients, 2.0, lambda count, coded: 0.4 * count)
    assert (step.comm_s, step.exposed_s, step.collectives) == (
        pytest.approx(1.6),
        pytest.approx(0.3),
        3,
    )
    slow = timeline(gradients, 2.0, lambda count, coded: 1.6)
    # While the first is under way the others get ready, and travel together.
    assert (slow.collectives, slow.exposed_s) == (2, pytest.approx(1.2))


def test_ranks_agree_before_each_round_and_sooner_when_they_come_from_a_reduction_together():
    gradients = [Gradient(1, 0.0), Gradient(1, 1.0), Gradient(1, 1.2)]
    asked = []

    def agree_s(tensors, waited):
        asked.append((tensors, waited))
        return 0.3 if waited else 0.1

    step = timeline(gradients, 2.0, lambda *_: 0.4, agree_s=agree_s)
    assert asked == [(1, True), (1, True), (1, False)]
    assert (step.agreements, step.agree_s) == (3, pytest.approx(0.7))
    assert (step.comm_s, step.exposed_s) == (pytest.approx(1.9), pytest.approx(0.2))


def test_expected_maximum_of_normal_numbers():
    known = {1: 0.0, 2: 1 / np.sqrt(np.pi), 3: 1.5 / np.sqrt(np.pi)}
    for ranks, value in known.items():
        assert expected_maximum(ranks) == pytest.approx(value, abs=1e-5)
    draws = np.random.default_rng(1).standard_normal((2000, 512)).max(axis=1)
    assert expected_maximum(512) == pytest.approx(draws.mean(), abs=4 * draws.std() / 2000**0.5)


# The model


def test_a_gigabit_link_by_hand():
    row = predict(training(), GIGABIT, Setting(), [2], [32], ClosedForm())[0]
    # Both gradients in turn: each rank sends half of each twice at 125 MB/s, 2 messages of 50 us.
    one = (4 << 20) / 125e6 + 2 * 50e-6
    # Rank 1 says that it is ready, rank 0 answers; each sends a message and reads one.
    agree = 2 * (50e-6 + 1e-6 + 1e-6 + 0.1e-6)
    assert row.exposed_s == pytest.approx(2 * (one + agree) - 0.02, rel=1e-9)
    assert (row.agree_s, row.root_s) == (pytest.approx(2 * agree), pytest.approx(2 * 2.1e-6))
    assert row.step_s == pytest.approx(0.03 + row.exposed_s)
    assert row.efficiency == pytest.approx(0.03 / row.step_s)


def test_one_rank_waits_for_nobody():
    row = predict(training(jitter=0.1), GIGABIT, Setting(), [1], [32], ClosedForm())[0]
    assert (row.exposed_s, row.straggler_s, row.efficiency) == (0, 0, pytest.approx(1))


@pytest.mark.parametrize("algorithm", ("hierarchical", "leaders"))
def test_the_leader_of_a_single_node_sends_nothing(algorithm):
    setting = Setting(ranks_per_node=4, algorithm=algorithm)
    one, two = predict(training(), GIGABIT, setting, [1, 2], [32], ClosedForm())
    assert 0 < one.comm_s < two.comm_s


@pytest.mark.parametrize("nodes", (2, 5, 16, 100))
def test_fewer_bits_are_never_slower_where_the_link_limits(nodes):
    rows = predict(training(), GIGABIT, Setting(), [nodes], [32, 8, 4, 2], ClosedForm())
    assert all(b.step_s < a.step_s for a, b in itertools.pairwise(rows))


def test_more_ranks_slower_links_and_more_noise_never_speed_a_step_up():
    few, many = predict(training(), GIGABIT, Setting(), [2, 64], [8], ClosedForm())
    assert many.step_s > few.step_s
    noisy = predict(training(jitter=0.05), GIGABIT, Setting(), [64], [8], ClosedForm())[0]
    # And whoever waits sleeps, and is told a little later.
    later = noisy.step_s - many.step_s - 0.05 * 0.03 * expected_maximum(64)
    assert 0 < later < 0.03 * 0.05 * 2


def test_strong_scaling_shares_the_batch():
    setting = Setting(mode="strong")
    rows = predict(training(), crossbar(8), setting, [1, 8], [32], ClosedForm())
    assert rows[1].compute_s == pytest.approx(rows[0].compute_s / 8)
    assert rows[1].throughput < 8 * rows[0].throughput


def test_a_faster_processor_leaves_communication_as_it_is():
    rows = [
        predict(training(), GIGABIT, Setting(speedup=s), [4], [32], ClosedForm())[0]
        for s in (1, 10)
    ]
    assert rows[1].compute_s == pytest.approx(rows[0].compute_s / 10)
    assert rows[1].efficiency < rows[0].efficiency


# SimGrid


@pytest.mark.full
@pytest.mark.usefixtures("needs_simgrid")
@pytest.mark.parametrize("algorithm", ("auto", "ring", "rabenseifner", "recursive_doubling"))
def test_simgrid_agrees_with_the_closed_form_where_nothing_is_in_the_way(algorithm):
    fabric = crossbar(8)
    plan = schedule(algorithm, Layout(32, 4), [(1 << 20, 0)])
    simulated = SimGrid(fabric)
    for phase in plan.phases:
        closed = phase_s(phase, plan, fabric, ClosedForm())
        assert phase_s(phase, plan, fabric, simulated) == pytest.approx(closed, rel=0.02)


@pytest.mark.usefixtures("needs_simgrid")
def test_a_tapered_tree_slows_an_exchange_down():
    tree = Fabric("tree", 1, 12.5e9, 2e-6, 5e-7, 200e9, shape=FatTree(8, 4))
    plan = schedule("direct", Layout(32), [(1 << 20, 0)])
    # Of a leaf's 8 cards, 24 of 31 messages leave over 4 links.
    assert SimGrid(tree).slowdown(plan, plan.phases[0]) == pytest.approx(2 * 24 / 31, rel=0.05)


@pytest.mark.usefixtures("needs_simgrid")
@pytest.mark.parametrize("routing", simgrid.ROUTINGS)
def test_a_sample_of_an_exchange_stands_for_all_of_it(routing, record_property):
    shape = Dragonfly(routers=8, endpoints=8, groups=4, global_links=16)
    fabric = Fabric("dragonfly", 2, 25e9, 2e-6, 5e-7, 200e9, shape=shape)
    plan = schedule("auto", Layout(256, 4), [(1 << 22, 0)], Coding(4))
    whole, part = (
        SimGrid(fabric, most, routing).slowdown(plan, plan.phases[0]) for most in (10**6, 2048)
    )
    print(f"{routing}: all rounds {whole:.3f}, a quarter of them {part:.3f}")
    assert part == pytest.approx(whole, rel=0.1)


ON_512 = """
import json, re, resource, time
from pathlib import Path
from qsgd_hpc.jobs import sites
from qsgd_hpc.scaling.predict.fabric import fabric_of_site
from qsgd_hpc.scaling.predict.model import ClosedForm, Setting, phase_s, predict
from qsgd_hpc.scaling.predict.simgrid import SimGrid
from tests.scaling.predict_samples import training

fabric = fabric_of_site(sites.load("polaris"))
layers = tuple((50_000 * (1 + i % 20), i * 5e-4) for i in range(160))
profile = training(layers=layers, compute_s=0.12, backward_s=0.08)
started = time.monotonic()
setting = Setting(ranks_per_node=4)
rows = predict(profile, fabric, setting, [8, 32, 128], [32, 8, 4], SimGrid(fabric))
# Its own ru_maxrss is at least that of the process that has started this one.
own_kb = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
simulators_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps({"ranks": rows[-1].ranks, "peak_bytes": 1024 * (own_kb + simulators_kb),
                  "seconds": time.monotonic() - started}))
"""


@pytest.mark.full  # 7 s
@pytest.mark.usefixtures("needs_simgrid")
def test_512_gpus_are_predicted_in_little_memory():
    # In a process of its own: this one may hold every framework.
    done = subprocess.run(
        [sys.executable, "-c", ON_512], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    told = json.loads(done.stdout)
    assert told["ranks"] == 512
    assert told["peak_bytes"] < 4 * 2**30


def test_platforms_have_what_the_profile_says():
    polaris = fabric_of_site(sites.load("polaris"))
    assert platform_line(polaris, 256) == "dragonfly 1 128 32 15 16 25000000000"
    assert platform_line(polaris, 1024, "minimal") == "dragonfly 2 256 32 1 16 25000000000"
    vista = fabric_of_site(sites.load("vista"))
    assert platform_line(vista, 64) == "fat_tree 2 32 32 1 50000000000"
    assert platform_line(GIGABIT, 4) == "crossbar 4 125000000"
    with pytest.raises(UsageError, match="as many groups as a group has routers"):
        platform_line(polaris, 10**6)


# The inputs and the command


def test_inputs_are_the_smallest_size_without_codes(tmp_path):
    points, mode = measured(study_folder(tmp_path, lambda p: 0.12 / p.ranks).path)
    found = training_of(points, mode, "here")
    assert (mode, found.ranks, found.batch, found.compute_s) == ("strong", 1, 128, 0.12)
    assert found.coding_s == pytest.approx(dict.fromkeys((32, 8, 4), 0.002 / (2 << 20)))


@pytest.mark.parametrize("missing", ("layers", "backward_s"))
def test_what_a_study_lacks_is_named_with_the_remedy(tmp_path, missing):
    folder = study_folder(tmp_path, lambda p: 0.1, **{missing: ...})
    with pytest.raises(
        UsageError, match=r"says nothing about layers and backward_s.*qsgd-hpc scale"
    ):
        training_of(*measured(folder.path), "here")


def test_one_rank_that_says_only_its_speed_computes_all_the_time(tmp_path):
    folder = study_folder(tmp_path, lambda p: 0.1 / p.ranks, compute_s=...)
    assert training_of(*measured(folder.path), "here").compute_s == pytest.approx(0.1)


def point_of(**changes):
    said = {
        "ranks": 2, "bits": 32, "nodes": 2, "case": CASE, "throughput": 4000.0, "unit": "words",
        "step_s": 0.1, "step_mean_s": 0.2, "compute_s": 0.1, "backward_s": 0.05,
        "layers": [[10, 0.0]], "global_batch_size": 40,
    }  # fmt: skip
    return {**said, **changes}


def test_a_single_rank_takes_the_order_of_its_gradients_from_two():
    alone = point_of(ranks=1, nodes=1, compute_s=0.2, layers=[], backward_s=0.0)
    both = point_of(layers=[[10, 0.0], [20, 0.05]])
    found = training_of([alone, both], "weak", "here")
    assert (found.ranks, found.compute_s, found.backward_s) == (1, 0.2, 0.1)
    assert found.layers == ((10, 0.0), (20, 0.1))
    assert any("measured with 2 ranks" in line for line in found.assumptions)


def test_a_step_counts_words_and_not_the_sentences_that_hold_them():
    assert training_of([point_of()], "weak", "here").batch == pytest.approx(400)


def test_what_the_engine_recorded_counts_by_its_median_step():
    found = training_of([point_of(source="engine", unit="samples")], "weak", "here")
    assert found.batch == pytest.approx(200)


def test_buckets_of_ddp_are_reduced_one_by_one_and_need_no_agreement():
    both = point_of(bits=4, layers=[[10, 0.0], [20, 0.0]], buckets=True)
    alone = point_of(ranks=1, nodes=1, layers=[], backward_s=0.0, buckets=True)
    found = training_of([alone, both], "weak", "here")
    assert found.buckets
    assert any("direct exchange" in line for line in found.assumptions)
    coded, plain = predict(found, GIGABIT, Setting(), [4], [4, 32], ClosedForm())
    assert (coded.collectives, coded.agree_s, coded.root_s) == (2, 0.0, 0.0)
    # A ring of 4 has 6 rounds; 2 reductions follow one another.
    assert plain.comm_s > 2 * 6 * GIGABIT.across_s


def test_the_table_has_the_parts_of_a_step():
    rows = predict(training(jitter=0.1), GIGABIT, Setting(), [4], [32], ClosedForm())
    lines = as_lines(Result("two layers", "images", tuple(rows)))
    head, row = (re.split(r"  +", line.strip()) for line in lines[2:])
    cells = dict(zip(head, row, strict=True))
    parts = [float(cells[name]) for name in ("compute ms", "wait ms", "exposed ms")]
    assert all(part > 1 for part in parts)
    assert sum(parts) == pytest.approx(float(cells["step ms"]), rel=0.01)


def run(*words):
    return CliRunner().invoke(cli, ["predict", *map(str, words)], catch_exceptions=True)


def test_one_rank_waits_for_none_and_is_ideal_at_any_speed():
    """Waiting for data does not shrink with computing, and one rank copies no gradients."""
    host = Fabric("a node with GPUs", 1, 25e9, 2e-6, 5e-7, 200e9, host_bandwidth=10e9)
    profile = training(data_s=0.03, staged=False)
    (row,) = predict(profile, host, Setting(speedup=10), [1], [32], ClosedForm())
    assert row.step_s == pytest.approx(0.03 / 10 + 0.03)
    assert (row.speedup, row.efficiency) == (pytest.approx(1), pytest.approx(1))


@pytest.mark.parametrize("simulated", (True, False))
def test_every_output_says_that_it_is_a_prediction(tmp_path, monkeypatch, simulated):
    if not simulated:

        def absent():
            raise UsageError("SimGrid: no C++ compiler was found; install it.")

        monkeypatch.setattr(predict_cli, "simulator", absent)
    elif fault := simgrid_fault():
        pytest.skip(fault)
    study_folder(tmp_path / "study", lambda p: 0.12 / p.ranks)
    common = (
        "--from",
        tmp_path / "study",
        "--site",
        "polaris",
        "--nodes",
        "8..20",
        "--bits",
        "32,4",
    )
    shown = run(*common, "--gpu-speedup", 10, "-o", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert LABEL in shown.output
    assert "given with --gpu-speedup" in " ".join(shown.output.split())
    assert "network.dragonfly" in shown.output
    assert ("Closed form only" in shown.output) is not simulated
    assert LABEL in (tmp_path / "out/prediction.md").read_text()
    assert (tmp_path / "out/prediction.png").read_bytes()[:4] == b"\x89PNG"
    data = json.loads(run(*common, "--json").output)
    assert data["label"] == LABEL
    assert {row["by"] for row in data["rows"]} == {
        "closed form",
        *(["SimGrid"] if simulated else []),
    }
    assert [row["nodes"] for row in data["rows"]][:6] == [8, 8, 16, 16, 20, 20]


def test_more_nodes_than_the_site_gives_to_a_job_are_remarked(tmp_path):
    study_folder(tmp_path, lambda p: 0.12 / p.ranks)
    common = ("--from", tmp_path, "--site", "polaris", "--no-simgrid", "--bits", 32, "--nodes")
    remark = "polaris accepts no jobs of more than 496 nodes."
    assert remark in run(*common, "8..512").output
    assert remark not in run(*common, "8..496").output


def test_validation_sets_the_study_s_own_sizes_beside_predictions(tmp_path):
    study_folder(tmp_path, lambda p: 0.12 / p.ranks + (0.1 if p.ranks > 1 else 0))
    shown = run("--from", tmp_path, "--link-gbps", 1, "--validate", "--no-simgrid", "--json")
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.output)["rows"]
    assert [(row["nodes"], row["bits"]) for row in rows] == [
        (n, b) for n in (2, 4) for b in (32, 8, 4)
    ]
    assert all(row["error"] == row["predicted_s"] / row["measured_s"] - 1 for row in rows)
    assert all(row["spread"] is None for row in rows)  # measured once


def test_a_prediction_uses_the_measurements_of_the_report(tmp_path):
    """A failed attempt counts for neither, and one rank for all algorithms."""
    folder = study_folder(
        tmp_path, lambda p: 0.12 / p.ranks, study={"algorithms": ("ring", "direct"), "bits": (32,)}
    )
    lines = folder.collection.read_text().splitlines(keepends=True)
    no_speed = [line.replace('"throughput": ', '"throughput": -') for line in lines]
    retried = [line.replace('"attempt": 1', '"attempt": 2') for line in lines]
    folder.collection.write_text("".join(no_speed + retried))
    for algorithm in ("ring", "direct"):
        points, _ = measured(folder.path, f"train-batch128-{algorithm}")
        assert sorted(p["ranks"] for p in points) == [1, 2, 4]
        assert all(p["throughput"] > 0 and p["case"].algorithm == algorithm for p in points)


def test_a_prediction_uses_no_run_in_other_bits(tmp_path):
    """As of a script that always compresses."""
    folder = study_folder(tmp_path, lambda p: 0.12 / p.ranks, study={"bits": (32, 4)}, nmse=0.01)
    points, _ = measured(folder.path)
    assert sorted((p["ranks"], p["bits"]) for p in points) == [(1, 32), (2, 4), (4, 4)]


def test_a_script_that_records_no_batch_is_predicted(tmp_path):
    study_folder(tmp_path, lambda p: 0.12 / p.ranks, global_batch_size=...)
    shown = run("--from", tmp_path, "--link-gbps", 1, "--nodes", 2, "--no-simgrid")
    assert shown.exit_code == 0, shown.output


def test_validation_says_how_far_repeats_are_apart(tmp_path):
    wobble = {1: 0.9, 2: 1.0, 3: 1.05}
    study_folder(tmp_path, lambda p: 0.12 / p.ranks * wobble[p.repeat], study={"repeats": 3})
    shown = run("--from", tmp_path, "--link-gbps", 1, "--validate", "--no-simgrid")
    assert "±10.0%" in shown.output, shown.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--site", "local"), "has no `network` in its profile"),
        ((), "Give --site NAME, or --link-gbps"),
        (("--site", "polaris", "--nodes", "a"), "expected 8..496"),
        (("--site", "polaris", "--nodes", "0..4"), "expected 8..496"),
        (("--site", "polaris", "--nodes", "8..4"), "expected 8..496"),
        (("--site", "polaris", "--link-latency-us", "5"), "of hosts with --link-gbps"),
        (("--link-gbps", "1", "--validate", "-o", "out"), "--validate only prints"),
        (("--link-gbps", "1", "--validate", "--bits", "4"), "drop --bits"),
        (("--link-gbps", "1", "--nodes", "2", "-o", "/dev/null/x"), "Choose another with -o"),
        (("--site", "polaris", "--bits", "3"), "expected some of 32,8,4,2"),
    ],
)
def test_faults_carry_the_remedy(tmp_path, words, said):
    study_folder(tmp_path, lambda p: 0.1)
    shown = run("--from", tmp_path, "--no-simgrid", *words)
    assert isinstance(shown.exception, UsageError)
    assert said in str(shown.exception)


def test_the_plot_shows_an_efficiency_above_ideal(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr("matplotlib.pyplot.close", kept.append)
    profile = training(ranks=4, data_s=0.1)
    rows = tuple(predict(profile, GIGABIT, Setting(mode="strong"), [1, 4], [32], ClosedForm()))
    write_folder(Result("two sizes", "images", rows), tmp_path)
    top = kept[0].axes[1].get_ylim()[1]
    assert 1.5 < max(row.efficiency for row in rows) < top


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize(
    "option", ["--gpu-speedup", "--link-gbps", "--link-latency-us", "--memory-gbs"]
)
def test_only_finite_numbers_describe_a_machine(tmp_path, option, value):
    shown = run("--from", tmp_path, option, value)
    assert shown.exit_code == 2
    assert f"Invalid value for '{option}'" in shown.output


def test_an_unknown_algorithm_is_refused_at_any_bits(tmp_path):
    shown = run("--from", tmp_path, "--link-gbps", 1, "--bits", 4, "--algorithm", "rings")
    assert shown.exit_code == 2
    assert "'rings' is not one of 'auto', 'direct'" in shown.output
