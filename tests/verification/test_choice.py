"""The choice of one token: ties, processors, filters, errors; and guesses at it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import EngineError
from forerun.verification.choice import SamplingState, choose, propose
from forerun.verification.filters import largest, survivors
from forerun.verification.noise import gumbel
from forerun.verification.sampling import SamplingParams

VOCAB = 50


def row(seed: int = 0, vocab: int = VOCAB, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=vocab) * scale).astype(np.float32)


def state(params: SamplingParams, seed: int = 0, prompt=(1, 2), vocab: int = VOCAB, ends=()) -> SamplingState:
    return SamplingState(params, seed, prompt, vocab, ends)


def tokens_over_seeds(logits, params, seeds=300):
    return {choose(logits, state(params, seed, vocab=len(logits))) for seed in range(seeds)}


# Greedy, ties


def test_equal_logits_go_to_the_lowest_id():
    logits = row()
    logits[[3, 7]] = logits.max() + 1
    assert choose(logits, state(SamplingParams())) == 3
    assert propose(logits, SamplingParams(), 0, 0, 2)[0][0] == 3
    assert choose(logits, state(SamplingParams(temperature=1.0, top_k=1))) == 3


@pytest.mark.parametrize("temperature", [0.01, 0.3, 1.0, 5.0])
def test_top_k_of_one_is_greedy_at_any_temperature(temperature):
    for seed in range(100):
        logits = row(seed)
        params = SamplingParams(temperature=temperature, top_k=1)
        assert choose(logits, state(params, seed)) == logits.argmax()


@pytest.mark.parametrize("temperature", [0.01, 1e-6, 1e-45, 5e-324])
def test_a_temperature_near_zero_gives_the_highest_logit(temperature):
    logits = row(3)
    logits[11] = logits.max() + 0.5
    assert tokens_over_seeds(logits, SamplingParams(temperature=temperature)) == {11}
    assert tokens_over_seeds(logits, SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)) == {11}


def test_every_likely_token_appears_within_300_seeds():
    logits = row(1, vocab=12, scale=1.0)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    likely = set(np.flatnonzero(probabilities > 0.05).tolist())
    assert len(likely) > 3
    assert likely <= tokens_over_seeds(logits, SamplingParams(temperature=1.0))


def test_the_choice_leaves_logits_and_state_alone():
    logits = row()
    before = logits.copy()
    logits.flags.writeable = False
    current = state(
        SamplingParams(temperature=1.0, logit_bias={4: 5}, repetition_penalty=1.3, frequency_penalty=1, min_tokens=9),
        ends=[0],
    )
    current.append(4)
    first = choose(logits, current)
    assert choose(logits, current) == first
    assert np.array_equal(logits, before)
    assert current.emitted == 1


def test_the_choice_depends_on_seed_and_position_and_nothing_else():
    logits, params = np.zeros(VOCAB, np.float32), SamplingParams(temperature=1.0)
    one, other = state(params, 5, prompt=[1, 2, 3]), state(params, 5, prompt=[9])
    other.append(8)
    other.append(7)
    assert one.position == other.position == 3
    assert choose(logits, one) == choose(logits, other)
    choices = {choose(logits, state(params, 5, prompt=[1] * length)) for length in range(1, 40)}
    assert len(choices) > 15


# Pruning is exact


@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.01, 1.0, 3.0, 12.0]),
    st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    st.sampled_from(
        [{}, {"top_p": 0.95}, {"top_p": 0.999}, {"min_p": 0.01}, {"top_k": 3000}, {"top_k": 4000, "top_p": 0.9}]
    ),
    st.integers(1, 12),
)
@settings(max_examples=150, deadline=None)
def test_the_choice_over_a_large_vocabulary_is_the_best_of_all_sums(seed, scale, temperature, filters, width):
    vocab = 6000
    logits = row(seed, vocab, scale)
    params = SamplingParams(temperature=temperature, **filters)
    kept = survivors(logits, float(logits.max()), params)
    kept = np.arange(vocab) if kept is None else kept
    sums = (logits[kept].astype(np.float64) - logits.max()) / temperature + gumbel(seed, 2, np.arange(vocab))[kept]
    best = kept[np.argsort(-sums, kind="stable")]
    assert choose(logits, state(params, seed, vocab=vocab)) == best[0]
    assert [token for token, _ in propose(logits, params, seed, 2, width)] == best[:width].tolist()


# Filters


def by_the_book(logits: np.ndarray, params: SamplingParams) -> list[int]:
    """top_k, top_p, min_p, each by sorting everything."""
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = [float(np.exp((float(logits[t]) - float(logits.max())) / params.temperature)) for t in order]
    if params.top_p < 1:
        total, mass, kept = sum(weights), 0.0, 0
        while mass < params.top_p * total * (1 - 1e-9):
            mass += weights[kept]
            kept += 1
        order, weights = order[:kept], weights[:kept]
    return sorted(token for token, weight in zip(order, weights, strict=True) if weight >= params.min_p)


@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.integers(0, 45),
    st.sampled_from([1.0, 0.99, 0.9, 0.512, 0.1, 1e-6]),
    st.sampled_from([0.0, 0.011, 0.3, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_filters_keep_what_sorting_everything_would_keep(halves, temperature, top_k, top_p, min_p):
    logits = np.array(halves, dtype=np.float32) / 2
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = survivors(logits, float(logits.max()), params)
    assert (list(range(len(logits))) if kept is None else kept.tolist()) == by_the_book(logits, params)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.97, 0.9999])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_the_nucleus_of_a_large_vocabulary_is_found_whatever_its_size(top_p, scale):
    logits = row(5, 9000, scale)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    kept = survivors(logits, float(logits.max()), params)
    weights = np.sort(np.exp(logits.astype(np.float64) - logits.max()))[::-1]
    mass = np.cumsum(weights) / weights.sum()
    assert abs(len(kept) - (np.searchsorted(mass, top_p) + 1)) <= 1
    assert mass[len(kept) - 1] >= top_p - 1e-6
    assert set(kept) == set(np.argsort(-logits, kind="stable")[: len(kept)])


def test_ties_at_the_edge_of_a_filter_keep_the_lowest_ids():
    logits = np.array([1, 0, 1, 0, 1, 0], dtype=np.float32)
    assert largest(logits, 2).tolist() == [0, 2]
    assert largest(logits, 4).tolist() == [0, 1, 2, 4]
    flat = np.zeros(8, np.float32)
    assert survivors(flat, 0.0, SamplingParams(temperature=1.0, top_p=0.5)).tolist() == [0, 1, 2, 3]
    assert survivors(flat, 0.0, SamplingParams(temperature=1.0, top_k=5, top_p=0.4)).tolist() == [0, 1]
    assert survivors(flat, 0.0, SamplingParams(temperature=1.0, min_p=1.0)).tolist() == list(range(8))


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, 10**9])
def test_top_k_off_or_beyond_the_vocabulary_keeps_everything(top_k):
    logits = row()
    assert choose(logits, state(SamplingParams(temperature=1.0, top_k=top_k))) == choose(
        logits, state(SamplingParams(temperature=1.0))
    )


# Processors


def test_a_bias_of_100_forces_and_of_minus_100_bans():
    logits = row(2)
    likeliest = int(logits.argmax())
    for temperature in (0.0, 1.0):
        assert tokens_over_seeds(logits, SamplingParams(temperature=temperature, logit_bias={31: 100})) == {31}
        banned = SamplingParams(temperature=temperature, logit_bias={likeliest: -100})
        assert likeliest not in tokens_over_seeds(logits, banned)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer():
    current = state(SamplingParams(repetition_penalty=2.0), prompt=[0, 1, 1, 1])
    current.append(2)
    current.append(2)
    assert current.processed(np.array([4, -4, 3, 5, -5], np.float32)).tolist() == [2, -8, 1.5, 5, -5]


def test_presence_counts_once_frequency_each_time_and_neither_the_prompt():
    logits = np.zeros(5, np.float32)
    presence = state(SamplingParams(presence_penalty=0.5), prompt=[0, 0])
    frequency = state(SamplingParams(frequency_penalty=0.5), prompt=[0, 0])
    for token in (2, 2, 2, 4):
        presence.append(token)
        frequency.append(token)
    assert presence.processed(logits).tolist() == [0, 0, -0.5, 0, -0.5]
    assert frequency.processed(logits).tolist() == [0, 0, -1.5, 0, -0.5]


def test_with_all_penalties_a_prompt_token_suffers_only_the_repetition_penalty():
    current = state(SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.25), prompt=[0])
    current.append(1)
    current.append(1)
    assert current.processed(np.array([4, 4, 4], np.float32)).tolist() == [2, 4 / 2 - 1 - 0.5, 4]


@given(st.lists(st.integers(0, VOCAB - 1), max_size=200), st.lists(st.integers(0, VOCAB - 1), max_size=200))
@settings(max_examples=30, deadline=None)
def test_counts_are_those_of_the_tokens_appended(prompt, answer):
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.125)
    current = state(params, prompt=prompt)
    for token in answer:
        current.append(token)
    logits = row()
    expected = logits.astype(np.float64)
    for token in set(prompt) | set(answer):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
        expected[token] -= 0.125 * answer.count(token) + 0.25 * (token in answer)
    assert np.array_equal(current.processed(logits), expected.astype(np.float32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ends", [{"stop_token_ids": [7]}, {}])
def test_an_end_token_is_banned_exactly_until_min_tokens(temperature, ends):
    logits = np.zeros(VOCAB, np.float32)
    logits[7] = 50.0
    current = state(SamplingParams(temperature=temperature, min_tokens=8, **ends), ends=[] if ends else [7])
    chosen = []
    while not chosen or (chosen[-1] != 7 and len(chosen) < 20):
        chosen.append(choose(logits, current))
        current.append(chosen[-1])
    assert len(chosen) == 9, "the end token may be token 9, not sooner"


def test_the_row_of_logits_is_needed_only_while_something_may_change_the_argmax():
    assert not state(SamplingParams()).needs_logits
    assert not state(SamplingParams(top_k=5, top_p=0.5, min_p=0.5)).needs_logits
    assert state(SamplingParams(temperature=0.5)).needs_logits
    assert state(SamplingParams(logit_bias={1: 1})).needs_logits
    assert state(SamplingParams(repetition_penalty=1.1)).needs_logits
    presence = state(SamplingParams(presence_penalty=1))
    assert not presence.needs_logits
    presence.append(3)
    assert presence.needs_logits
    assert not state(SamplingParams(min_tokens=2)).needs_logits, "there is nothing to ban"
    ending = state(SamplingParams(min_tokens=2), ends=[5])
    for _ in range(2):
        assert ending.needs_logits
        ending.append(1)
    assert not ending.needs_logits


# Errors


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)]
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_are_an_error_and_never_a_token(params, value):
    logits = row()
    logits[20] = value
    with pytest.raises(EngineError, match="token 20"):
        choose(logits, state(params))
    with pytest.raises(EngineError, match="token 20"):
        propose(logits, params, 0, 0, 3)


def test_nothing_left_to_choose_is_an_error():
    with pytest.raises(EngineError, match="every logit is -inf"):
        choose(np.full(VOCAB, -np.inf, np.float32), state(SamplingParams()))
    with pytest.raises(EngineError, match="min_tokens"):
        choose(np.zeros(3, np.float32), state(SamplingParams(min_tokens=5), vocab=3, ends=[0, 1, 2]))


def test_a_row_of_the_wrong_length_is_an_error():
    with pytest.raises(EngineError, match="49 logits for a vocabulary of 50"):
        choose(row(vocab=49), state(SamplingParams(temperature=1.0)))


@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_tokens_at_minus_infinity_are_never_chosen_or_proposed(vocab):
    logits = np.full(vocab, -np.inf, np.float32)
    logits[[4, 9]] = [1.0, 2.0]
    for params in (SamplingParams(temperature=2.0), SamplingParams(temperature=2.0, top_k=10), SamplingParams()):
        assert tokens_over_seeds(logits, params, 60) <= {4, 9}
        assert {token for token, _ in propose(logits, params, 0, 5, 8)} == {4, 9}


# Guesses


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"logit_bias": {3: 2.0}}])
def test_the_first_guess_on_the_target_s_own_logits_is_its_choice(temperature, filters):
    params = SamplingParams(temperature=temperature, **filters)
    for seed in range(100):
        logits = row(seed)
        assert propose(logits, params, seed, 2, 3)[0][0] == choose(logits, state(params, seed))


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.2, 1.0, 2.0]), st.integers(1, 9), st.sampled_from([0, 3]))
@settings(max_examples=80, deadline=None)
def test_guesses_are_distinct_fall_in_chance_and_sum_to_at_most_one(seed, temperature, width, top_k):
    guesses = propose(row(seed), SamplingParams(temperature=temperature, top_k=top_k), seed, 4, width)
    chances = [chance for _, chance in guesses]
    assert len({token for token, _ in guesses}) == len(guesses) <= width
    assert chances == sorted(chances, reverse=True)
    assert all(0 < chance <= 1 for chance in chances)
    assert sum(chances) <= 1 + 1e-6


def test_a_greedy_guess_has_its_softmax_probability():
    logits = row(8)
    probabilities = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    for token, chance in propose(logits, SamplingParams(), 0, 0, 4):
        assert chance == pytest.approx(probabilities[token], rel=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_same_noise_guesses_come_true_about_as_often_as_they_say(temperature):
    """With errors of the size that is assumed; independent noise would come true far less often."""
    rng = np.random.default_rng(4)
    params = SamplingParams(temperature=temperature)
    said, came = [], []
    for seed in range(1500):
        logits = row(seed)
        target = (logits + rng.gumbel(size=VOCAB) * 0.7).astype(np.float32)
        (guess, chance), *_ = propose(logits, params, seed, 2, 1)
        said.append(chance)
        came.append(guess == choose(target, state(params, seed)))
    assert np.mean(came) == pytest.approx(np.mean(said), abs=0.06)
    sure = np.array(said) > 0.8
    assert np.mean(np.array(came)[sure]) > 0.8
