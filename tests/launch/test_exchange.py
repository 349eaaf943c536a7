"""Functions that travel to the ranks of ``qsgd_hpc.run``."""

from __future__ import annotations

import pickle
import traceback

import cloudpickle
import pytest

from qsgd_hpc.launch.exchange import dumps_by_value


def make():
    factor = 3

    class Local:
        def fail(self):
            raise KeyError("in a class")

    def outer(x):
        def inner():
            if x > 1:
                raise KeyError("in a closure")
            return factor * x

        return inner() if x else Local().fail()

    return outer


def sent(function):
    """Return the function as a rank gets it, by value as from a script."""
    module = __import__(__name__, fromlist=["make"])
    cloudpickle.register_pickle_by_value(module)
    try:
        return pickle.loads(dumps_by_value(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.parametrize(
    ("argument", "line"),
    ((2, 'raise KeyError("in a closure")'), (0, 'raise KeyError("in a class")')),
)
def test_tracebacks_show_the_lines_of_the_script(argument, line):
    function = sent(make())
    assert function(1) == 3
    with pytest.raises(KeyError) as raised:
        function(argument)
    text = "".join(traceback.format_exception(raised.value))
    assert line in text
    assert f'File "{__file__}"' in text
