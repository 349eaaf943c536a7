"""The report: complete, self-contained, and recomputed to the byte from the raw records."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from matplotlib.image import imread

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.analysis.compute import analyse
from qsgd_hpc.scaling.analysis.results import COLUMNS
from qsgd_hpc.scaling.define.study import plan
from qsgd_hpc.scaling.report.drawing.output import charts, write_sheet
from qsgd_hpc.scaling.report.drawing.style import spread
from qsgd_hpc.scaling.report.report import Report, context, load, render, results, write
from qsgd_hpc.scaling.report.tables import latex_tables
from qsgd_hpc.scaling.store import Attempt, StudyFolder
from tests.scaling.analysis_samples import case_analysis, report_of
from tests.scaling.samples import amdahl, attempt, attempts, metered, several, study, written

PLOTS = ("accuracy_1", "accuracy_2", "breakdown", "speedup")
FILES = (
    *("REPORT.md", "report.html", "results.csv", "results.tex", "plot.png", "plot.svg"),
    *(f"{stem}.{end}" for stem in PLOTS for end in ("pdf", "png")),
)
CASE_COLUMNS = ("workload", "framework", "batch_size", "algorithm", "network", "unit")


class Page(HTMLParser):
    """Collects tags and what would be loaded from elsewhere; checks that tags are closed."""

    VOID = ("meta", "br", "img", "link", "use", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.links: list[str] = []
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
        self.links += [w[1:] for w in wanted if w.startswith("#")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag) if tag not in self.VOID else None


def page_of(report: Report) -> str:
    return render("report.html.j2", context(report, [["plot"]] * len(report.analysis.cases), None))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The report of a study of one case that recorded everything."""
    whole = study(nodes=(1, 2), bits=(32, 4), repeats=3)
    wobble = {1: 0.99, 2: 1.0, 3: 1.01}
    found = [metered(p, speed=amdahl(p) * wobble[p.repeat] * (1 + 4 / p.bits)) for p in plan(whole)]
    folder = written(tmp_path_factory.mktemp("study"), whole, found)
    write(load(folder), folder.path)
    return folder.path


def test_every_file_is_written(made):
    assert {p.name for p in made.iterdir() if p.is_file()} >= set(FILES)


@pytest.mark.full
def test_the_same_records_give_the_same_bytes(made, tmp_path):
    write(load(StudyFolder(made)), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(FILES)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes(), name


def test_the_page_is_well_formed_and_loads_nothing(made):
    text = (made / "report.html").read_text()
    page = Page(text)
    assert page.loads == []
    assert page.tags.count("script") == 1 and page.tags.count("svg") > 6
    assert len(page.ids) == len(set(page.ids))
    assert set(page.links) <= set(page.ids)
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


@pytest.mark.full
def test_every_colour_of_the_charts_follows_the_page():
    for chart in charts(case_analysis(nodes=(1, 2, 4)), "case"):
        for drawing in chart.drawings:
            ElementTree.fromstring(drawing.svg)
            assert re.findall(r"#[0-9a-f]{6}\b", drawing.svg) == []


def test_every_value_of_a_chart_can_be_pointed_at():
    case = case_analysis(nodes=(1, 2))
    found = {c.panel.name: c.drawings[0].svg for c in charts(case, "case")}
    assert list(found) == [
        *("throughput", "wire", "quality", "efficiency", "breakdown", "accuracy_1", "accuracy_2")
    ]
    titles = {
        name: re.findall(r"<title>(.*?)</title>", svg, re.DOTALL) for name, svg in found.items()
    }
    assert len(titles["throughput"]) == len(titles["efficiency"]) == 4
    assert (
        "2 nodes, 4 bit\n" in titles["throughput"][3] and "95% interval" in titles["throughput"][3]
    )
    assert len(titles["wire"]) == len(titles["quality"]) == 3
    parts = [t.split("\n")[1].split(":")[0] for t in titles["breakdown"] if "8 bit" in t]
    assert parts == [
        *("Computing", "Waiting for communication", "Waiting for data"),
        *("Hidden communication", "Coding"),
    ]
    assert len(titles["accuracy_2"]) == 2 * 3 * 5


def test_what_was_not_recorded_is_not_drawn():
    old = case_analysis(full=False, quality="", nodes=(2,), repeats=1)
    assert [c.panel.name for c in charts(old, "case")] == ["throughput", "wire"]
    page = page_of(report_of(old))
    assert "Should you compress" not in page and "Scaling laws" not in page
    assert '<th scope="col">Step</th>' not in page


def test_the_csv_holds_the_tables_unrounded_with_the_case_in_front(made):
    table = pd.read_csv(made / "results.csv")
    assert tuple(table.columns) == (*CASE_COLUMNS, *COLUMNS)
    truth = analyse(StudyFolder(made).attempts()[0]).cases[0].table
    assert table["throughput"].tolist() == pytest.approx(truth["throughput"].tolist(), rel=1e-8)
    assert set(table["workload"]) == {"train"} and set(table["unit"]) == {"images"}
    assert (made / "results.csv").read_text().splitlines()[1].endswith(",702,128,,")


def test_medians_of_counts_are_whole_numbers():
    """Of two repeats, a median may lie between two numbers of bytes."""
    whole = study(nodes=(2,), bits=(4,), repeats=2)
    found = [metered(p, speed=1.0, wire_bytes=10**10 + p.repeat) for p in plan(whole)]
    (total,) = results(analyse(found))["wire_bytes_total"]
    assert total in (10**10 + 1, 10**10 + 2)


def test_markdown_and_page_show_every_row(made):
    markdown, page = (made / "REPORT.md").read_text(), (made / "report.html").read_text()
    assert len([ln for ln in markdown.splitlines() if re.match(r"\| [12] \|", ln)]) == 3
    assert len(re.findall(r'<td class="bits"', page)) == 3
    assert markdown.startswith("# On 2 nodes, 4-bit QSGD sends")
    for name in re.findall(r"\]\(([^)]+)\)", markdown):
        assert (made / name).exists(), name


@pytest.mark.full
def test_several_cases_have_a_section_a_link_and_a_folder_each(tmp_path):
    whole = several(nodes=(2,), bits=(32, 4), ranks_per_node=2)
    folder = written(tmp_path / "study", whole, attempts(whole))
    report = load(folder)
    text = page_of(report)
    page = Page(text)
    assert text.count("<td>2 nodes (4 ranks), <span") == 6
    keys = [case.case.key for case in report.analysis.cases]
    assert len(keys) == 6 and set(keys) <= set(page.links)
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("article") == 6
    # One case's files show where those of all go; all would take this test half a minute.
    one = dataclasses.replace(report.analysis.cases[0], curves=pd.DataFrame())
    write(report_of(one, one), tmp_path / "report")
    assert (tmp_path / "report" / keys[0] / "plot.png").exists()


def test_text_from_records_is_escaped(tmp_path):
    whole = study(script=study().programs[0].script.with_name("<b>&.py"), nodes=(1,), bits=(32,))
    (point,) = plan(whole)
    odd = attempt(point, speed=1.0, host="<script>alert(1)</script>", mpi="a | b", dataset="$x^{")
    folder = written(tmp_path, whole, [odd])
    page = write(load(folder), tmp_path).read_text()
    assert "<script>alert" not in page and "<b>&" not in page
    assert "a \\| b" in (tmp_path / "REPORT.md").read_text()


@pytest.mark.full
def test_a_name_full_of_markup_breaks_neither_page_nor_plots(tmp_path):
    nasty = case_analysis("</script><b>$x_{", unit="<i>&", nodes=(1, 2))
    report = report_of(nasty)
    page = Page(page_of(report))
    assert page.tags.count("script") == 1 and "b" not in page.tags
    write_sheet(nasty, report.findings.headline, "$\\frac{", tmp_path / "plot")
    ElementTree.parse(tmp_path / "plot.svg")


def test_a_long_headline_ends_inside_the_sheet(tmp_path):
    case = case_analysis(nodes=(1,), bits=(32,))
    write_sheet(case, "On 3 nodes, 4-bit QSGD shows no difference " * 4, "", tmp_path / "plot")
    pixels = imread(tmp_path / "plot.png")
    assert (pixels[:, -40:] == pixels[0, -1]).all()


def test_failures_gaps_and_torn_lines_are_in_the_report(tmp_path):
    whole = study(bits=(32,))
    first, second = plan(whole)
    failed = Attempt(second, 1, "TIMEOUT", None)
    folder = written(tmp_path, whole, [attempt(first, speed=9.0), failed])
    with folder.collection.open("a") as file:
        file.write('{"format": 1, "poi')
    text = "\n".join(load(folder).incidents)
    assert "attempt 1: the job ended as TIMEOUT; not used" in text
    assert f"Not measured yet: 1 of 2 points ({second.name(False)})." in text
    assert "line 3" in text


def test_points_of_different_code_are_pointed_out(tmp_path):
    whole = study(bits=(32,))
    found = attempts(whole)
    changed = json.loads(found[1].to_line())["provenance"]
    changed["git"] = {"commit": "f" * 40, "dirty": True}
    later = Attempt(found[1].point, 1, "COMPLETED", 0, found[1].records, 0, changed)
    cautions = load(written(tmp_path, whole, [found[0], later])).origins.cautions
    assert [c.split(":")[0] for c in cautions][:2] == ["Mixed points", "Uncommitted changes"]


def test_without_a_finished_point_there_is_no_report(tmp_path):
    folder = written(tmp_path, study(), [])
    with pytest.raises(UsageError, match="no point of this study is finished"):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"nodes": (1,), "bits": (32,)}, marks=pytest.mark.full),
        {"nodes": (1, 2, 4, 8, 16, 32), "bits": (32, 8, 4, 2)},
        {"nodes": (2, 4), "bits": (4,), "mode": "weak", "ranks_per_node": 4},
    ],
)
def test_every_shape_of_study_can_be_drawn(tmp_path, changes):
    whole = study(batch_size=1024, **changes)
    folder = written(tmp_path, whole, attempts(whole))
    assert len(page_of(load(folder))) > 10_000


def test_labels_are_spread_with_the_least_movement():
    assert spread([0.1, 0.5], gap=0.1) == pytest.approx([0.1, 0.5])
    assert spread([0.5, 0.5], gap=0.1) == pytest.approx([0.45, 0.55])
    placed = spread([0.1, 0.48, 0.5, 0.5, 0.9], gap=0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(placed))
    assert (placed[0], placed[-1]) == (0.1, 0.9)
    assert spread([], gap=0.1) == []


def test_the_latex_table_is_whole_and_escaped():
    text = latex_tables([case_analysis("50%_off & $5 #1 {~^\\}")], "a\nsource")
    assert text.splitlines()[0] == "% a source"
    body = text[text.index(r"\midrule") :]
    columns = re.search(r"\\begin\{tabular\}\{(\w+)\}", text)[1]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 10
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(columns) - 1}
    assert r"50\%\_off \& \$5 \#1 \{\textasciitilde{}\textasciicircum{}\textbackslash{}\}" in text
    assert text.count(r"\begin{") == text.count(r"\end{") == 2
    assert text.isascii()


@pytest.mark.full
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here")
def test_the_latex_table_compiles(tmp_path: Path):
    (tmp_path / "t.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n"
        + latex_tables([case_analysis('50%_off & $5 #1 {~^\\}"<|>')], "s")
        + "\\end{document}\n"
    )
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Overfull" not in done.stdout, done.stdout[-2000:]
