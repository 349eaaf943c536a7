"""A code and an algorithm are added by the steps of docs/design.md, and by nothing else.

The core is compiled for it, which takes minutes.
"""

from __future__ import annotations

import pytest

from tests.adding.scratch import Scratch, Toy, before, documented

pytestmark = [pytest.mark.timeout(1800), pytest.mark.serial]

COARSE = Toy(
    "coarse",
    (
        (
            "csrc/quant/code_list.h",
            "  X(kEden, eden)\n",
            "  X(kEden, eden) \\\n  X(kCoarse, coarse)\n",
        ),
        before(
            "qsgd_hpc/compression.py",
            "def has_choice_of_bits(",
            '''@dataclass(frozen=True)
class Coarse(Lossy):
    """The elements of at least half a bucket's largest magnitude, rounded up to it."""

    scheme = "coarse"
    biased = True

    def _bits(self) -> int:
        return 2


''',
        ),
        before("qsgd_hpc/compression.py", '    "Elias",\n', '    "Coarse",\n'),
        before(
            "tests/reference_schemes.py",
            "@dataclass(frozen=True)\nclass Definition:",
            """def coarse(x: Floats, *_: object) -> tuple[Floats, Codes]:
    top = np.abs(x).max()
    level = np.abs(x) >= np.float32(0.5) * top
    codes = np.where(np.signbit(x), 1 - level, 1 + level)
    return np.array([top], dtype=np.float32), codes.astype(np.uint8)


""",
        ),
        before(
            "tests/reference_schemes.py",
            '    "sign": Definition(',
            '    "coarse": Definition([2], coarse, lambda s, codes, _: (codes - 1) * s[0]),\n',
        ),
        before("docs/compression.md", "| `terngrad` |", "| `coarse` | 2.06 | yes | a toy |\n"),
    ),
)
ROUNDS = """def _through_first(ranks: int, tensors: Tensors, _: Coding | None) -> tuple[Phase, ...]:
    others = np.arange(1, ranks)
    first = np.zeros_like(others)
    sizes = np.full(len(others), sum(count for count, _ in tensors) * FLOAT_BYTES)
    return (
        Phase(1, lambda i: Messages(others, first, sizes), pattern="to first"),
        Phase(1, lambda i: Messages(first, others, sizes), pattern="from first"),
    )


"""
THROUGH_FIRST = Toy(
    "through_first",
    (
        (
            "csrc/collectives/algorithm_list.h",
            "  X(kLeadersSra, leaders_sra)\n",
            "  X(kLeadersSra, leaders_sra) \\\n  X(kThroughFirst, through_first)\n",
        ),
        (
            "qsgd_hpc/env.py",
            '"hierarchical", "leaders",\n',
            '"hierarchical", "leaders",\n    "through_first",\n',
        ),
        before(
            "qsgd_hpc/scaling/predict/schedules.py",
            "_FLAT: dict[str,",
            ROUNDS,
        ),
        before(
            "qsgd_hpc/scaling/predict/schedules.py",
            '    "sra": _sra,\n',
            '    "through_first": _through_first,\n',
        ),
    ),
    command=("docs/site/settings_table.py",),
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """Return a copy to which both have been added, compiled."""
    made = Scratch(tmp_path_factory.mktemp("adding") / "scratch")
    assert made.add(COARSE) == documented("Adding a code", "coarse")
    assert made.add(THROUGH_FIRST) == documented("Adding an algorithm", "through_first")
    made.compile()
    return made


ON_THREADS = """
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from qsgd_hpc import _core, compression
from qsgd_hpc.frameworks.compressors import Choices

world = _core.ThreadWorld(2)

def reduced(rank, values, **how):
    x = np.array(values, np.float32)
    _core.Communicator.over_threads(world, rank).allreduce([x], **how)
    return x.tolist()

def everywhere(mine, **how):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: reduced(rank, mine[rank], **how), range(2)))

print(everywhere([[1, 2, 3], [10, 20, 30]], algorithm="through_first"))
coding = Choices.coarse().coding().spec
print(everywhere([[4, -3, 1], [0, -8, 0]], coding=coding, algorithm="allgather"))
print(compression.from_environment(), "coarse" in dir(Choices))
"""


def test_both_work_on_two_ranks(scratch: Scratch) -> None:
    said = scratch.run("-c", ON_THREADS, QSGD_SCHEME="coarse").splitlines()
    assert said[0] == "[[11.0, 22.0, 33.0], [11.0, 22.0, 33.0]]"
    assert said[1] == "[[4.0, -12.0, 0.0], [4.0, -12.0, 0.0]]"
    assert said[2].startswith("Coarse(")
    assert said[2].endswith(" True")


def test_commands_name_them(scratch: Scratch) -> None:
    assert "through_first" in scratch.run("-m", "qsgd_hpc", "bench", "allreduce", "--help")
    words = ("bench", "codec", "--scheme", "coarse", "--size", "64K", "--threads", "1")
    assert "coarse" in scratch.run("-m", "qsgd_hpc", *words, "--rounds", "1")


def test_both_pass_the_tests_of_all_codes_and_algorithms(scratch: Scratch) -> None:
    whole = ("every_choice", "compression", "accuracy_benchmark", "env")
    files = ["tests/bench/test_words.py", *(f"tests/test_{name}.py" for name in whole)]
    scratch.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "tests/docs/test_design.py")
    of_all = ("quant/test_schemes", "scaling/test_predict_schedules")
    files = ["tests/collectives/test_collectives.py", *(f"tests/{name}.py" for name in of_all)]
    only = ("-k", "coarse or through_first")
    said = scratch.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *only, *files)
    assert " passed" in said
