"""Features that Keras 3 lacks are found, and corrected if that is safe."""

from __future__ import annotations

from qsgd_hpc.eight_steps.check import check, fix
from qsgd_hpc.eight_steps.reading import parse

BEGIN = """import tensorflow as tf
import horovod.tensorflow.keras as hvd
hvd.init()
opt = tf.keras.optimizers.SGD(0.1 * hvd.size())
model = tf.keras.Sequential()
"""
MENDED = [
    ("a = opt.variables()", "a = opt.variables"),
    (
        "b = hvd.DistributedOptimizer(opt).variables()",
        "b = hvd.DistributedOptimizer(opt).variables",
    ),
    ("model.compile(o, experimental_run_tf_function=False)", "model.compile(o)"),
    ("model.compile(experimental_run_tf_function=False, loss=l)", "model.compile(loss=l)"),
    (
        "c = tf.keras.optimizers.Adam(lr=0.1, decay=0.0)",
        "c = tf.keras.optimizers.Adam(learning_rate=0.1)",
    ),
    ("d = opt.lr", "d = opt.learning_rate"),
    ("e = tf.keras.optimizers.legacy.SGD(0.1)", "e = tf.keras.optimizers.SGD(0.1)"),
    ("model.fit_generator(generator=g, epochs=2, workers=4)", "model.fit(x=g, epochs=2)"),
    ("model.evaluate(g, max_queue_size=(8), verbose=0)", "model.evaluate(g, verbose=0)"),
]
SAID = [
    "tf.layers.dense(x, 2)",
    "f = tf.keras.optimizers.Adam(decay=0.01)",
    "model.fit_generator(g, 100)",
    "model.save_weights('w.h5')",
    "tf.keras.callbacks.ModelCheckpoint('w.h5', save_weights_only=True)",
]
RIGHT = [
    "g = opt.variables, opt.learning_rate, model.variables",
    "h = tf.compat.v1.train.AdamOptimizer(0.1).variables()",
    "model.fit(x, y, epochs=2)",
    "model.save_weights('w.weights.h5')",
    "i = args.lr, torch.optim.SGD(p, lr=0.1)",
]


def lines(text: str) -> list[int]:
    return [each.line - 5 for each in check(parse(BEGIN + text)) if each.rule.id == "QH001"]


def test_what_is_gone_is_mended():
    text, fixed = ("\n".join(each) + "\n" for each in zip(*MENDED, strict=True))
    assert sorted(set(lines(text))) == list(range(1, len(MENDED) + 1))
    done = fix(parse(BEGIN + text))
    # fit() gets a callback by another rule.
    after = done.script.text.replace("epochs=2, callbacks", "epochs=2)\ncallbacks").split("\n")
    assert [each for each in fixed.split("\n") if each not in after] == []
    assert "QH001" not in {each.rule.id for each in done.left}


def test_what_has_no_safe_edit_is_said():
    assert lines("\n".join([*SAID, "model.fit(x, y)"])) == list(range(1, len(SAID) + 1))
    left = [each for each in check(parse(BEGIN + "\n".join(SAID))) if each.rule.id == "QH001"]
    assert not any(each.fixable for each in left)


def test_what_keras_3_has_and_scripts_for_keras_2_are_left_alone():
    assert lines("\n".join(RIGHT)) == []
    assert lines("import os\nos.environ['TF_USE_LEGACY_KERAS'] = '1'\na = opt.variables()") == []
