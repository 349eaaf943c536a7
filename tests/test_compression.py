"""Which gradients are compressed, how, and what a wrong setting is told."""

from __future__ import annotations

import re
import warnings

import pytest

from qsgd_hpc import compression, env
from qsgd_hpc.compression import (
    Auto,
    Eden,
    Elias,
    Lossy,
    MinMax,
    Nuqsgd,
    Qsgd,
    Sign,
    TernGrad,
    TopK,
    from_environment,
)
from qsgd_hpc.errors import UsageError
from qsgd_hpc.rules import Rule, as_rules, first_match, parse_rules

MATRIX = (64, 100)


def bits_of(settings: Lossy, name: str = "w", shape: tuple[int, ...] = MATRIX) -> int | None:
    coding = settings.coding_for_gradient(name, shape, "float32")
    return None if coding is None else coding.spec.bits


def test_rules_are_read_as_text_and_as_pairs_alike():
    text = parse_rules(" *.bias=32, embed*=8,>1M=2 ,<4k=fp32,")
    pairs = as_rules([("*.bias", 32), ("embed*", "8"), (">1M", 2), Rule("<4k", 32)])
    assert text == pairs
    assert as_rules("") == ()


def test_the_first_rule_that_fits_decides():
    rules = parse_rules("head.*=fp32, *weight=8, >1.5k=2, <10=1")
    assert first_match(rules, "head.weight", 10**6) == 32
    assert first_match(rules, "body.weight", 10**6) == 8
    assert first_match(rules, "body.scale", 1501) == 2
    assert first_match(rules, "body.scale", 1500) is None
    assert first_match(rules, "body.scale", 9) == 1


@pytest.mark.parametrize("text", ["embed*", "w=0", "w=9", "w=x", "=4", "w=", "w=-4"])
def test_a_wrong_rule_is_quoted_with_the_form_to_use(text):
    with pytest.raises(UsageError, match=f"rule '{re.escape(text)}': .*1 to 8, 32 or fp32"):
        parse_rules(text)


def test_a_wrong_size_or_pair_is_told_its_form():
    with pytest.raises(UsageError, match="such as >1M"):
        parse_rules(">big=4")
    with pytest.raises(UsageError, match="a pair such as"):
        as_rules(["embed*=8"])


def test_small_and_one_dimensional_gradients_stay_exact_unless_a_rule_says_otherwise():
    plain = Qsgd(min_elements=1000)
    assert bits_of(plain) == 4
    assert bits_of(plain, shape=(6400,)) is None
    assert bits_of(plain, shape=(10, 99)) is None
    ruled = Qsgd(min_elements=1000, rules="*.bias=8, head=32, >5k=2")
    assert bits_of(ruled, "fc.bias", (8,)) == 8
    assert bits_of(ruled, "head") is None
    assert bits_of(ruled, "w", (6400,)) == 2


def test_only_floating_gradients_are_compressed():
    settings = Qsgd(rules="*=4")
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert settings.coding_for_gradient("w", MATRIX, dtype) is not None
    assert settings.coding_for_gradient("w", MATRIX, "int64") is None


@pytest.mark.parametrize(
    ("settings", "on"),
    [(Qsgd(1), True), (Qsgd(2), True), (Qsgd(4), False), (Qsgd(4, error_feedback=True), True),
     (Qsgd(2, error_feedback=False), False), (Sign(), True), (TernGrad(), True), (TopK(), True),
     (MinMax(2), True), (Nuqsgd(8), False),
     (Elias(), False), (Elias(4), True)],
)  # fmt: skip
def test_error_feedback_is_on_where_it_is_needed(settings, on):
    assert settings.feeds_back is on
    assert settings.coding().error_feedback is on
    assert not settings.coding(lasting=False).error_feedback


def test_rules_decide_error_feedback_by_their_own_bits():
    coding = Qsgd(8, rules="*=2").coding_for_gradient("w", MATRIX, "float32")
    assert coding is not None
    assert coding.error_feedback


def test_one_bit_is_the_sign_code():
    assert Qsgd(1).coding().spec == Sign().coding().spec
    assert "sign" in repr(Qsgd(1).coding().spec)
    assert bits_of(TopK(rules="*=4")) == 4


def test_nearest_rounding_warns_once_and_feeds_back():
    compression._warn_of_bias.cache_clear()
    with pytest.warns(UserWarning, match="biased"):
        settings = Qsgd(8, rounding="nearest")
    assert settings.feeds_back
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Qsgd(4, rounding="nearest")


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [(lambda: Qsgd(0), "bits=0.*1 to 8"), (lambda: Qsgd(9), "bits=9.*1 to 8"),
     (lambda: Qsgd(2.5), "1 to 8"), (lambda: Qsgd(norm="min"), "'max' or 'l2'"),
     (lambda: Qsgd(rounding="up"), "'stochastic' or 'nearest'"),
     (lambda: MinMax(bucket_size=100), "multiple of 64"),
     (lambda: TopK(0.0), "ratio=0.0.*above 0"), (lambda: TopK(ratio=1.5), "ratio=1.5"),
     (lambda: Sign(nmse_budget=0), "nmse_budget=0.*above 0"),
     (lambda: Sign(error_feedback="on"), "True, False, or None")],
)  # fmt: skip
def test_wrong_settings_name_value_and_choices(wrong, remedy):
    with pytest.raises(UsageError, match=remedy):
        wrong()


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_number_of_bits_is_a_setting(bits):
    assert Qsgd(bits).bits == bits


def from_variables(monkeypatch, **variables: str) -> Lossy | None:
    for name in env.TABLE:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return from_environment()


def test_environment_chooses_scheme_bits_and_all_else(monkeypatch):
    assert from_variables(monkeypatch) is None
    assert from_variables(monkeypatch, QSGD_BITS="32", QSGD_SCHEME="sign") is None
    assert from_variables(monkeypatch, QSGD_BITS="3") == Qsgd(3)
    assert from_variables(monkeypatch, QSGD_BITS=" Auto") == Auto()
    assert from_variables(monkeypatch, QSGD_SCHEME="topk") == TopK()
    assert from_variables(monkeypatch, QSGD_SCHEME="minmax", QSGD_BITS="8") == MinMax(8)
    everything = from_variables(
        monkeypatch, QSGD_BITS="4", QSGD_RULES="embed*=8", QSGD_NMSE_BUDGET="0.01",
        QSGD_ERROR_FEEDBACK="on", QSGD_MIN_ELEMENTS="5",
    )  # fmt: skip
    assert everything == Qsgd(
        4, rules=[("embed*", 8)], nmse_budget=0.01, error_feedback=True, min_elements=5
    )


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [({"QSGD_BITS": "9"}, "1 to 8, 32 .plain float32. or auto"),
     ({"QSGD_BITS": "4", "QSGD_RULES": "w"}, "QSGD_RULES"),
     ({"QSGD_BITS": "4", "QSGD_ERROR_FEEDBACK": "maybe"}, "auto, on or off"),
     ({"QSGD_BITS": "4", "QSGD_NMSE_BUDGET": "-1"}, "above 0"),
     ({"QSGD_BITS": "auto", "QSGD_SCHEME": "topk"}, "fixed number of bits"),
     ({"QSGD_BITS": "4", "QSGD_SCHEME": "terngrad"}, "fixed number of bits")],
)  # fmt: skip
def test_wrong_variables_are_named_with_the_remedy(monkeypatch, variables, remedy):
    with pytest.raises(UsageError, match=remedy):
        from_variables(monkeypatch, **variables)


@pytest.mark.parametrize("kind", [Qsgd, Eden, MinMax, Nuqsgd, Elias])
def test_open_bits_begin_with_the_most_and_are_fed_back_only_if_asked(kind):
    coding = kind("auto", rules="head=4").coding_for_gradient("w", MATRIX, "float32")
    assert (coding.auto_bits, coding.spec.bits, coding.error_feedback) == (True, 8, False)
    assert kind("auto", error_feedback=True).coding().error_feedback
    ruled = kind("auto", rules="head=4").coding_for_gradient("head", MATRIX, "float32")
    assert (ruled.auto_bits, ruled.spec.bits) == (False, 4)
    assert kind("auto").coding_for_gradient("w", (5,), "float32") is None
    assert not kind(8).coding().auto_bits


def test_an_open_code_is_qsgd_until_the_planner_knows_better(monkeypatch):
    for chosen in (Auto(rules="head=4"), from_variables(monkeypatch, QSGD_BITS="auto")):
        coding = chosen.coding()
        assert (coding.auto_code, coding.auto_bits, coding.error_feedback) == (True, True, False)
        assert (coding.spec.scheme, coding.spec.bits) == ("qsgd", 8)
    ruled = Auto(rules="head=4").coding_for_gradient("head", MATRIX, "float32")
    assert ruled == Qsgd(4).coding()
    assert from_variables(monkeypatch, QSGD_BITS="auto", QSGD_SCHEME="qsgd") == Qsgd("auto")
    with pytest.raises(UsageError, match=r"auto\(bits=4\): choose a code"):
        Auto(bits=4)


@pytest.mark.parametrize("settings", [{"norm": "l2"}, {"bucket_size": 192}])
def test_settings_that_eden_lacks_leave_qsgd(settings):
    coding = Auto(**settings).coding()
    assert coding.auto_bits
    assert not coding.auto_code


def test_where_the_planner_knows_nothing_bits_must_be_given():
    Qsgd(4).require_fixed_length("QSGDState")
    with pytest.raises(UsageError, match=r"QSGDState\(bits='auto'\).*choose 1 to 8"):
        Qsgd("auto").require_fixed_length("QSGDState")
    with pytest.raises(UsageError, match="QSGDState: elias codes have a variable length"):
        Elias().require_fixed_length("QSGDState")


@pytest.mark.parametrize(
    ("text", "value"),
    [("on", "on"), ("1", "on"), ("off", "off"), ("false", "off"), (" Advise ", "advise")],
)
def test_the_planner_is_on_off_or_advises(monkeypatch, text, value):
    monkeypatch.delenv("QSGD_PLANNER")
    assert env.get("QSGD_PLANNER") == "advise"
    monkeypatch.setenv("QSGD_PLANNER", text)
    assert env.get("QSGD_PLANNER") == value


def test_a_wrong_planner_is_told_what_there_is(monkeypatch):
    monkeypatch.setenv("QSGD_PLANNER", "maybe")
    with pytest.raises(UsageError, match="on, off or advise"):
        env.get("QSGD_PLANNER")
