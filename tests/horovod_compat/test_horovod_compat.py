"""``import horovod`` means this package, however a program is started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qsgd_hpc.horovod_compat import FOLDER, HorovodFinder

ROOT = Path(__file__).parents[2]


def python(*arguments: str, path: tuple[Path, ...] = (FOLDER, ROOT), **environ: str):
    """Run Python with a PYTHONPATH, as a rank of ``qsgd-hpc run --horovod`` has one."""
    folders = os.pathsep.join(map(str, path))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": folders, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def said(code: str, **options) -> str:
    done = python("-c", code, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def other(tmp_path):
    """A folder with another Horovod in it."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'the other'\n")
    return tmp_path


def test_horovod_modules_are_this_packages_own():
    pairs = {
        "horovod.torch": "qsgd_hpc.torch",
        "horovod.torch.mpi_ops": "qsgd_hpc.torch",
        "horovod.torch.compression": "qsgd_hpc.torch.compression",
        "horovod.torch.elastic.sampler": "qsgd_hpc.torch.elastic",
        "horovod.torch.elastic.state": "qsgd_hpc.torch.elastic",
        "horovod.torch.functions": "qsgd_hpc.torch.functions",
        "horovod.torch.optimizer": "qsgd_hpc.torch.optimizer",
        "horovod.torch.sync_batch_norm": "qsgd_hpc.torch.sync_batch_norm",
        "horovod.common.process_sets": "qsgd_hpc.runtime.process_sets",
    }
    checks = "".join(
        f"assert importlib.import_module({ours!r}) is importlib.import_module({theirs!r})\n"
        for ours, theirs in pairs.items()
    )
    assert said(f"import importlib\n{checks}import horovod.torch as hvd\nprint(hvd)").endswith(
        "qsgd_hpc/torch/__init__.py'>"
    )


def test_what_scripts_import_from_common_is_there():
    assert (
        said(
            "from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt\n"
            "from horovod.common.util import num_rank_is_power_2, gpu_available, split_list, env\n"
            "from horovod.common.basics import HorovodBasics\n"
            "import os, horovod.torch as hvd\n"
            "assert HorovodInternalError is hvd.HorovodInternalError\n"
            "assert [num_rank_is_power_2(n) for n in (0, 1, 2, 3, 8)] == [0, 1, 1, 0, 1]\n"
            "assert split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]\n"
            "basics = HorovodBasics(__file__ if '__file__' in globals() else '', 'mpi_lib')\n"
            "assert basics.mpi_built() and not basics.is_initialized()\n"
            "with env(A_VARIABLE='x', B_VARIABLE=None):\n"
            "    assert os.environ['A_VARIABLE'] == 'x' and 'B_VARIABLE' not in os.environ\n"
            "assert 'A_VARIABLE' not in os.environ\n"
            "assert gpu_available('mpi_lib') == (hvd.cuda_built() or hvd.rocm_built())\n"
            "from horovod.common.util import ccl_built, ddl_built, extension_available\n"
            "from horovod.common.util import gloo_built, mpi_built, nccl_built\n"
            "assert mpi_built(verbose=True) and not nccl_built() and not gloo_built()\n"
            "assert extension_available('torch') and not extension_available('no_framework')\n"
            "print('all there')"
        )
        == "all there"
    )


def test_no_gpu_is_available_without_kernels():
    asked = "from horovod.common.util import gpu_available; print(gpu_available('mpi_lib'))"
    assert said(asked, QSGD_GPU_LIBRARY="none") == "False"


@pytest.mark.full
def test_classes_are_where_scripts_import_them_from():
    assert (
        said(
            "from horovod.torch.compression import Compressor, FP16Compressor, NoneCompressor\n"
            "import horovod.torch as hvd\n"
            "class Half(Compressor):\n"
            "    @staticmethod\n"
            "    def compress(tensor): return tensor / 2, None\n"
            "    @staticmethod\n"
            "    def decompress(tensor, context): return tensor * 2\n"
            "assert hvd.Compression.fp16 is FP16Compressor\n"
            "assert hvd.Compression.none is NoneCompressor\n"
            "from horovod.torch.elastic.sampler import ElasticSampler\n"
            "from horovod.torch.elastic.state import TorchState\n"
            "assert ElasticSampler is hvd.elastic.ElasticSampler\n"
            "print(Half().compress(4.0))"
        )
        == "(2.0, None)"
    )


@pytest.mark.parametrize(
    ("name", "counterpart"),
    [
        ("horovod.tensorflow", "qsgd_hpc.tensorflow"),
        ("horovod.tensorflow.mpi_ops", "qsgd_hpc.tensorflow"),
        ("horovod.tensorflow.keras", "qsgd_hpc.keras"),
        ("horovod.keras", "qsgd_hpc.keras"),
        ("horovod.mxnet", "qsgd_hpc.mxnet"),
        ("horovod.mxnet.mpi_ops", "qsgd_hpc.mxnet"),
    ],
)
def test_every_framework_has_its_counterpart(name, counterpart):
    assert HorovodFinder().find_spec(name, None).loader.target == counterpart


@pytest.mark.parametrize("name", ["spark", "ray", "torch.none"])
def test_what_is_not_here_is_an_import_error_that_says_so(name):
    code = f"try:\n    import horovod.{name}\nexcept ImportError as e:\n    print(e)"
    message = said(code)
    assert f"horovod.{name}".startswith(re.match(r"[\w.]+", message)[0].rstrip("."))
    assert "qsgd-hpc" in message


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_installed_horovod_loses_and_rank_0_says_so(other, rank):
    code = "import horovod; print(horovod.__version__)"
    done = python("-c", code, path=(FOLDER, ROOT, other), PMI_RANK=rank)
    assert done.stdout == "0.28.1\n"
    assert (f"not the Horovod in {other}" in done.stderr) == (rank == "0")


@pytest.mark.full
def test_install_does_the_same_without_a_path(other):
    code = "from qsgd_hpc.horovod_compat import install; install(); install()\nimport horovod"
    assert said(f"{code}.torch; print(horovod.__file__)", path=(ROOT, other)).startswith(
        str(FOLDER)
    )


def test_install_is_refused_after_another_horovod_was_imported(other):
    code = "import horovod\nfrom qsgd_hpc.horovod_compat import install\ninstall()"
    done = python("-c", code, path=(ROOT, other))
    assert "is already imported" in done.stderr
    assert str(other) in done.stderr


@pytest.mark.full
def test_it_holds_for_modules_tests_and_processes_that_a_program_starts(tmp_path):
    program = tmp_path / "test_program.py"
    program.write_text(
        # A module that does not import torch, as four processes do it.
        "import subprocess, sys\n"
        "check = 'import horovod.common.process_sets as ours; '\\\n"
        "    'assert ours.__name__ == \"qsgd_hpc.runtime.process_sets\"'\n"
        "def test_name():\n"
        "    exec(check, {})\n"
        "    subprocess.run([sys.executable, '-c', check], check=True)\n"
        "if __name__ == '__main__':\n"
        "    test_name()\n"
    )
    module = python("-m", "test_program", path=(FOLDER, ROOT, tmp_path))
    assert module.returncode == 0, module.stderr
    tests = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(program))
    assert tests.returncode == 0, tests.stdout


def test_naming_torch_costs_no_import_of_torch():
    code = "import sys, horovod\nprint('torch' in sys.modules, 'mpi4py' in sys.modules)"
    assert said(code) == "False False"


@pytest.mark.full
def test_calls_of_keras_2_are_there_for_such_scripts_alone():
    for package in ("keras", "jax"):
        pytest.importorskip(package)
    code = (
        "import keras\n"
        "assert not hasattr(keras.Model, 'fit_generator')\n"
        "import horovod.keras as hvd\n"
        "from keras import backend as K\n"
        "opt = keras.optimizers.SGD(lr=0.5, decay=1.0)\n"
        "opt.iterations.assign(3)\n"
        "assert float(opt.learning_rate) == 0.125 and float(K.get_value(opt.lr)) == 0.5\n"
        "K.set_value(opt.lr, 0.25)\n"
        "assert float(opt.lr) == 0.25 and len(opt.variables()) == len(opt.variables) == 2\n"
        "assert isinstance(keras.optimizers.legacy.Adam(), keras.optimizers.Adam)\n"
        "try: keras.callbacks.ModelCheckpoint('x.keras', period=2)\n"
        "except ValueError as e: print(e)"
    )
    assert "period=2" in said(code, KERAS_BACKEND="jax")  # the one that is imported soonest
