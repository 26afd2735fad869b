"""Sampled tokens follow the target's filtered distribution exactly, with and without a draft."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from forerun.verification.choice import SamplingState, choose
from forerun.verification.sampling import SamplingParams
from tests.verification.toy_target import chain, decode, markov_table, random_trees, same_noise

DRAWS = 20_000
LOGITS = np.array([1.2, 0.1, -0.4, 2.0, 0.1, -1.5, 0.9, -0.2], dtype=np.float32)
FILTERS = [
    {},
    {"top_k": 3},
    {"top_p": 0.75},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
]
PROCESSORS = [{"logit_bias": {3: -1.0, 5: 2.5}}, {"repetition_penalty": 1.5}]


def exact(logits: np.ndarray, params: SamplingParams, seen=()) -> np.ndarray:
    """The distribution that the parameters ask for, worked out the long way: float64 [vocabulary]."""
    logits = logits.astype(np.float64)
    for token, value in (params.logit_bias or {}).items():
        logits[token] += value
    for token in set(seen):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    p[order[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def assert_follows(counts: np.ndarray, p: np.ndarray) -> None:
    assert counts[p == 0].sum() == 0, "a token that the filters leave out was chosen"
    expected = p * counts.sum()
    rare = expected < 5
    if rare.sum() > 1 or 0 < expected[rare].sum() < 5:  # cells too small for the test are counted together
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    filled = expected > 0
    if filled.sum() > 1:
        assert stats.chisquare(counts[filled], expected[filled]).pvalue > 1e-4


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [*product([0.3, 1.0, 1.7], FILTERS), *((1.0, processors) for processors in PROCESSORS)],
    ids=repr,
)
def test_choices_follow_the_filtered_distribution_over_seeds(temperature, filters):
    params = SamplingParams(temperature=temperature, **filters)
    counts = np.zeros(len(LOGITS))
    for seed in range(DRAWS):
        counts[choose(LOGITS, SamplingState(params, seed, [3, 6], len(LOGITS)))] += 1
    assert_follows(counts, exact(LOGITS, params, seen=[3, 6]))


def test_choices_follow_the_distribution_over_positions_of_one_seed():
    params = SamplingParams(temperature=1.0)
    counts = np.zeros(len(LOGITS))
    state = SamplingState(params, 1, [0], len(LOGITS))
    for _ in range(DRAWS):
        token = choose(LOGITS, state)
        counts[token] += 1
        state.append(token)
    assert_follows(counts, exact(LOGITS, params))


def draft_for(kind: str, table: np.ndarray, params: SamplingParams, seed: int):
    """Random trees; same-noise trees of a draft that is near the target; always the same wrong-or-right guess."""
    if kind == "random":
        return random_trees(len(table), seed)
    if kind == "always 0":
        return lambda tokens, position: chain([0, 0])
    return same_noise(table + markov_table(len(table), 5, 0.5), params, seed, depth=1, width=2)


@pytest.mark.parametrize(
    ("kind", "filters"),
    [("random", {}), ("same noise", {}), ("same noise", FILTERS[-1]), *(("always 0", filters) for filters in FILTERS)],
    ids=repr,
)
def test_verified_tokens_follow_the_filtered_distribution(kind, filters):
    """What follows each token in one long answer, most of it checked as nodes of trees."""
    params = SamplingParams(temperature=1.0, **filters)
    table = markov_table(5, 2, 1.0)
    answer = decode(table, params, DRAWS, seed=3, drafter=draft_for(kind, table, params, 3))
    assert sum(verdict.accepted for verdict in answer.verdicts) > DRAWS / 20
    followers = np.zeros((5, 5))
    np.add.at(followers, ([0, *answer.tokens[:-1]], answer.tokens), 1)
    for counts, logits in zip(followers, table, strict=True):
        assert_follows(counts, exact(logits, params))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_three_tokens_of_a_markov_model_follow_their_joint_law_with_a_draft(temperature):
    vocab = 4
    table, params = markov_table(vocab, 7, 1.0), SamplingParams(temperature=temperature)
    draft = table + markov_table(vocab, 5, 0.5)
    chances = [exact(row, params) for row in table]
    counts, p = np.zeros((vocab,) * 3), np.zeros((vocab,) * 3)
    for a, b, c in product(range(vocab), repeat=3):
        p[a, b, c] = chances[0][a] * chances[a][b] * chances[b][c]
    for seed in range(DRAWS // 8):  # independent answers, each with trees of two levels
        drafter = same_noise(draft, params, seed, depth=2, width=1)
        counts[tuple(decode(table, params, 3, seed=seed, drafter=drafter).tokens)] += 1
    assert_follows(counts.ravel(), p.ravel())


@pytest.mark.parametrize(("temperature", "wanted"), [(1.0, [0.3, 0.5, 0.2]), (0.0, [0.0, 1.0, 0.0])])
@pytest.mark.parametrize("guess", [0, 1, 2])
def test_a_guess_that_is_always_the_same_does_not_pull_the_output(temperature, wanted, guess):
    table = np.tile(np.log(np.array([0.3, 0.5, 0.2], dtype=np.float32)), (3, 1))
    params = SamplingParams(temperature=temperature)
    answer = decode(table, params, 20_000, seed=guess, drafter=lambda tokens, position: chain([guess] * 3))
    assert_follows(np.bincount(answer.tokens, minlength=3).astype(float), np.array(wanted))
