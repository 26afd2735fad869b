"""Limits of context, of a step, and of a draft model smaller than its target: met exactly, and by nobody else."""

import pytest

from forerun.drafting.draft_model import DraftModelDrafter
from forerun.drafting.suffix import SuffixDrafter
from forerun.errors import InvalidRequestError
from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Malicious, Oracle
from tests.engine.guessing import Guess, coming, truth_of, wrong
from tests.engine.harness import VOCABULARY, Ask, decoder, engine, plain, run, same
from tests.models.tiny import tiny_decoder

FOREVER = SamplingParams(max_tokens=10_000, ignore_eos=True)


class Watched:
    """A decoder that keeps the sizes and greatest positions of the batches that it ran."""

    def __init__(self, inner):
        self._inner, self.rows, self.last_position = inner, [], []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def forward(self, batch, store):
        self.rows.append(batch.rows)
        self.last_position.append(int(batch.positions.max()))
        return self._inner.forward(batch, store)


def careless(truth, length=40):
    """Right for as long as the answer is known, then anything; it never looks at limits or room."""
    return Guess(lambda context, limit: [*coming(truth, context, length), *range(length)][:length])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 47, 60, 61, 62, 63])
def test_the_context_limit_ends_the_answer_exactly_though_drafts_would_go_on(length):
    ask = Ask([length] * length, FOREVER)
    (expected,), truth = truth_of([ask], context_length=64)
    watched = Watched(decoder())
    (output,) = run(engine(watched, [careless(truth)], depth=40, nodes=40, context_length=64), [ask])
    assert same(output, expected)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 64 - length
    assert max(watched.last_position) <= 62, "the last token of an answer is never computed"


def test_the_cache_bounds_the_context_when_it_is_smaller_than_the_model_s():
    served = engine(slots=50, page_size=16)
    assert served.context_limit == 48
    (output,) = run(served, [Ask([1, 2], FOREVER)])
    assert len(output.token_ids) == 46
    with pytest.raises(InvalidRequestError, match="48"):
        served.add([1] * 48, FOREVER)


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers_and_one_shorter_gets_a_token():
    served = engine(context_length=20)
    with pytest.raises(InvalidRequestError, match=r"25 tokens.* 20"):
        served.add([1] * 25, FOREVER)
    (output,) = run(served, [Ask([1] * 19, FOREVER)])
    assert len(output.token_ids) == 1


@pytest.mark.parametrize("k", range(1, 17))
def test_one_request_at_a_time_with_drafts_of_any_length(k):
    asks = [Ask([at, 3], SamplingParams(max_tokens=18, ignore_eos=True)) for at in range(2)]
    alone, truth = truth_of(asks)
    outputs = run(engine(drafters=[careless(truth)], max_batch=1, depth=k, nodes=k), asks)
    assert all(map(same, outputs, alone))


@pytest.mark.parametrize("token_limit", [1, 2, 7, 16])
def test_a_step_never_computes_more_tokens_than_its_limit(token_limit):
    asks = [Ask([at] * (3 + 5 * at), SamplingParams(max_tokens=9, ignore_eos=True)) for at in range(4)]
    alone, truth = truth_of(asks)
    watched = Watched(decoder())
    outputs = run(engine(watched, [careless(truth)], token_limit=token_limit), asks)
    assert all(map(same, outputs, alone))
    assert max(watched.rows) <= token_limit


@pytest.mark.parametrize(
    ("width", "depth", "nodes", "step_nodes"), [(1, 3, 9, 9), (2, 2, 5, 64), (3, 8, 4, 6), (1, 1, 1, 1), (4, 4, 16, 0)]
)
def test_trees_stay_within_width_depth_nodes_and_the_step_s_budget(width, depth, nodes, step_nodes):
    asks = [Ask([at, 7], SamplingParams(max_tokens=12, ignore_eos=True)) for at in range(3)]
    alone, truth = truth_of(asks)
    bushy = Malicious(truth, VOCABULARY)
    watched = Watched(decoder())
    served = engine(watched, [bushy, careless(truth, 12)], width=width, depth=depth, nodes=nodes, step_nodes=step_nodes)
    assert all(map(same, run(served, asks), alone))
    for verdict in bushy.verdicts:
        assert len(verdict.tree) <= min(nodes, step_nodes)
        assert max(verdict.tree.depths(), default=0) <= depth
        assert max(map(len, verdict.tree.children())) <= width
    assert max(watched.rows) <= max(3 + step_nodes, 6)


def test_a_draft_model_with_a_shorter_context_leaves_long_requests_alone_and_serves_the_others():
    """One long and seven short requests: the long one is not drafted for, and costs the others nothing."""
    target = decoder()
    draft = tiny_decoder(max_position_embeddings=64)
    drafter = DraftModelDrafter(draft, slots=2048, target_vocab_size=VOCABULARY)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    asks = [Ask([5] * 100, params), *(Ask([at, 4], params) for at in range(7))]
    served = engine(target, [drafter], width=1, depth=4, nodes=4)
    long, *short = run(served, asks)
    assert same(long, plain(asks[0]))
    assert long.stats.drafted == 0, "no drafts, not drafts that stand for nothing"
    for ask, output in zip(asks[1:], short, strict=True):
        assert same(output, plain(ask))
        assert output.stats.acceptance_rate == 1.0
    assert not served.speculation.disabled
    (again,) = run(served, [Ask([9, 9], params)])
    assert again.stats.acceptance_rate == 1.0


def test_an_answer_that_outgrows_the_draft_model_goes_on_without_it():
    draft = tiny_decoder(max_position_embeddings=64)
    drafter = DraftModelDrafter(draft, slots=512, target_vocab_size=VOCABULARY)
    ask = Ask([8] * 40, SamplingParams(max_tokens=60, ignore_eos=True))
    (output,) = run(engine(decoder(), [drafter], width=1, depth=4, nodes=4), [ask])
    assert same(output, plain(ask))
    assert 15 <= output.stats.accepted <= 64 - 40
    assert output.stats.acceptance_rate == 1.0
    assert not drafter._sequences


def test_another_drafter_speaks_where_the_draft_model_cannot():
    draft = tiny_decoder(max_position_embeddings=32)
    drafter = DraftModelDrafter(draft, slots=512, target_vocab_size=VOCABULARY)
    ask = Ask([8] * 40, SamplingParams(max_tokens=20, ignore_eos=True))
    (expected,), truth = truth_of([ask])
    (output,) = run(engine(decoder(), [drafter, Oracle(truth)]), [ask])
    assert same(output, expected)
    assert {"oracle", "target"} == set(output.completions[0].sources)


@pytest.mark.parametrize("vocabulary", [64, 700])
def test_a_draft_model_of_another_vocabulary_size_proposes_ids_of_the_target_only(vocabulary):
    """A smaller one lacks ids (prompts with those are left alone), a larger one is padded."""
    draft = tiny_decoder(seed=3, vocab_size=vocabulary)
    drafter = DraftModelDrafter(draft, slots=512, target_vocab_size=VOCABULARY)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4, ignore_eos=True)
    asks = [Ask([1, 2, 3], params), Ask([500, 2], params)]
    served = engine(drafters=[drafter])
    outputs = run(served, asks)
    assert all(same(output, plain(ask)) for ask, output in zip(asks, outputs, strict=True))
    assert not served.speculation.disabled


def test_answers_cross_powers_of_two_with_drafts_on_the_border():
    """Drafts of seven begin at every distance from 64 and 128 tokens; half of them are cut short."""
    for start in range(57, 65):
        ask = Ask([start] * start, SamplingParams(max_tokens=12, ignore_eos=True))
        (expected,), truth = truth_of([ask])
        half = Guess(
            lambda context, limit, truth=truth: [
                token if at < 4 else wrong(token) for at, token in enumerate(coming(truth, context, 7))
            ]
        )
        assert same(run(engine(drafters=[half]), [ask])[0], expected)


def test_a_drafter_is_told_how_many_levels_are_of_use():
    drafter = Guess(lambda context, limit: [1, 2, 3])
    run(engine(drafters=[drafter, SuffixDrafter()], context_length=40), [Ask([1, 2, 3], FOREVER)])
    assert all(length + room == 39 for _, length, room in drafter.asked)
    assert min(room for _, _, room in drafter.asked) >= 1
