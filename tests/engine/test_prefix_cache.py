"""What is found of earlier prompts: committed tokens only, as many as without drafts, and never another answer."""

import pytest

from forerun.drafting.suffix import SuffixDrafter
from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Anti, Oracle
from tests.engine.guessing import Guess, PartlyRight, coming, truth_of
from tests.engine.harness import VOCABULARY, Ask, decoder, engine, plain, run, same

PROMPT = [at * 7 % 50 for at in range(50)]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_prompt_found_again_after_rejected_drafts_is_answered_as_when_it_was_new(family):
    model = decoder(family)
    ask = Ask(PROMPT, PARAMS)
    (cold,), truth = truth_of([ask], model)
    served = engine(model, [Anti(truth, VOCABULARY)], page_size=4)
    for repeated in range(3):
        (output,) = run(served, [ask])
        assert same(output, cold)
        assert output.stats.cached_tokens == (48 if repeated else 0)


def test_drafts_do_not_cost_prefix_hits():
    """Prompts that come back: with drafts at least as many tokens are found as without, but for one page."""
    asks = [Ask([*PROMPT[:30], at, *PROMPT[:at]], PARAMS) for at in range(5)] * 2
    _, truth = truth_of(asks[:5])
    hits = []
    for drafters in ([], [Anti(truth, VOCABULARY)], [Oracle(truth)], [SuffixDrafter(min_score=0.0)]):
        served = engine(drafters=drafters, page_size=4, slots=400)
        hits.append(sum(run(served, [ask])[0].stats.cached_tokens for ask in asks))
    assert min(hits[1:]) >= hits[0] - 4
    assert hits[0] > 200


def test_a_long_prompt_in_chunks_is_answered_alike_cold_and_warm():
    ask = Ask(PROMPT, PARAMS)
    (expected,), truth = truth_of([ask])
    for drafters in ([Oracle(truth)], [SuffixDrafter(min_score=0.0)], [PartlyRight(truth, 5, [5, 0, 2])]):
        served = engine(drafters=drafters, token_limit=8, page_size=4)
        for _ in range(2):
            assert same(run(served, [ask])[0], expected)


def test_nothing_is_drafted_before_the_last_chunk_of_a_prompt():
    ask = Ask(PROMPT, PARAMS)
    (expected,), truth = truth_of([ask])
    drafter = Guess(lambda context, limit: coming(truth, context, 4))
    served = engine(drafters=[drafter], token_limit=8)
    asked_after = []
    (output,) = run(served, [ask], each_step=lambda _: asked_after.append(len(drafter.asked)))
    assert same(output, expected)
    assert asked_after[:7] == [0] * 7, "50 tokens in chunks of 8 take seven steps"
    assert all(length > len(PROMPT) for _, length, _ in drafter.asked)


def test_a_new_prompt_in_chunks_beside_drafting_requests_gets_none_of_their_drafts():
    asks = [Ask([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True)), Ask(PROMPT, PARAMS)]
    alone, truth = truth_of(asks)
    drafter = Guess(lambda context, limit: coming(truth, context, 3))
    served = engine(drafters=[drafter], token_limit=12)
    first = served.add(asks[0].prompt, asks[0].params)
    served.step()
    second = served.add(asks[1].prompt, asks[1].params)
    while served.has_work:
        served.step()
        served.check()
    assert same(served.collect(first), alone[0])
    assert same(served.collect(second), alone[1])
    lengths = [length for request_id, length, _ in drafter.asked if request_id > first + 1]
    assert min(lengths) > len(PROMPT)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_second_turn_after_a_stop_inside_a_draft_is_that_of_plain_decoding(family):
    """Turn 1 ends by a stop token in the middle of an accepted block; turn 2 begins with everything said so far."""
    model = decoder(family)
    whole = plain(Ask(PROMPT, SamplingParams(max_tokens=20)), model)
    stop = next(token for at, token in enumerate(whole.token_ids) if at > 8 and token not in whole.token_ids[:at])
    first = Ask(PROMPT, SamplingParams(max_tokens=20, stop_token_ids=[stop], temperature=0.0, seed=1))
    (turn1,), _ = truth_of([first], model)
    second = Ask([*PROMPT, *turn1.token_ids, 5, 6, 7], SamplingParams(max_tokens=20, temperature=0.7, seed=2))
    (turn2,), _ = truth_of([second], model)
    knows = {tuple(first.prompt): whole.token_ids, tuple(second.prompt): turn2.token_ids}
    drafter = Guess(lambda context, limit: coming(knows, context, 7))
    served = engine(model, [drafter], page_size=4)
    (warm1,) = run(served, [first])
    (warm2,) = run(served, [second])
    assert same(warm1, turn1)
    assert same(warm2, turn2)
    assert warm2.stats.cached_tokens >= len(PROMPT) + len(turn1.token_ids) - 4


def test_requests_that_share_a_prefix_at_the_same_time_do_not_write_into_each_other():
    asks = [Ask([*PROMPT[:33], at], PARAMS) for at in range(4)]
    alone, truth = truth_of(asks)
    served = engine(drafters=[PartlyRight(truth, 4, [3, 0, 4])], page_size=4)
    run(served, [Ask(PROMPT[:33], SamplingParams(max_tokens=1))])
    outputs = run(served, asks)
    assert all(map(same, outputs, alone))
    assert all(output.stats.cached_tokens == 32 for output in outputs)


def test_prefixes_are_evicted_and_found_in_part():
    asks = [Ask([at, *PROMPT[:40]], PARAMS) for at in range(4)]
    alone, truth = truth_of(asks)
    served = engine(drafters=[Oracle(truth)], page_size=4, slots=100)
    cached = []
    for _ in range(3):
        outputs = [run(served, [ask])[0] for ask in asks]
        assert all(map(same, outputs, alone))
        cached.append(sum(output.stats.cached_tokens for output in outputs))
    (again,) = run(served, [asks[-1]])
    assert again.stats.cached_tokens == 40, "the last one is still there"
    assert max(cached[1:]) < 4 * 40, "the pool is too small for all of them"


def test_a_prompt_that_is_found_whole_still_computes_its_last_token():
    ask = Ask(PROMPT[:32], PARAMS)
    served = engine(page_size=16)
    first, second = (run(served, [ask])[0] for _ in range(2))
    assert same(first, second)
    assert second.stats.cached_tokens == 16
    assert second.stats.prefill_tokens == 16


def test_forgetting_and_turning_off_leave_nothing_to_find():
    ask = Ask(PROMPT, PARAMS)
    served = engine(page_size=4)
    run(served, [ask])
    served.clear_history()
    assert run(served, [ask])[0].stats.cached_tokens == 0
    without = engine(page_size=4, prefix=False)
    assert [run(without, [ask])[0].stats.cached_tokens for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("rejected", [True, False])
def test_what_is_found_of_a_finished_answer_never_includes_its_last_token_which_was_not_computed(rejected):
    """Answers that end at every distance from a page's border; the next prompt goes on from all of their tokens."""
    for length in range(1, 9):
        first = Ask(PROMPT[:9], SamplingParams(max_tokens=length, ignore_eos=True))
        (turn1,), truth = truth_of([first])
        second = Ask([*first.prompt, *turn1.token_ids, 5], PARAMS)
        served = engine(drafters=[Anti(truth, VOCABULARY) if rejected else Oracle(truth)], page_size=4)
        assert same(run(served, [first])[0], turn1)
        served.speculation.drafters.clear()
        (turn2,) = run(served, [second])
        assert same(turn2, plain(second))
        assert turn2.stats.cached_tokens == (8 + length) // 4 * 4
