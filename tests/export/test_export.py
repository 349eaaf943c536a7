"""An exported model has nothing of this package in it, and computes what it computed before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from qsgd_hpc.cli import cli

pytestmark = [
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
OWN = {"QsgdAllreduce", "QsgdAllgather", "QsgdAlltoall", "QsgdBroadcast"}
ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "qsgd_hpc":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import numpy as np
x = np.linspace(-1, 1, 12, dtype="float32").reshape(2, 6)
"""


def export(*arguments):
    """Run the command."""
    return CliRunner().invoke(cli, ["export", *map(str, arguments)])


def elsewhere(code: str, *arguments: object) -> np.ndarray:
    """Return what code prints as ``y`` in a process that cannot import this package."""
    ended = subprocess.run(
        [sys.executable, "-c", ABSENT + code + "\nprint(np.asarray(y).tolist())"]
        + [str(each) for each in arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return np.array(json.loads(ended.stdout.splitlines()[-1]), "float32")


def operations(folder: Path) -> set[str]:
    """Return the operations of a SavedModel's graph and functions."""
    from tensorflow.core.protobuf import saved_model_pb2

    file = folder / "saved_model.pb"
    (graph,) = saved_model_pb2.SavedModel.FromString(file.read_bytes()).meta_graphs
    functions = [node for each in graph.graph_def.library.function for node in each.node_def]
    listed = {each.name for each in graph.meta_info_def.stripped_op_list.op}
    return {node.op for node in [*graph.graph_def.node, *functions]} | listed


@pytest.fixture(scope="module")
def trained():
    """Return a model that has been trained with a distributed optimizer, and inputs."""
    import keras

    import qsgd_hpc.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), "mse")
    x = np.random.default_rng(0).standard_normal((32, 6)).astype("float32")
    model.fit(x, x[:, :3], verbose=0)
    yield model, np.linspace(-1, 1, 12, dtype="float32").reshape(2, 6)
    hvd.shutdown()


@pytest.mark.full  # 12 s
def test_a_keras_file_keeps_its_outputs_and_loses_its_optimizer(trained, tmp_path):
    model, x = trained
    model.save(tmp_path / "model.keras")
    done = export(tmp_path / "model.keras", tmp_path / "out.keras")
    assert done.exit_code == 0, done.output
    assert "loads without qsgd-hpc (sequential" in done.output
    there = elsewhere(
        "import keras; model = keras.saving.load_model(sys.argv[1])\n"
        "assert not model.compiled; y = model(x)",
        tmp_path / "out.keras",
    )
    assert np.allclose(there, model.predict(x, verbose=0), atol=1e-6)
    sizes = [(tmp_path / name).stat().st_size for name in ("model.keras", "out.keras")]
    assert sizes[1] < sizes[0]


@pytest.mark.full
def test_layers_of_this_package_become_keras_own(trained, tmp_path):
    import keras

    import qsgd_hpc.tensorflow as hvd

    sync = hvd.SyncBatchNormalization()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), sync])
    model(np.random.default_rng(0).standard_normal((32, 6)), training=True)
    model.save(tmp_path / "model.keras")
    assert b"qsgd_hpc" in zipfile.ZipFile(tmp_path / "model.keras").read("config.json")
    done = export(tmp_path / "model.keras", tmp_path / "out.keras")
    assert done.exit_code == 0, done.output
    there = elsewhere(
        "import keras; y = keras.saving.load_model(sys.argv[1])(x)", tmp_path / "out.keras"
    )
    assert np.allclose(there, model(trained[1]), atol=1e-6)


@pytest.mark.full
def test_a_lookup_keeps_its_vocabulary(tmp_path):
    import keras

    import qsgd_hpc.tensorflow as hvd

    words = np.array([[10], [20], [30]])
    lookup = keras.layers.IntegerLookup()
    lookup.adapt(words)
    inner = [lookup, keras.layers.Embedding(8, 4), keras.layers.Flatten()]
    model = keras.Sequential(
        [keras.Input((1,), dtype="int64"), *inner, hvd.SyncBatchNormalization()]
    )
    model.save(tmp_path / "model.keras")
    done = export(tmp_path / "model.keras", tmp_path / "out.keras")
    assert done.exit_code == 0, done.output
    plain = keras.saving.load_model(tmp_path / "out.keras")
    assert np.allclose(plain.predict(words, verbose=0), model.predict(words, verbose=0), atol=1e-6)


@pytest.mark.full
def test_a_saved_model_with_collectives_serves_and_steps_on_one_rank(trained, tmp_path):
    import tensorflow as tf

    import qsgd_hpc.tensorflow as hvd

    class Trained(tf.Module):
        def __init__(self):
            self.w = tf.Variable(tf.ones((6, 2)))

        @tf.function(input_signature=[tf.TensorSpec((None, 6))])
        def serve(self, x):
            return {"y": x @ self.w}

        @tf.function(input_signature=[tf.TensorSpec((None, 6))])
        def step(self, x):
            scaled = hvd.allreduce(x, op=hvd.Sum, postscale_factor=3.0)
            rows = hvd.allgather(x)
            splits = tf.constant([tf.compat.dimension_value(x.shape[0]) or 2], tf.int32)
            sent, received = hvd.alltoall(x, splits)
            with tf.control_dependencies([received]):
                return scaled + rows + sent + hvd.broadcast(x, 0)

    module = Trained()
    tf.saved_model.save(module, str(tmp_path / "in"), signatures={"serving_default": module.serve})
    assert operations(tmp_path / "in") & OWN
    done = export(tmp_path / "in", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "signatures: serving_default" in done.output
    assert not operations(tmp_path / "out") & OWN
    code = """
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
x = tf.constant(x)
served = model.signatures["serving_default"](x=x)["y"]
y = tf.concat([served, model.step(x)], 1)
"""
    x = trained[1]
    there = elsewhere(code, tmp_path / "out")
    assert np.allclose(there, np.concatenate([x @ np.ones((6, 2)), 6 * x], 1), atol=1e-5)


@pytest.mark.full
def test_a_checkpoint_of_a_graph_is_restored_by_its_own_graph(trained, tmp_path):
    import tensorflow as tf

    import qsgd_hpc.tensorflow as hvd

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, (None, 6), name="x")
        w = tf.compat.v1.get_variable("w", (6, 2), initializer=tf.compat.v1.ones_initializer())
        tf.identity(x @ w, name="y")
        tf.compat.v1.assign(w, hvd.allreduce(w * 2, name="w"))
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"), global_step=7)
    assert b"Qsgd" in (tmp_path / "model.ckpt-7.meta").read_bytes()
    done = export(tmp_path / "model.ckpt-7", tmp_path / "out" / "model.ckpt")
    assert done.exit_code == 0, done.output
    assert "1 variables" in done.output
    code = """
import tensorflow as tf
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    saver = tf.compat.v1.train.import_meta_graph(sys.argv[1] + ".meta")
    saver.restore(session, sys.argv[1])
    y = session.run("y:0", {"x:0": x})
"""
    there = elsewhere(code, tmp_path / "out" / "model.ckpt")
    assert np.allclose(there, trained[1] @ np.ones((6, 2)), atol=1e-6)


def test_what_cannot_be_exported_is_answered_with_what_can(tmp_path):
    from qsgd_hpc.errors import UsageError

    (tmp_path / "there").mkdir()
    (tmp_path / "model.keras").write_bytes(b"")
    for source, target, message in [
        ("nothing", "out", "expected a .keras file"),
        ("model.keras", "there", "exists"),
        ("model.keras", "model", r"named *.keras"),
    ]:
        done = export(tmp_path / source, tmp_path / target)
        assert isinstance(done.exception, UsageError)
        assert message in str(done.exception)
    assert Path(tmp_path / "there").is_dir()


def test_a_failed_export_leaves_the_files_beside_its_target(tmp_path):
    from qsgd_hpc.errors import UsageError

    (tmp_path / "model.keras").write_bytes(b"no archive")
    (tmp_path / "out.keras.md").write_text("of another export")
    before = sorted(tmp_path.iterdir())
    done = export(tmp_path / "model.keras", tmp_path / "out.keras")
    assert isinstance(done.exception, UsageError)
    assert "not a Keras file" in str(done.exception)
    assert sorted(tmp_path.iterdir()) == before


def test_a_layer_of_the_script_is_answered_with_the_option_that_names_its_module(tmp_path):
    import keras

    from qsgd_hpc.errors import UsageError

    class Twice(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    keras.Sequential([keras.layers.Input((3,)), Twice()]).save(tmp_path / "model.keras")
    done = export(tmp_path / "model.keras", tmp_path / "out.keras")
    assert isinstance(done.exception, UsageError)
    assert "Could not locate class 'Twice'. Name the modules" in str(done.exception)
    assert str(done.exception).endswith("--import MODULE")


def test_modules_of_layers_are_found_in_the_folder_of_the_shell(tmp_path, monkeypatch):
    from qsgd_hpc.errors import UsageError
    from qsgd_hpc.export.convert import _import_layers

    (tmp_path / "layers_of_the_script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    _import_layers(["layers_of_the_script"])
    assert sys.modules.pop("layers_of_the_script").__file__.startswith(str(tmp_path))
    with pytest.raises(UsageError, match=r"--import no_layers: No module named .* without \.py"):
        _import_layers(["no_layers"])
