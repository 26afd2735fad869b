"""The fixed policy: the limits it was given, and the surest nodes of all requests up to the step's budget."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.control.base import StepRecord
from forerun.control.fixed import FixedController
from forerun.drafting.base import DraftLimit
from forerun.drafting.tree import DraftTree

LIMIT = DraftLimit(width=3, depth=5, nodes=7)


def chain(*scores):
    size = len(scores)
    return DraftTree(list(range(size)), list(range(-1, size - 1)), list(scores), ["test"] * size)


@pytest.mark.parametrize("requests", [1, 2, 32])
def test_the_limit_is_the_same_whatever_the_load(requests):
    assert FixedController(LIMIT, 64).limit(requests) == LIMIT


def test_trees_within_the_budget_are_left_alone():
    trees = [chain(0.9, 0.8), chain(0.1)]
    assert FixedController(LIMIT, 3).plan(trees, 100) == trees


def test_the_surest_nodes_of_all_requests_stay():
    sure, doubtful = chain(0.9, 0.8, 0.7), chain(0.6, 0.2)
    assert [len(tree) for tree in FixedController(LIMIT, 3).plan([sure, doubtful], 100)] == [3, 0]
    assert [len(tree) for tree in FixedController(LIMIT, 4).plan([doubtful, sure], 100)] == [1, 3]


@pytest.mark.parametrize(("step_nodes", "free_rows"), [(0, 100), (100, 0), (0, 0)])
def test_without_budget_or_room_nothing_is_drafted(step_nodes, free_rows):
    assert [len(tree) for tree in FixedController(LIMIT, step_nodes).plan([chain(0.9)], free_rows)] == [0]


@settings(max_examples=60, deadline=None)
@given(
    chains=st.lists(st.lists(st.floats(0.01, 1.0), max_size=8), min_size=1, max_size=5),
    step_nodes=st.integers(0, 20),
    free_rows=st.integers(0, 20),
)
def test_no_more_nodes_than_budget_and_free_rows_and_no_fewer_than_there_is_use_for(chains, step_nodes, free_rows):
    trees = [chain(*sorted(scores, reverse=True)) for scores in chains]
    planned = FixedController(LIMIT, step_nodes).plan(trees, free_rows)
    assert len(planned) == len(trees), "every request gets a tree, if an empty one"
    assert sum(map(len, planned)) == min(step_nodes, free_rows, sum(map(len, trees)))
    kept = [score for tree in planned for score in tree.scores]
    dropped = [score for tree, cut in zip(trees, planned, strict=True) for score in tree.scores[len(cut) :]]
    assert not kept or not dropped or min(kept) >= max(dropped)
    for tree, cut in zip(trees, planned, strict=True):
        assert list(cut.tokens) == list(tree.tokens[: len(cut)])


def test_a_step_teaches_it_nothing():
    controller = FixedController(LIMIT, 64)
    controller.observe(StepRecord(1, 5, 4, 4, 5, 0.1, 0.2, 0.4))
    assert controller == FixedController(LIMIT, 64)
