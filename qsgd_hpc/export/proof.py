"""Test that an exported model does not need this package, by loading it without the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from qsgd_hpc.errors import UsageError

__all__ = ["prove"]

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
        reason = ended.stderr.strip().splitlines()[-1:]
        raise UsageError(f"{target} does not load without this package: {''.join(reason)}")
    return ended.stdout.strip().splitlines()[-1]
