"""ProcessSet objects before any rank has started."""

from __future__ import annotations

import numpy as np
import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics, process_sets
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set


@pytest.fixture(autouse=True)
def no_job():
    """No rank has started, whatever the modules of other tests do when they are imported."""
    basics.shutdown()


def test_ranks_are_kept_ascending():
    assert ProcessSet([3, np.int64(1), 2]).ranks == [1, 2, 3]
    assert ProcessSet(range(2)).ranks == [0, 1]


@pytest.mark.parametrize("wrong", [[], [1, 1], [-1], [0.5], [True], ["0"]])
def test_ranks_that_cannot_be_are_named(wrong):
    with pytest.raises(UsageError, match=r"ProcessSet\(\[.*each once"):
        ProcessSet(wrong)
    with pytest.raises(UsageError, match=r"ProcessSet\(3\): pass a list"):
        ProcessSet(3)


def test_unregistered_set_knows_only_its_ranks():
    new = ProcessSet([0, 1])
    assert (new.process_set_id, new.size(), new.rank(), new.included()) == (None,) * 4
    assert repr(new) == "ProcessSet(ranks=[0, 1], process_set_id=None)"


def test_global_set_is_number_0_and_empty_before_init():
    assert global_process_set.process_set_id == 0
    assert global_process_set.ranks is None
    assert global_process_set.size() is None
    assert global_process_set.included() is None


def test_a_misspelt_choice_of_sets_is_named():
    with pytest.raises(UsageError, match=r"process_sets='dynmic': .*\"dynamic\""):
        basics.init(process_sets="dynmic")


def test_sets_need_a_running_job():
    for call in (process_sets.add_process_set, process_sets.remove_process_set):
        with pytest.raises(UsageError, match=r"call hvd\.init"):
            call(ProcessSet([0]))
