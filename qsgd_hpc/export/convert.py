"""Export of a trained model: detect its format, write the target, and test it.

A ``.keras`` file is a zip archive of a configuration and weights; see graphs.py for the others.
"""

from __future__ import annotations

import glob
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    if kind == "keras":
        return _export_archive(source, target, imports)
    # Imported here, because importing TensorFlow takes seconds.
    from qsgd_hpc.export.graphs import export_checkpoint, export_saved_model

    return (export_saved_model if kind == "saved_model" else export_checkpoint)(source, target)


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


CONFIG, WEIGHTS = "config.json", "model.weights.h5"
# Classes of this package, and their equivalents on a single rank.
COUNTERPARTS = {"SyncBatchNormalization": ("keras.layers", "BatchNormalization")}


def _export_archive(source: Path, target: Path, imports: Sequence[str]) -> None:
    """Write the model without its optimizer, and with this package's layers replaced by Keras's.

    Raises:
        UsageError: the source is damaged, or the model has custom classes that no module in
            ``imports`` defines.
    """
    if not zipfile.is_zipfile(source):
        raise UsageError(f"{source}: not a Keras file, which is a zip archive; it may be truncated")
    with zipfile.ZipFile(source) as archive:
        config = json.loads(archive.read(CONFIG))
    config.pop("compile_config", None)
    if any(True for _ in _own_objects(config)):
        _rebuild(source, target, config, imports)
    else:
        _strip(source, target, config)


def _own_objects(config: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of this package's classes in a configuration."""
    if isinstance(config, dict):
        if str(config.get("module")).partition(".")[0] in ("qsgd_hpc", "horovod"):
            yield config
        for value in config.values():
            yield from _own_objects(value)
    elif isinstance(config, list):
        for value in config:
            yield from _own_objects(value)


def _strip(source: Path, target: Path, config: dict[str, Any]) -> None:
    """Copy the archive without the parts that only training needs."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if name == CONFIG:
                new.writestr(name, json.dumps(config))
            elif name == WEIGHTS:
                _copy_weights(old, new)
            else:
                new.writestr(name, old.read(name))


def _copy_weights(old: zipfile.ZipFile, new: zipfile.ZipFile) -> None:
    import h5py

    with tempfile.TemporaryDirectory() as folder:
        extracted = old.extract(WEIGHTS, folder)
        kept = Path(folder) / "kept.h5"
        with h5py.File(extracted) as source, h5py.File(kept, "w") as target:
            target.attrs.update(source.attrs)
            for name in source:
                if name != "optimizer":
                    source.copy(name, target)
        new.write(kept, WEIGHTS)


def _rebuild(source: Path, target: Path, config: dict[str, Any], imports: Sequence[str]) -> None:
    """Create the model with Keras's classes and the same weights."""
    import keras

    _import_layers(imports)
    kinds: dict[str, type] = {}
    for own in _own_objects(config):
        kinds[own["class_name"]] = kind = _class_of(own)
        kinds[own.get("registered_name") or own["class_name"]] = kind
    try:
        trained = keras.saving.load_model(source, kinds, compile=False)
        for own in list(_own_objects(config)):
            module, name = COUNTERPARTS[own["class_name"]]
            own.update(module=module, class_name=name, registered_name=None)
            own["config"] = _known_to(getattr(keras.layers, name), own["config"])
        plain = keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError) as error:  # ValueError: a Lambda layer, in safe mode
        raise UsageError(
            f"{source}: {str(error).splitlines()[0]} Name the modules that define your own "
            "layers: --import MODULE"
        ) from error
    plain.set_weights(trained.get_weights())
    for old, new in zip(trained._flatten_layers(), plain._flatten_layers(), strict=True):
        if hasattr(old, "save_assets") and hasattr(new, "load_assets"):  # a lookup's vocabulary
            with tempfile.TemporaryDirectory() as folder:
                old.save_assets(folder)
                new.load_assets(folder)
    plain.save(target)


def _import_layers(modules: Sequence[str]) -> None:
    """Import modules that define custom layers, as ``prove`` does: also from this folder.

    Raises:
        UsageError: one cannot be imported.
    """
    # The console script has its own folder in sys.path instead.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(
                f"--import {module}: {error}. Give the name of the module, without .py, and run "
                "this in its folder or install it"
            ) from error


def _class_of(own: dict[str, Any]) -> type:
    if own["class_name"] not in COUNTERPARTS:
        raise UsageError(
            f"{own['class_name']} of {own['module']} has no equivalent in Keras; known: "
            + ", ".join(COUNTERPARTS)
        )
    kind: type = getattr(importlib.import_module(own["module"]), own["class_name"])
    return kind


def _known_to(kind: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the options that both classes have."""
    known = kind().get_config()
    return {name: value for name, value in config.items() if name in known}
