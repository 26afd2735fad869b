"""The draft model: exact where it equals the target, exact in its cache, and never in the way of a request."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafting.base import DraftContext, DraftLimit
from forerun.drafting.draft_model import DraftModelDrafter, check_same_vocabulary, warn_if_large
from forerun.drafting.tree import DraftTree
from forerun.errors import DraftModelError
from forerun.kernels.batch import AttentionPath, TokenBatch
from forerun.models.decoder import Decoder
from forerun.verification.choice import SamplingState, choose
from forerun.verification.sampling import SamplingParams
from forerun.verification.walk import Verdict
from tests.models.tiny import tiny_decoder

GREEDY = SamplingParams()
GREEDY = replace(GREEDY, temperature=0.0)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9)
CHAIN = DraftLimit(width=1, depth=4, nodes=4)
TREE = DraftLimit(width=3, depth=5, nodes=12)
VERDICT = Verdict(DraftTree(), (), 0)
TARGET = tiny_decoder()
OTHER = tiny_decoder(seed=1)
WINDOWED = tiny_decoder("mistral")


def next_logits(decoder: Decoder, tokens: Sequence[int]) -> np.ndarray:
    """Logits after `tokens`, computed alone and from nothing."""
    size = len(tokens)
    everything = np.arange(size)
    batch = TokenBatch(
        np.asarray(tokens),
        everything,
        everything,
        [AttentionPath(everything, everything, 0, size)],
        np.array([size - 1]),
    )
    return decoder.forward(batch, decoder.new_store(size)).numpy()[0]


def continuation(decoder: Decoder, prompt: Sequence[int], params: SamplingParams, seed: int, count: int) -> list[int]:
    """What the target answers, token by token."""
    tokens = list(prompt)
    state = SamplingState(params, seed, prompt, decoder.vocab_size)
    for _ in range(count):
        token = choose(next_logits(decoder, tokens), state)
        state.append(token)
        tokens.append(token)
    return tokens[len(prompt) :]


def context(tokens: list[int], *, request_id: int = 0, params: SamplingParams = GREEDY, seed: int = 5, room: int = 99):
    return DraftContext(request_id, tokens, len(tokens), params, seed, room)


def drafter_of(decoder: Decoder = TARGET, slots: int = 1024, **settings: object) -> DraftModelDrafter:
    return DraftModelDrafter(decoder, slots=slots, target_vocab_size=TARGET.vocab_size, min_score=0.0, **settings)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 512, length).tolist()


def first_path(tree: DraftTree) -> list[int]:
    path, node = [], -1
    while (child := next((at for at, parent in enumerate(tree.parents) if parent == node), None)) is not None:
        path.append(tree.tokens[child])
        node = child
    return path


def holds(tree: DraftTree, tokens: Sequence[int]) -> int:
    """How many of the tokens, from the first on, the tree guessed."""
    node = -1
    for count, token in enumerate(tokens):
        below = {tree.tokens[at]: at for at, parent in enumerate(tree.parents) if parent == node}
        if token not in below:
            return count
        node = below[token]
    return len(tokens)


@pytest.mark.parametrize("decoder", [TARGET, WINDOWED], ids=["full attention", "sliding window"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_target_as_its_own_draft_is_always_right(decoder: Decoder, params: SamplingParams) -> None:
    drafter = drafter_of(decoder)
    tokens = prompt_of(21)
    answer = continuation(decoder, tokens, params, 5, 25)
    asked, done = context(tokens, params=params), 0
    for accepted in (4, 0, 2, 1, 3, 4):  # the rest of each chain is thrown away, as if it had been rejected
        tree = drafter.propose([asked], CHAIN)[0]
        assert first_path(tree) == answer[done : done + 4]
        tokens += answer[done : done + accepted + 1]
        done += accepted + 1
        drafter.observe(asked, VERDICT)
        drafter.check()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_tree_holds_the_targets_own_answer(params: SamplingParams) -> None:
    tokens = prompt_of(10)
    tree = drafter_of().propose([context(tokens, params=params)], DraftLimit(width=3, depth=4, nodes=99))[0]
    assert holds(tree, continuation(TARGET, tokens, params, 5, 4)) == 4
    assert max(tree.depths()) == 4
    assert max(map(len, tree.children())) == 3


def test_guesses_do_not_depend_on_company_chunks_or_history() -> None:
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 17, 64)]
    alone = [drafter_of(OTHER).propose([context(tokens)], TREE)[0] for tokens in prompts]
    for chunk in (16, 50, 512):
        together = drafter_of(OTHER, chunk=chunk)
        contexts = [context(tokens, request_id=number) for number, tokens in enumerate(prompts)]
        assert together.propose(contexts, TREE) == alone
        assert together.propose(contexts, TREE) == alone, "asking again changes nothing"


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=10), st.integers(0, 5))
def test_cache_follows_committed_tokens_exactly(steps: list[tuple[int, int]], seed: int) -> None:
    drafter = drafter_of(OTHER, slots=400)
    draw = np.random.default_rng(seed)
    contexts = [context(prompt_of(5 + 9 * number, seed), request_id=number) for number in range(3)]
    for number, committed in steps:
        asked = contexts[number]
        tree = drafter.propose([asked], TREE)[0]
        assert drafter.cached(number) == len(asked.tokens)
        drafter.check()
        guessed = first_path(tree)[:committed]
        asked.tokens.extend([*guessed, int(draw.integers(2, 512))])  # type: ignore[attr-defined]
        drafter.observe(asked, VERDICT)
        assert drafter.cached(number) <= len(asked.tokens)
    for asked in contexts:
        fresh = drafter_of(OTHER).propose([replace(asked, request_id=77)], TREE)
        assert drafter.propose([asked], TREE) == fresh
        drafter.forget(asked.request_id)
    drafter.check()
    assert all(drafter.cached(number) == 0 for number in range(3))


def test_trees_stay_within_limit_and_room() -> None:
    for room in (0, 1, 2, 9):
        tree = drafter_of(OTHER).propose([context(prompt_of(9), room=room)], TREE)[0]
        assert len(tree) <= TREE.nodes
        assert max(tree.depths(), default=0) <= min(room, TREE.depth)


def test_no_nodes_asked_no_work() -> None:
    drafter = drafter_of()
    assert len(drafter.propose([context(prompt_of(9))], DraftLimit(3, 5, 0))[0]) == 0
    assert drafter.cached(0) == 0


def test_unlikely_nodes_are_not_expanded() -> None:
    drafter = DraftModelDrafter(OTHER, slots=256, min_score=2.0)
    assert max(drafter.propose([context(prompt_of(9))], TREE)[0].depths()) == 1


def test_a_context_beyond_the_drafts_limit_is_left_out_alone() -> None:
    short = tiny_decoder(max_position_embeddings=64)
    drafter = drafter_of(short)
    prompts = [prompt_of(length, seed=length) for length in (100, 20, 30)]
    trees = drafter.propose([context(tokens, request_id=number) for number, tokens in enumerate(prompts)], CHAIN)
    assert len(trees[0]) == 0
    assert [len(tree) for tree in trees[1:]] == [4, 4]
    assert first_path(trees[1]) == continuation(TARGET, prompts[1], GREEDY, 5, 4)
    drafter.check()


@pytest.mark.parametrize("length", range(58, 68))
def test_at_its_context_limit_the_draft_stops_level_by_level(length: int) -> None:
    drafter = drafter_of(tiny_decoder(max_position_embeddings=64))
    tree = drafter.propose([context(prompt_of(length))], CHAIN)[0]
    assert len(tree) == max(0, min(4, 65 - length))
    drafter.check()


def test_without_room_in_the_cache_the_youngest_goes_without() -> None:
    drafter = drafter_of(OTHER, slots=96)
    prompts = [prompt_of(40, seed=number) for number in range(3)]
    contexts = [context(tokens, request_id=number) for number, tokens in enumerate(prompts)]
    youngest_first = drafter.propose(contexts[::-1], CHAIN)
    assert [len(tree) > 0 for tree in youngest_first] == [False, True, True]
    drafter.check()
    drafter.forget(0)
    assert len(drafter.propose([contexts[2]], CHAIN)[0]) > 0
    drafter.check()


def test_an_older_request_takes_room_from_a_younger_one() -> None:
    drafter = drafter_of(OTHER, slots=64)
    young, old = context(prompt_of(40, 1), request_id=9), context(prompt_of(40, 2), request_id=3)
    assert len(drafter.propose([young], CHAIN)[0]) > 0
    assert len(drafter.propose([old], CHAIN)[0]) > 0
    assert drafter.cached(9) == 0
    assert len(drafter.propose([young], CHAIN)[0]) == 0
    drafter.check()


def test_forgetting_gives_every_page_back() -> None:
    drafter = drafter_of(OTHER, slots=128)
    for number in range(30):
        assert len(drafter.propose([context(prompt_of(60, number), request_id=number)], TREE)[0]) > 0
        drafter.forget(number)
        drafter.forget(number)
    drafter.check()


@pytest.mark.parametrize("size", [500, 520])
def test_padded_vocabularies_never_give_ids_that_the_target_lacks(size: int) -> None:
    draft = tiny_decoder(seed=1, vocab_size=size)
    params = replace(SAMPLED, temperature=5.0, top_p=1.0, logit_bias={511: 5.0})
    trees = drafter_of(draft).propose(
        [context([1, 2, 3], params=params, seed=seed, request_id=seed) for seed in range(9)], TREE
    )
    assert all(0 <= token < min(size, 512) for tree in trees for token in tree.tokens)
    assert all(len(tree) for tree in trees)


def test_a_token_that_the_draft_does_not_know_ends_drafting_for_that_request_alone() -> None:
    drafter = drafter_of(tiny_decoder(vocab_size=500))
    trees = drafter.propose([context([1, 505, 3]), context([1, 2, 3], request_id=1)], CHAIN)
    assert [len(tree) for tree in trees] == [0, 4]


def test_unusable_logits_are_an_error_and_not_a_guess() -> None:
    broken = tiny_decoder()
    broken.final_norm.weight.fill_(torch.nan)
    with pytest.raises(Exception, match="logit"):
        drafter_of(broken).propose([context([1, 2, 3])], CHAIN)


@dataclass
class NamedVocabulary:
    differences: list[str]

    def same_vocabulary(self, other: object) -> list[str]:
        return self.differences


def test_another_vocabulary_is_refused_and_the_difference_named() -> None:
    check_same_vocabulary(NamedVocabulary([]), NamedVocabulary([]))  # type: ignore[arg-type]
    with pytest.raises(DraftModelError, match="size: 3 tokens are missing"):
        check_same_vocabulary(NamedVocabulary(["size: 3 tokens are missing"]), NamedVocabulary([]))  # type: ignore[arg-type]


def test_a_large_draft_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not warn_if_large(100, 30)
        assert not caplog.records
        assert warn_if_large(100, 31)
    assert "31%" in caplog.text


def test_a_cache_without_a_page_is_refused() -> None:
    with pytest.raises(DraftModelError, match="slots"):
        DraftModelDrafter(OTHER, slots=3)
