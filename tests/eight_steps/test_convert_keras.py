"""Rules of the conversion for Keras, one at a time: optimizers, callbacks and files."""

from __future__ import annotations

import pytest

from qsgd_hpc.eight_steps.convert import convert
from tests.eight_steps.scripts import done


def test_a_model_of_keras_is_loaded_when_rank_0_has_written_it():
    after = done(
        """
import keras
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
model.fit(x, y, epochs=2)
model.save("model.keras")
again = keras.models.load_model("model.keras")
"""
    ).after
    line = "hvd.allgather_object(None)  # until rank 0 has written the file\n"
    assert f'{line}again = keras.models.load_model("model.keras")' in after


def test_a_schedule_of_keras_is_left_to_the_author():
    text = """
        import keras

        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)
        model.compile(keras.optimizers.Adam(rate), "mse")
        model.fit(x, y)
    """
    made = done(text)
    assert "Warmup" not in made.after
    (note,) = [note.text for note in made.to_decide if "this schedule" in note.text]
    assert "divide its number of steps by hvd.size()" in note


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("given", ["", "callbacks=[]", "callbacks=[Mine()]", "callbacks=[Mine(),]"])
def test_each_callback_has_a_line(given, newline):
    text = "import keras\n\ndef main():\n    model.compile(keras.optimizers.Adam(0.1), 'mse')\n"
    text += f"    model.fit(x, y, verbose=0{', ' * bool(given)}{given})\n"
    made = convert(text.replace("\n", newline).encode())
    assert "\n" not in made.after.replace(newline, "")
    mine = ["        Mine(),"] * ("Mine" in given)
    lines = made.after.split(newline)
    begin = next(i for i, line in enumerate(lines) if line.endswith("callbacks=["))
    assert lines[begin + 1 : begin + 5 + len(mine)] == [
        "        hvd.callbacks.BroadcastGlobalVariablesCallback(0),",
        "        hvd.callbacks.MetricAverageCallback(),",
        lines[begin + 3],
        *mine,
        "    ])",
    ]
    assert "LearningRateWarmupCallback(" in lines[begin + 3]


def test_callbacks_that_write_are_rank_0s():
    text = """
        import keras

        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(x, y, steps_per_epoch=50, callbacks=[keras.callbacks.TensorBoard("logs")])
    """
    after = done(text).after
    assert '*([keras.callbacks.TensorBoard("logs")] if hvd.rank() == 0 else [])' in after
    assert "steps_per_epoch=50 // hvd.size()" in after


CALLBACKS = """
import keras

{early}
rate = 0.1
model = make()
model.compile(keras.optimizers.Adam(rate), "mse")
{late}
model.fit(x, y, epochs=1, callbacks=kept)
{again}
"""


KEPT = 'kept = [keras.callbacks.CSVLogger("a.csv")]'


WARM_UP = "LearningRateWarmupCallback(float(model.optimizer.learning_rate), warmup_epochs=1)"


def test_callbacks_that_are_listed_before_the_model_has_a_rate_keep_their_list():
    after = done(CALLBACKS.format(early=KEPT, late="pass", again="")).after
    listed = 'kept = [*([keras.callbacks.CSVLogger("a.csv")] if hvd.rank() == 0 else [])]'
    assert f"\n{listed}\n" in after and f"{WARM_UP}, *kept]" in after
    within = done(CALLBACKS.format(early="pass", late=KEPT, again="")).after
    assert f"    hvd.callbacks.{WARM_UP},\n" in within and "callbacks=kept," in within


def test_each_fit_with_the_same_callbacks_warms_up_its_own_rate():
    again = """
model.compile(keras.optimizers.Adam(1e-5), "mse")
model.fit(x, y, epochs=2, callbacks=kept)
"""
    after = done(CALLBACKS.format(early="pass", late=KEPT, again=again)).after
    assert after.count(f"{WARM_UP}, *kept]") == after.count("MetricAverageCallback()") == 2
    assert after.count("CSVLogger") == after.count("if hvd.rank() == 0 else [])") == 1


OWN_COMPILE = """
import keras

class Distiller(keras.Model):
    def compile(self, optimizer, metrics, alpha):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.alpha = alpha

model = Distiller()
{compile_}
model.fit(x, y, epochs=2)
"""


@pytest.mark.parametrize(
    ("compile_", "wrapped"),
    [
        ("model.compile(keras.optimizers.Adam(), ['accuracy'], 0.1)", "keras.optimizers.Adam("),
        ("set_up(model)", "optimizer)"),
    ],
)
def test_an_optimizer_that_an_own_compile_passes_on_is_wrapped_once(compile_, wrapped):
    made = done(OWN_COMPILE.format(compile_=compile_)).after
    assert f"hvd.DistributedOptimizer({wrapped}" in made
    assert made.count("hvd.DistributedOptimizer(") == 1


@pytest.mark.parametrize(
    "given",
    [
        "keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)",
        "d_optimizer=keras.optimizers.Adam(1e-3), g_optimizer=keras.optimizers.Adam(1e-3)",
    ],
)
def test_all_optimizers_of_an_own_compile_are_wrapped(given):
    made = done(
        f"""
        import keras

        class GAN(keras.Model):
            def compile(self, d_optimizer, g_optimizer):
                super().compile()
                self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

            def train_step(self, images):
                self.d_optimizer.apply_gradients(gradients(images))

        gan = GAN()
        gan.compile({given})
        gan.fit(x, epochs=2)
        """
    )
    wrapped = "hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))"
    assert made.after.count(wrapped) == 2
    assert "LearningRateWarmupCallback" not in made.after
    told = [note.text for note in made.to_decide]
    assert "raise these learning rates over a warm-up." in told
    assert not any("wrap this optimizer" in text for text in told)


def test_a_model_beside_one_with_several_optimizers_keeps_its_warm_up():
    made = done(
        """
        import keras
        encoder, gan = make_models()
        encoder.compile(keras.optimizers.Adam(1e-3), "mse")
        gan.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3))
        encoder.fit(x, y, epochs=2)
        gan.fit(x, epochs=2)
        """
    ).after
    warmed, together = made[made.index("encoder.fit") :].split("gan.fit")
    assert "LearningRateWarmupCallback(1e-3 * hvd.size()" in warmed
    assert "LearningRateWarmupCallback" not in together


@pytest.mark.parametrize(("given", "told"), [("", True), ("steps_per_epoch=100, ", False)])
def test_a_data_set_of_unknown_length_needs_a_number_for_the_warm_up(given, told):
    made = done(
        f"""
        import tensorflow as tf
        data = tf.data.TFRecordDataset(files).map(parse).batch(32)
        model = tf.keras.Sequential(layers)
        model.compile(tf.keras.optimizers.Adam(1e-3), "mse")
        model.fit(data, {given}epochs=2)
        """
    )
    assert "LearningRateWarmupCallback" in made.after
    texts = [note.text for note in made.to_decide]
    assert any("pass steps_per_epoch= to the warm-up" in text for text in texts) == told


KERAS = """
import keras
first, second = make_models()
first.compile("adam", "mse")
second.compile({arguments})
first.fit(x, y, epochs=2)
second.fit(x, y, epochs=2)
"""


@pytest.mark.parametrize(
    ("arguments", "left"),
    [("**options", True), ("d_optimizer=d, g_optimizer=g", True), ("optimizer=o", False)],
)
def test_a_model_whose_optimizer_is_not_seen_is_left_to_the_author(arguments, left):
    made = done(KERAS.format(arguments=arguments))
    texts = [note.text for note in made.to_decide]
    assert any("DistributedOptimizer for each optimizer" in text for text in texts) == left
    assert "LearningRateWarmupCallback(float(second.optimizer.learning_rate)" in made.after


@pytest.mark.parametrize(("optimizer", "left"), [("own", True), ("first.optimizer", False)])
def test_a_loop_beside_fit_is_left_to_the_author(optimizer, left):
    loop = f"for x in data:\n    {optimizer}.apply_gradients(pairs_of(x))\n"
    made = done(KERAS.format(arguments="o") + loop)
    assert any("of its loop" in note.text for note in made.to_decide) == left


@pytest.mark.parametrize(
    "callbacks", ["{}", "{},", "\n    {},\n", "a, {}", "{}, b", "a, {}, b", "a,\n    {},\n    b,\n"]
)
def test_rank_0_restores_a_backup_before_the_broadcast(callbacks):
    after = done(f"""
import keras

model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", loss="mse")
model.fit(x, y, epochs=2, callbacks=[{callbacks.format("keras.callbacks.BackupAndRestore('d')")}])
""").after
    restore, _, others = after.partition("hvd.callbacks.BroadcastGlobalVariablesCallback(0)")
    assert "*([keras.callbacks.BackupAndRestore('d')] if hvd.rank() == 0 else [])," in restore
    assert "BackupAndRestore" not in others
    assert [each for each in "ab" if f"{each}," in others] == [c for c in "ab" if c in callbacks]


def test_a_backup_appended_to_the_callbacks_is_left_to_the_author():
    made = done("""
        import keras

        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
        callbacks = [a]
        callbacks.append(keras.callbacks.BackupAndRestore("d"))
        model.fit(x, y, epochs=2, callbacks=callbacks)
    """)
    assert ["only rank 0 may have this" in note.text for note in made.to_decide] == [True]


@pytest.mark.parametrize(
    ("draw", "alike"),
    [
        *(("model_selection.KFold(5, shuffle=True)", True), ("utils.shuffle(x, y)", True)),
        ("model_selection.KFold(5, shuffle=True, random_state=0)", False),
    ],
)
def test_ranks_that_split_data_by_the_seed_of_numpy_keep_one_seed(draw, alike):
    after = done(f"""
        import keras
        from sklearn import model_selection, utils

        keras.utils.set_random_seed(1)
        drawn = {draw}
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
        model.fit(x, y, epochs=2)
    """).after
    assert ("set_random_seed(1)\n" in after) == alike
