"""Functions of hvd whose parentheses were forgotten are found, and those given away are not."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from qsgd_hpc.eight_steps.check import check, fix
from qsgd_hpc.eight_steps.reading import parse

BEGIN = "import horovod.torch as hvd\nfrom horovod.tensorflow import local_rank, size_op as ops\n"
BEGIN += "hvd.init()\n"


def found(text: str) -> list[str]:
    return [each.reason for each in check(parse(BEGIN + text)) if each.rule.id == "QH103"]


MISSING = [
    ("x = hvd.rank == 0", "x = hvd.rank() == 0"),
    ("x = 0 != hvd.cross_rank", "x = 0 != hvd.cross_rank()"),
    ("x = (hvd.rank) in (0, 1)", "x = (hvd.rank()) in (0, 1)"),
    ("x = 0 <= local_rank < 4", "x = 0 <= local_rank() < 4"),
    ("if not hvd.rank: x = 1", "if not hvd.rank(): x = 1"),
    ("if hvd.mpi_built: x = 1", "if hvd.mpi_built(): x = 1"),
    ("while a and hvd.is_initialized: x = 1", "while a and hvd.is_initialized(): x = 1"),
    ("x = 1 if local_rank else 2", "x = 1 if local_rank() else 2"),
    ("x = hvd.rank if a else 0", "x = hvd.rank() if a else 0"),
    ("x = [y for y in z if hvd.rank]", "x = [y for y in z if hvd.rank()]"),
    ("lr = 0.1 * hvd.size", "lr = 0.1 * hvd.size()"),
    ("lr *= hvd.size", "lr *= hvd.size()"),
    ("x = 2 * ops", "x = 2 * ops()"),
    ("x = f'{hvd.rank} of {hvd.size:3}'", "x = f'{hvd.rank()} of {hvd.size():3}'"),
    ("x = '%d %d' % (hvd.rank, hvd.size)", "x = '%d %d' % (hvd.rank(), hvd.size())"),
    ("x = '{}'.format(hvd.rank)", "x = '{}'.format(hvd.rank())"),
    ("x = str(hvd.rank)", "x = str(hvd.rank())"),
    ("x = y[hvd.rank::hvd.size]", "x = y[hvd.rank()::hvd.size()]"),
    ("x = gpus[local_rank]", "x = gpus[local_rank()]"),
    (
        "x = DistributedSampler(y, num_replicas=hvd.size, rank=hvd.rank)",
        "x = DistributedSampler(y, num_replicas=hvd.size(), rank=hvd.rank())",
    ),
    ("x = y.shard(hvd.size, hvd.rank)", "x = y.shard(hvd.size(), hvd.rank())"),
    ("x = any_one(num_replicas=hvd.size)", "x = any_one(num_replicas=hvd.size())"),
    ("r = hvd.rank\nx = r == 0", "r = hvd.rank\nx = r() == 0"),
    ("x = hvd.add_process_set([0]).rank == 0", "x = hvd.add_process_set([0]).rank() == 0"),
]
DOUBTFUL = ["hvd.shutdown", "hvd.barrier", "r = 0\nif a:\n  r = hvd.rank\nr + 1"]
MEANT = [
    "x = hvd.rank() == 0",
    "x = hvd.rank is None or callable(hvd.rank) or hasattr(hvd, 'rank')",
    "x = map(hvd.rank, y)",
    "x = partial(hvd.rank)",
    "x = Logger(hvd.rank, rank_fn=hvd.rank, rank=hvd.rank)",
    "x = [hvd.rank, hvd.size], {'rank': hvd.rank}",
    "x = lambda: hvd.rank",
    "def get_rank():\n    return hvd.rank",
    "x = hvd.rank.__name__ == 'rank'",
    "rank = hvd.rank()\nx = rank == 0",
    "rank = 0\nx = rank == 0",
    "def f(rank):\n    return rank == 0",
    "class A:\n    def __init__(self):\n        self.rank = hvd.rank()\n"
    "    def b(self):\n        return self.rank == 0",
    "from torch import distributed\nx = distributed.rank == 0",
    "x = hvd.Average == 0 or hvd.elastic",
]


def functions(texts: Iterable[str]) -> str:
    """Return a script with each text in a function of its own."""
    return "\n".join(f"def f{n}():\n{textwrap.indent(each, '  ')}" for n, each in enumerate(texts))


def test_parentheses_that_are_missing_are_put_there():
    text, expected = (functions(several) for several in zip(*MISSING, strict=True))
    assert fix(parse(BEGIN + text)).script.text == BEGIN + expected


def test_what_may_be_meant_otherwise_is_left_to_the_author():
    text = functions(DOUBTFUL)
    assert len(found(text)) == len(DOUBTFUL)
    assert fix(parse(BEGIN + text)).script.text == BEGIN + text


def test_init_that_is_not_called_is():
    text = "import horovod.torch as hvd\nhvd.init{}\nx = hvd.rank()\n"
    assert fix(parse(text.format(""))).script.text == text.format("()")


def test_functions_that_are_meant_as_such_are_left_alone():
    assert found(functions(MEANT)) == []


def test_the_reason_says_what_happens_instead():
    assert found(
        "a = hvd.rank == 0\nb = hvd.rank != 0\nc = not hvd.rank\nhvd.size > 1\nhvd.init"
    ) == [
        "hvd.rank is a function: hvd.rank == 0 is never true",
        "hvd.rank is a function: hvd.rank != 0 is always true",
        "hvd.rank is a function, which is always true",
        "hvd.size is a function, which has no order",
        "hvd.init does nothing, because it is not called",
    ]
