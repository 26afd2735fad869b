"""Native passes over a row: the same ids and the same bits as numpy gives, and so the same choices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.kernels.native_rows import native_rows
from forerun.verification import choice, filters
from forerun.verification.choice import SamplingState, choose, propose
from forerun.verification.filters import largest, rough_scores, survivors
from forerun.verification.noise import ceiling_terms, gumbel_ceiling
from forerun.verification.sampling import SamplingParams

pytestmark = pytest.mark.skipif(native_rows() is None, reason="no native kernels on this machine")

SIZES = st.sampled_from([1, 2, 7, 8, 31, 32, 33, 100, 511, 512, 513, 1000, 5000])


def rounded(seed: int, size: int, steps: float) -> np.ndarray:
    """Numbers on a grid, so that many are equal."""
    return (np.round(np.random.default_rng(seed).normal(size=size) * steps) / 4).astype(np.float32)


@pytest.fixture
def numpy_alone(monkeypatch):
    """A switch: from its call on there are no native passes."""

    def switch():
        for module in (choice, filters):
            monkeypatch.setattr(module, "native_rows", lambda: None)

    return switch


@given(SIZES, st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 1000.0]), st.integers(1, 300), st.booleans())
@settings(max_examples=500, deadline=None)
def test_largest_and_at_least_keep_what_numpy_keeps(size, seed, steps, count, banned):
    row = rounded(seed, size, steps)
    if banned:
        row[row < 0] = -np.inf
    by_value = np.argsort(-row, kind="stable")
    assert largest(row, count).tolist() == sorted(by_value[:count].tolist())
    for threshold in (float(row[seed % size]), 0.1, -np.inf, np.inf):
        kept = native_rows().at_least(row, threshold)
        assert kept.tolist() == np.flatnonzero(row >= np.float32(threshold)).tolist()


@given(SIZES, st.integers(-(2**63), 2**64 - 1), st.integers(0, 10**6), st.sampled_from([1e-30, 0.3, 1.0, 7.0, 1e30]))
@settings(max_examples=300, deadline=None)
def test_ceilings_have_the_bits_of_numpy(size, seed, position, temperature):
    row = rounded(position, size, 9.3)
    row[:: 1 + position % 9] = -np.inf
    best = float(row.max()) if row.max() > -np.inf else 0.0
    with np.errstate(over="ignore"):
        wanted = gumbel_ceiling(seed, position, size) + rough_scores(row, best, temperature)
    ceilings = native_rows().score_ceilings(row, best, temperature, ceiling_terms(seed, position))
    assert np.array_equal(ceilings.view(np.int32), wanted.view(np.int32))


FILTERS = [
    {},
    {"top_k": 40},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1e-9},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"logit_bias": {3: 5.0, 17: -100.0}, "min_tokens": 3},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_every_choice_and_guess_is_the_one_that_numpy_makes(params, numpy_alone):
    rows = [rounded(seed, vocab, scale) for seed, (vocab, scale) in enumerate([(300, 9), (6000, 0.3), (9001, 40)] * 4)]
    rows[4][::2] = -np.inf
    asked = [(row, temperature) for row in rows for temperature in (0.0, 1e-9, 0.7, 1.0, 4.0)]

    def results():
        made = []
        for row, temperature in asked:
            wish = SamplingParams(temperature=temperature, **params)
            for seed in range(6):
                state = SamplingState(wish, seed, [1, 2, 5], len(row), [0])
                state.append(7)
                made.append((choose(row, state), propose(row, wish, seed, 4, 5)))
            if temperature > 0:
                kept = survivors(row, float(row.max()), wish)
                made.append(None if kept is None else kept.tolist())
        return made

    native = results()
    numpy_alone()
    assert results() == native
