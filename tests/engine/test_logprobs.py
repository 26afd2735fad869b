"""Log-probabilities: one for every token, the target's own, whoever guessed the token and however it is delivered."""

import math

import pytest

from forerun.drafting.draft_model import DraftModelDrafter
from forerun.drafting.suffix import SuffixDrafter
from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Anti, Oracle
from tests.engine.guessing import truth_of
from tests.engine.harness import VOCABULARY, Ask, decoder, engine, run, same

PROMPT = [5, 6, 5, 6, 5, 6]


def drafters(kind, truth):
    return {
        "suffix": lambda: SuffixDrafter(min_score=0.0),
        "draft": lambda: DraftModelDrafter(decoder(seed=9), slots=512, target_vocab_size=VOCABULARY),
        "oracle": lambda: Oracle(truth),
        "anti": lambda: Anti(truth, VOCABULARY),
    }[kind]()


def chunks_of(served, ask):
    served.add(ask.prompt, ask.params)
    chunks = []
    while served.has_work:
        chunks += served.step()
    return chunks


@pytest.mark.parametrize("kind", ["suffix", "draft", "oracle", "anti"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_token_has_its_logprob_with_every_drafter_streamed_or_not(kind, temperature):
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24, logprobs=3, repetition_penalty=1.3)
    ask = Ask(PROMPT, params)
    (expected,), truth = truth_of([ask])
    (output,) = run(engine(drafters=[drafters(kind, truth)]), [ask])
    assert same(output, expected)
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    assert all(len(entry.top) == 3 for entry in output.logprobs)
    assert output.stats.drafted > 0, "asking for logprobs turned speculation off"
    chunks = chunks_of(engine(drafters=[drafters(kind, truth)]), ask)
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert sum((chunk.logprobs for chunk in chunks), ()) == expected.logprobs


def test_logprobs_under_a_penalty_are_those_of_the_model_itself():
    """Forced by a bias to repeat one token, with the suffix drafter always right: no logprob becomes 0."""
    params = SamplingParams(max_tokens=16, logprobs=0, logit_bias={7: 100.0}, repetition_penalty=1.1, ignore_eos=True)
    (output,) = run(engine(drafters=[SuffixDrafter(min_score=0.0)]), [Ask(PROMPT, params)])
    assert set(output.token_ids) == {7}
    assert output.stats.accepted > 0
    assert all(-math.inf < entry.logprob < -0.01 for entry in output.logprobs)
    assert len({entry.logprob for entry in output.logprobs}) > 3


def test_without_being_asked_for_there_are_no_logprobs():
    (output,) = run(engine(), [Ask(PROMPT, SamplingParams(max_tokens=4))])
    assert output.logprobs is None
    (chunk, *_) = chunks_of(engine(), Ask(PROMPT, SamplingParams(max_tokens=1)))
    assert chunk.logprobs is None


@pytest.mark.parametrize("index", range(5))
def test_an_end_inside_a_block_leaves_no_logprob_behind_it(index):
    params = SamplingParams(max_tokens=20, logprobs=1)
    (whole,), truth = truth_of([Ask(PROMPT, params)])
    end = frozenset({whole.token_ids[index]})
    length = whole.token_ids.index(whole.token_ids[index]) + 1
    (output,) = run(engine(drafters=[Oracle(truth)], end_tokens=end), [Ask(PROMPT, params)])
    assert output.logprobs == whole.logprobs[:length]
    assert output.completions[0].sources[0] == "target"


def test_logprobs_survive_a_preemption():
    params = SamplingParams(max_tokens=16, logprobs=2)
    (expected,), truth = truth_of([Ask(PROMPT, params)])
    served = engine(drafters=[Oracle(truth)], depth=3)

    def preempt(number):
        if served.scheduler.running and number in (1, 2, 4):
            served.scheduler.preempt(served.scheduler.running[0])

    (output,) = run(served, [Ask(PROMPT, params)], each_step=preempt)
    assert same(output, expected)
