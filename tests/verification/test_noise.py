"""Noise is a function of seed, position and token, Gumbel by law, and independent in all three."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from forerun.verification.noise import derive_seed, gumbel, gumbel_ceiling, random_seed

VOCAB = 5000


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_a_token_has_the_same_noise_whatever_else_is_asked_for(ids, seed, position):
    everything = gumbel(seed, position, np.arange(VOCAB))
    assert gumbel(seed, position, np.array(ids, dtype=np.int64)).tolist() == everything[ids].tolist()


@pytest.mark.parametrize("size", range(1, 40))
def test_the_ends_of_an_array_are_like_its_middle(size):
    everything = gumbel(3, 14, np.arange(VOCAB))
    for start in (0, 1, 7, 4000):
        assert np.array_equal(gumbel(3, 14, np.arange(start, start + size)), everything[start : start + size])


def test_known_values_stay_as_they_are():
    """A change of the hash would change every seeded answer."""
    known = [-0.15500369734885247, 2.899770249956457, 1.7946181567515742]
    assert gumbel(42, 7, np.array([0, 1, 49151])).tolist() == pytest.approx(known, abs=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2**63, -5])
def test_noise_follows_the_gumbel_law(seed):
    noise = gumbel(seed, 11, np.arange(50_000))
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > 1e-3


def test_noise_follows_the_gumbel_law_across_positions_and_across_seeds():
    by_position = np.array([gumbel(9, position, np.array([17]))[0] for position in range(8000)])
    by_seed = np.array([gumbel(seed, 9, np.array([17]))[0] for seed in range(8000)])
    assert stats.kstest(by_position, stats.gumbel_r.cdf).pvalue > 1e-3
    assert stats.kstest(by_seed, stats.gumbel_r.cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    ("one", "other", "shift"),
    [
        ((5, 3), (6, 3), 0),
        ((5, 3), (5, 4), 0),
        ((5, 3), (6, 4), 0),
        ((5, 4), (6, 3), 0),
        ((5, 3), (5, 4), 1),
        ((5, 3), (5, 3), 1),
        ((5, 3), (5, 3), 256),
        ((0, 0), (2**32, 0), 0),
        ((1, 0), (0, 1), 0),
    ],
)
def test_noise_is_independent_across_seeds_positions_and_tokens(one, other, shift):
    size = 20_000
    first = gumbel(*one, np.arange(size))
    second = gumbel(*other, np.arange(shift, size + shift))
    assert abs(stats.spearmanr(first, second).statistic) < 4 / np.sqrt(size)
    table, *_ = np.histogram2d(stats.gumbel_r.cdf(first), stats.gumbel_r.cdf(second), bins=8, range=[[0, 1], [0, 1]])
    assert stats.chisquare(table.ravel()).pvalue > 1e-4


def test_the_position_of_the_largest_noise_is_uniform():
    """What sampling from equal logits comes to: the winner over positions."""
    winners = [int(gumbel(1, position, np.arange(16)).argmax()) for position in range(8000)]
    assert stats.chisquare(np.bincount(winners, minlength=16)).pvalue > 1e-4
    pairs = np.zeros((16, 16))
    np.add.at(pairs, (winners[:-1], winners[1:]), 1)
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 1), (2**64 - 1, 123456), (77, 3)])
@pytest.mark.parametrize("vocab", [1, 2, 16383, 16385, 60_000])
def test_noise_never_exceeds_its_ceiling_and_large_noise_is_near_it(seed, position, vocab):
    noise, ceiling = gumbel(seed, position, np.arange(vocab)), gumbel_ceiling(seed, position, vocab)
    assert np.all(noise <= ceiling + 1e-4)
    large = noise > 4
    assert np.all(ceiling[large] - noise[large] < 0.08)


def test_seeds_of_several_answers_differ_and_the_first_is_the_request_s_own():
    for seed in (0, 1, 2**63, -3):
        seeds = [derive_seed(seed, index) for index in range(50)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 50
    assert derive_seed(1, 1) != derive_seed(2, 1) != derive_seed(0, 2)


def test_a_negative_seed_is_taken_modulo_two_to_the_64():
    ids = np.arange(100)
    assert np.array_equal(gumbel(-1, 3, ids), gumbel(2**64 - 1, 3, ids))
    assert derive_seed(-1, 4) == derive_seed(2**64 - 1, 4)


def test_fresh_seeds_differ():
    assert len({random_seed() for _ in range(20)}) == 20
