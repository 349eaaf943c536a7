"""Carry out every collective over the arrays of one library, and save what it returns.

    python tests/gpu/arrays_script.py LIBRARY FOLDER

Values, names and seed are the same for every library, and so is the noise of the codes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

INTEGERS = ("uint8", "int8", "uint16", "int16", "int32", "uint32", "int64")
FLOATS = ("float16", "float32", "float64")  # and bfloat16, where the library has it
COUNT = 3001


class Numpy:
    """Plain arrays."""

    module = "qsgd_hpc.arrays"
    dtypes: tuple[str, ...] = (*INTEGERS, *FLOATS, "bfloat16")

    def __init__(self) -> None:
        self.hvd: Any = importlib.import_module(self.module)

    def array(self, values: NDArray[Any]) -> Any:
        return values

    def values(self, array: Any) -> NDArray[Any]:
        assert isinstance(array, np.ndarray)
        return array

    def call(self, function: Any, array: Any, **options: Any) -> Any:
        return function(array, **options)


class CuPy(Numpy):
    """Plain arrays on a GPU."""

    dtypes = (*INTEGERS, *FLOATS)

    def array(self, values: NDArray[Any]) -> Any:
        import cupy

        return cupy.asarray(values)

    def values(self, array: Any) -> NDArray[Any]:
        import cupy

        assert isinstance(array, cupy.ndarray)
        return cupy.asnumpy(array)


class Jax(Numpy):
    """JAX's arrays, on whatever it computes."""

    module = "qsgd_hpc.jax"

    def __init__(self) -> None:
        super().__init__()
        import jax

        jax.config.update("jax_enable_x64", True)
        self.jax = jax

    def array(self, values: NDArray[Any]) -> Any:
        return self.jax.numpy.asarray(values)

    def values(self, array: Any) -> NDArray[Any]:
        assert array.devices() == {self.jax.local_devices()[0]}
        return np.asarray(array)


class JaxJit(Jax):
    """The same, each call a program of its own."""

    def call(self, function: Any, array: Any, **options: Any) -> Any:
        with self.hvd.translated_errors():
            program = self.jax.jit(lambda x: function(x, **options))
            return self.jax.block_until_ready(program(array))


LIBRARIES = {"numpy": Numpy, "cupy": CuPy, "jax": Jax, "jax.jit": JaxJit}


def dtype_of(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def plain(library: Numpy, dtype: str) -> Iterator[tuple[str, Any]]:
    """Yield the results of what sends values."""
    hvd, call = library.hvd, library.call
    draw = np.random.default_rng(hvd.rank())
    mine = library.array(draw.integers(0, 60, (COUNT, 2)).astype(dtype_of(dtype)))
    rows = library.array(draw.integers(0, 60, (4 * hvd.size(), 3)).astype(dtype_of(dtype)))
    for op in ("Sum", "Average", "Max"):
        options = {"op": getattr(hvd, op), "name": f"{op} {dtype}"}
        yield f"{op} {dtype}", call(hvd.allreduce, mine, **options)
        yield f"{op} of rows {dtype}", call(hvd.reducescatter, rows, **options)
    root = hvd.size() - 1
    yield f"sent {dtype}", call(hvd.broadcast, mine, root_rank=root, name=f"sent {dtype}")
    yield f"gathered {dtype}", call(hvd.allgather, rows, name=f"gathered {dtype}")
    yield f"exchanged {dtype}", call(hvd.alltoall, rows, name=f"exchanged {dtype}")


def coded(library: Numpy, dtype: str) -> Iterator[tuple[str, Any]]:
    """Yield the results of what sends codes, of which each step draws noise of its own."""
    hvd = library.hvd
    codes = [hvd.Compression.qsgd(bits=bits, min_elements=0) for bits in (2, 4, 8)]
    codes.append(hvd.Compression.eden(bits=3, min_elements=0))
    for number, compression in enumerate(codes):
        name = f"code {number} {dtype}"
        for step in range(2):
            draw = np.random.default_rng([hvd.rank(), step])
            mine = library.array(draw.standard_normal(COUNT).astype(dtype_of(dtype)))
            result = library.call(hvd.allreduce, mine, name=name, compression=compression)
            yield f"{name} {step}", result


def main(name: str, folder: str) -> None:
    library = LIBRARIES[name]()
    library.hvd.init()
    results = [each for dtype in library.dtypes for each in plain(library, dtype)] + [
        each for dtype in library.dtypes if "float" in dtype for each in coded(library, dtype)
    ]
    bits = {key: library.values(x) for key, x in results}
    bits = {key: x.view(np.uint16) if x.dtype.name == "bfloat16" else x for key, x in bits.items()}
    np.savez(Path(folder, f"{library.hvd.rank()}.npz"), **bits)
    library.hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
