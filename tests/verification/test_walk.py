"""Verification down a draft tree emits exactly what plain decoding emits, whatever the tree holds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafting.tree import EMPTY_TREE, DraftTree
from forerun.errors import EngineError
from forerun.verification.choice import SamplingState
from forerun.verification.logprobs import TokenLogprob, token_logprob
from forerun.verification.sampling import SamplingParams
from forerun.verification.walk import LogitRows, Verdict, verify
from tests.verification.toy_target import (
    Answer,
    chain,
    decode,
    malicious,
    markov_table,
    oracle,
    random_trees,
    same_noise,
)

VOCAB = 12
TABLE = markov_table(VOCAB)
COUNT = 30

PARAMS = [
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.3},
    {"logit_bias": {3: 100.0}},
    {"logit_bias": {3: -100.0, 4: 2.5}},
    {"min_tokens": 8, "stop_token_ids": [2]},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
]

DRAFTERS = {
    "oracle": lambda plain, params, seed: oracle(plain.tokens, 1),
    "random": lambda plain, params, seed: random_trees(VOCAB, seed),
    "same noise": lambda plain, params, seed: same_noise(TABLE, params, seed),
    "noisy draft": lambda plain, params, seed: same_noise(TABLE + markov_table(VOCAB, 9, 0.7), params, seed),
    "malicious": lambda plain, params, seed: malicious(plain.tokens, 1, VOCAB),
    "empty": lambda plain, params, seed: lambda tokens, position: EMPTY_TREE,
    "one child": lambda plain, params, seed: oracle(plain.tokens, 1, depth=1),
}


def values(answer: Answer) -> list[tuple]:
    return [(entry.token_id, entry.logprob, entry.top) for entry in answer.logprobs]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("settings_", PARAMS, ids=repr)
def test_same_tokens_and_logprobs_with_and_without_a_draft(drafter, temperature, settings_):
    params = SamplingParams(temperature=temperature, logprobs=3, **settings_)
    ends = params.stop_token_ids
    for seed in range(2):
        plain = decode(TABLE, params, COUNT, seed=seed, end_tokens=ends)
        drafted = decode(
            TABLE, params, COUNT, seed=seed, end_tokens=ends, drafter=DRAFTERS[drafter](plain, params, seed)
        )
        assert drafted.tokens == plain.tokens
        assert values(drafted) == values(plain)
        assert len(drafted.logprobs) == len(drafted.tokens)


@given(st.integers(0, 10**6), st.sampled_from(PARAMS), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 25))
@settings(max_examples=60, deadline=None)
def test_same_tokens_whatever_the_tree(seed, settings_, temperature, nodes):
    params = SamplingParams(temperature=temperature, **settings_)
    plain = decode(TABLE, params, COUNT, seed=seed, end_tokens=params.stop_token_ids)
    drafter = random_trees(VOCAB, seed, nodes)
    assert (
        decode(TABLE, params, COUNT, seed=seed, end_tokens=params.stop_token_ids, drafter=drafter).tokens
        == plain.tokens
    )


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("filters", [{}, {"top_k": 1}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_a_draft_model_equal_to_the_target_is_always_right(temperature, filters):
    params = SamplingParams(temperature=temperature, **filters)
    for seed in range(10):
        drafter = same_noise(TABLE, params, seed, depth=4, width=1)
        answer = decode(TABLE, params, 50, seed=seed, drafter=drafter)
        assert all(verdict.accepted == verdict.drafted for verdict in answer.verdicts)
        assert len(answer.verdicts) == 10, "four drafted tokens and a bonus in every step"


def test_an_oracle_is_accepted_through_penalties_too():
    params = SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    plain = decode(TABLE, params, 50, seed=3)
    answer = decode(TABLE, params, 50, seed=3, drafter=oracle(plain.tokens, 1))
    assert answer.tokens == plain.tokens
    assert sum(verdict.accepted for verdict in answer.verdicts) == 40


@pytest.mark.parametrize(
    "where",
    [
        "cpu",
        "elsewhere",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_logits_go_to_the_lowest_id_at_root_node_and_bonus(where, temperature):
    logits = torch.zeros(3, 10)
    logits[:, [3, 7]] = 50.0
    tree = DraftTree([7, 3], [-1, -1], [0.5, 0.5], ["a", "b"])
    params = SamplingParams(temperature=temperature, top_k=1)
    verdict = verify(tree, rows_at(logits, where), SamplingState(params, 0, [1], 10))
    assert verdict.tokens == (3, 3)
    assert verdict.path == (1,)


def rows_at(logits: torch.Tensor, where: str) -> LogitRows:
    rows = LogitRows(logits.to("cuda") if where == "cuda" else logits)
    if where == "elsewhere":
        rows._host = None  # takes the way of a device whose memory is not the host's
    return rows


@pytest.mark.parametrize("where", ["cpu", "elsewhere"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_at_a_visited_node_is_an_error_and_elsewhere_costs_nothing(where, temperature, value):
    params = SamplingParams(temperature=temperature)
    tree = chain([4, 5])
    for broken, fails in ((0, True), (1, True), (2, False)):
        logits = torch.zeros(3, 10)
        logits[0, 4] = logits[1, 8] = 1000.0
        logits[broken, 6] = value
        state = SamplingState(params, 0, [1], 10)
        if fails:
            with pytest.raises(EngineError, match="token 6"):
                verify(tree, rows_at(logits, where), state)
            assert state.emitted == broken
        else:
            assert verify(tree, rows_at(logits, where), state).tokens == (4, 8)


def test_only_visited_rows_are_looked_at():
    looked = []

    class Watched(LogitRows):
        def row(self, index):
            looked.append(index)
            return super().row(index)

    logits = torch.zeros(6, 10)
    logits[0, 4] = logits[3, 9] = 1000.0
    tree = DraftTree([1, 2, 4, 5, 6], [-1, -1, -1, 0, 2], [0.5] * 5, ["x"] * 5)
    verify(tree, Watched(logits), SamplingState(SamplingParams(temperature=1.0), 0, [1], 10))
    assert looked == [0, 3]


def test_the_walk_ends_at_a_stop_inside_the_accepted_path():
    logits = torch.full((7, 20), 0.0)
    draft = [10, 11, 2, 15, 16, 17]
    for index, token in enumerate([*draft, 18]):
        logits[index, token] = 5.0
    for position in range(6):
        state = SamplingState(SamplingParams(logprobs=0), 0, [1], 20)
        seen = []

        def stop(token, seen=seen, position=position):
            seen.append(token)
            return len(seen) == position + 1

        verdict = verify(chain(draft), LogitRows(logits), state, stop)
        assert verdict.tokens == tuple(draft[: position + 1]) == tuple(seen)
        assert verdict.bonus is None
        assert verdict.path == tuple(range(position + 1))
        assert verdict.accepted == len(verdict.logprobs) == state.emitted == position + 1
        assert verdict.sources == ("chain",) * (position + 1)


def test_a_stop_that_no_draft_holds_is_the_bonus():
    logits = torch.zeros(1, 5)
    logits[0, 2] = 1.0
    verdict = verify(EMPTY_TREE, LogitRows(logits), SamplingState(SamplingParams(), 0, [1], 5), lambda token: True)
    assert (verdict.tokens, verdict.bonus, verdict.sources, verdict.path) == ((2,), 2, ("target",), ())


def test_of_children_with_the_same_token_the_first_is_taken():
    tree = DraftTree([4, 4, 5, 6], [-1, -1, 0, 1], [0.5] * 4, list("abcd"))
    logits = torch.zeros(5, 10)
    for index, token in enumerate([4, 5, 6, 7, 7]):
        logits[index, token] = 9.0
    assert verify(tree, LogitRows(logits), SamplingState(SamplingParams(), 0, [1], 10)).path == (0, 2)


def test_logprobs_are_those_of_the_raw_logits_at_each_node_of_the_walk():
    params = SamplingParams(temperature=0.7, logprobs=2, logit_bias={1: 3.0}, repetition_penalty=1.5, top_k=4)
    plain = decode(TABLE, params, 12, seed=1)
    answer = decode(TABLE, params, 12, seed=1, drafter=oracle(plain.tokens, 1))
    for before, token, entry in zip([0, *answer.tokens], answer.tokens, answer.logprobs, strict=False):
        assert entry == token_logprob(TABLE[before], token, 2)


def test_tokens_tell_who_guessed_them_and_the_bonus_is_the_target_s():
    plain = decode(TABLE, SamplingParams(), 10)
    tree = DraftTree([plain.tokens[0], plain.tokens[1]], [-1, 0], [0.9, 0.8], ["suffix", "model"])
    rows = LogitRows(torch.from_numpy(TABLE[[0, *plain.tokens[:2]]]))
    verdict = verify(tree, rows, SamplingState(SamplingParams(), 0, [0], VOCAB))
    assert verdict.sources == ("suffix", "model", "target")
    assert verdict.tokens == tuple(plain.tokens[:3])
    assert (verdict.accepted, verdict.drafted) == (2, 2)


def test_penalties_count_each_committed_token_once_and_no_draft():
    params = SamplingParams(frequency_penalty=0.5)
    for drafter in ("malicious", "oracle", "random"):
        plain = decode(TABLE, params, 30)
        state = SamplingState(params, 0, [0], VOCAB)
        tokens = [0]
        draft = DRAFTERS[drafter](plain, params, 1)
        while state.emitted < 30:
            tree = draft(tokens, state.position)
            rows = torch.from_numpy(TABLE[[token % VOCAB for token in (tokens[-1], *tree.tokens)]])
            tokens += verify(tree, LogitRows(rows), state).tokens
            counted = state.processed(np.zeros(VOCAB, np.float32)) / np.float32(-0.5)
            assert counted.tolist() == [tokens[1:].count(token) for token in range(VOCAB)]


def test_the_number_of_rows_must_be_that_of_the_nodes_and_the_root():
    with pytest.raises(EngineError, match="2 rows of logits for a draft tree of 2 nodes; there must be 3"):
        verify(chain([1, 2]), LogitRows(torch.zeros(2, 5)), SamplingState(SamplingParams(), 0, [1], 5))
    with pytest.raises(EngineError, match="shape"):
        LogitRows(torch.zeros(5))


# Verdicts

trees = st.integers(0, 12).flatmap(
    lambda size: st.tuples(*(st.integers(-1, node - 1) for node in range(size))).map(
        lambda parents: DraftTree(
            list(range(len(parents))), list(parents), [0.5] * len(parents), [f"d{i}" for i in range(len(parents))]
        )
    )
)


@given(trees, st.lists(st.integers(-2, 14), max_size=5), st.sampled_from([None, 77]))
@settings(max_examples=200, deadline=None)
def test_a_verdict_holds_only_a_path_that_the_tree_has(tree, path, bonus):
    above, valid = -1, bool(path) or bonus is not None
    for node in path:
        valid = valid and 0 <= node < len(tree) and tree.parents[node] == above
        above = node
    if not valid:
        with pytest.raises(ValueError, match="path"):
            Verdict(tree, tuple(path), bonus)
        return
    verdict = Verdict(tree, tuple(path), bonus)
    assert verdict.tokens == (*path, *([] if bonus is None else [bonus]))
    assert verdict.accepted == len(path) <= verdict.drafted == len(tree)
    assert len(verdict.sources) == len(verdict.tokens)


@given(trees, st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_verify_takes_every_accepted_token_from_a_child_and_the_bonus_from_none(tree, seed):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(tree) + 1, 6)).astype(np.float32))
    state = SamplingState(SamplingParams(temperature=1.0), seed, [1], 6)
    verdict = verify(tree, LogitRows(logits), state)
    end = verdict.path[-1] if verdict.path else -1
    assert verdict.bonus is not None
    assert all(token != verdict.bonus for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == end)
    assert state.emitted == len(verdict.tokens) == verdict.accepted + 1


def test_a_verdict_has_a_logprob_for_each_token_or_none_at_all():
    with pytest.raises(ValueError, match="1 log-probabilities for 2 tokens"):
        Verdict(chain([4]), (0,), 5, (TokenLogprob(4, -0.1),))
