"""Arrays on a GPU, of CuPy and of JAX, in and outside of ``jit``: on real ranks.

Where there is no GPU, the kernels' twin takes the host's arrays for a device's. A GPU must give the
bits that the twin does.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.arrays_script import FLOATS
from tests.gpu.memory import has_cupy, has_jax
from tests.processes import without_settings

pytestmark = pytest.mark.serial

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("arrays_script.py")
Results = list[Mapping[str, Any]]
Reduce = Callable[..., Results]

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
ON_GPU = [
    pytest.param("cupy", marks=pytest.mark.skipif(not has_cupy(), reason="no GPU with CuPy")),
    pytest.param("jax", marks=pytest.mark.skipif(not has_jax(), reason="no GPU with JAX")),
    pytest.param("jax.jit", marks=pytest.mark.skipif(not has_jax(), reason="no GPU with JAX")),
]


def on_ranks(ranks: int, *command: str, **environ: str) -> str:
    """Run a command on ranks of this Python; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "qsgd_hpc", "run", "-np", str(ranks), sys.executable, *command],
        cwd=ROOT,
        env={**without_settings(), "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-9000:]
    return done.stdout


@pytest.fixture
def reduce(tmp_path: Path) -> Reduce:
    """Return reduce(library, ranks, **environ), which returns the results by rank."""

    def run(library: str, ranks: int, **environ: str) -> Results:
        folder = tmp_path / f"{library} {len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        on_ranks(ranks, str(SCRIPT), library, str(folder), **environ)
        return [dict(np.load(folder / f"{rank}.npz")) for rank in range(ranks)]

    return run


@pytest.fixture
def over_twin(twin: Path, reduce: Reduce) -> Reduce:
    """Return the same where the host's memory is a device's."""

    def run(library: str, ranks: int) -> Results:
        return reduce(library, ranks, QSGD_GPU_LIBRARY=str(twin), JAX_PLATFORMS="cpu")

    return run


def assert_same_bits(found: Results, wanted: Results) -> None:
    for mine, other in zip(found, wanted, strict=True):
        assert {f"code 0 {dtype} 1" for dtype in FLOATS} <= set(mine) <= set(other)
        for key, values in mine.items():
            assert values.dtype == other[key].dtype, key
            np.testing.assert_array_equal(values, other[key], err_msg=key, strict=True)


@needs_jax
def test_every_library_gets_the_same_bits(over_twin: Reduce) -> None:
    wanted = over_twin("numpy", 2)
    for library in ("jax", "jax.jit"):
        assert_same_bits(over_twin(library, 2), wanted)


def test_a_device_has_coded_what_it_holds(over_twin: Reduce, reduce: Reduce) -> None:
    """The noise of its kernels is not that of the host."""
    host = reduce("numpy", 2, QSGD_GPU_LIBRARY="none")
    for mine, other in zip(over_twin("numpy", 2), host, strict=True):
        for key, values in mine.items():
            noisy = key.startswith("code") and not key.startswith("code 3")  # eden draws none
            assert np.array_equal(values, other[key]) != noisy, key


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("library", ON_GPU)
def test_a_gpu_gives_the_bits_of_the_twin(
    over_twin: Reduce, reduce: Reduce, library: str, ranks: int
) -> None:
    assert_same_bits(reduce(library, ranks), over_twin("numpy", ranks))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("library", ON_GPU[:2])
def test_what_holds_for_arrays_on_a_gpu(tmp_path: Path, library: str, ranks: int) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.ranks", "--timeout", "120")
    files = [f"tests/contract/test_{name}.py" for name in ("arrays_device", "collectives")]
    printed = on_ranks(
        ranks, "-m", "pytest", *options, *files, "-k", library, RANKS_FOLDER=str(tmp_path)
    )
    assert len(re.findall(r"\d{2} passed", printed)) == ranks, printed[-2000:]
