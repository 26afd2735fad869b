"""What the KV cache holds after a step: exactly the committed tokens, whatever was drafted and rejected."""

import numpy as np
import pytest
import torch

from forerun.drafting.draft_model import DraftModelDrafter
from forerun.kernels.batch import AttentionPath, TokenBatch
from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Anti, Empty, Oracle
from tests.engine.guessing import Guess, PartlyRight, coming, tree, truth_of, wrong
from tests.engine.harness import KERNELS, VOCABULARY, Ask, decoder, engine, plain, run, same
from tests.models.tiny import tiny_decoder


def rebuilt(model, tokens):
    """A fresh store with keys and values of `tokens`, computed in one pass, in slots 0, 1, ..."""
    count = len(tokens)
    store, all_rows = model.new_store(count), np.arange(count)
    path = AttentionPath(all_rows, all_rows, 0, count)
    model.forward(TokenBatch(np.asarray(tokens), all_rows, all_rows, [path], np.empty(0, np.int64)), store)
    return store


def same_contents(store, slots, expected):
    """Whether `slots` of a store hold, bit for bit, what the first slots of `expected` do; the last one is scratch."""
    parts = ("keys", "values", "key_scales", "value_scales")
    pairs = [(getattr(store, part), getattr(expected, part)) for part in parts]
    return all(one is other is None or torch.equal(one[:, slots], other[:, : len(slots)]) for one, other in pairs)


def compare_with_rebuilt(served, model):
    """Every running request's cache is, bit for bit, that of its committed tokens. Returns how many were compared."""
    for request in served.scheduler.running:
        computed = request.slots.computed
        slots = torch.from_numpy(request.slots.slots[:computed].copy())
        assert same_contents(served._store, slots, rebuilt(model, request.tokens[:computed]))
        if request.answer:
            assert computed == len(request.tokens) - 1, "the cache lags behind the answer by more than the next root"
    return len(served.scheduler.running)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    ("dtype", "cache"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)]
)
def test_the_cache_is_that_of_the_committed_tokens_for_every_number_of_accepted_drafts(dtype, cache, family, kernels):
    model = decoder(family, dtype=dtype, cache=cache, kernels=kernels)
    for k in (1, 7):
        ask = Ask([3, 1, 4, 1, 5], SamplingParams(max_tokens=5 * k + 3, ignore_eos=True))
        (expected,), truth = truth_of([ask], model)
        drafter = PartlyRight(truth, k, range(k + 1))
        served = engine(model, [drafter], depth=k, nodes=k)
        (output,) = run(served, [ask], each_step=lambda _, served=served: compare_with_rebuilt(served, model))
        assert same(output, expected)
        assert {verdict.accepted for verdict in drafter.verdicts} >= set(range(k + 1))


@pytest.mark.parametrize("branch", range(3))
def test_an_accepted_branch_is_moved_to_where_its_tokens_belong(branch):
    """Three chains of three hang on the root, and only one of them, of any rank, is right."""
    ask = Ask([8, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    (expected,), truth = truth_of([ask])

    def three_chains(context, limit):
        right = coming(truth, context, 3)
        if len(right) < 3:
            return right
        chains = [[(token + 1 + at) % VOCABULARY for token in right] for at in range(3)]
        chains[branch] = right
        tokens = [chains[at][level] for level in range(3) for at in range(3)]
        return tree(tokens, [-1, -1, -1, 0, 1, 2, 3, 4, 5])

    served = engine(drafters=[Guess(three_chains)], page_size=4)
    (output,) = run(served, [ask], each_step=lambda _: compare_with_rebuilt(served, decoder()))
    assert same(output, expected)
    assert output.stats.steps == 10, "every step accepts three drafts and adds one token"


def test_a_cache_crossing_pages_and_windows_with_a_whole_batch_stays_that_of_the_committed_tokens():
    model = decoder("mistral")
    asks = [Ask([at] * (14 + at), SamplingParams(max_tokens=30, ignore_eos=True)) for at in range(4)]
    alone, truth = truth_of(asks, model)
    served = engine(model, [PartlyRight(truth, 5, [5, 0, 3, 1, 4, 2])], page_size=4)
    outputs = run(served, asks, each_step=lambda _: compare_with_rebuilt(served, model))
    assert all(map(same, outputs, alone))


def test_a_long_spell_without_drafts_leaves_nothing_stale():
    ask = Ask([2, 7, 1], SamplingParams(max_tokens=90, ignore_eos=True))
    (expected,), truth = truth_of([ask])
    drafter = Guess(lambda context, limit: coming(truth, context, 8) if len(context.tokens) > 53 else [])
    served = engine(drafters=[Empty(), drafter])
    (output,) = run(served, [ask])
    assert same(output, expected)
    assert output.stats.acceptance_rate == 1.0
    assert output.stats.steps == 50 + -(-39 // 9)


def test_500_tokens_with_about_half_of_the_drafts_rejected_are_the_plain_ones():
    model = tiny_decoder(max_position_embeddings=640)
    ask = Ask([9, 9, 8], SamplingParams(max_tokens=500, ignore_eos=True, temperature=1.0, seed=5))
    (expected,), truth = truth_of([ask], model)
    served = engine(model, [PartlyRight(truth, 6, [0, 6, 3, 1, 5])])
    (output,) = run(served, [ask], each_step=lambda number: number % 20 or compare_with_rebuilt(served, model))
    assert same(output, expected)
    assert len(output.token_ids) == 500
    assert 0.3 < output.stats.acceptance_rate < 0.7


def test_all_drafts_rejected_at_temperature_1_in_a_batch_changes_nothing():
    asks = [Ask([at, 5], SamplingParams(max_tokens=50, ignore_eos=True, temperature=1.0, seed=at)) for at in range(3)]
    alone, truth = truth_of(asks)
    served = engine(drafters=[Anti(truth, VOCABULARY)])
    outputs = run(served, asks, each_step=lambda number: number % 5 or compare_with_rebuilt(served, decoder()))
    assert all(map(same, outputs, alone))
    assert all(output.stats.accepted == 0 for output in outputs)
    assert all(output.stats.drafted > 200 for output in outputs)


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_lies_in_slots_that_nobody_owns_does_not_matter(kernels):
    """Slots given back are not cleaned: here they hold NaN, the worst that a former owner can leave."""
    model = decoder(kernels=kernels)
    asks = [Ask([at, at, 3], SamplingParams(max_tokens=20, logprobs=2, ignore_eos=True)) for at in range(3)]
    alone, truth = truth_of(asks, model)
    served = engine(model, [PartlyRight(truth, 4, [4, 0, 2])], page_size=4, prefix=False)

    def poison(_):
        owned = {slot for request in served.scheduler.running for slot in request.slots.slots[: request.slots.computed]}
        free = torch.tensor([slot for slot in range(served._store.slots) if slot not in owned])
        served._store.keys[:, free] = torch.nan
        served._store.values[:, free] = torch.nan

    poison(0)
    outputs = run(served, asks, each_step=poison)
    assert all(map(same, outputs, alone))


def test_the_draft_model_s_cache_holds_committed_tokens_only_and_keeps_up():
    target, draft = decoder("mistral"), decoder("mistral", seed=9)
    drafter = DraftModelDrafter(draft, slots=1024, target_vocab_size=VOCABULARY, page_size=4)
    asks = [Ask([at] * 20, SamplingParams(max_tokens=40, ignore_eos=True)) for at in range(3)]
    served = engine(target, [drafter], page_size=4)
    lengths = {}

    def compare(_):
        drafter.check()
        for request in served.scheduler.running:
            cached = drafter.cached(request.request_id)
            assert cached <= len(request.tokens)
            if request.answer and request.request_id in lengths:
                assert cached >= lengths[request.request_id] - 1, "the draft fell behind by more than one step"
            lengths[request.request_id] = len(request.tokens)
            sequence = drafter._sequences.get(request.request_id)
            if sequence is not None and cached:
                slots = torch.from_numpy(sequence.slots[:cached].copy())
                assert same_contents(drafter._store, slots, rebuilt(draft, request.tokens[:cached]))

    outputs = run(served, asks, each_step=compare)
    assert all(same(output, plain(ask, target)) for ask, output in zip(asks, outputs, strict=True))
    assert not drafter._sequences


def test_a_wrong_guess_after_a_right_one_of_the_same_token_is_not_mixed_up():
    """A child repeats its parent's token; only the parent is right."""
    ask = Ask([1, 2, 3, 4], SamplingParams(max_tokens=24, ignore_eos=True))
    (expected,), truth = truth_of([ask])

    def doubled(context, limit):
        right = coming(truth, context, 2)
        return tree([right[0], wrong(right[0]), right[0]], [-1, -1, 0]) if len(right) == 2 else right

    served = engine(drafters=[Guess(doubled), Oracle(truth)], nodes=6)
    (output,) = run(served, [ask], each_step=lambda _: compare_with_rebuilt(served, decoder()))
    assert same(output, expected)
