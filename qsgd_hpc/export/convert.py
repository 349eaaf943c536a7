"""Export of a trained model: detect its format, write the target, and test it."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from qsgd_hpc.errors import UsageError

__all__ = ["export_model"]


def export_model(source: Path, target: Path, imports: Sequence[str] = ()) -> str:
    """Write ``source`` without operations and classes of this package, ready for inference.

    Args:
        source: a ``.keras`` file, the folder of a SavedModel, or the prefix of a checkpoint of
            TensorFlow, such as ``model.ckpt-1000``.
        target: the new file, folder or prefix, in the same format; it must not exist. If the
            export fails, what it has written is removed, and nothing else.
        imports: modules that define custom layers of a ``.keras`` file.
    Returns:
        A description of the target, loaded in a process that cannot import this package.
    Raises:
        UsageError: the source is none of these, or the target exists or does not load.
    """
    kind = _kind(source)
    if target.exists() or _index_of(target).exists():
        raise UsageError(f"{target} exists; choose a new name, or remove it")
    if kind == "keras" and target.suffix != ".keras":
        raise UsageError(f"{target}: Keras loads only files named *.keras; add the ending")
    target.parent.mkdir(parents=True, exist_ok=True)
    before = _files_of(target)  # of other models: the source may be among them
    try:
        _write(kind, source, target, imports)
        return prove(kind, target, imports)
    except BaseException:
        _remove(target, _files_of(target) - before)
        raise


def _kind(source: Path) -> str:
    if source.suffix == ".keras" and source.is_file():
        return "keras"
    if (source / "saved_model.pb").is_file():
        return "saved_model"
    if _index_of(source).is_file():
        return "checkpoint"
    raise UsageError(
        f"{source}: expected a .keras file, a folder with saved_model.pb, or the prefix of a "
        "checkpoint (there is PREFIX.index). Files with weights only (.weights.h5) do not "
        "depend on this package: use them directly"
    )


def _index_of(prefix: Path) -> Path:
    return prefix.parent / f"{prefix.name}.index"


def _write(kind: str, source: Path, target: Path, imports: Sequence[str]) -> None:
    # Imported here, because importing a framework takes seconds.
    if kind == "keras":
        from qsgd_hpc.export.archive import export_archive

        export_archive(source, target, imports)
    elif kind == "saved_model":
        from qsgd_hpc.export.graphs import export_saved_model

        export_saved_model(source, target)
    else:
        from qsgd_hpc.export.graphs import export_checkpoint

        export_checkpoint(source, target)


def _files_of(target: Path) -> set[Path]:
    """Return the files named as the target, or as a prefix of a checkpoint names its files."""
    return {target, *target.parent.glob(f"{glob.escape(target.name)}.*")}


def _remove(target: Path, files: set[Path]) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    for file in {target, *files}:
        if file.is_file():
            file.unlink()


# Runs in a separate process, which cannot import this package.
_PROOF = """
import importlib, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("qsgd_hpc", "horovod"):
            raise ModuleNotFoundError(f"{name} is hidden in this test", name=name)

sys.meta_path.insert(0, Absent())
kind, target, imports = json.loads(sys.argv[1])
for module in imports:
    importlib.import_module(module)
if kind == "keras":
    import keras
    model = keras.saving.load_model(target)
    print(f"{model.name}: {model.count_params()} parameters")
else:
    import tensorflow as tf
if kind == "saved_model":
    model = tf.saved_model.load(target)
    print("signatures: " + (", ".join(sorted(model.signatures)) or "none"))
if kind == "checkpoint":
    names = [name for name, _ in tf.train.list_variables(target)]
    if tf.io.gfile.exists(target + ".meta"):
        with tf.Graph().as_default():
            tf.compat.v1.train.import_meta_graph(target + ".meta", clear_devices=True)
    print(f"{len(names)} variables")
"""


def prove(kind: str, target: Path, imports: Sequence[str]) -> str:
    """Load a model in a process that cannot import this package; return its description.

    Raises:
        UsageError: it cannot be loaded; the message has the last line of the error.
    """
    question = json.dumps([kind, str(target.absolute()), list(imports)])
    ended = subprocess.run(
        [sys.executable, "-c", _PROOF, question],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        # Keras adds the whole configuration of the layer.
        if own := re.search(r"Could not locate class '[^']*'", ended.stderr):
            raise UsageError(
                f"{target} does not load: {own[0]}. Name the modules that define your own layers: "
                "--import MODULE"
            )
        last = ended.stderr.strip().rpartition("\n")[2]
        raise UsageError(f"{target} does not load without this package: {last}")
    return ended.stdout.strip().splitlines()[-1]
