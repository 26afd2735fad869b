"""Requests that are pushed out, cancelled or abandoned: nothing is lost or doubled, and nobody else notices."""

import random

import pytest

from forerun.drafting.draft_model import DraftModelDrafter
from forerun.drafting.suffix import SuffixDrafter
from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Oracle, Ragged
from tests.engine.guessing import Guess, PartlyRight, coming, truth_of
from tests.engine.harness import VOCABULARY, Ask, decoder, engine, finish, run, same

ASKS = [Ask([at, 9, 9, at], SamplingParams(max_tokens=14, ignore_eos=True)) for at in range(3)]


@pytest.fixture(scope="module")
def answers():
    return truth_of(ASKS)


@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_a_request_preempted_at_any_step_goes_on_with_the_same_tokens(drafts, answers):
    alone, truth = answers
    for when in range(9):
        drafter = Guess(lambda context, limit: coming(truth, context, drafts) if drafts else [])
        served = engine(drafters=[drafter], depth=8, page_size=4)
        told = []

        def preempt(number, served=served, when=when):
            if number == when and served.scheduler.running:
                served.scheduler.preempt(served.scheduler.running[-1])

        ids = [served.add(ask.prompt, ask.params) for ask in ASKS]
        for number in range(100):
            told += served.step()
            served.check()
            preempt(number)
            if not served.has_work:
                break
        for request_id, expected in zip(ids, alone, strict=True):
            streamed = sum((chunk.token_ids for chunk in told if chunk.request_id == request_id), ())
            assert same(served.collect(request_id), expected)
            assert streamed == expected.token_ids, "a token was told twice, or never"
        assert served.pool.in_use == 0


def test_preempting_everybody_after_every_other_step_only_costs_time(answers):
    alone, truth = answers
    served = engine(drafters=[PartlyRight(truth, 4, [4, 1, 0])], page_size=4)

    def preempt(number):
        for request in list(served.scheduler.running) if number % 2 else ():
            served.scheduler.preempt(request)

    outputs = run(served, ASKS, each_step=preempt)
    assert all(map(same, outputs, alone))
    assert all(output.stats.preemptions >= 2 for output in outputs)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_cache_for_hardly_more_than_one_request_serves_all_of_them(prefix, answers):
    alone, truth = answers
    served = engine(drafters=[Ragged(truth)], slots=24, page_size=4, prefix=prefix)
    outputs = run(served, ASKS)
    assert all(map(same, outputs, alone))
    assert sum(output.stats.preemptions for output in outputs) > 0


def test_draft_nodes_never_push_a_request_out():
    """Two requests fill the pool but for one page. Trees of any size take what is free, and nothing more."""
    asks = [Ask([at] * 10, SamplingParams(max_tokens=6, ignore_eos=True)) for at in range(2)]
    alone, _ = truth_of(asks)
    wide = Guess(lambda context, limit: list(range(16)))
    served = engine(drafters=[wide], slots=36, page_size=4, depth=16)
    outputs = run(served, asks)
    assert all(map(same, outputs, alone))
    assert all(output.stats.preemptions == 0 for output in outputs)


def kept_state(served, suffix, draft):
    """Everything that grows with live requests."""
    return len(served.scheduler.requests), served.pool.in_use, len(suffix._requests), len(draft._sequences)


def test_cancelling_half_in_mid_run_leaves_the_others_as_they_would_be_alone():
    """50 rounds over one shared prefix: the victims are drawn anew each time, and go while drafts are under way."""
    prefix = [3, 1, 4, 1, 5, 9, 2, 6] * 2
    asks = [Ask([*prefix, at], SamplingParams(max_tokens=8, ignore_eos=True)) for at in range(6)]
    alone, truth = truth_of(asks)
    suffix = SuffixDrafter(min_score=0.0)
    served = engine(drafters=[suffix, PartlyRight(truth, 4, [2, 0, 4])], page_size=4)
    draw = random.Random(7)
    for _ in range(50):
        ids = [served.add(ask.prompt, ask.params) for ask in asks]
        victims = set(draw.sample(range(6), 3))
        served.step()
        for at in victims:
            if draw.random() < 0.5:
                served.step()
            served.cancel(ids[at])
            served.check()
        finish(served)
        for at, request_id in enumerate(ids):
            output = served.collect(request_id)
            if at in victims and output.finish_reason == "cancelled":
                assert output.token_ids == alone[at].token_ids[: len(output.token_ids)]
            else:
                assert same(output, alone[at])
    assert not suffix._requests


@pytest.mark.parametrize("when", ["waiting", "in its prompt", "decoding", "held"])
def test_a_request_can_be_cancelled_in_any_state(when):
    hold = {"min_batch": 4, "max_wait_ms": 1e6} if when == "held" else {}
    drafter = Oracle(lambda context: range(40))
    served = engine(drafters=[drafter], token_limit=8, max_batch=4, page_size=4, **hold)
    request_id = served.add(list(range(30)), SamplingParams(max_tokens=10, ignore_eos=True))
    (request,) = served.scheduler.requests
    for _ in range({"waiting": 0, "in its prompt": 2, "decoding": 6, "held": 1}[when]):
        served.step()
    assert bool(request.answer) == (when == "decoding")
    served.cancel(request_id)
    served.cancel(request_id)
    assert not served.has_work
    assert served.pool.in_use == 0
    assert drafter.forgotten == [request.request_id]
    (chunk,) = served.step()
    assert chunk.finish_reason == "cancelled"
    output = served.collect(request_id)
    assert output.finish_reason == "cancelled"
    assert output.completions[0].error is None


def test_cancelling_what_is_unknown_or_finished_does_nothing():
    served = engine()
    (output,) = run(served, [Ask([1, 2], SamplingParams(max_tokens=2))])
    served.cancel(output.request_id)
    served.cancel(12345)
    assert served.step() == []
    assert output.finish_reason == "length"


def test_cancelling_ends_the_unfinished_answers_to_a_prompt_and_keeps_the_finished_ones():
    end = frozenset(range(0, VOCABULARY, 5))
    served = engine(end_tokens=end)
    request_id = served.add([1, 2], SamplingParams(n=6, temperature=1.5, seed=1, max_tokens=200))
    while not served._answers[request_id].finished:
        served.step()
    served.cancel(request_id)
    output = served.collect(request_id)
    reasons = [completion.finish_reason for completion in output.completions]
    assert set(reasons) == {"stop", "cancelled"}
    assert served.pool.in_use == 0


def test_nothing_is_kept_for_requests_that_have_gone():
    suffix = SuffixDrafter(min_score=0.0)
    draft = DraftModelDrafter(decoder(seed=9), slots=512, target_vocab_size=VOCABULARY)
    served = engine(drafters=[suffix, draft], slots=128, page_size=4)
    assert kept_state(served, suffix, draft) == (0, 0, 0, 0)
    draw = random.Random(3)
    ids = []
    for number in range(60):
        ids.append(served.add([number % 5] * (1 + number % 9), SamplingParams(max_tokens=1 + number % 7)))
        served.step()
        if draw.random() < 0.5:
            served.cancel(draw.choice(ids))
    finish(served)
    for request_id in ids:
        served.collect(request_id)
    assert kept_state(served, suffix, draft) == (0, 0, 0, 0)
    assert not served._answers
