"""Seeds: the same seed gives the same answer in any company, and answers without one differ."""

import pytest

from forerun.drafting.draft_model import DraftModelDrafter
from forerun.drafting.suffix import SuffixDrafter
from forerun.verification.sampling import SamplingParams
from tests.engine.guessing import PartlyRight, truth_of
from tests.engine.harness import VOCABULARY, Ask, decoder, engine, plain, run, same

PROMPT = [4, 8, 15, 16, 23, 42]


def sampled(seed, **settings):
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "seed": seed, **settings})


def test_seeded_and_unseeded_requests_mix():
    asks = [Ask(PROMPT, sampled(seed)) for seed in (1, None, 1, 2)]
    first, unseeded, again, other = run(engine(drafters=[SuffixDrafter(min_score=0.0)]), asks)
    assert same(first, again)
    assert same(first, plain(asks[0]))
    assert same(other, plain(asks[3]))
    assert len({first.token_ids, unseeded.token_ids, other.token_ids}) == 3


def test_answers_without_a_seed_differ_and_each_is_repeatable_only_by_chance():
    outputs = run(engine(), [Ask(PROMPT, sampled(None)) for _ in range(4)])
    assert len({output.token_ids for output in outputs}) == 4


def test_sixteen_seeds_at_a_low_temperature_copy_a_phrase_as_they_do_alone():
    """The bias holds the answer to three tokens of the prompt, so that the suffix drafter is right again and again."""
    phrase = [7, 30, 9] * 6
    bias = dict.fromkeys((7, 30, 9), 30.0)
    asks = [Ask(phrase, sampled(seed, temperature=0.1, logit_bias=bias)) for seed in range(16)]
    outputs = run(engine(drafters=[SuffixDrafter(min_score=0.0)], max_batch=16), asks)
    for ask, output in zip(asks, outputs, strict=True):
        assert same(output, plain(ask))
        assert set(output.token_ids) <= {7, 30, 9}
    assert sum(output.stats.accepted for output in outputs) > 0


def test_several_answers_are_those_of_plain_decoding_and_differ():
    ask = Ask(PROMPT, sampled(3, n=4))
    expected = plain(ask)
    drafter = DraftModelDrafter(decoder(), slots=1024, target_vocab_size=VOCABULARY)
    (output,) = run(engine(drafters=[drafter], width=1), [ask])
    assert same(output, expected)
    assert [completion.index for completion in output.completions] == [0, 1, 2, 3]
    assert len({completion.token_ids for completion in output.completions}) == 4
    assert sum(len(completion.token_ids) for completion in output.completions) == 4 * 16
    for completion in output.completions:
        assert completion.stats.acceptance_rate == 1.0
        assert completion.stats.accepted + completion.stats.steps == 15


def test_the_first_answers_do_not_depend_on_how_many_are_asked_for():
    few, many = (plain(Ask(PROMPT, sampled(3, n=count))) for count in (1, 3))
    assert few.completions[0].token_ids == many.completions[0].token_ids
    two = plain(Ask(PROMPT, sampled(3, n=2)))
    assert [c.token_ids for c in two.completions] == [c.token_ids for c in many.completions[:2]]


def test_greedy_answers_to_one_prompt_are_all_alike():
    (output,) = run(engine(), [Ask(PROMPT, SamplingParams(n=3, max_tokens=8))])
    assert len({completion.token_ids for completion in output.completions}) == 1


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_a_seeded_answer_depends_neither_on_its_place_nor_on_preemption(order):
    asks = [Ask([at, *PROMPT], sampled(at, n=2)) for at in range(4)]
    alone, _ = truth_of(asks)
    shuffled = [asks[at] for at in order]
    truth = {tuple(ask.prompt): output.token_ids for ask, output in zip(asks, alone, strict=True)}
    served = engine(drafters=[PartlyRight(truth, 4, [0, 2, 4])], slots=96, page_size=4, max_batch=8)
    outputs = run(served, shuffled)
    assert all(same(output, alone[at]) for at, output in zip(order, outputs, strict=True))
    assert sum(c.stats.preemptions for output in outputs for c in output.completions) > 0


def test_each_row_of_a_batch_with_mixed_temperatures_is_what_it_is_alone():
    for batch in (2, 3, 4, 8):
        asks = [
            Ask([at, at + 9], sampled(at, temperature=at * 0.4, top_p=1.0 - 0.05 * at, max_tokens=8))
            for at in range(batch)
        ]
        drafter = DraftModelDrafter(decoder(seed=9), slots=1024, target_vocab_size=VOCABULARY)
        outputs = run(engine(drafters=[drafter]), asks)
        assert all(same(output, plain(ask)) for ask, output in zip(asks, outputs, strict=True))
