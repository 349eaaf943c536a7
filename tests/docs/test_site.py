"""The documentation site builds without a warning, and what it promises is on it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

from qsgd_hpc.cli import VERBS
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.sites.queues import queue_faults
from tests.docs.pages import BLOCK, blocks, repository_pages

pytest.importorskip("sphinx", reason="the extra docs is not installed")
ROOT = Path(__file__).parents[2]
PUBLIC = {
    "qsgd_hpc": "qsgd_hpc",
    "torch": "qsgd_hpc.torch",
    "ddp": "qsgd_hpc.torch.ddp",
    "tensorflow": "qsgd_hpc.tensorflow",
    "keras": "qsgd_hpc.keras",
    "jax": "qsgd_hpc.jax",
    "arrays": "qsgd_hpc.arrays",
    "common": "qsgd_hpc.frameworks.common",
    "compression": "qsgd_hpc.compression",
    "jobs": "qsgd_hpc.jobs",
    "scaling": "qsgd_hpc.scaling",
    "eight_steps": "qsgd_hpc.eight_steps.convert",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
ELSEWHERE = {"__version__", "Compression", "callbacks", "elastic"}  # data, and modules


class Page(HTMLParser):
    """The ids and the links of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id":
                self.ids.add(value or "")
            elif name in ("href", "src") and value and tag != "link":
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for framework in ("torch", "tensorflow", "keras", "jax", "optax"):
        if find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed, whose modules the site describes")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs"]
    done = subprocess.run(
        [*command, ".", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html") if "_static" not in file.parts}


@pytest.mark.full
def test_every_page_of_the_repository_is_one_of_the_site(site: Path) -> None:
    found = repository_pages()
    assert len(found) > 30
    for page in found:
        assert (site / page.relative_to(ROOT)).with_suffix(".html").exists(), page


def anchors(page: Path) -> set[str]:
    """Return what headings are called in links, as on GitHub."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = (LINK.sub(r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.M))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_to_a_file_and_a_heading() -> None:
    """The build below sees more, and takes long."""
    known = {page: anchors(page) for page in repository_pages()}
    seen, broken = 0, []
    for page in known:
        for _, link in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            seen += 1
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.exists() or (
                parts.fragment and parts.fragment not in known.get(target, {parts.fragment})
            ):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert seen > 300
    assert not broken, "\n".join(broken)


@pytest.mark.full
def test_links_within_the_site_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            known = pages.get(target)
            wanted = unquote(parts.fragment)
            if not target.exists() or (known and wanted and wanted not in known.ids):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert not broken, "\n".join(broken)


@pytest.mark.full
@pytest.mark.parametrize("page", PUBLIC)
def test_every_public_name_is_described(pages: dict[Path, Page], site: Path, page: str) -> None:
    module = importlib.import_module(PUBLIC[page])
    described = {
        each.rsplit(".", 1)[-1]
        for file, found in pages.items()
        if file.parent == site / "docs" / "reference"
        for each in found.ids
        if file.stem in (page, "common", "qsgd_hpc")
    }
    missing = set(module.__all__) - ELSEWHERE - described
    assert not missing


@pytest.mark.full
def test_every_verb_is_described(pages: dict[Path, Page], site: Path) -> None:
    ids = pages[site / "docs" / "reference" / "cli.html"].ids
    assert {f"qsgd-hpc-{verb}" for verb in VERBS} <= ids


@pytest.mark.full
def test_every_lesson_is_in_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    links = {urlsplit(link).path for link in pages[site / "docs" / "index.html"].links}
    for lesson in (ROOT / "tutorials").rglob("README.md"):
        assert f"../{lesson.relative_to(ROOT).with_suffix('.html')}" in links


def test_tables_of_settings_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    table = importlib.import_module("settings_table")
    assert table.page(text) == text, "run: python docs/site/settings_table.py"
    assert table.page(text.replace("| `QSGD_BITS` |", "| `QSGD_BIT` |")) == text


def _source() -> str:
    files = [*(ROOT / "qsgd_hpc").rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]*")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    # Strings that go on in the next line are one string.
    return re.sub(r'["\'](?: \+)?\n *f?["\']', "", text)


def test_messages_that_troubleshooting_quotes_are_in_the_source() -> None:
    source = _source()
    page = ROOT / "docs" / "troubleshooting.md"
    quoted = [text for _, text in blocks(page, "text")]
    for row in re.findall(r"^\|.*\|$", page.read_text(encoding="utf-8"), re.M):
        quoted += [code for code in re.findall(r"`([^`]+)`", row) if " " in code]
    assert len(quoted) > 40
    missing = [
        part
        for text in quoted
        for part in re.split(r"\.\.\.|<[^>]*>|\n|^qsgd-hpc: (?:warning: )?", text)
        if part.strip() and part.strip() not in source
    ]
    assert not missing


@pytest.mark.parametrize(
    ("queue", "nodes", "walltime_min"), [("prod", 8, 30), ("debug", 2, 120), (None, 600, 30)]
)
def test_messages_about_queues_are_found_on_the_troubleshooting_page(
    queue: str | None, nodes: int, walltime_min: float
) -> None:
    page = ROOT / "docs" / "troubleshooting.md"
    forms = [
        re.escape(re.sub(r"<[^>]*>", "\0", line))
        .replace("\0", ".+")
        .replace(re.escape("..."), ".*")
        for _, text in blocks(page, "text")
        for line in text.splitlines()
    ]
    (message,) = queue_faults(sites.load("polaris"), queue, nodes, walltime_min)
    assert any(re.fullmatch(form, message) for form in forms), message


def test_a_lesson_that_nobody_has_named_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    contents = importlib.import_module("contents")
    for name in ("known", "another", "new"):
        (tmp_path / "tutorials" / name).mkdir(parents=True)
        (tmp_path / "tutorials" / name / "README.md").write_text(f"# The {name} lesson\n")
    app = SimpleNamespace(srcdir=tmp_path, config=SimpleNamespace(root_doc="docs/index"))
    page = "# All\n\n## Learn\n\n- [First](../tutorials/known/README.md): it\n"
    page += "\n<!-- then: absent,\nnew -->\n\n## Other\n\nwords\n"
    source = [page]
    contents.add_navigation(app, "docs/index", source)
    learn = source[0].partition("## Other")[0]
    assert re.findall(r"^(.+) <\.\./tutorials/(.+)/README.md>$", learn, re.M) == [
        ("First", "known"),
        ("The new lesson", "new"),
        ("The another lesson", "another"),
    ]
