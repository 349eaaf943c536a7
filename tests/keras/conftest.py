"""What ``qsgd_hpc.keras`` promises, on the backend that ``KERAS_BACKEND`` names.

Runs as plain ``pytest`` on one rank; ``tests/mpi/test_keras.py`` runs it on more.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from qsgd_hpc.runtime import basics
from tests.contract.conftest import end_job

__all__ = ["end_job"]

BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")

if not all(find_spec(name) for name in ("keras", BACKEND)):
    collect_ignore_glob = ["test_*.py"]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("serial")  # the gate runs some of them in test_contract.py, on two ranks


@pytest.fixture(scope="module", autouse=True)
def job():
    """A job, whatever the tests of other folders have left."""
    basics.init()
