"""Counters that add up: what was proposed, accepted and emitted, per answer and per step."""

from dataclasses import dataclass, field

import pytest

from forerun.control.fixed import FixedController
from forerun.drafting.base import DraftLimit
from forerun.drafting.draft_model import DraftModelDrafter
from forerun.drafting.suffix import SuffixDrafter
from forerun.engine.outputs import RequestStats
from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Anti, Empty, Malicious, Oracle, Ragged
from tests.engine.guessing import Guess, PartlyRight, coming, tree, truth_of
from tests.engine.harness import VOCABULARY, Ask, decoder, engine, plain, run, same

ASKS = [Ask([at] * (1 + 3 * at), SamplingParams(max_tokens=22, ignore_eos=True)) for at in range(3)]


@pytest.fixture(scope="module")
def answers():
    return truth_of(ASKS)


def pairs(truth):
    """Two children at the root, the second one right, and a right child below it: a tree of three."""

    def guess(context, limit):
        right = coming(truth, context, 2)
        return tree([(right[0] + 1) % VOCABULARY, right[0], right[1]], [-1, -1, 1]) if len(right) == 2 else right

    return Guess(guess)


KINDS = {
    "oracle": Oracle,
    "anti": lambda truth: Anti(truth, VOCABULARY),
    "ragged": Ragged,
    "partly right": lambda truth: PartlyRight(truth, 6, [0, 3, 6, 1]),
    "tree": pairs,
    "malicious": lambda truth: Malicious(truth, VOCABULARY),
    "suffix": lambda truth: SuffixDrafter(min_score=0.0),
    "draft": lambda truth: DraftModelDrafter(decoder(), slots=512, target_vocab_size=VOCABULARY),
}


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_and_steps_add_up_to_the_tokens_emitted(kind, answers):
    """The first token comes from the prompt's own step; after it, every token is a draft's or a step's."""
    alone, truth = answers
    drafter = KINDS[kind](truth)
    outputs = run(engine(drafters=[drafter]), ASKS)
    for output, expected in zip(outputs, alone, strict=True):
        assert same(output, expected)
        stats, emitted = output.stats, len(output.token_ids) - 1
        assert 0 <= stats.accepted <= stats.drafted
        assert stats.accepted + stats.steps == emitted == stats.decode_tokens
        assert stats.prefill_tokens + stats.cached_tokens == output.prompt_tokens
        guessed = [source for source in output.completions[0].sources if source != "target"]
        assert len(guessed) == stats.accepted
        if stats.drafted:
            assert stats.acceptance_rate == stats.accepted / stats.drafted
            assert stats.mean_accepted_length == emitted / stats.steps


@pytest.mark.parametrize("kind", ["oracle", "ragged", "partly right", "tree"])
def test_what_is_counted_as_drafted_is_what_was_verified(kind, answers):
    _, truth = answers
    drafter = KINDS[kind](truth)
    outputs = run(engine(drafters=[drafter], step_nodes=7), ASKS)
    assert sum(verdict.drafted for verdict in drafter.verdicts) == sum(output.stats.drafted for output in outputs)
    assert sum(verdict.accepted for verdict in drafter.verdicts) == sum(output.stats.accepted for output in outputs)


@pytest.mark.parametrize("drafters", [[], [Empty()]])
def test_without_drafts_rates_are_none(drafters):
    (output,) = run(engine(drafters=drafters), ASKS[:1])
    assert output.stats.acceptance_rate is None
    assert output.stats.mean_accepted_length is None
    assert output.stats.drafted == output.stats.accepted == 0
    assert output.stats.steps == 21


def test_a_fresh_count_has_no_rates():
    fresh = RequestStats()
    assert (fresh.acceptance_rate, fresh.mean_accepted_length, fresh.decode_tokens_per_s, fresh.ttft_s) == (None,) * 4


def test_a_request_that_does_not_want_drafts_gets_and_teaches_none(answers):
    alone, truth = answers
    drafter = Oracle(truth)
    asks = [Ask(ask.prompt, ask.params, speculate=bool(at)) for at, ask in enumerate(ASKS)]
    outputs = run(engine(drafters=[drafter]), asks)
    assert all(map(same, outputs, alone))
    assert [output.stats.drafted > 0 for output in outputs] == [False, True, True]
    assert len(drafter.forgotten) == 2
    assert len(drafter.verdicts) == sum(output.stats.steps for output in outputs[1:]) + 2


def test_preemptions_and_found_tokens_are_counted_without_disturbing_the_sums(answers):
    alone, truth = answers
    served = engine(drafters=[Oracle(truth)], depth=2, page_size=4)

    def preempt(number):
        if number in (1, 3) and served.scheduler.running:
            served.scheduler.preempt(served.scheduler.running[0])

    outputs = run(served, ASKS, each_step=preempt)
    assert all(map(same, outputs, alone))
    assert sum(output.stats.preemptions for output in outputs) == 2
    for output in outputs:
        assert output.stats.accepted + output.stats.steps == len(output.token_ids) - 1


@dataclass
class Times:
    """A clock that moves on by one second whenever it is read."""

    now: float = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_times_are_taken_from_the_engine_s_clock():
    (output,) = run(engine(clock=Times()), [Ask([1, 2], SamplingParams(max_tokens=5))])
    assert output.stats.ttft_s > 0
    assert output.stats.decode_s > 0
    assert output.stats.decode_tokens_per_s == 4 / output.stats.decode_s
    (single,) = run(engine(clock=Times()), [Ask([1, 2], SamplingParams(max_tokens=1))])
    assert single.stats.decode_tokens_per_s is None


@dataclass
class Recorder:
    """A fixed policy that keeps what it is told."""

    steps: list = field(default_factory=list)
    policy: FixedController = field(default_factory=lambda: FixedController(DraftLimit(3, 4, 6), 16))

    def limit(self, requests):
        return self.policy.limit(requests)

    def plan(self, trees, free_rows):
        return self.policy.plan(trees, free_rows)

    def observe(self, step):
        self.steps.append(step)


def test_the_controller_is_told_of_every_step(answers):
    _, truth = answers
    served = engine(drafters=[Oracle(truth)])
    served.speculation.controller = recorder = Recorder()
    outputs = run(served, ASKS)
    assert sum(step.drafted for step in recorder.steps) == sum(output.stats.drafted for output in outputs)
    assert sum(step.accepted for step in recorder.steps) == sum(output.stats.accepted for output in outputs)
    assert all(step.requests <= 3 and step.rows >= step.requests + step.drafted for step in recorder.steps)
    assert all(min(step.draft_s, step.forward_s) >= 0 for step in recorder.steps)
    assert all(step.total_s >= step.draft_s + step.forward_s for step in recorder.steps)
    assert all(step.emitted <= step.requests + step.accepted for step in recorder.steps)


def test_plain_and_speculative_answers_have_the_same_prompt_counts():
    ask = Ask(list(range(40)), SamplingParams(max_tokens=3))
    (output,) = run(engine(drafters=[SuffixDrafter(min_score=0.0)], token_limit=16), [ask])
    assert output.stats.prefill_tokens == plain(ask).stats.prefill_tokens == 40
