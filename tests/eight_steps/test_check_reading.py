"""What a script's names mean, whatever way they are bound."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qsgd_hpc.eight_steps.reading import Framework, Script, parse, read
from qsgd_hpc.errors import UsageError


def last(source: Script) -> str:
    """Return the qualified name of what the last call calls."""
    return source.called(max(source.calls, key=source.start))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\ntorch.save(x)", "torch.save"),
        ("import torch.optim as optim\noptim.SGD(p)", "torch.optim.SGD"),
        ("from torch import optim\noptim.SGD(p)", "torch.optim.SGD"),
        ("from torch.optim import SGD\nSGD(p)", "torch.optim.SGD"),
        ("from torch.optim import SGD as S\nS(p)", "torch.optim.SGD"),
        ("import torch.utils.data\ntorch.utils.data.DataLoader(d)", "torch.utils.data.DataLoader"),
        ("from . import tools\ntools.run()", ".tools.run"),
        ("from .tools import run\nrun()", ".tools.run"),
        ("import torch\nS = torch.optim.SGD\nS(p)", "torch.optim.SGD"),
        ("import torch\no = torch.optim.SGD(p)\no.step()", "torch.optim.SGD().step"),
        ("import torch\no = torch.optim.SGD(p)\no = wrap(o)\no.step()", "wrap().step"),
        ("import torch\ndef f(o):\n    o.step()\nf(torch.optim.SGD())", "torch.optim.SGD"),
        ("from x import C\nclass D:\n def a(self):\n  self.c = C()\n def b(self):\n  self.c.d()",
         "x.C().d"),
        ("from x import f\nwith f() as y:\n    y.g()", "x.f().g"),
        ("from x import f\nfor y in f():\n    y.g()", "y.g"),
        ("from x import f, g\na, b = f(), g()\nb.h()", "x.g().h"),
        ("try:\n    import a.b as h\nexcept ImportError:\n    h = None\nh.f()", "a.b.f"),
        ("print(1)", "print"),
        ("x[0].f()", "x[].f"),
        ("import x\nx = x.y\nx.z()", "x.y.z"),
        ("def f(x):\n    x.y()", "x.y"),
        ("from horovod.torch import *\ninit()", "horovod.torch.init"),
    ],
)  # fmt: skip
def test_a_call_has_the_name_of_what_it_calls(text, expected):
    assert last(parse(text)) == expected


def test_a_parameter_is_what_the_only_call_gives_it():
    source = parse(
        "from torch.optim import SGD\ndef train(model, o=None):\n    o.step()\ntrain(m, o=SGD(p))\n"
    )
    (stepped,) = [c for c in source.calls if source.code(c.func) == "o.step"]
    assert source.called(stepped) == "torch.optim.SGD().step"


def test_names_that_mean_each_other_end():
    source = parse("a = b\nb = a\na.f()\nb = b\nb.f()\n")
    assert all(source.called(call) for call in source.calls)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch", {Framework.TORCH}),
        ("import horovod.torch as hvd", {Framework.TORCH}),
        ("from tensorflow import keras\nkeras.Sequential().fit(x)", {Framework.KERAS}),
        ("import tensorflow as tf\nwith tf.GradientTape() as t:\n    pass", {Framework.TF2}),
        ("import tensorflow.compat.v1 as tf\ntf.Session()", {Framework.TF1}),
        ("import tensorflow as tf\ntf.compat.v1.train.MonitoredTrainingSession()", {Framework.TF1}),
        ("import tensorflow as tf\ntf.train.MonitoredTrainingSession()", {Framework.TF1}),
        ("import jax.numpy as jnp", {Framework.JAX}),
        ("import sklearn\nsklearn.svm.SVC().fit(x)", set()),
    ],
)
def test_the_frameworks_are_known(text, expected):
    assert parse(text).frameworks == expected


@pytest.mark.parametrize(
    ("text", "modules", "alias"),
    [
        ("import horovod.torch as hvd", ["horovod.torch"], "hvd"),
        ("import qsgd_hpc.keras as q", ["qsgd_hpc.keras"], "q"),
        ("from horovod import tensorflow as h", ["horovod.tensorflow"], "h"),
        ("import horovod.torch", ["horovod.torch"], "horovod.torch"),
        ("from qsgd_hpc.scaling import record", [], "hvd"),
        ("import torch", [], "hvd"),
    ],
)
def test_the_distributed_module_is_known(text, modules, alias):
    source = parse(text)
    assert [each.module for each in source.distributed] == modules
    assert source.alias == alias


def test_where_a_node_is_and_what_it_is_inside_of():
    source = parse(
        "def f():\n    for x in y:\n        while z:\n            if a:\n"
        "                g(x)\n            else:\n                h(x)\n"
    )
    g, h = source.calls
    assert (source.start(g), source.end(g)) == ((5, 16), (5, 20))
    assert [type(loop).__name__ for loop in source.loops(g)] == ["While", "For"]
    assert [branch.taken for branch in source.branches(g)] == [True]
    assert [branch.taken for branch in source.branches(h)] == [False]
    function = source.function(g)
    assert function is not None and function.name.value == "f"


def test_what_a_loop_iterates_over_is_not_repeated():
    source = parse("for x in f():\n    pass\nelse:\n    g()\nwhile h():\n    pass\n")
    repeated = [source.code(c.func) for c in source.calls if source.loops(c)]
    assert repeated == ["h"]


def test_the_entry_is_the_main_block():
    with_main = parse("import x\nif __name__ == '__main__':\n    x.main()\n")
    assert with_main.entry is with_main.module.body[1]
    without = parse("import x\nx.main()\n")
    assert without.entry is without.module


def test_comments_are_known_by_line():
    assert parse("a = 1  # one\n# two\nb = f(  # three\n)\n").comments == {
        1: "# one",
        2: "# two",
        3: "# three",
    }


def test_assignments_are_in_order_of_the_text():
    names = [each.name for each in parse("b = 1\ndef f():\n    c = 2\na: int = 3\n").assignments]
    assert names == ["b", "c", "a"]


def test_a_notebook_is_answered_with_the_way_to_a_script():
    with pytest.raises(UsageError, match=r"nbconvert --to script train\.ipynb"):
        parse('{"cells": [{"source": ["import torch"]}]}', Path("train.ipynb"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("x = 1\nif x\n    pass\n", "2: not valid Python: expected ':'"),
        ("if 1:\n\tx = 1\n        y = 2\n", "3: not valid Python: inconsistent use of tabs"),
        ("x = 1\nprint x\n", "2: not valid Python: Missing parentheses in call to 'print'"),
        ("x = 1\0\n", "1: not valid Python: source code string cannot contain null bytes"),
    ],
)
def test_a_syntax_error_names_path_and_line_and_reason(tmp_path: Path, text: str, fault: str):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"broken\.py:{re.escape(fault)}"):
        read(path)


def test_a_missing_file_is_a_usage_error(tmp_path: Path):
    with pytest.raises(UsageError, match=r"none\.py: No such file"):
        read(tmp_path / "none.py")


def test_bytes_that_are_no_text_are_a_usage_error(tmp_path: Path):
    path = tmp_path / "bytes.py"
    path.write_bytes(b"x = '\xff'\n")
    with pytest.raises(UsageError, match=r"bytes\.py"):
        read(path)


def test_windows_line_ends_and_latin_1_are_kept(tmp_path: Path):
    path = tmp_path / "old.py"
    path.write_bytes(b"# -*- coding: latin-1 -*-\r\nx = '\xe4'\r\n")
    source = read(path)
    assert source.text.encode(source.encoding) == path.read_bytes()


ODD = "\f\v\x1c\x85\u2028\u2029\U0001f600\t"
SHAPES = (
    "f(1)", "\ff(2)", "\f\ff(3)", "# {}", "x = '{}'; f(4)", 'x = """{}\n{}"""; f(5)', "\f",
    "x = (1,\n\f f(6))", "if f(7):\n    \f  x = f(8)", "x = 1 + \\\n\ff(9)",
)  # fmt: skip


@settings(deadline=None)
@example([("\ff(2)", "", "\r"), ("\f", "", "\n"), ("f(1)", "", "\n")], False)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(SHAPES), st.text(ODD, max_size=3), st.sampled_from(["\n", "\r\n", "\r"])
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_calls_are_where_pythons_parser_has_them(lines, marked):
    text = "".join(line.format(odd, odd).replace("\n", end) + end for line, odd, end in lines)
    source = text.encode("utf-8-sig" if marked else "utf-8")
    found = parse(source)
    assert found.text.encode(found.encoding) == source
    rows = re.split(r"\r\n?|\n", text)
    expected = sorted(
        (node.lineno, len(rows[node.lineno - 1].encode()[: node.col_offset].decode()))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
    )
    assert sorted(found.start(call) for call in found.calls) == expected
    assert all(found.text.startswith("f(", found.offset(place)) for place in expected)
