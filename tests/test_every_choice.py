"""What holds for every code and every algorithm that the core has, those yet to come among them."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from qsgd_hpc import _core, compression, env
from qsgd_hpc.frameworks.compressors import Choices
from qsgd_hpc.scaling.predict import schedules

BUCKET = 512
SIZES = (0, 1, BUCKET - 1, BUCKET, BUCKET + 1, 1300)
KEPT = {"topk": {"k": 16}}
CASTS = ("float16", "bfloat16")
CODED = _core.COMPRESSED_ALGORITHMS
EXACT = tuple(name for name in _core.ALGORITHMS if name not in ("auto", *CODED))


def spec_of(scheme, **options):
    return _core.CodecSpec(scheme=scheme, **KEPT.get(scheme, {}), **options)


def gaussian(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def round_trip(x, spec, **key):
    return _core.decode(_core.encode(x, spec=spec, **key), count=x.size, spec=spec)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", _core.SCHEMES)
def test_a_message_is_as_long_as_its_code_says_and_equal_for_one_key(scheme, size):
    spec, x = spec_of(scheme), gaussian(size)
    message = _core.encode(x, spec=spec, seed=3)
    assert len(message) == 32 + spec.bytes(size)
    assert bytes(_core.encode(x, spec=spec, seed=3)) == bytes(message)
    decoded = _core.decode(message, count=size, spec=spec)
    assert decoded.shape == x.shape
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("scheme", _core.SCHEMES)
def test_zeros_stay_and_signs_do_not_turn(scheme):
    spec = spec_of(scheme)
    assert not round_trip(np.zeros(1300, np.float32), spec).any()
    decoded = round_trip(-1 - np.abs(gaussian(1300)), spec)
    assert (decoded <= 0).all()
    assert decoded.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scheme", _core.SCHEMES)
def test_what_is_not_finite_is_seen_by_the_decoder(scheme, bad):
    x = gaussian(1300)
    x[700] = bad
    decoded = round_trip(x, spec_of(scheme))
    assert not np.isfinite(decoded[BUCKET : 2 * BUCKET]).all()
    assert np.isfinite(decoded[:BUCKET]).all()


@pytest.mark.parametrize("scheme", _core.SCHEMES)
def test_a_code_that_calls_itself_unbiased_is(scheme):
    spec, x, draws = spec_of(scheme), gaussian(BUCKET), 400
    mean = np.mean([round_trip(x, spec, step=step) for step in range(draws)], axis=0)
    left = np.sum((mean - x) ** 2) / np.sum(x**2)
    one = np.sum((round_trip(x, spec) - x) ** 2) / np.sum(x**2)
    if spec.biased:
        assert left > 2 * one / draws
    elif scheme not in CASTS:  # whose error is that of float32 sums
        assert left == pytest.approx(one / draws, rel=0.5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("algorithm", [*EXACT, *CODED])
def test_every_algorithm_ends_in_one_sum_on_all_ranks(algorithm, ranks):
    world = _core.ThreadWorld(ranks)
    data = [gaussian(5000, seed=rank) for rank in range(ranks)]
    coding = spec_of("qsgd", bits=8) if algorithm in CODED else None

    def one(rank):
        # All on one node, or nodes of 2 and a rest, as the algorithm likes it.
        node = ranks if algorithm == "shared" else 2
        communicator = _core.Communicator.over_threads(world, rank, node)
        x = data[rank].copy()
        communicator.allreduce([x], algorithm=algorithm, coding=coding)
        return x

    with ThreadPoolExecutor(ranks) as pool:
        sums = list(pool.map(one, range(ranks)))
    assert len({x.tobytes() for x in sums}) == 1
    exact = np.sum(data, axis=0, dtype=np.float64)
    error = np.sum((sums[0] - exact) ** 2) / np.sum(exact**2)
    # A requantising ring has the most: w (p+1)/2, with w = 1.1e-4 of 8 bits.
    assert error < (1e-3 if coding else 1e-12)


@pytest.mark.parametrize("scheme", _core.SCHEMES)
@pytest.mark.parametrize("algorithm", CODED)
def test_every_code_travels_by_every_algorithm(algorithm, scheme):
    ranks, world = 5, _core.ThreadWorld(5)

    def one(rank):
        communicator = _core.Communicator.over_threads(world, rank, 2)
        x = gaussian(70_000, seed=rank)
        report = communicator.allreduce([x], algorithm=algorithm, coding=spec_of(scheme))
        return x, report["result_finite"]

    with ThreadPoolExecutor(ranks) as pool:
        sums = list(pool.map(one, range(ranks)))
    assert len({x.tobytes() for x, _ in sums}) == 1
    assert all(finite for _, finite in sums)
    assert sums[0][0].any()


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("algorithm", [*EXACT, *CODED])
def test_every_algorithm_has_a_load_that_grows_with_size(algorithm, ranks):
    cost = (spec_of("qsgd", bits=4), 1e-10, 1e-10, 1e-10)
    machine = _core.Machine(
        ranks=ranks,
        ranks_per_node=2 if ranks % 2 == 0 else 1,
        within=(1e-6, 1e-10),
        across=(1e-5, 1e-9),
        shared=(1e-6, 1e-10),
        codecs=[cost],
    )
    coding = cost[0] if algorithm in CODED else None
    seconds = [
        _core.allreduce_s(machine, algorithm=algorithm, count=count, coding=coding)
        for count in (1, 1 << 10, 1 << 20, 1 << 28)
    ]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < 1e-3
    assert seconds[-1] > 1e-2


def test_settings_predictions_and_bindings_know_every_algorithm():
    assert set(env.ALGORITHMS) == set(_core.ALGORITHMS)
    assert set(env.COMPRESSED) == set(CODED)
    assert set(schedules.ALGORITHMS) == set(_core.ALGORITHMS) - {"auto"}


def test_users_can_name_every_code():
    assert set(compression.KINDS) == set(_core.SCHEMES) - set(CASTS)
    offered = {kind for _, kind in inspect.getmembers(Choices, inspect.isclass)}
    assert set(compression.KINDS.values()) <= offered
    for scheme in compression.KINDS:
        assert env.TABLE["QSGD_SCHEME"].parse(scheme) == scheme
