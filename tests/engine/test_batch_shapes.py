"""Batches and trees of every shape: many requests, uneven drafts, flat, deep, single and empty trees."""

import random

import pytest

from forerun.drafting.suffix import SuffixDrafter
from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Anti, Oracle, Ragged
from tests.engine.guessing import Guess, PartlyRight, coming, tree, truth_of
from tests.engine.harness import VOCABULARY, Ask, engine, run, same


def others(token, count):
    """`count` tokens that are not `token`."""
    return [(token + 1 + at) % VOCABULARY for at in range(count)]


def flat(right):
    """Depth 1: four children of the root, the third one right."""
    first, second, third = others(right[0], 3)
    return tree([first, second, right[0], third], [-1] * 4)


SHAPES = {
    "depth 1 x 4": flat,
    "chain of 4": lambda right: tree(right[:4], range(-1, len(right[:4]) - 1)),
    "single": lambda right: tree(right[:1], [-1]),
    "empty": lambda right: tree([], []),
    "comb": lambda right: tree([right[0], *others(right[0], 1), right[1], *others(right[1], 1)], [-1, -1, 0, 0]),
    "only the second branch goes on": lambda right: tree(
        [*others(right[0], 1), right[0], *others(right[1], 1), right[1]], [-1, -1, 0, 1]
    ),
}


def shaped(shape, truth):
    def guess(context, limit):
        right = coming(truth, context, 4)
        return SHAPES[shape](right) if len(right) >= 2 else right

    return Guess(guess)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_of_every_shape_leave_the_answer_as_it_is(shape, temperature):
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=2)
    asks = [Ask([at, 1], params) for at in range(2)]
    alone, truth = truth_of(asks)
    drafter = shaped(shape, truth)
    outputs = run(engine(drafters=[drafter], width=4), asks)
    assert all(map(same, outputs, alone))
    if shape != "empty":
        assert all(output.stats.accepted >= 8 for output in outputs)


def test_a_tree_that_is_a_chain_costs_and_gives_what_the_chain_does():
    asks = [Ask([4, 1], SamplingParams(max_tokens=21, ignore_eos=True))]
    _, truth = truth_of(asks)
    (as_tree,) = run(engine(drafters=[shaped("chain of 4", truth)], width=4, depth=4), asks)
    (as_chain,) = run(engine(drafters=[Oracle(truth)], width=1, depth=4, nodes=4), asks)
    assert same(as_tree, as_chain)
    assert as_tree.stats.steps == as_chain.stats.steps
    assert as_tree.stats.accepted == as_chain.stats.accepted


def test_64_uneven_requests_on_a_small_cache_are_each_what_they_are_alone():
    asks = [Ask([at, at // 2], SamplingParams(max_tokens=4 + at % 9, ignore_eos=True)) for at in range(64)]
    alone, truth = truth_of(asks)
    served = engine(drafters=[Ragged(truth)], slots=320, page_size=4, max_batch=64, depth=16, step_nodes=300)
    outputs = run(served, asks)
    assert all(map(same, outputs, alone))
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert sum(output.stats.accepted for output in outputs) > 100


@pytest.mark.parametrize("drafter", ["partly right", "ragged", "anti"])
def test_a_batch_of_every_size_from_one_to_eight(drafter):
    asks = [Ask([at, 6], SamplingParams(max_tokens=7, ignore_eos=True)) for at in range(8)]
    alone, truth = truth_of(asks)
    make = {
        "partly right": lambda: PartlyRight(truth, 15, [15, 3, 0, 7]),
        "ragged": lambda: Ragged(truth),
        "anti": lambda: Anti(truth, VOCABULARY),
    }[drafter]
    served = engine(drafters=[make()], max_batch=8, depth=15, step_nodes=120)
    for size in range(1, 9):
        assert all(map(same, run(served, asks[:size]), alone))


def test_requests_that_come_and_go_in_the_middle_of_others_change_nothing():
    asks = [Ask([at] * (1 + at * 3), SamplingParams(max_tokens=3 + 4 * at, ignore_eos=True)) for at in range(6)]
    alone, truth = truth_of(asks)
    served = engine(drafters=[PartlyRight(truth, 3, [1, 3, 0])], max_batch=3, token_limit=16)
    ids = []
    for ask in asks:
        ids.append(served.add(ask.prompt, ask.params))
        served.step()
        served.check()
    while served.has_work:
        served.step()
        served.check()
    assert all(same(served.collect(number), expected) for number, expected in zip(ids, alone, strict=True))


def test_the_first_tokens_of_200_prompts_computed_together_are_those_computed_alone():
    """Prompts are cut anywhere and share steps with drafts; alone each is computed in one pass."""
    draw = random.Random(11)
    asks = [
        Ask([draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 24))], SamplingParams(max_tokens=2))
        for _ in range(200)
    ]
    one_by_one = engine(prefix=False)
    alone = [run(one_by_one, [ask])[0] for ask in asks]
    outputs = run(engine(drafters=[SuffixDrafter(min_score=0.0)], token_limit=33, max_batch=12), asks)
    assert all(map(same, outputs, alone))
