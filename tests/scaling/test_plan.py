"""A study's points, their order and commands, and the faults of its definition."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.scaling.define.definition import define
from qsgd_hpc.scaling.define.study import (
    BITS,
    Study,
    differences,
    environment,
    equal_threads,
    parse_counts,
    plan,
    script_args,
)
from qsgd_hpc.scaling.run.cost import estimate, print_plan
from tests.scaling.samples import study


def test_nodes_are_crossed_with_bits_and_repeats():
    points = plan(study(nodes=(2, 4), bits=(32, 4), repeats=3))
    assert len(points) == len({p.key for p in points}) == 2 * 2 * 3


def test_one_rank_is_measured_once_per_repeat_as_fp32():
    alone = [p for p in plan(study(bits=(8, 4, 2), repeats=2)) if p.ranks == 1]
    assert [(p.bits, p.repeat) for p in alone] == [(32, 1), (32, 2)]


def test_one_node_of_two_ranks_is_crossed_with_bits():
    assert len(plan(study(nodes=(1,), bits=(32, 8), ranks_per_node=2))) == 2


def test_every_repeat_is_a_complete_round_in_an_order_of_its_own():
    whole = study(nodes=(1, 2, 4, 8), repeats=3)
    points = plan(whole)
    third = len(points) // 3
    rounds = [points[i * third : (i + 1) * third] for i in range(3)]
    assert [{p.repeat for p in r} for r in rounds] == [{1}, {2}, {3}]
    orders = [[(p.nodes, p.bits) for p in r] for r in rounds]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert len({tuple(o) for o in orders}) == 3
    assert orders[0] != sorted(orders[0])


def test_the_order_is_the_same_every_time():
    keys = [p.key for p in plan(study())]
    assert keys == [p.key for p in plan(study())]
    assert keys[0] == "train-batch128-nodes2-bits32-repeat1"


def test_the_scripts_own_arguments_come_first_and_stay_as_they_are():
    odd = ("--name", "a b'c", "--", "-x")
    point = plan(study())[0]
    assert script_args(study(args=odd, epochs=3), point) == (
        *odd,
        "--global-batch-size",
        "128",
        "--epochs",
        "3",
    )
    assert script_args(study(mode="weak"), point) == ("--batch-size", "128")


@pytest.mark.parametrize(
    ("mode", "template", "words"),
    [
        ("strong", ("--bs", "{rank_batch}"), ["--bs", "64"]),
        ("weak", ("-B", "{global_batch}"), ["-B", "256"]),
        ("strong", (), []),
    ],
)
def test_a_script_may_take_its_batch_in_words_of_its_own_or_not_at_all(mode, template, words):
    whole = study(mode=mode, nodes=(2,), bits=(32,), batch_size=128, batch_args=template)
    assert list(script_args(whole, plan(whole)[0])) == [*whole.programs[0].args, *words]


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("for x in data: ...\n", "--global-batch-size"),
        ("parser.add_argument('--global-batch-size')\n", None),
        ("@click.option(...)\ndef main(global_batch_size): ...\n", None),
    ],
)
def test_the_plan_says_where_a_script_may_ignore_its_batch(tmp_path, text, option):
    (script := tmp_path / "train.py").write_text(text)
    whole = study(script=script)
    assert whole.programs[0].unknown_batch_option(whole.mode) == option
    console = Console(file=io.StringIO(), width=200)
    print_plan(console, whole, (), estimate(whole, plan(whole), {}, None))
    assert ("If it ignores the option" in console.file.getvalue()) == (option is not None)
    assert study(script=script, batch_args=()).programs[0].unknown_batch_option("strong") is None


def test_batch_words_that_nobody_knows_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"only \{global_batch\} and \{rank_batch\}"):
        study(batch_args=("--bs", "{batch}")).check()


def test_batch_words_with_an_open_quote_are_refused(tmp_path):
    (tmp_path / "train.py").touch()
    settings = {"scripts": ["train.py"], "batch_args": "--bs '{rank_batch}"}
    with pytest.raises(UsageError, match=r"--batch-args .*No closing quotation"):
        define(settings, folder=tmp_path, site=sites.load("local"), workdir=tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
def test_limits_that_compare_with_nothing_are_refused(value):
    for whole in (study(target=value), study(max_node_hours=value)):
        with pytest.raises(UsageError, match="expected a number above 0"):
            whole.check()


def test_another_target_is_no_other_study():
    assert differences(study(target=0.9), study(target=0.95)) == []


def test_the_code_is_always_set_so_that_the_callers_environment_cannot_leak_in(monkeypatch):
    monkeypatch.setenv("QSGD_SCHEME", "eden")
    for point in plan(study()):
        own = environment(study(), point, "r.jsonl")
        assert (own["QSGD_BITS"], own["QSGD_SCHEME"]) == (str(point.bits), "qsgd")


def test_nodes_of_one_machine_share_its_cores_equally_at_every_size():
    assert equal_threads(8, study(nodes=(1, 2, 4))) == 2
    assert equal_threads(2, study(nodes=(1, 4))) == 1
    shared = study(nodes=(1, 2), threads=4)
    assert {environment(shared, p, "r.jsonl")["OMP_NUM_THREADS"] for p in plan(shared)} == {"4"}
    assert "OMP_NUM_THREADS" not in environment(study(), plan(study())[0], "r.jsonl")


def test_all_faults_of_a_definition_are_named_at_once(tmp_path):
    wrong = study(script=tmp_path / "nope.py", mode="sideways", repeats=0, args=("--batch-size=4",))
    with pytest.raises(UsageError) as caught:
        wrong.check()
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    for word in ("nope.py", "sideways", "--repeats 0", "--batch-size follows"):
        assert any(word in line for line in lines)


def test_a_batch_that_ranks_cannot_share_is_refused_in_strong_mode_only(tmp_path):
    script = tmp_path / "s.py"
    script.touch()
    uneven = study(script=script, nodes=(1, 3), batch_size=128)
    with pytest.raises(UsageError, match="128 cannot be shared by 3 ranks"):
        uneven.check()
    replace(uneven, mode="weak").check()


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", "", "1,,2", "²"])
def test_node_counts_that_are_no_whole_numbers_from_1_are_refused(text):
    with pytest.raises(UsageError, match="--nodes"):
        parse_counts(text, "--nodes")


def test_bits_other_than_2_4_8_32_are_refused_each_by_name():
    with pytest.raises(UsageError) as caught:
        parse_counts("32,16,3", "--bits", allowed=BITS)
    assert len(str(caught.value).splitlines()) == 2


def test_counts_keep_their_order_and_lose_their_doubles():
    assert parse_counts(" 2,1, 2", "--nodes") == [2, 1]


def test_a_definition_survives_its_json():
    whole = study(args=("--lr", "0.1"), epochs=3, filesystems=("home",), walltime_min=12.5)
    assert Study.from_json(whole.to_json()) == whole


def test_every_value_in_which_definitions_differ_is_named():
    other = {
        "script": Path("/home/bob/train.py"),
        "epochs": 9,
        "mode": "weak",
        "nodes": (4,),
        "bits": (2,),
    }
    lines = differences(study(), study(**other))
    assert [line.split(":")[0] for line in lines] == list(other)
    assert "nodes: the folder has 1,2, this command has 4" in lines
