"""The report's page as a browser shows it: drawn whole, quiet, alone, and answering a hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qsgd_hpc.scaling.report.report import context, render
from tests.browser.chromium import Browser
from tests.scaling.analysis_samples import case_analysis, report_of

NASTY = "</script><b>bold"
COMPLAINTS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
SHOWN = "[...document.querySelectorAll('figure svg')].filter(s => s.getClientRects().length)"
BAR = "document.querySelector('.wire .mark[data-series=\"4\"] path')"
POINT = "#train-torch-batch128-throughput .wide.linear .mark[data-series='4']"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two cases: one with everything there is, one with an unfriendly name."""
    first = case_analysis(nodes=(1, 2, 4))
    other = case_analysis(NASTY, quality="perplexity", unit="words", nodes=(2,), repeats=1)
    text = render("report.html.j2", context(report_of(first, other), [["plot"]] * 2, None))
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(text, encoding="utf-8")
    return file


def tip(browser: Browser) -> str:
    hidden, text = browser.js("[document.querySelector('#tip').hidden, tip.textContent]")
    return "" if hidden else str(text)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 390])
def test_every_chart_is_drawn_and_nothing_complains_or_leaves_the_page(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    drawn = browser.js(
        f"{SHOWN}.map(s => [s.closest('figure').id, s.getBoundingClientRect().width,"
        "...[...s.querySelectorAll('.mark')].map(m => {"
        "const b = m.getBoundingClientRect(); return Math.max(b.width, b.height); })])"
    )
    figures = browser.js("document.querySelectorAll('figure').length")
    assert len(drawn) == figures > 9
    for name, wide, *marks in drawn:
        assert wide > 250 and marks and min(marks) > 0, name
    assert [e for e in browser.events if e[0] in COMPLAINTS] == []
    asked = [p["request"]["url"] for m, p in browser.events if m == "Network.requestWillBeSent"]
    assert [url for url in asked if url != page.as_uri()] == []


def test_nothing_is_wider_than_a_phone(browser, page):
    browser.open(page, width=390)
    assert browser.js("document.documentElement.scrollWidth") == 390
    # Wide tables scroll on their own; nothing else may stick out.
    out = browser.js(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg') && "
        "e.getBoundingClientRect().right > 391).map(e => e.tagName + '.' + e.className)"
    )
    assert out == []


def test_dark_and_light_differ_and_text_is_readable_in_both(browser, page):
    seen = []
    for dark in (False, True):
        browser.open(page, dark=dark)
        seen.append(
            browser.js(
                f"[document.body, document.querySelector('figure svg text'), {BAR}]"
                ".map((e, i) => getComputedStyle(e)[['backgroundColor', 'fill', 'fill'][i]])"
            )
        )
    assert all(light != dark for light, dark in zip(*seen, strict=True))
    for background, text, _ in seen:
        assert contrast(background, text) >= 4.5


def test_pointing_at_a_mark_shows_its_values(browser, page):
    browser.open(page)
    # Scrolling hides a tip, and the event of the scroll to the point may come late: point again.
    x, y = browser.middle(POINT)
    browser.wait(lambda: browser.move(x, y) or tip(browser), "a tip under the pointer")
    lines = tip(browser).splitlines()
    assert lines[0] == "2 nodes, 4 bit"
    assert re.fullmatch(r"[\d,]+ images/s", lines[1])
    assert re.fullmatch(r"95% interval [\d,]+\.\.[\d,]+, 3 runs", lines[2])
    browser.move(5, 5)
    browser.wait(lambda: not tip(browser), "the tip to go")


def test_the_keyboard_goes_from_mark_to_mark(browser, page):
    browser.open(page)
    browser.js(f"{SHOWN}[0].querySelector('.mark[tabindex=\"0\"]').focus()")
    first = browser.wait(lambda: tip(browser), "the tip of the first mark")
    browser.key("ArrowRight")
    second = browser.wait(lambda: (t := tip(browser)) != first and t, "the next tip")
    assert first.startswith("1 node") and second.startswith("2 nodes")
    assert browser.js("document.activeElement.getAttribute('aria-label')") == second.replace(
        "\n", ", "
    )
    assert browser.js(f"{SHOWN}[0].querySelectorAll('[tabindex=\"0\"]').length") == 1
    browser.key("Escape")
    browser.wait(lambda: not tip(browser), "the tip to go")


def test_a_series_can_be_hidden_in_all_charts_of_its_case_alone(browser, page):
    browser.open(page)
    hidden = "document.querySelectorAll('.case:{}-of-type [data-series=\"8\"].off').length"
    total = browser.js(
        "document.querySelectorAll('.case:first-of-type svg [data-series=\"8\"]').length"
    )
    browser.click(".legend button[data-toggles='8']")
    browser.wait(lambda: browser.js(hidden.format("first")) == total, "the series to go")
    assert browser.js(hidden.format("last")) == 0
    assert browser.js("document.querySelector('[data-toggles=\"8\"]').ariaPressed") == "false"
    browser.click(".legend button[data-toggles='8']")
    browser.wait(lambda: browser.js(hidden.format("first")) == 0, "the series to come back")


def test_tables_sort_by_their_exact_values(browser, page):
    browser.open(page)
    column = (
        "[...document.querySelectorAll('.results:first-of-type')][0].tBodies[0].rows.length && "
        "[...document.querySelector('.results').tBodies[0].rows].map(r => +r.cells[2].dataset.sort)"
    )
    before = browser.js(column)
    heading = ".results th:nth-child(3) button"
    for order in (sorted(before), sorted(before, reverse=True)):
        browser.click(heading)
        browser.wait(lambda order=order: browser.js(column) == order, "the sorted table")


def test_the_reader_may_choose_the_axes(browser, page):
    browser.open(page)
    shown = f"{SHOWN}[0].parentNode.className"
    assert "linear" in browser.js(shown)
    browser.click(".scales button[data-scale='log']")
    browser.wait(lambda: " log" in browser.js(shown), "the logarithmic chart")


def test_a_name_full_of_markup_stays_text(browser, page):
    browser.open(page)
    assert browser.js("document.querySelectorAll('main b').length") == 0
    assert NASTY in browser.js("document.querySelector('nav').textContent")
    link = browser.js("document.querySelector('nav tbody tr:last-child a').hash.slice(1)")
    assert browser.js(f"!!document.getElementById({json.dumps(link)})")


def test_the_page_prints_with_every_series(browser, page):
    browser.open(page)
    browser.click(".legend button[data-toggles='8']")
    paper = browser.pdf()
    assert paper.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", paper)) > 1
    browser.call("Emulation.setEmulatedMedia", media="print")
    faint = browser.js(
        "[...document.querySelectorAll('.off')].filter(e => getComputedStyle(e).opacity < 1).length"
    )
    browser.call("Emulation.setEmulatedMedia", media="")
    assert faint == 0


def contrast(one: str, two: str) -> float:
    """Return the contrast ratio of two CSS colours, 1..21 (WCAG 2, relative luminance)."""

    def luminance(colour: str) -> float:
        channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
