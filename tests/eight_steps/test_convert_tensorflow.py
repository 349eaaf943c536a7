"""Rules of the conversion for TensorFlow 1 and 2, one at a time."""

from __future__ import annotations

import pytest

from tests.eight_steps.scripts import TF2, done


@pytest.mark.parametrize(
    "line",
    [
        "model.load_weights('m.weights.h5')",
        "again = tf.saved_model.load('exported')",
        "checkpoint.restore(tf.train.latest_checkpoint('checkpoints'))",
    ],
)
def test_a_model_of_tensorflow_is_loaded_when_rank_0_has_written_it(line):
    after = done(TF2 + line).after
    assert f"\nhvd.barrier()  # until rank 0 has written the file\n{line}" in after
    assert after.count("hvd.barrier()") == 1


def test_a_compiled_step_of_xla_is_pointed_out():
    text = TF2.replace("for images", "@tf.function(jit_compile=True)\ndef step(images").replace(
        "labels in data.take(100):", "labels):"
    )
    text += "\nfor batch in data:\n    step(*batch)\n"
    assert any("XLA" in note.text for note in done(text).to_decide)


def test_an_optimizer_by_its_short_name_in_tensorflow_has_its_rate_scaled():
    made = done(TF2.replace("tf.keras.optimizers", "tf.optimizers"))
    assert "optimizer = tf.optimizers.Adam(0.01 * hvd.size())" in made.after


def test_a_monitored_session_has_its_hook_and_its_folder_on_rank_0():
    text = """
        import tensorflow.compat.v1 as tf

        train_op = tf.train.AdamOptimizer(0.1).minimize(loss)
        hooks = [tf.train.StopAtStepHook(last_step=100)]
        with tf.train.MonitoredTrainingSession(checkpoint_dir="c", hooks=hooks) as session:
            while not session.should_stop():
                session.run(train_op)
    """
    after = done(text).after
    assert "hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(" in after
    assert "last_step=100 // hvd.size()" in after
    assert 'checkpoint_dir="c" if hvd.rank() == 0 else None' in after
    assert "hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.1 * hvd.size())).minimize" in after


def test_a_session_broadcasts_what_it_restores_but_not_behind_its_training():
    text = """
import tensorflow.compat.v1 as tf

optimizer = tf.train.GradientDescentOptimizer(0.1)
train_op = optimizer.minimize(loss)
saver = tf.train.Saver()
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    saver.restore(session, "pretrained")
    for step in range(100):
        session.run(train_op)
    saver.restore(session, "best")
    print(session.run(loss))
"""
    lines = [line.strip() for line in done(text).after.splitlines()]
    sent = lines.index("session.run(hvd.broadcast_global_variables(0))")
    first = lines.index('saver.restore(session, "pretrained")')
    assert first < sent < next(i for i, line in enumerate(lines) if line.startswith("for step"))


@pytest.mark.parametrize(("added", "mean"), [("value", ""), ("value / batches", " / hvd.size()")])
def test_what_a_session_returns_is_summed_as_numbers(added, mean):
    text = f"""
        import tensorflow.compat.v1 as tf

        train_op = tf.train.AdamOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for epoch in range(3):
                total = 0.0
                batches = int(x.shape[0] / 50)
                for i in range(batches):
                    _, value = session.run([train_op, loss])
                    total += {added}
                print("{{:.3f}}".format(total))
    """
    assert f"total = sum(hvd.allgather_object(total)){mean}\n" in done(text).after


def test_a_metric_that_is_summed_is_not_missing():
    made = done("""
        import keras
        import tensorflow as tf

        model = keras.Sequential([keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD()
        metric = keras.metrics.Mean()

        def train_step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
            return loss

        for epoch in range(3):
            metric.reset_state()
            for x, y in data:
                metric.update_state(train_step(x, y))
            print(metric.result())
    """)
    assert "for each_metric in (metric,):" in made.after
    assert not any("metric covers only" in note.text for note in made.to_decide)


@pytest.mark.parametrize(
    ("gradients", "place"),
    [
        ("g = tape.gradient(a, w)\n    h = tape.gradient(b, v)\n", "\n    g ="),
        ("if i % 2:\n        g = tape.gradient(a, w)\n    h = tape.gradient(b, v)\n", "\n    if"),
        ("for v in parts:\n        h = tape.gradient(a, v)\n", "\n    for v"),
        ("    with other:\n            g = tape.gradient(a, w)\n", "\n        with other"),
    ],
)
def test_a_persistent_tape_is_wrapped_once(gradients, place):
    after = done(
        f"""
import tensorflow as tf
for i, x in enumerate(data):
    with tf.GradientTape(persistent=True) as tape:
        a, b = losses_of(x)
    {gradients}    first.apply_gradients(zip(g, w))
"""
    ).after
    wrapped = "tape = hvd.DistributedGradientTape(tape)"
    assert after.count(wrapped) == 1 and f"{wrapped}{place}" in after


def test_what_minimize_computes_is_left_to_the_author():
    made = done(
        """
        import tensorflow as tf
        for x in data:
            with tf.GradientTape() as tape:
                loss = loss_of(x)
            optimizer.apply_gradients(zip(tape.gradient(loss, w), w))
            other.minimize(lambda: loss_of(x), v)
        """
    )
    assert any("average the gradients" in note.text for note in made.to_decide)
