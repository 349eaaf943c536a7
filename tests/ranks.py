"""A pytest plugin (``-p tests.ranks``) for suites that every rank of a job runs in the same order.

A rank whose test fails ends at once and with it the job, because the others may be waiting for it
in that very test; what failed stands on its stderr, before anything that follows from it. So does
where a rank is in a test that takes too long (pytest's ``--timeout``).
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# pytest points fd 2 at a file of its own while a test runs; what a rank says at its end must not
# be lost in there, so this is the stderr from before.
_STDERR = os.fdopen(os.dup(2), "w")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # pytest cleans up folders of earlier runs; ranks that do so at once trip over each other.
    if config.option.basetemp is None:
        # A rank that ends at once cleans up nothing: its folder lies in one that somebody owns.
        own = Path(os.environ.get("RANKS_FOLDER", tempfile.gettempdir())) / f"ranks-{os.getpid()}"
        config.option.basetemp = own
        config.add_cleanup(functools.partial(shutil.rmtree, own, ignore_errors=True))


def pytest_runtest_logreport(report):
    if not report.failed:
        return
    parts = [f"{report.nodeid} failed in its {report.when}", report.longreprtext]
    parts += [text for _, text in report.sections]
    sys.__stdout__.flush()
    _STDERR.write("\n".join(parts) + "\n")
    _STDERR.flush()
    os._exit(1)
