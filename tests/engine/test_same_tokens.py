"""Promise 1: the same tokens, whatever the drafter, the tree, the batch, the chunks, the cache and its pressure."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from forerun.drafting.draft_model import DraftModelDrafter
from forerun.drafting.suffix import SuffixDrafter
from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Anti, Malicious, Oracle, Ragged, Random
from tests.engine.guessing import truth_of
from tests.engine.harness import CONTEXT, EVERY_KERNELS, KERNELS, VOCABULARY, Ask, decoder, engine, plain, run, same
from tests.models.tiny import FAMILIES

# Few words, so that answers repeat themselves and the suffix drafter has something to find.
PROMPTS = st.lists(st.integers(0, 7), min_size=1, max_size=60) | st.lists(
    st.integers(0, VOCABULARY - 1), min_size=1, max_size=30
)


@st.composite
def sampling(draw):
    most = draw(st.integers(1, 40))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5])),
        top_k=draw(st.sampled_from([0, 1, 5, 40])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4, -0.3])),
        logit_bias=draw(
            st.none() | st.dictionaries(st.integers(0, 20), st.sampled_from([-100.0, -2.0, 3.0]), max_size=3)
        ),
        seed=draw(st.integers(0, 2**63)),
        max_tokens=most,
        min_tokens=draw(st.sampled_from([0, 0, most // 2])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.lists(st.integers(0, 40), max_size=3)),
        logprobs=draw(st.sampled_from([None, 0, 5])),
        n=draw(st.sampled_from([1, 1, 1, 2])),
    )


ASKS = st.lists(st.builds(Ask, PROMPTS, sampling()), min_size=1, max_size=4)


def drafters(names, model, truth):
    """Drafters by name; `truth` maps a prompt to the tokens that plain decoding gives."""
    other = decoder(seed=9, dtype=model.dtype, cache=model.cache_dtype)
    made = {
        "suffix": lambda: SuffixDrafter(min_score=0.0),
        "same": lambda: DraftModelDrafter(model, slots=2048),
        "other": lambda: DraftModelDrafter(other, slots=512),
        "oracle": lambda: Oracle(truth),
        "anti": lambda: Anti(truth, VOCABULARY),
        "random": lambda: Random(VOCABULARY),
        "malicious": lambda: Malicious(truth, VOCABULARY),
        "ragged": lambda: Ragged(truth),
    }
    return [made[name]() for name in names]


HELD = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)]  # weights, and the cache
EVERY_HELD = [(*held, None) for held in HELD] + [(torch.bfloat16, None, 8), (torch.bfloat16, None, 4)]  # and quantised
NAMES = ["suffix", "same", "other", "oracle", "anti", "random", "malicious", "ragged"]


EXAMPLES = int(os.environ.get("FORERUN_EXAMPLES", "60"))


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    asks=ASKS,
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
    width=st.integers(1, 4),
    depth=st.integers(1, 12),
    nodes=st.integers(0, 20),
    step_nodes=st.integers(0, 40),
    token_limit=st.integers(8, 64),
    max_batch=st.integers(1, 4),
    pages=st.integers(0, 30),
    page_size=st.sampled_from([4, 16]),
    prefix=st.booleans(),
    repeat=st.booleans(),
    held=st.sampled_from(EVERY_HELD),
    kernels=st.sampled_from(EVERY_KERNELS),
    family=st.sampled_from(sorted(FAMILIES)),
)
def test_tokens_and_logprobs_equal_those_of_the_request_alone(
    asks,
    names,
    width,
    depth,
    nodes,
    step_nodes,
    token_limit,
    max_batch,
    pages,
    page_size,
    prefix,
    repeat,
    held,
    kernels,
    family,
):
    model = decoder(family, dtype=held[0], cache=held[1], bits=held[2], kernels=kernels)
    ends = frozenset(range(0, VOCABULARY, 40))
    alone, truth = truth_of(asks, model, end_tokens=ends)
    # As few pages as the longest request needs, and up to `pages` more: from constant preemption to none.
    longest = max(len(ask.prompt) + ask.params.max_tokens for ask in asks)
    slots = (-(-longest // page_size) + pages) * page_size
    crowded = engine(
        model,
        drafters(names, model, truth),
        slots=slots,
        width=width,
        depth=depth,
        nodes=nodes,
        step_nodes=step_nodes,
        token_limit=token_limit,
        max_batch=max_batch,
        page_size=page_size,
        prefix=prefix,
        end_tokens=ends,
    )
    for _ in range(1 + repeat):  # the second time prompts are found in the prefix cache, and drafters know the answers
        outputs = run(crowded, asks)
        assert not crowded.speculation.disabled
        for ask, output, expected in zip(asks, outputs, alone, strict=True):
            note(f"{ask} gave {output.token_ids}, alone {expected.token_ids}")
            assert same(output, expected)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("dtype", "cache"), HELD)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_as_its_own_draft_model_is_always_right(temperature, dtype, cache, kernels):
    model = decoder(dtype=dtype, cache=cache, kernels=kernels)
    drafter = DraftModelDrafter(model, slots=2048, min_score=0.0)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    asks = [Ask([1, 2, 3], params), Ask([9] * 20, params)]
    outputs = run(engine(model, [drafter], width=1, depth=4, nodes=4), asks)
    for ask, output in zip(asks, outputs, strict=True):
        assert same(output, plain(ask, model))
        assert output.stats.acceptance_rate == 1.0
        assert output.stats.steps <= -(-39 // 5) + 1


@pytest.mark.parametrize("k", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_perfect_drafter_saves_steps_and_changes_nothing(k, batch):
    asks = [Ask([at, at + 1, at + 2], SamplingParams(max_tokens=33)) for at in range(batch)]
    alone, truth = truth_of(asks)
    outputs = run(engine(drafters=[Oracle(truth)], depth=k, nodes=k, step_nodes=k * batch, max_batch=8), asks)
    for output, expected in zip(outputs, alone, strict=True):
        assert same(output, expected)
        emitted = len(output.token_ids) - 1
        assert output.stats.acceptance_rate == 1.0
        assert output.stats.accepted + output.stats.steps == emitted
        assert output.stats.steps == -(-emitted // (k + 1))


def test_one_word_repeated_48_times_is_answered_alike():
    ask = Ask([77] * 48, SamplingParams(max_tokens=32, seed=42))
    for kernels in KERNELS:
        for dtype in (torch.float32, torch.bfloat16):
            model = decoder(dtype=dtype, kernels=kernels)
            (output,) = run(engine(model, [SuffixDrafter(min_score=0.0)], width=1, depth=4, nodes=4), [ask])
            assert same(output, plain(ask, model))


def test_the_context_limit_is_met_exactly_by_every_prompt_length():
    model = decoder(kernels="native")
    for length in (1, 2, 7, 30, 31, 40, 62, 63):
        ask = Ask([length] * length, SamplingParams(max_tokens=200, ignore_eos=True))
        (expected,), truth = truth_of([ask], model, context_length=64)
        for k in (1, 4, 16):
            (output,) = run(engine(model, [Oracle(truth)], depth=k, nodes=k, context_length=64), [ask])
            assert same(output, expected)
            assert output.finish_reason == "length"
            assert len(output.token_ids) + length == 64


def test_growing_past_powers_of_two_and_to_the_models_own_limit():
    ask = Ask([3, 4], SamplingParams(max_tokens=1000, ignore_eos=True))
    expected = plain(ask)
    (output,) = run(engine(drafters=[SuffixDrafter(min_score=0.0)], nodes=16, depth=16), [ask])
    assert same(output, expected)
    assert len(output.token_ids) + 2 == CONTEXT


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("length", [30, 100])
def test_crossing_the_sliding_window_changes_nothing(family, length):
    model = decoder(family)
    ask = Ask(list(range(length)), SamplingParams(max_tokens=60, ignore_eos=True))
    (expected,), truth = truth_of([ask], model)
    (output,) = run(engine(model, [Ragged(truth)]), [ask])
    assert same(output, expected)


def test_logits_of_a_position_are_the_same_bits_in_a_verify_pass_of_any_width():
    """Log-probabilities are exact functions of the logits; here they are compared bit for bit for k = 1 .. 16."""
    ask = Ask([5, 6, 7, 8], SamplingParams(max_tokens=40, logprobs=20, ignore_eos=True))
    (expected,), truth = truth_of([ask])
    for k in range(1, 17):
        (output,) = run(engine(drafters=[Oracle(truth)], depth=k, nodes=k), [ask])
        assert output.logprobs == expected.logprobs
