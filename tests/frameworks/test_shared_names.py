"""Variables of equal names do not share error feedback silently."""

from __future__ import annotations

import warnings

import pytest

from qsgd_hpc.compression import Qsgd
from qsgd_hpc.frameworks.shared_names import warn_of_shared_residual
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.process_sets import global_process_set


class Variable:
    """Stands in for any framework's variable."""


@pytest.mark.parametrize("feedback", [True, False])
def test_two_variables_of_one_name_are_warned_about_if_there_is_error_feedback(feedback):
    basics.init()
    first, second = Variable(), Variable()
    coding = Qsgd(4, error_feedback=feedback).coding()
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
            warn_of_shared_residual(name, variable, coding, global_process_set)
        said.append(len(caught))
    assert said == [0, 0, 0, feedback, 0, feedback]


def test_a_variable_that_is_gone_shares_nothing():
    basics.init()
    coding = Qsgd(2).coding()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            warn_of_shared_residual("gone", Variable(), coding, global_process_set)
            warn_of_shared_residual("gone", Variable(), None, global_process_set)
