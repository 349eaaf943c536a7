"""Gradients of the collectives, in every framework, by the table in docs/horovod.md.

What a rank's input must get is computed here, from all ranks' output gradients, by numpy alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.contract.conftest import job
from tests.contract.test_collectives_sets import registered

FACTORS = {"prescale_factor": 0.5, "postscale_factor": 3.0}
SCALE = 1.5
REDUCED = {"Average": np.mean, "Sum": np.sum}


class Torch:
    """``torch.autograd``."""

    framework = "torch"

    def run(self, function, *lists):
        """Return what a function of lists of tensors returns, as arrays."""
        import torch

        made = function(*[[torch.tensor(a) for a in arrays] for arrays in lists])
        return [t.detach().numpy() for t in made]

    def pulled(self, function, xs, gs):
        """Return the gradients of xs where function(xs) gets gs; they have gradients, too."""
        import torch

        xs = [x if x.requires_grad else x.clone().requires_grad_() for x in xs]
        return list(torch.autograd.grad(function(xs), xs, gs, create_graph=True))

    def pulled_apart(self, function, xs, gs):
        """Return the same, computed for one result after the other."""
        import torch

        xs = [x.clone().requires_grad_() for x in xs]
        # Products keep what they need for one backward pass, and no longer.
        ys = function([x * torch.ones_like(x) for x in xs])
        for y, g in zip(ys, gs, strict=True):
            (y * torch.ones_like(y)).backward(g)
        return [x.grad for x in xs]


class Eager:
    """``tf.GradientTape``."""

    framework = "tensorflow"

    def run(self, function, *lists):
        import tensorflow as tf

        made = function(*[[tf.constant(a) for a in arrays] for arrays in lists])
        return [t.numpy() for t in made]

    def pulled(self, function, xs, gs):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(xs)
            ys = function(xs)
        return tape.gradient(ys, xs, gs)

    def pulled_apart(self, function, xs, gs):
        import tensorflow as tf

        with tf.GradientTape(persistent=True) as tape:
            tape.watch(xs)
            ys = function(xs)
        return [tape.gradient(y, x, g) for y, x, g in zip(ys, xs, gs, strict=True)]


class Function(Eager):
    """The same in a ``tf.function``."""

    def run(self, function, *lists):
        import tensorflow as tf

        return super().run(tf.function(function), *lists)


class Graph(Eager):
    """``tf.gradients`` in a graph of TensorFlow 1."""

    def run(self, function, *lists):
        import tensorflow as tf

        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            return session.run(function(*[[tf.constant(a) for a in each] for each in lists]))

    def pulled(self, function, xs, gs):
        import tensorflow as tf

        return tf.gradients(function(xs), xs, gs)

    def pulled_apart(self, function, xs, gs):
        import tensorflow as tf

        ys = function(xs)
        return [tf.gradients(y, x, g)[0] for y, x, g in zip(ys, xs, gs, strict=True)]


class Jax:
    """``jax.vjp``."""

    framework = "jax"

    def run(self, function, *lists):
        import jax.numpy as jnp

        made = function(*[[jnp.asarray(a) for a in arrays] for arrays in lists])
        return [np.asarray(a) for a in made]

    def pulled(self, function, xs, gs):
        import jax

        return jax.vjp(function, xs)[1](gs)[0]

    def pulled_apart(self, function, xs, gs):
        import jax

        def member(i):
            _, pull = jax.vjp(lambda x: function([*xs[:i], x, *xs[i + 1 :]])[i], xs[i])
            return pull(gs[i])[0]

        return [member(i) for i in range(len(xs))]


class Jit(Jax):
    """The same in a compiled program."""

    def run(self, function, *lists):
        import jax

        return super().run(jax.jit(function), *lists)


WAYS = {
    "torch": Torch(),
    "tensorflow": Eager(),
    "tensorflow.function": Function(),
    "tensorflow.graph": Graph(),
    "jax": Jax(),
    "jax.jit": Jit(),
}


@dataclass(frozen=True)
class World:
    """A way of differentiating, and the module with the collectives that it is to go through."""

    way: Any
    hvd: Any


@pytest.fixture(scope="module", params=WAYS)
def world(request):
    way = WAYS[request.param]
    for framework in job(way.framework):
        yield World(way, framework.hvd)


@pytest.fixture(params=["alone", "grouped"])
def grouped(request):
    return request.param == "grouped"


def called(hvd, kind, xs, *, grouped, **options):
    """Return what a collective makes of several tensors, as a group or of one after the other."""
    if grouped:
        return getattr(hvd, f"grouped_{kind}")(xs, **options)
    return [getattr(hvd, kind)(x, **options) for x in xs]


def drawn(what, rank, shapes):
    """Return arrays that every rank knows of every rank."""
    return [np.random.default_rng([what, rank, i]).normal(size=s) for i, s in enumerate(shapes)]


def check(world, call, inputs, outputs, first, second):
    """Compare the gradients of a collective, and theirs, with the formulae.

    Args:
        call: carries it out on a list of tensors, in a process set.
        inputs: the tensors' shapes on the rank at a place, of so many ranks; outputs likewise.
        first: the gradient of the i-th input at a place, of all ranks' gradients of its output.
        second: the gradient of that output gradient, of those of all ranks' firsts.
    """
    halves = ((0, 2), (1, 3)) if world.hvd.size() > 2 else ()
    with registered(world.hvd, range(world.hvd.size()), *halves) as sets:
        for each in sets:
            if each.included():
                check_in(each, world.way, call, inputs, outputs, first, second)


def check_in(each, way, call, inputs, outputs, first, second):
    here, n = each.rank(), each.size()
    gs = [drawn(1, place, outputs(place, n)) for place in range(n)]
    vs = [drawn(2, place, inputs(place, n)) for place in range(n)]
    xs = drawn(3, here, inputs(here, n))

    def function(xs):
        return call(xs, each)

    def twice(xs, gs, vs):
        return way.pulled(lambda gs: way.pulled(function, xs, gs), gs, vs)

    def compare(found, right, everyone):
        for i, made in enumerate(found):
            expected = right([of_rank[i] for of_rank in everyone], here, i)
            np.testing.assert_allclose(made, expected, rtol=1e-12, atol=1e-12)

    compare(way.run(lambda xs, gs: way.pulled(function, xs, gs), xs, gs[here]), first, gs)
    compare(way.run(lambda xs, gs: way.pulled_apart(function, xs, gs), xs, gs[here]), first, gs)
    compare(way.run(twice, xs, gs[here], vs[here]), second, vs)


@pytest.mark.parametrize("op", REDUCED)
def test_of_allreduce(world, op, grouped):
    def call(xs, each):
        options = {"op": getattr(world.hvd, op), **FACTORS, "process_set": each}
        return called(world.hvd, "allreduce", xs, grouped=grouped, **options)

    def shapes(place, n):
        return [(5, 2), ()]

    def reduced(gs, place, i):
        return SCALE * REDUCED[op](gs, axis=0)

    check(world, call, shapes, shapes, first=reduced, second=reduced)


@pytest.mark.parametrize("op", REDUCED)
def test_of_reducescatter(world, op, grouped):
    def call(xs, each):
        options = {"op": getattr(world.hvd, op), **FACTORS, "process_set": each}
        return called(world.hvd, "reducescatter", xs, grouped=grouped, **options)

    def wholes(place, n):
        return [(5, 2), (7,)]

    def shares(place, n):
        return [np.array_split(np.empty(shape), n)[place].shape for shape in wholes(place, n)]

    def gathered(gs, place, i):
        return SCALE * (len(gs) if op == "Sum" else 1) * np.concatenate(gs)

    def own(vs, place, i):
        return np.array_split(SCALE * REDUCED[op](vs, axis=0), len(vs))[place]

    check(world, call, wholes, shares, first=gathered, second=own)


def test_of_allgather(world, grouped):
    # XLA runs a small program's collectives one by one, in an order that depends on their shapes.
    count = 1 if isinstance(world.way, Jit) else 2

    def rows(i, n):
        return [(place + i) % 3 for place in range(n)]

    def call(xs, each):
        if world.way.framework != "jax":
            return called(world.hvd, "allgather", xs, grouped=grouped, process_set=each)
        # JAX must know all ranks' rows beforehand.
        known = [rows(i, each.size()) for i in range(len(xs))]
        if grouped:
            return world.hvd.grouped_allgather(xs, process_set=each, rows=known)
        return [world.hvd.allgather(x, None, each, k) for x, k in zip(xs, known, strict=True)]

    def parts(place, n):
        return [(rows(0, n)[place], 2), (rows(1, n)[place],)][:count]

    def wholes(place, n):
        return [(sum(rows(0, n)), 2), (sum(rows(1, n)),)][:count]

    def own(gs, place, i):
        ends = np.cumsum(rows(i, len(gs)))
        return np.split(np.mean(gs, 0), ends)[place]

    def gathered(vs, place, i):
        return np.concatenate(vs) / len(vs)

    check(world, call, parts, wholes, first=own, second=gathered)


def test_of_broadcast(world):
    def call(xs, each):
        return [world.hvd.broadcast(x, each.ranks[-1], process_set=each) for x in xs]

    def shapes(place, n):
        return [(3, 2), ()]

    def of_root(gs, place, i):
        return np.mean(gs, 0) * (place == len(gs) - 1)

    def from_root(vs, place, i):
        return vs[-1] / len(vs)

    check(world, call, shapes, shapes, first=of_root, second=from_root)


def test_of_alltoall(world):
    """Sends (from + 2 * to) % 3 rows."""

    def splits(place, n):
        return [(place + 2 * to) % 3 for to in range(n)]

    def received(place, n):
        return [splits(source, n)[place] for source in range(n)]

    def call(xs, each):
        here, n = each.rank(), each.size()
        told = {"received_splits": received(here, n)} if world.way.framework == "jax" else {}
        options = {"splits": splits(here, n), "process_set": each, **told}
        return [world.hvd.alltoall(x, **options)[0] for x in xs]

    def sent_shapes(place, n):
        return [(sum(splits(place, n)), 2)]

    def received_shapes(place, n):
        return [(sum(received(place, n)), 2)]

    def exchanged(arrays, place, cut):
        """Return what comes to a place if every rank cuts its rows so."""
        n = len(arrays)
        parts = [np.split(a, np.cumsum(cut(r, n)))[place] for r, a in enumerate(arrays)]
        return np.concatenate(parts)

    check(
        world,
        call,
        sent_shapes,
        received_shapes,
        first=lambda gs, place, i: exchanged(gs, place, received),
        second=lambda vs, place, i: exchanged(vs, place, splits),
    )
