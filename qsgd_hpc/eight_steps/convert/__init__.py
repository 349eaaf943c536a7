"""Conversion of a serial training script to a distributed one: `qsgd-hpc convert`.

A framework's rules (`torch_script`, `keras_script`, ...) read the script and add edits to a `Plan`.
Decisions that no rule can make become TODOs. Text without edits is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qsgd_hpc.eight_steps.convert.jax_script import convert_jax
from qsgd_hpc.eight_steps.convert.keras_script import convert_keras
from qsgd_hpc.eight_steps.convert.plan import Note, Plan, apply
from qsgd_hpc.eight_steps.convert.tf1_script import convert_tf1
from qsgd_hpc.eight_steps.convert.tf2_script import convert_tf2
from qsgd_hpc.eight_steps.convert.torch_script import convert_torch
from qsgd_hpc.eight_steps.reading import Framework, Script, distributed_without_hvd, parse
from qsgd_hpc.eight_steps.tree import diff as difference
from qsgd_hpc.errors import UsageError

__all__ = ["FRAMEWORKS", "Conversion", "Note", "convert"]

FRAMEWORKS: Mapping[str, Framework] = {each.name.lower(): each for each in Framework}
"""Frameworks by the values of ``--framework``.

:meta hide-value:
"""
RULES: Mapping[Framework, Callable[[Plan], None]] = {
    Framework.TORCH: convert_torch,
    Framework.KERAS: convert_keras,
    Framework.TF2: convert_tf2,
    Framework.TF1: convert_tf1,
    Framework.JAX: convert_jax,
}


@dataclass(frozen=True)
class Conversion:
    """A script before and after.

    Attributes:
        path: path of the script, for messages.
        before: its text.
        after: the text of the distributed script; the same if it was distributed already.
        framework: its framework.
        notes: actions, and open decisions (step 0), with the lines of `before`.
        encoding: encoding of the script.
    """

    path: Path
    before: str
    after: str
    framework: Framework
    notes: tuple[Note, ...]
    encoding: str = "utf-8"

    @property
    def to_decide(self) -> tuple[Note, ...]:
        """The decisions that the conversion leaves to the author of the script."""
        return tuple(note for note in self.notes if note.step == 0)

    @property
    def changed(self) -> bool:
        """Whether the text was changed."""
        return self.before != self.after

    def diff(self) -> str:
        """Return the changes in the format of `diff -u`."""
        name = str(self.path)
        return difference(self.before, self.after, name, f"{name} (distributed)")


def convert(
    source: str | bytes, path: Path = Path("<script>"), framework: Framework | None = None
) -> Conversion:
    """Convert a serial training script to a distributed one.

    Args:
        source: the text of the script.
        path: for messages.
        framework: its framework; None: detected.
    Returns:
        The conversion; unchanged if the script is distributed already.
    Raises:
        UsageError: the text is not Python, or has no training that can be converted.
    """
    script = parse(source, path)
    if script.distributed:
        known = sorted(script.frameworks, key=lambda f: f.value)
        return Conversion(path, script.text, script.text, (known or [Framework.TORCH])[0], ())
    chosen = framework or _framework(script)
    plan = Plan(script)
    RULES[chosen](plan)
    after = apply(script.text, plan.edits)
    compile(after, str(path), "exec")
    notes = tuple(sorted(set(plan.notes)))
    return Conversion(path, script.text, after, chosen, notes, script.encoding)


def _framework(script: Script) -> Framework:
    called = {script.called(call) for call in script.calls}
    if (fault := distributed_without_hvd(script)) is not None:
        raise UsageError(f"{script.path}: already {fault}")
    found = set(script.frameworks)
    compiles = any(name.endswith(".compile") for name in called)
    if Framework.KERAS in found and not compiles:
        found.discard(Framework.KERAS)  # the fit of another library
    if Framework.KERAS in found:
        found -= {Framework.TORCH, Framework.JAX, Framework.TF2}  # Keras's backend, or its model
    if len(found) > 1 and not any(name.endswith(".backward") for name in called):
        found.discard(Framework.TORCH)  # its loaders, or its writer for TensorBoard
    if len(found) == 1:
        return found.pop()
    if found:
        names = ", ".join(name for name, each in FRAMEWORKS.items() if each in found)
        raise UsageError(
            f"{script.path}: trains with several frameworks ({names}): choose by --framework"
        )
    raise UsageError(
        f"{script.path}: no training that can be converted was found. Looked for "
        "imports of torch or jax, for model.compile and model.fit of Keras, for "
        "tf.GradientTape and for sessions of TensorFlow 1; a framework can be chosen by --framework"
    )
