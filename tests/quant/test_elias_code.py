"""The paper's sparse code on the wire: what it holds, and that no more travels than is used."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from qsgd_hpc import _core
from tests import reference_schemes
from tests.engine.ranks import on_ranks

HEADER = 32
KEY = {"seed": (7 << 32) + 5, "tensor": 9, "step": 11, "rank": 3}
COMPRESSED = [name for name in _core.COMPRESSED_ALGORITHMS if "_sra" not in name]


def spec_of(bits, bucket=512, **more):
    return _core.CodecSpec(scheme="elias", bits=bits, bucket_size=bucket, **more)


def gradient(rank, count):
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


class Bits:
    """Reads a stream of bits, highest first."""

    def __init__(self, data):
        self._bits = "".join(f"{byte:08b}" for byte in data)
        self._at = 0

    def take(self, count):
        self._at += count
        return int(self._bits[self._at - count : self._at], 2)

    def omega(self):
        n = 1
        while self.take(1):
            self._at -= 1
            n = self.take(n + 1)
        return n


def levels_of(slot, count):
    """Return the signed levels of a bucket as the paper's section 3.2 says."""
    (length,) = struct.unpack_from("<I", slot)
    assert not any(slot[4 + length :])
    levels = np.zeros(count, int)
    if length == 0:
        return levels
    bits, place = Bits(slot[4 : 4 + length]), 0
    while place < count:
        place += bits.omega()
        if place > count:
            break
        sign = -1 if bits.take(1) else 1
        levels[place - 1] = sign * bits.omega()
    return levels


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [1, 63, 512])
def test_a_slot_holds_the_levels_of_the_papers_code(bits, count):
    spec, x, s = spec_of(bits), gradient(1, count), 2 ** (bits - 1) - 1
    message = bytes(_core.encode(x, spec=spec, **KEY))
    (norm,) = struct.unpack_from("<f", message, HEADER)
    assert norm == pytest.approx(np.linalg.norm(x.astype(np.float64)), rel=1e-6)
    levels = levels_of(message[HEADER + 4 :], count)
    ratio = np.minimum(np.abs(x) / np.float32(norm) * np.float32(s), np.float32(s))
    floor = np.floor(ratio)
    u = reference_schemes.thresholds(count, 512, **KEY)[:count]
    expected = floor + reference_schemes.take_up((ratio - floor).astype(np.float64), u)
    assert levels.tolist() == (np.sign(x) * expected).astype(int).tolist()
    decoded = _core.decode(np.frombuffer(message, np.uint8), count=count, spec=spec)
    assert np.allclose(decoded, norm / s * levels, rtol=1e-6, atol=0)


def bound_bits(n, s):
    """Theorem 3.2's, with the norm."""
    nonzero = s * (s + math.sqrt(n))
    return (3 + 1.5 * math.log2(2 * (s * s + n) / nonzero)) * nonzero + 32


@pytest.mark.parametrize("shape", ["gaussian", "equal", "heavy", "one"])
@pytest.mark.parametrize(("bits", "bucket"), [(2, 512), (2, 4096), (4, 512), (5, 256), (5, 512)])
def test_the_mean_length_meets_the_theorem(bits, bucket, shape):
    rng = np.random.default_rng(5)
    x = {
        "gaussian": rng.standard_normal(bucket),
        "equal": rng.choice([-1.0, 1.0], bucket),
        "heavy": rng.standard_cauchy(bucket),
        "one": np.eye(1, bucket).ravel(),
    }[shape].astype(np.float32)
    spec = spec_of(bits, bucket)
    lengths = []
    for step in range(30):
        message = bytes(_core.encode(x, spec=spec, step=step))
        lengths.append(struct.unpack_from("<I", message, HEADER + 4)[0])
    mean = 8 * np.mean(lengths) + 32
    assert mean <= bound_bits(bucket, 2 ** (bits - 1) - 1)
    if shape == "gaussian":  # what the planner goes by; beside the norm there is the slot's length
        assert mean + 32 == pytest.approx(8 * spec.mean_bytes(bucket), rel=0.05)


def test_sqrt_n_levels_take_at_most_2_8_bits_an_element():
    spec, x = spec_of(5, 256), gradient(1, 256)  # 15 levels; 16 is the root
    message = bytes(_core.encode(x, spec=spec))
    (length,) = struct.unpack_from("<I", message, HEADER + 4)
    assert 8 * length + 32 <= 2.8 * 256 + 32


@pytest.mark.parametrize("count", [1, 511, 512, 513, 5000])
def test_what_is_planned_for_adds_up_over_buckets(count):
    spec = spec_of(5)
    rest = spec.bytes(count % 512)
    assert spec.bytes(count) == count // 512 * spec.bytes(512) + rest
    assert 0 < spec.mean_bytes(count) <= spec.bytes(count) + 1


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7])
def test_lengths_that_cannot_be_are_refused_by_the_checksum(at):
    message = np.array(_core.encode(gradient(1, 600), spec=spec_of(5)))
    message[HEADER + 8 + at] ^= 0xFF
    with pytest.raises(RuntimeError, match="checksum"):
        _core.decode(message, count=600, spec=spec_of(5))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("algorithm", COMPRESSED)
def test_only_what_is_used_travels(algorithm, ranks):
    """And arrives: all ranks end with the same sum, near the exact one."""
    spec, count = spec_of(7, 4096), 1 << 16

    def program(me):
        x = gradient(me.rank, count)
        me.allreduce("w", x, "sum", spec).wait()
        return x, me.engine.quality()["w"], me.engine.stats()["wire_bytes"]

    results = on_ranks(ranks, program, algorithm=algorithm)
    exact = sum(gradient(rank, count) for rank in range(ranks)).astype(np.float64)
    assert len({x.tobytes() for x, _, _ in results}) == 1
    error = np.square(results[0][0] - exact).sum() / np.square(exact).sum()
    assert 0 < error < 0.3 * ranks
    copies = (ranks - 1) if algorithm == "allgather" else 2 * (ranks - 1) / ranks
    for _, quality, sent in results:
        assert 1 < quality["bits"] < 5
        assert quality["wire_bytes"] == pytest.approx(quality["bits"] * count / 8, rel=0.01)
        assert sent == pytest.approx(copies * quality["wire_bytes"], rel=0.05)
        assert sent < 0.5 * copies * spec.bytes(count)


def test_codes_of_one_length_and_of_many_travel_together():
    codings = [spec_of(5), _core.CodecSpec(bits=4), spec_of(2, 1024), _core.CodecSpec(bits=8)]

    def program(me):
        xs = [gradient(10 * me.rank + i, 3000 + i) for i in range(4)]
        handles = [
            me.allreduce(f"w{i}", x, "sum", coding)
            for i, (x, coding) in enumerate(zip(xs, codings, strict=True))
        ]
        for handle in handles:
            handle.wait()
        return [x.tobytes() for x in xs], me.engine.stats()["fused_reductions"]

    together = on_ranks(3, program, cycle_time_s=0.5)
    alone = on_ranks(3, program, fusion_bytes=0)
    assert {fused for _, fused in together} == {1}
    assert {fused for _, fused in alone} == {4}
    assert len({tuple(xs) for xs, _ in (*together, *alone)}) == 1


@pytest.mark.parametrize("bits", [2, 5])
def test_what_is_lost_is_fed_back(bits):
    spec, count, steps = spec_of(bits, contract=True), 3000, 30

    def program(me):
        total = np.zeros(count)
        for step in range(steps):
            x = gradient(100 * step + me.rank, count)
            me.allreduce("w", x, "sum", spec, error_feedback=True).wait()
            total += x
        return total, me.engine.owed_share("w")

    results = on_ranks(3, program)
    exact = sum(
        gradient(100 * s + r, count).astype(np.float64) for s in range(steps) for r in range(3)
    )
    owed = sum(share.astype(np.float64) for _, share in results)
    assert np.abs(owed).max() > 0.1
    assert np.allclose(results[0][0] + owed, exact, atol=0.01)


@pytest.mark.parametrize("ranks_per_node", [2, 3])
def test_shards_of_nodes_are_told_the_bits_that_were_used(ranks_per_node):
    def program(me):
        x = gradient(me.rank, 1 << 14)
        me.allreduce("w", x, "sum", spec_of(5)).wait()
        return x.tobytes(), me.engine.quality()["w"]["bits"]

    results = on_ranks(6, program, ranks_per_node=ranks_per_node)
    assert len({x for x, _ in results}) == 1
    assert all(1 < bits < 4 for _, bits in results)


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_the_largest_floats_stay_finite(bits):
    x = gradient(3, 512)
    x[0] = np.finfo(np.float32).max
    decoded = _core.decode(_core.encode(x, spec=spec_of(bits)), count=x.size, spec=spec_of(bits))
    assert np.isfinite(decoded).all()
    assert decoded[0] > 1e38
