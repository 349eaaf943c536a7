"""What JAX's transformations make of the collectives; see conftest.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.contract.training import needs_ranks
from tests.gpu.memory import has_jax

pytestmark = pytest.mark.full

jax = pytest.importorskip("jax")
jnp = jax.numpy

import qsgd_hpc.jax as hvd  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def world():
    hvd.init()


def total():
    """What the ranks' numbers, counted from 1, add up to."""
    return hvd.size() * (hvd.size() + 1) / 2


def mine(count=4):
    return jnp.arange(1.0, count + 1) * (hvd.rank() + 1)


GRADIENTS = {
    # Where rank r's loss is r + 1 times the sum of its results; see also test_gradients.py.
    "max": (
        lambda x: hvd.allreduce(x, op=hvd.Max, prescale_factor=2.0),
        lambda x: 2 * total() * (hvd.rank() == hvd.size() - 1),
    ),
    "min": (lambda x: hvd.allreduce(x, op=hvd.Min), lambda x: total() * (hvd.rank() == 0)),
    "product": (
        lambda x: hvd.allreduce(x, op=hvd.Product),
        lambda x: total() * jnp.prod(jnp.arange(1.0, hvd.size() + 1)) / (hvd.rank() + 1)
        * (x / (hvd.rank() + 1)) ** (hvd.size() - 1),
    ),
    "scattered max": (
        lambda x: hvd.reducescatter(x, op=hvd.Max),
        lambda x: (hvd.rank() == hvd.size() - 1) * np.repeat(
            np.arange(1.0, hvd.size() + 1),
            [len(part) for part in np.array_split(np.arange(4), hvd.size())],
        ),
    ),
    "vmap": (jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Sum)), lambda x: total()),
    "vmap of allgather": (
        lambda x: jax.vmap(hvd.allgather)(x.reshape(2, 2)),
        lambda x: total() / hvd.size(),
    ),
    "vmap of reducescatter": (
        lambda x: jax.vmap(lambda y: hvd.reducescatter(jnp.tile(y, hvd.size())))(x.reshape(2, 2)),
        lambda x: total(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("which", GRADIENTS)
def test_gradients_beside_those_of_every_framework(which, jitted):
    function, expected = GRADIENTS[which]
    gradient = jax.grad(lambda x: ((hvd.rank() + 1) * function(x)).sum())
    found = (jax.jit(gradient) if jitted else gradient)(mine())
    np.testing.assert_allclose(found, np.broadcast_to(expected(mine()), 4), rtol=1e-5)


def test_gradients_of_uneven_exchanges():
    size, rank = hvd.size(), hvd.rank()
    rows = [r + 1 for r in range(size)]
    gather = jax.jit(jax.grad(lambda x: (hvd.allgather(x, rows=rows) ** 2).sum()))
    np.testing.assert_allclose(gather(mine(rank + 1)), 2 * mine(rank + 1), rtol=1e-6)

    sent, received = [rank + r for r in range(size)], [r + rank for r in range(size)]

    def exchanged(x):
        result, rows = hvd.alltoall(x, sent, received_splits=received)
        return ((rank + 1) * result).sum() + rows.sum()

    weights = np.repeat(np.arange(1.0, size + 1), sent)
    np.testing.assert_allclose(jax.jit(jax.grad(exchanged))(mine(sum(sent))), weights)


def test_second_derivatives_and_forward_mode():
    def loss(x):
        return (hvd.allreduce(x, op=hvd.Sum) ** 2).sum()

    x, v = mine(3), jnp.ones(3)
    summed = np.arange(1.0, 4) * total()
    change = jax.jit(lambda x: jax.jvp(loss, (x,), (v,))[1])(x)
    np.testing.assert_allclose(change, 2 * (summed * hvd.size()).sum(), rtol=1e-6)
    curve = jax.jit(jax.grad(lambda x: jax.grad(loss)(x).sum()))(x)
    np.testing.assert_allclose(curve, 2.0 * hvd.size() ** 2, rtol=1e-6)


def test_loops_and_branches_carry_collectives_out_each_time():
    def body(carry, x):
        return carry + hvd.allreduce(x, op=hvd.Sum), carry

    xs = mine(12).reshape(4, 3)
    last, _ = jax.jit(lambda xs: jax.lax.scan(body, jnp.zeros(3), xs))(xs)
    np.testing.assert_allclose(last, np.arange(1.0, 13).reshape(4, 3).sum(0) * total())
    branch = jax.jit(
        lambda x, yes: jax.lax.cond(yes, lambda x: hvd.allreduce(x, op=hvd.Sum), lambda x: x, x)
    )
    assert branch(mine(), False)[0] == hvd.rank() + 1
    assert branch(mine(), True)[0] == total()


@pytest.mark.skipif(has_jax(), reason="a program on a GPU carries out one after the other")
def test_many_collectives_of_one_program_may_be_under_way_in_any_order():
    count = 60

    @jax.jit
    def program(x):
        order = range(count) if hvd.rank() % 2 else reversed(range(count))
        made = {i: hvd.allreduce(x + i, name=f"any{i}", op=hvd.Sum) for i in order}
        return [made[i] for i in range(count)]

    for _ in range(3):
        results = program(mine())
        for i, result in enumerate(results):
            np.testing.assert_allclose(result, np.arange(1.0, 5) * total() + i * hvd.size())


def test_a_callback_of_one_program_may_run_another():
    """Neither may wait for a thread that the other has."""
    inner = jax.jit(lambda x: hvd.allreduce(x, name="inner", op=hvd.Sum))

    def call(x):
        return np.asarray(inner(jnp.asarray(x)))

    @jax.jit
    def outer(x):
        summed = hvd.allreduce(x, name="outer", op=hvd.Sum)
        return jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), summed)

    results = []
    thread = threading.Thread(target=lambda: results.append(np.asarray(outer(mine()))), daemon=True)
    thread.start()
    thread.join(60)
    np.testing.assert_allclose(results[0], np.arange(1.0, 5) * total() * hvd.size())


def test_donated_arguments_are_reduced_in_their_place():
    step = jax.jit(
        lambda params, grads: params - hvd.allreduce_gradients(grads, op=hvd.Sum),
        donate_argnums=(0,),
    )
    params = jnp.zeros(1 << 18)
    for _ in range(3):
        params = step(params, jnp.ones(1 << 18))
    np.testing.assert_allclose(params, -3.0 * hvd.size())


def test_results_may_be_donated():
    add = jax.jit(lambda x, y: x + y, donate_argnums=0)
    for _ in range(3):
        summed = hvd.allreduce(mine(), op=hvd.Sum)
        np.testing.assert_allclose(
            add(summed, mine()), np.arange(1, 5) * (total() + hvd.rank() + 1)
        )
        assert summed.is_deleted()


def test_programs_keep_their_names_when_other_ranks_trace_again():
    """A rank with a short last batch traces once more; named and later calls still fit."""
    step = jax.jit(lambda x: x.sum() + hvd.allreduce(jnp.ones(2), name="steady", op=hvd.Sum).sum())
    assert step(jnp.zeros(4)) == 2 * hvd.size()
    assert step(jnp.zeros(4 + hvd.rank())) == 2 * hvd.size()
    assert hvd.allreduce(jnp.ones(1), op=hvd.Sum)[0] == hvd.size()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "complex64"])
def test_types_that_the_core_does_not_know(dtype):
    array = jnp.full(3, 1.0 + hvd.rank()).astype(dtype)
    for transform in (lambda f: f, jax.jit):
        summed = transform(lambda x: hvd.allreduce(x, op=hvd.Sum))(array)
        assert summed.dtype == array.dtype
        assert complex(summed[0]) == total()
        moved = transform(lambda x: hvd.broadcast(x, hvd.size() - 1))(array)
        assert complex(moved[0]) == hvd.size()


@needs_ranks(2)
def test_errors_of_programs_reach_every_rank_as_what_they_are():
    program = jax.jit(lambda x: hvd.allreduce(x, name="unequal"))
    with (
        pytest.raises(hvd.HorovodInternalError, match=r"\[[34]\].*\[[34]\]"),
        hvd.translated_errors(),
    ):
        program(jnp.zeros(3 + hvd.rank() % 2)).block_until_ready()
    assert hvd.allreduce(jnp.ones(1), op=hvd.Sum)[0] == hvd.size()


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_errors_are_translated_from_every_class_in_which_jax_raises_them(kind):
    with pytest.raises(hvd.HorovodInternalError, match=r"^unequal$"), hvd.translated_errors():
        raise kind("INTERNAL: HorovodInternalError: unequal")
    for error in (kind("of the script"), hvd.UsageError("UsageError: of ours")):
        with pytest.raises(type(error)) as caught, hvd.translated_errors():
            raise error
        assert caught.value is error


def test_what_programs_cannot_do_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match="call hvd"):
        jax.jit(lambda x: hvd.allreduce_async(x).wait())(mine())
    with pytest.raises(ValueError, match="stop_gradient"):
        jax.grad(lambda x: hvd.allreduce(x, op=hvd.Adasum).sum())(mine())
    with pytest.raises(ValueError, match="whole arrays"):
        jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum))(mine(4).reshape(2, 2))
    with pytest.raises(ValueError, match="received_splits"):
        jax.jit(lambda x: hvd.alltoall(x, [4] + [0] * (hvd.size() - 1))[0])(mine())


def test_a_program_of_another_job_is_refused():
    program = jax.jit(lambda x: hvd.allreduce(x, name="other job"))
    program(mine())
    call = "qsgd_hpc.runtime.basics.rank"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, lambda: hvd.size() + 7)
        wrong = jax.jit(lambda x: hvd.allreduce(x, name="other job")).lower(mine()).compile()
    with pytest.raises(hvd.UsageError, match="clear_caches"), hvd.translated_errors():
        jax.block_until_ready(wrong(mine()))
