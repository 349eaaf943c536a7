"""What error feedback needs of biased codes: they contract, and nothing is lost over the steps."""

from __future__ import annotations

import numpy as np
import pytest

from qsgd_hpc import _core

BUCKET = 512
# Codes whose error is below the gradient itself for every input.
CONTRACTIONS = [
    {"scheme": "sign"},
    {"scheme": "topk", "k": 16},
    {"scheme": "nuqsgd", "bits": 2, "rounding": "nearest"},
    {"scheme": "nuqsgd", "bits": 4, "rounding": "nearest", "norm": "l2"},
    {"scheme": "terngrad", "rounding": "nearest"},
    {"scheme": "eden", "bits": 1},
    {"scheme": "eden", "bits": 3},
]
# Unbiased codes whose error is beyond the gradient until their scale is shrunk.
COARSE = [
    {"scheme": "minmax", "bits": 1},
    {"scheme": "nuqsgd", "bits": 2},
    {"scheme": "nuqsgd", "bits": 2, "norm": "l2"},
    {"scheme": "elias", "bits": 2},
]


def name(options):
    return "-".join(str(v) for v in options.values())


def gradients(kind, n, seed=1):
    random = np.random.default_rng(seed)
    draw = {
        "gaussian": random.standard_normal,
        "student": lambda size: random.standard_t(4, size),
        "one-sided": lambda size: random.uniform(0.1, 1, size),
        "sparse": lambda size: random.standard_normal(size) * (random.random(size) < 0.02),
    }
    return draw[kind](n).astype(np.float32)


def error(x, spec, step=0):
    """Return |Q(x) - x|^2 / |x|^2 of every bucket."""
    q = _core.decode(_core.encode(x, spec=spec, step=step), count=x.size, spec=spec)
    squares = [(v.astype(np.float64) ** 2).reshape(-1, BUCKET).sum(axis=1) for v in (q - x, x)]
    return squares[0] / squares[1]


@pytest.mark.parametrize("kind", ["gaussian", "student", "one-sided", "sparse"])
@pytest.mark.parametrize("options", CONTRACTIONS, ids=name)
def test_biased_code_contracts_every_bucket(options, kind):
    assert (error(gradients(kind, BUCKET * 100), _core.CodecSpec(**options)) < 1).all()


def test_sign_and_topk_contract_by_the_published_factors():
    """Sign: 1 - |x|_1^2 / (d |x|^2). Top-k: at most 1 - k / d."""
    x = gradients("student", BUCKET * 50)
    buckets = x.astype(np.float64).reshape(-1, BUCKET)
    ratio = np.abs(buckets).sum(axis=1) ** 2 / (BUCKET * (buckets**2).sum(axis=1))
    assert error(x, _core.CodecSpec(scheme="sign")) == pytest.approx(1 - ratio, rel=1e-5)
    assert (error(x, _core.CodecSpec(scheme="topk", k=16)) <= 1 - 16 / BUCKET).all()


@pytest.mark.parametrize("kind", ["gaussian", "student"])
@pytest.mark.parametrize("options", COARSE, ids=name)
def test_contract_turns_a_coarse_code_into_a_contraction(options, kind):
    """Q has the error w > 1; Q / (1 + w) has the error w / (1 + w)."""
    x, draws = gradients(kind, BUCKET * 20), 50
    mean = {
        contract: np.mean(
            [error(x, _core.CodecSpec(**options, contract=contract), t) for t in range(draws)],
            axis=0,
        )
        for contract in (False, True)
    }
    coarse = mean[False] > 1.2
    assert coarse.any()
    w = mean[False][coarse]
    assert mean[True][coarse] == pytest.approx(w / (1 + w), rel=0.1)


def test_contract_leaves_a_fine_code_alone():
    x = gradients("gaussian", BUCKET * 20)
    for scheme in ("minmax", "nuqsgd"):
        plain, shrunk = (_core.CodecSpec(scheme=scheme, bits=4, contract=c) for c in (False, True))
        assert np.array_equal(_core.encode(x, spec=plain), _core.encode(x, spec=shrunk))


@pytest.mark.parametrize(
    "options",
    [*CONTRACTIONS, *({**o, "contract": True} for o in COARSE), {"scheme": "bfloat16"}],
    ids=name,
)
def test_error_feedback_sends_everything_but_the_last_residual(options):
    """The sum of what was sent is the sum of the gradients minus the last residual."""
    n, steps, spec = BUCKET * 4, 200, _core.CodecSpec(**options)
    residual = np.zeros(n, dtype=np.float32)
    sent = np.zeros(n)
    given = np.zeros(n)
    norms = []
    for step in range(steps):
        gradient = gradients("gaussian", n, seed=step) + np.float32(0.5)
        v = gradient + residual
        message = _core.encode(v, spec=spec, step=step)
        decoded = _core.decode(message, count=n, spec=spec)
        residual = v - decoded
        sent += decoded
        given += gradient
        norms.append(np.linalg.norm(residual))
    # Each step rounds v and the residual once, to float32.
    slack = steps * 2**-23 * (max(norms) + np.abs(given).max())
    assert np.abs(sent + residual - given).max() <= slack
    # It does not run away: of the steps, the second half owes no more than the first, about.
    assert max(norms[steps // 2 :]) <= 1.5 * max(norms[: steps // 2])
