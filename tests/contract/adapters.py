"""What the contract suite must know of a framework: one class for each.

A framework to come adds a class here; the tests of ``test_collectives*.py`` then hold for it.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np

from tests.gpu.memory import has_cupy, has_device

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")

# Of one rounding, relative.
PRECISION = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


class Adapter(Protocol):
    """A framework's tensors, and its module with the collectives."""

    hvd: ModuleType
    dtypes: tuple[str, ...]
    has_handles: bool
    """Whether there are asynchronous calls, as ``allreduce_async``."""

    def tensor(self, values: Any, dtype: str) -> Any:
        """Return a tensor of these values; dtypes are named as numpy's, and bfloat16."""

    def array(self, tensor: Any) -> np.ndarray:
        """Return the values; floating ones in at least float32."""

    def dtype(self, tensor: Any) -> str:
        """Return the name of a tensor's type."""


class Torch:
    """PyTorch."""

    has_handles = True

    def __init__(self) -> None:
        import torch

        import qsgd_hpc.torch as hvd

        self.hvd = hvd
        self.dtypes = ("bool", "uint16", "uint32", *INTEGERS, *FLOATS)
        self._torch = torch

    def tensor(self, values: Any, dtype: str) -> Any:
        return self._torch.from_numpy(np.array(values)).to(getattr(self._torch, dtype))

    def array(self, tensor: Any) -> np.ndarray:
        widen = tensor.dtype in (self._torch.float16, self._torch.bfloat16)
        return (tensor.float() if widen else tensor).numpy()

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).removeprefix("torch.")


class TorchOnDevice(Torch):
    """PyTorch, with tensors on a GPU."""

    def tensor(self, values: Any, dtype: str) -> Any:
        return super().tensor(values, dtype).to("cuda")

    def array(self, tensor: Any) -> np.ndarray:
        assert tensor.is_cuda, "a result has left the GPU"
        return super().array(tensor.cpu())


class Numpy:
    """Plain arrays; bfloat16 is ml_dtypes', where that is installed."""

    has_handles = True

    def __init__(self) -> None:
        import qsgd_hpc.arrays as hvd

        self.hvd = hvd
        self.dtypes = ("bool", "uint16", "uint32", *INTEGERS, *FLOATS)
        try:
            import ml_dtypes

            self._bfloat16 = np.dtype(ml_dtypes.bfloat16)
        except ImportError:
            self.dtypes = tuple(each for each in self.dtypes if each != "bfloat16")

    def tensor(self, values: Any, dtype: str) -> Any:
        return np.array(values).astype(self._bfloat16 if dtype == "bfloat16" else dtype)

    def array(self, tensor: Any) -> np.ndarray:
        return tensor.astype(np.float32) if tensor.dtype.itemsize == 2 else tensor

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype)


class CuPy(Numpy):
    """Arrays on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        import cupy

        self.dtypes = tuple(each for each in self.dtypes if each != "bfloat16")
        self._cupy = cupy

    def tensor(self, values: Any, dtype: str) -> Any:
        return self._cupy.asarray(super().tensor(values, dtype))

    def array(self, tensor: Any) -> np.ndarray:
        assert isinstance(tensor, self._cupy.ndarray), "a result has left the GPU"
        return super().array(self._cupy.asnumpy(tensor))


class TensorFlow:
    """TensorFlow, eagerly."""

    has_handles = False

    def __init__(self) -> None:
        import tensorflow as tf

        import qsgd_hpc.tensorflow as hvd

        self.hvd = hvd
        self.dtypes = ("bool", "uint16", "uint32", *INTEGERS, *FLOATS)
        self._tf = tf

    def tensor(self, values: Any, dtype: str) -> Any:
        return self._tf.cast(self._tf.constant(np.array(values)), dtype)

    def array(self, tensor: Any) -> np.ndarray:
        widen = tensor.dtype in (self._tf.float16, self._tf.bfloat16)
        return (self._tf.cast(tensor, self._tf.float32) if widen else tensor).numpy()

    def dtype(self, tensor: Any) -> str:
        return tensor.dtype.name


class MXNet:
    """MXNet's arrays with numpy's semantics, which know scalars and empty arrays."""

    has_handles = False

    def __init__(self) -> None:
        import mxnet

        import qsgd_hpc.mxnet as hvd

        mxnet.npx.set_np()
        self.hvd = hvd
        self.dtypes = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
        self._np = mxnet.np

    def tensor(self, values: Any, dtype: str) -> Any:
        return self._np.array(np.array(values), dtype=dtype)

    def array(self, tensor: Any) -> np.ndarray:
        widen = tensor.dtype == np.float16
        return tensor.asnumpy().astype(np.float32) if widen else tensor.asnumpy()

    def dtype(self, tensor: Any) -> str:
        return np.dtype(tensor.dtype).name


class Jax:
    """JAX, on concrete arrays."""

    has_handles = True

    def __init__(self) -> None:
        import jax

        import qsgd_hpc.jax as hvd

        jax.config.update("jax_enable_x64", True)
        self.hvd = hvd
        self.dtypes = ("bool", "uint16", "uint32", *INTEGERS, *FLOATS)
        self._jax = jax

    def tensor(self, values: Any, dtype: str) -> Any:
        return self._jax.numpy.asarray(np.array(values)).astype(dtype)

    def array(self, tensor: Any) -> np.ndarray:
        widen = tensor.dtype.name in ("float16", "bfloat16")
        return np.asarray(tensor.astype("float32") if widen else tensor)

    def dtype(self, tensor: Any) -> str:
        return tensor.dtype.name


class JaxJit(Jax):
    """JAX, each call a program of its own."""

    has_handles = False

    COMPILED = (
        "allreduce",
        "grouped_allreduce",
        "allgather",
        "grouped_allgather",
        "broadcast",
        "reducescatter",
        "grouped_reducescatter",
        "alltoall",
    )

    def __init__(self) -> None:
        super().__init__()
        # One of each way through the core; each takes many compilations.
        self.dtypes = ("bool", "int32", "uint32", "bfloat16", "float32", "float64")
        plain = self.hvd
        compiled = {name: self._compiled(getattr(plain, name)) for name in self.COMPILED}
        for name in ("allgather", "grouped_allgather"):
            compiled[name] = self._telling_rows(compiled[name])
        compiled["alltoall"] = self._telling_splits(compiled["alltoall"])
        # What has no meaning in a program, such as handles, is not there.
        names = [n for n in plain.__all__ if not n.endswith("_async") and n != "synchronize"]
        facts = {name: getattr(plain, name) for name in names}
        self.hvd = SimpleNamespace(**{**facts, **compiled})  # type: ignore[assignment]
        self._plain = plain

    def _compiled(self, function: Any) -> Any:
        def call(tensors: Any, *arguments: Any, **options: Any) -> Any:
            program = self._jax.jit(lambda t: function(t, *arguments, **options))
            with self._plain.translated_errors():
                return self._jax.block_until_ready(program(tensors))

        return call

    def _telling_rows(self, function: Any) -> Any:
        """Have the ranks tell each other their rows, which a program must know beforehand."""

        def call(tensors: Any, *arguments: Any, **options: Any) -> Any:
            many = isinstance(tensors, list)
            mine = [len(t) if t.ndim else 1 for t in (tensors if many else [tensors])]
            sets = options.get("process_set", self._plain.global_process_set)
            everyone = self._plain.allgather_object(mine, process_set=sets)
            rows = list(zip(*everyone, strict=True))
            return function(tensors, *arguments, **options, rows=rows if many else rows[0])

        return call

    def _telling_splits(self, function: Any) -> Any:
        def call(tensor: Any, splits: Any = None, **options: Any) -> Any:
            if splits is None:
                return function(tensor, **options)
            mine = [float(n) for n in splits]
            fits = len(mine) == self._plain.size() and sum(mine) == len(tensor) and min(mine) >= 0
            whole = all(n.is_integer() for n in mine)
            if not (fits and whole):  # which this rank finds out by itself
                return function(tensor, mine, **options, received_splits=mine)
            everyone = self._plain.allgather_object(mine)
            received = [sent[self._plain.rank()] for sent in everyone]
            return function(tensor, mine, **options, received_splits=received)

        return call


ADAPTERS = {
    "torch": Torch,
    "numpy": Numpy,
    "tensorflow": TensorFlow,
    "jax": Jax,
    "jax.jit": JaxJit,
}
if has_device():
    ADAPTERS["torch.cuda"] = TorchOnDevice
if has_cupy():
    ADAPTERS["cupy"] = CuPy
if find_spec("mxnet"):  # in an environment of its own, without the others
    ADAPTERS["mxnet"] = MXNet
