"""The report: complete, self-contained, and recomputed to the byte from the raw records."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pandas as pd
import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.analyse import COLUMNS, analyse
from qsgd_hpc.scaling.attempts import Attempt
from qsgd_hpc.scaling.folder import StudyFolder
from qsgd_hpc.scaling.panels import spread
from qsgd_hpc.scaling.plan import plan
from qsgd_hpc.scaling.plots import charts
from qsgd_hpc.scaling.report import load, write
from tests.unit.scaling_samples import amdahl, attempt, attempts, study, written

FILES = ("REPORT.md", "report.html", "results.csv", "plot.png", "plot.svg")


class Page(HTMLParser):
    """Collects tags and what would be loaded from elsewhere; checks that tags are closed."""

    VOID = ("meta", "br", "img", "link", "use", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        wanted = [values.get(k) or "" for k in ("src", "href", "xlink:href")]
        self.loads += [w for w in wanted if w and not w.startswith("#")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag) if tag not in self.VOID else None


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    whole = study(nodes=(1, 2, 4), repeats=3)
    wobble = {1: 0.99, 2: 1.0, 3: 1.01}
    found = attempts(whole, lambda p: amdahl(p) * wobble[p.repeat] * (1 + 4 / p.bits))
    folder = written(tmp_path_factory.mktemp("study"), whole, found)
    write(load(folder), folder.path)
    return folder.path


def test_every_file_is_written_and_the_same_records_give_the_same_bytes(made, tmp_path):
    write(load(StudyFolder(made)), tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes(), name


def test_the_page_is_well_formed_and_loads_nothing(made):
    text = (made / "report.html").read_text()
    page = Page(text)
    assert page.loads == []
    assert page.tags.count("svg") == 4 and "script" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_every_colour_of_the_charts_follows_the_page(made):
    for chart in charts(load(StudyFolder(made)).analysis):
        for svg in filter(None, (chart.svg, chart.narrow)):
            ElementTree.fromstring(svg)
            assert re.findall(r"#[0-9a-f]{6}\b", svg) == []


def test_the_csv_holds_the_table_unrounded(made):
    table = pd.read_csv(made / "results.csv")
    assert tuple(table.columns) == COLUMNS
    folder = StudyFolder(made)
    truth = analyse(folder.attempts()[0]).table
    assert table["images_per_s"].tolist() == pytest.approx(truth["images_per_s"].tolist(), rel=1e-8)
    assert (made / "results.csv").read_text().splitlines()[1].endswith(",702,256")


def test_markdown_and_page_show_every_row(made):
    markdown, page = (made / "REPORT.md").read_text(), (made / "report.html").read_text()
    rows = len(load(StudyFolder(made)).analysis.table)
    assert rows == 7
    assert len([ln for ln in markdown.splitlines() if re.match(r"\| [124] \|", ln)]) == rows
    assert len(re.findall(r'class="bits"', page)) == rows
    assert markdown.startswith("# On 4 nodes, 4-bit QSGD sends")


def test_text_from_records_is_escaped(tmp_path):
    whole = study(script=study().script.with_name("<b>&.py"), nodes=(1,), bits=(32,))
    (point,) = plan(whole)
    odd = attempt(point, speed=1.0, host="<script>alert(1)</script>", mpi="a | b")
    folder = written(tmp_path, whole, [odd])
    page = write(load(folder), tmp_path).read_text()
    assert "<script>" not in page and "<b>&.py" not in page
    assert "a \\| b" in (tmp_path / "REPORT.md").read_text()


def test_failures_gaps_and_torn_lines_are_in_the_report(tmp_path):
    whole = study(bits=(32,))
    first, second = plan(whole)
    failed = Attempt(second, 1, "TIMEOUT", None)
    folder = written(tmp_path, whole, [attempt(first, speed=9.0), failed])
    with folder.collection.open("a") as file:
        file.write('{"format": 1, "poi')
    text = "\n".join(load(folder).incidents)
    assert "attempt 1: the job ended as TIMEOUT; not used" in text
    assert f"Not measured yet: {second.key}" in text
    assert "line 3" in text


def test_points_of_different_code_are_pointed_out(tmp_path):
    whole = study(bits=(32,))
    found = attempts(whole)
    changed = json.loads(found[1].to_line())["provenance"]
    changed["git"] = {"commit": "f" * 40, "dirty": True}
    later = Attempt(found[1].point, 1, "COMPLETED", 0, found[1].records, 0, changed)
    cautions = load(written(tmp_path, whole, [found[0], later])).origins.cautions
    assert [c.split(":")[0] for c in cautions] == ["Mixed points", "Uncommitted changes"]


def test_without_a_finished_point_there_is_no_report(tmp_path):
    folder = written(tmp_path, study(), [])
    with pytest.raises(UsageError, match="no point of this study is finished"):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": (1,), "bits": (32,)},
        {"nodes": (1, 2, 4, 8, 16, 32), "bits": (32, 8, 4, 2)},
        {"nodes": (2, 4), "bits": (4,), "mode": "weak", "ranks_per_node": 4},
    ],
)
def test_every_shape_of_study_can_be_drawn(tmp_path, changes):
    whole = study(batch_size=1024, **changes)
    folder = written(tmp_path, whole, attempts(whole))
    assert write(load(folder), tmp_path).stat().st_size > 10_000


def test_labels_are_spread_with_the_least_movement():
    assert spread([0.1, 0.5], gap=0.1) == pytest.approx([0.1, 0.5])
    assert spread([0.5, 0.5], gap=0.1) == pytest.approx([0.45, 0.55])
    placed = spread([0.1, 0.48, 0.5, 0.5, 0.9], gap=0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(placed))
    assert (placed[0], placed[-1]) == (0.1, 0.9)
    assert spread([], gap=0.1) == []
