"""The report says what the codes lost, and what the planner left uncoded, where records tell."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.console import Console

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.compute import analyse
from qsgd_hpc.scaling.define.study import plan
from qsgd_hpc.scaling.report.findings import coded_sentences, findings
from qsgd_hpc.scaling.report.report import context, render
from qsgd_hpc.scaling.report.tables import cells, headings
from qsgd_hpc.scaling.report.terminal import print_result
from tests.scaling.analysis_samples import case_analysis, report_of
from tests.scaling.samples import attempts, engine_only, metered, metered_attempts, study

BITS = (32, 8, 4)


def case_of(found):
    (case,) = analyse(found).cases
    return case


def lost(errors, **changes):
    """Return the sentences of a study whose codes lose so much on two ranks, by bits."""
    whole = study(bits=(32, *errors), **changes)
    return coded_sentences(
        case_of(
            [
                metered(p, speed=100.0, nmse=errors[p.bits] * p.ranks / 2 if p.bits < 32 else None)
                for p in plan(whole)
            ]
        )
    )


def with_engines(whole, told):
    """Return attempts of scripts that know no error; `told(point, rank)` is of the engine."""
    found = []
    for point in plan(whole):
        engines = [{"event": "engine", "rank": r, **told(point, r)} for r in range(point.ranks)]
        made = metered(point, speed=100.0, nmse=None)
        found.append(replace(made, records=(*made.records, *engines)))
    return found


def planned(plain, declined=None):
    """Return the sentences of a study whose repeats send so many of 40 tensors as float32."""

    def told(point, rank):
        asked = point.bits == 4
        uncoded = plain[point.repeat - 1] if asked else 0
        return {
            "asked_tensors": 40 if asked else 0,
            "plain_tensors": uncoded,
            "declined_tensors": (declined or plain)[point.repeat - 1] if asked else 0,
            "asked_elements": 1000 if asked else 0,
            "plain_elements": 2 * uncoded,
        }

    return coded_sentences(case_of(with_engines(study(bits=(32, 4), repeats=2), told)))


@pytest.mark.parametrize(
    ("value", "text", "share"),
    [
        (0.00011, "0.00011", "0.011%"),
        (0.000095, "0.000095", "0.0095%"),
        (0.0355, "0.035", "3.5%"),
        (0.1, "0.10", "10%"),
        (1.62, "1.6", "160%"),
        (None, "–", "–"),
    ],
)
def test_errors_of_codes_have_two_digits_however_small(value, text, share):
    assert units.nmse(value) == text
    assert units.share(value) == share


def test_the_table_shows_the_error_of_what_was_coded_alone():
    whole = study(bits=BITS)
    errors = {8: 0.00011, 4: 0.0355}
    case = case_of([metered(p, speed=100.0, nmse=errors.get(p.bits)) for p in plan(whole)])
    assert ("nmse", "NMSE") in headings(case)
    shown = [(r["ranks"], r["bits"], cells(r, case)["nmse"]) for r in case.rows()]
    assert shown == [(1, 32, "–"), (2, 32, "–"), (2, 8, "0.00011"), (2, 4, "0.035")]


@pytest.mark.parametrize("bits", [(32,), BITS])
def test_there_is_no_column_where_nothing_was_coded_or_no_record_tells(bits):
    whole = study(bits=bits)
    # The first generation of scripts knew no error, whatever travelled.
    case = case_of(attempts(whole) if bits == BITS else metered_attempts(whole))
    assert "nmse" not in dict(headings(case))
    assert coded_sentences(case) == ()
    assert "NMSE" not in shown_everywhere(report_of(case))


def test_of_a_script_that_records_no_error_the_engines_say_it():
    errors = {0: 0.03, 1: 0.05}
    found = with_engines(
        study(nodes=(2,), bits=(32, 4)),
        lambda point, rank: {"nmse": errors[rank] if point.bits == 4 else None},
    )
    plain, four = case_of(found).rows()
    assert (plain["nmse"], four["nmse"]) == (None, pytest.approx(0.04))


def test_a_run_in_other_bits_than_its_points_is_not_used():
    """As of a script with a hook of its own, in 4 bits, whatever the study sets."""
    found = with_engines(
        study(nodes=(2,), bits=BITS), lambda point, rank: {"gradient_bits": 4, "wire_bytes": 9}
    )
    analysis = analyse(found)
    (case,) = analysis.cases
    assert [row["bits"] for row in case.rows()] == [4]
    (caution,) = [c for c in analysis.cautions if c.startswith("Bits:")]
    assert "In 2 of 3 measurements on several ranks the script compressed gradients to 4" in caution
    assert "although the study set fp32 (such as" in caution
    assert "They are not used." in caution


def test_a_script_that_ignores_all_bits_of_a_study_has_no_report(tmp_path):
    found = with_engines(study(nodes=(2,), bits=(8, 4)), lambda point, rank: {"gradient_bits": 32})
    assert not analyse(found).cases
    assert "the script compressed no gradient although" in " ".join(analyse(found).cautions)


def test_what_the_script_recorded_goes_over_what_the_engines_did():
    found = with_engines(study(nodes=(2,), bits=(4,)), lambda point, rank: {"nmse": 0.5})
    own = replace(found[0], records=_with_error(found[0].records, 0.03))
    assert case_of([own]).rows()[0]["nmse"] == pytest.approx(0.03)


def test_what_coding_lost_is_said_of_the_largest_size_with_the_rule():
    told = lost({8: 0.000055, 4: 0.0175}, nodes=(1, 2, 4))
    assert told == (
        "Coding error, relative to the squared magnitude of the gradients: 0.011% with 8 bit (NMSE "
        "0.00011), 3.5% with 4 bit (NMSE 0.035). As a rule, an NMSE below 0.1 does not affect "
        "training.",
    )


@pytest.mark.parametrize(("nmse", "needs"), [(0.099, False), (0.1, True), (1.6, True)])
def test_error_feedback_is_spoken_of_where_training_may_notice(nmse, needs):
    (told,) = lost({2: nmse})
    assert told.endswith("near and above 1 it needs error feedback.") is needs


def test_repeats_count_by_their_median_as_in_every_other_column():
    whole = study(bits=(32, 4), repeats=3)
    found = [
        metered(p, speed=100.0, nmse=None if p.bits == 32 else 0.01 * p.repeat**2)
        for p in plan(whole)
    ]
    assert case_of(found).rows()[-1]["nmse"] == pytest.approx(0.04)


def test_what_the_planner_left_uncoded_is_one_line():
    assert planned([37, 37]) == (
        "The planner sent 37 of 40 tensors (7% of the elements) as float32 although 4 bit was set.",
    )


def test_repeats_in_which_the_planner_chose_differently_are_a_range():
    (told,) = planned([0, 37])
    assert told.startswith("The planner sent 0 to 37 of 40 tensors (0% to 7% of the elements)")


def test_the_planner_is_not_named_for_what_others_have_given_up():
    (told,) = planned([37, 37], declined=[37, 30])
    assert told.startswith("37 of 40 tensors (7% of the elements) were sent as float32")


def test_where_all_that_was_asked_travels_coded_nothing_is_said():
    assert planned([0, 0]) == ()
    whole = study(bits=(32, 4))
    old = [engine_only(whole, point, step_s=0.1) for point in plan(whole)]
    assert coded_sentences(case_of(old)) == ()


def shown_everywhere(report):
    """Return the Markdown, the page and the terminal of a report as one text."""
    filled = context(report, [["plot"]] * len(report.analysis.cases), None)
    made = "\n".join(render(name, filled) for name in ("report.md.j2", "report.html.j2"))
    screen = Console(width=200)
    with screen.capture() as caught:
        print_result(screen, report, "report.html")
    return f"{made}\n{caught.get()}"


def test_page_markdown_and_terminal_show_column_and_sentences_once_each():
    counts = dict.fromkeys(("asked_tensors", "asked_elements", "plain_elements"), 4)
    counts |= dict.fromkeys(("plain_tensors", "declined_tensors"), 3)
    plain, four = with_engines(
        study(nodes=(2,), bits=(32, 4)), lambda point, rank: counts if point.bits == 4 else {}
    )
    made = case_of([plain, replace(four, records=_with_error(four.records, 0.03))])
    text = shown_everywhere(report_of(made))
    assert text.count("gradients: 3.0% with 4 bit (NMSE 0.030)") == 3
    assert text.count("The planner sent 3 of 4 tensors") == 3
    assert '<th scope="col">NMSE</th>' in text and "| NMSE |" in text
    assert re.search(r"bytes +NMSE", text)
    assert '<td data-sort="0.03">0.030</td>' in text


def _with_error(records, nmse):
    return tuple({**r, "nmse": nmse} if r["event"] == "final" else r for r in records)


def test_the_words_of_a_case_hold_the_sentences():
    case = case_analysis()
    told = findings(study(), report_of(case).analysis, machine=None).cases[0].coded
    assert told == coded_sentences(case) != ()
