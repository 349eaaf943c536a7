"""Variables of equal names do not share error feedback silently."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest

from qsgd_hpc.compression import Qsgd
from qsgd_hpc.frameworks.shared_names import claim_residual
from qsgd_hpc.runtime import basics, feedback
from qsgd_hpc.runtime.process_sets import global_process_set


class Variable:
    """Stands in for any framework's variable."""


class Cyclic(Variable):
    """One that only the garbage collector frees."""

    def __init__(self):
        self.own = self


@pytest.fixture
def forgotten(monkeypatch):
    """Return the list of names that the engine is told to forget."""
    basics.init()
    feedback.forget_ownerless()
    names = []
    engine = basics.context().engine

    class Telling:
        def __getattr__(self, name):
            return getattr(engine, name)

        def forget_owed(self, owed):
            names.extend(owed)

    job = dataclasses.replace(basics.context(), engine=Telling())
    monkeypatch.setattr(basics, "context", lambda: job)
    return names


def claim(name, variable):
    claim_residual(name, variable, Qsgd(2).coding(), global_process_set)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_two_variables_of_one_name_are_warned_about_if_there_is_error_feedback(error_feedback):
    basics.init()
    first, second = Variable(), Variable()
    coding = Qsgd(4, error_feedback=error_feedback).coding()
    said = []
    for name, variable in [
        ("kernel", first),
        ("kernel", first),
        ("bias", second),
        ("kernel", second),
        ("kernel", second),
        ("kernel", first),
    ]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            claim_residual(name, variable, coding, global_process_set)
        said.append(len(caught))
    assert said == [0, 0, 0, error_feedback, 0, error_feedback]


def test_a_variable_that_is_gone_shares_nothing():
    basics.init()
    coding = Qsgd(2).coding()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            claim_residual("gone", Variable(), coding, global_process_set)
            claim_residual("gone", Variable(), None, global_process_set)


@pytest.mark.parametrize("kind", [Variable, Cyclic])
def test_a_residual_ends_with_its_variable(forgotten, kind):
    claim("heir", kind())
    second = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        claim("heir", second)
        claim("heir", second)
    assert forgotten == ["allreduce.heir"]


def test_residuals_are_freed_when_any_other_variable_is_first_reduced(forgotten):
    claim("freed", Variable())
    assert forgotten == []
    claim("another", Variable())
    assert forgotten == ["allreduce.freed"]


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_residual_that_was_loaded_is_the_next_variables(forgotten, dies):
    first = Variable()
    claim("loaded", first)
    if dies == "before":
        del first
    with pytest.warns(UserWarning, match="does not add it"):  # this job has one rank
        feedback.load_error_feedback_state({"loaded": np.ones(3, np.float32)})
    first = second = Variable()
    claim("loaded", second)
    assert forgotten == []
    claim("loaded", second)
    del first, second
    claim("after", Variable())
    assert forgotten == ["allreduce.loaded"]
    feedback.load_error_feedback_state({})


def test_a_residual_is_kept_while_another_variable_of_its_name_lives(forgotten):
    first, second = Variable(), Variable()
    claim("taken", first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        claim("taken", second)
    del first
    claim("other", Variable())
    assert forgotten == []
