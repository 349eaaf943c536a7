"""Export a ``.keras`` file: a zip archive of a configuration and weights."""

from __future__ import annotations

import importlib
import json
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qsgd_hpc.errors import UsageError

__all__ = ["export_archive"]

CONFIG, WEIGHTS = "config.json", "model.weights.h5"
# Classes of this package, and their equivalents on a single rank.
COUNTERPARTS = {
    "SyncBatchNormalization": ("keras.layers", "BatchNormalization"),
}


def export_archive(source: Path, target: Path, imports: Sequence[str]) -> None:
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

    for module in imports:
        importlib.import_module(module)
    kinds = {own["class_name"]: _class_of(own) for own in _own_objects(config)}
    registered = {
        own.get("registered_name") or name: kinds[name]
        for own in _own_objects(config)
        for name in [own["class_name"]]
    }
    try:
        trained = keras.saving.load_model(source, {**kinds, **registered}, compile=False)
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
