"""The smallest script of PyTorch, and its conversion."""

from __future__ import annotations

import textwrap

from qsgd_hpc.eight_steps.convert import convert

__all__ = ["done", "has", "torch_script"]

TORCH = """
import torch
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = make_model()
loader = DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{setup}
for epoch in range(3):
    total = 0.0
    for x, y in loader:
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        {clip}optimizer.step()
        total += loss.item()
    {after}
"""

TF2 = """
import tensorflow as tf

model = make()
optimizer = tf.keras.optimizers.Adam(0.01)
data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(9).batch(8)
for images, labels in data.take(100):
    with tf.GradientTape() as tape:
        loss = loss_of(model(images), labels)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
"""


def torch_script(setup="pass", after="pass", clip=""):
    lines = textwrap.indent(textwrap.dedent(after), "    ").strip()
    return TORCH.format(setup=textwrap.dedent(setup), after=lines, clip=clip)


def done(text):
    return convert(textwrap.dedent(text))


def has(made, lines):
    """Return whether a conversion has these lines in a loop."""
    return textwrap.indent(textwrap.dedent(lines).strip(), "    ") + "\n" in made.after


NOISY = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x * self.scale{drawn}

net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.ones(64, 8))
for (x,) in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
    optimizer.zero_grad()
    net(x).mean().backward()
    optimizer.step()
"""
