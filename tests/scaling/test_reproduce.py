"""Published tables: every number is shown, with its source, and what is ours is computed."""

from __future__ import annotations

import json

import pytest
import yaml
from click.testing import CliRunner

from qsgd_hpc._data import data
from qsgd_hpc.cli import cli
from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.predict.output import LABEL
from qsgd_hpc.scaling.reproduce import (
    NAMES,
    effective_gbps,
    measured_cells,
    network_profile,
    predicted,
    published,
    study_text,
)
from tests.scaling.predict_samples import study_folder


def shown(*words):
    result = CliRunner().invoke(cli, ["reproduce", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", NAMES)
def test_every_published_number_is_shown_with_its_source(name):
    table = published(name)
    text = shown(name)
    assert table.source in text
    for row in table.rows:
        for value in row[3:]:
            assert f"{value:.6g}" in text or f"{value:.2f}" in text, row
    for sentence in (*table.assumptions, *table.misses):
        assert sentence in text
    assert (LABEL in text) is (name != "texar")
    cells = json.loads(shown(name, "--json"))["cells"]
    assert sum(cell["published"] is not None for cell in cells) == len(table.rows)


def test_the_tables_are_those_of_the_files():
    files = {f.name for f in data("scaling").joinpath("published").iterdir()}
    assert files == {f"{name}.yaml" for name in NAMES}


def test_calibrated_numbers_come_out_and_count_for_nothing():
    table = published("qsgd-tf")
    cells, remarks = predicted(table)
    base = [cell for cell in cells if cell.role == "calibrated"]
    assert len(base) == len(remarks) == len(table.networks) == 4
    for cell in base:
        assert cell.setting == "fp32, 8 GPUs"
        assert cell.error is None
        assert cell.found == pytest.approx(cell.published, rel=1e-6)
        assert cell.part_found == pytest.approx(cell.part_published, rel=1e-6)
    assert sum(cell.error is not None for cell in cells) == 20


def test_a_link_s_speed_is_found_again():
    # 100 MB in 1.4 s among 8: 2 x 7/8 x 100 MB each.
    profile = network_profile(published("qsgd-tf"), "resnet50", 1.0, overlaps=False)
    size = 2 * 7 / 8 * profile.parameters * 4
    assert effective_gbps(profile, 8, 0.0, size / 125e6) == pytest.approx(1.0, rel=1e-3)


def test_compression_pays_most_for_the_largest_gradients():
    cells = {(c.what, c.setting.split(",")[0]): c.found for c in predicted(published("horovod"))[0]}
    gain = {n: cells[n, "8 bit"] / cells[n, "fp32"] for n in ("inception3", "resnet101", "vgg16")}
    assert gain["vgg16"] > gain["resnet101"] >= 1
    assert gain["vgg16"] > gain["inception3"] >= 1


@pytest.mark.parametrize("name", [n for n in NAMES if "measure" in published(n).facts])
def test_what_measures_a_table_is_a_study_of_one_workload(name):
    body = yaml.safe_load(study_text(published(name)))
    assert len(body["workloads"]) == 1
    assert set(body["nodes"]) >= {1, 2}


def test_a_table_of_other_machines_says_so_when_it_shall_be_measured():
    with pytest.raises(UsageError, match="cannot be measured here"):
        study_text(published("horovod"))


@pytest.mark.parametrize("name", ["horovod", "qsgd-tf"])
def test_measurements_do_not_stand_beside_other_quantities(tmp_path, name):
    folder = study_folder(tmp_path, lambda p: 0.12 / p.ranks)
    with pytest.raises(UsageError, match="cannot be measured here"):
        measured_cells(published(name), folder.path)


def test_measurements_of_this_machine_stand_beside_the_table(tmp_path):
    folder = study_folder(tmp_path, lambda p: 0.12 / p.ranks)
    cells = measured_cells(published("alcf"), folder.path)
    assert {(c.setting, c.published, c.role) for c in cells if c.published} == {
        ("fp32, 1", 281, "measured"),
        ("fp32, 2", 382, "measured"),
        ("fp32, 4", 689, "measured"),
    }
    assert cells[0].found == pytest.approx(128 / 0.12)
    assert "MEASURED on this machine, not on the published one" in shown(
        "alcf", "--results", tmp_path
    )


def test_an_unknown_table_is_answered_with_the_known_ones():
    with pytest.raises(UsageError, match="available: qsgd-tf, horovod"):
        published("imagenet")
