"""Merged trees: valid, within the limits, made of nothing but the guesses; and the budget over all requests."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafting.merge import merge_trees, select_nodes
from forerun.drafting.tree import EMPTY_TREE, DraftTree
from tests.drafting.scripted import chain

VOCABULARY = 6
LIMITS = {"nodes": 100, "width": 100, "depth": 100, "vocab_size": 100}


@st.composite
def trees(draw: st.DrawFn, largest: int = 12) -> DraftTree:
    size = draw(st.integers(0, largest))
    tokens = draw(st.lists(st.integers(-2, VOCABULARY + 1), min_size=size, max_size=size))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    anything = st.one_of(st.floats(0, 1), st.sampled_from([math.nan, math.inf, -1.0, 0.0, 3.0]))
    scores = draw(st.lists(anything, min_size=size, max_size=size))
    return DraftTree(tokens, parents, scores, [draw(st.sampled_from("ab"))] * size)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


limits = st.fixed_dictionaries(
    {
        "nodes": st.integers(0, 10),
        "width": st.integers(0, 4),
        "depth": st.integers(0, 5),
        "vocab_size": st.just(VOCABULARY),
    }
)


@settings(max_examples=120)
@given(st.lists(trees(), max_size=3), limits)
def test_merged_tree_is_valid_and_within_its_limits(drafts: list[DraftTree], limit: dict[str, int]) -> None:
    merged = merge_trees(drafts, **limit)
    assert len(merged) <= limit["nodes"]
    assert all(depth <= limit["depth"] for depth in merged.depths())
    assert all(len(children) <= limit["width"] for children in merged.children())
    assert all(0 <= token < VOCABULARY for token in merged.tokens)
    assert all(0 < score <= 1 for score in merged.scores)
    assert list(merged.scores) == sorted(merged.scores, reverse=True)
    assert len(set(paths(merged))) == len(merged)
    assert all(s <= merged.scores[p] for s, p in zip(merged.scores, merged.parents, strict=True) if p >= 0)


@settings(max_examples=80)
@given(st.lists(trees(), max_size=3), limits)
def test_merging_invents_nothing_and_is_idempotent(drafts: list[DraftTree], limit: dict[str, int]) -> None:
    merged = merge_trees(drafts, **limit)
    assert set(paths(merged)) <= {path for tree in drafts for path in paths(tree)}
    assert merge_trees([merged], **limit) == merged
    assert merge_trees([merged, merged], **limit) == merged


@settings(max_examples=80)
@given(st.lists(trees(), max_size=3))
def test_without_limits_every_valid_path_is_kept(drafts: list[DraftTree]) -> None:
    merged = merge_trees(drafts, nodes=99, width=99, depth=99, vocab_size=VOCABULARY)
    valid = {path for tree in drafts for path in paths(tree) if all(0 <= token < VOCABULARY for token in path)}
    assert set(paths(merged)) == valid


def test_same_prefix_is_one_node_of_the_surest_drafter() -> None:
    merged = merge_trees([chain([1, 2], 0.5, "suffix"), chain([1, 3], 0.8, "draft")], **LIMITS)
    assert list(merged.tokens) == [1, 3, 2]
    assert list(merged.parents) == [-1, 0, 0]
    assert list(merged.source) == ["draft", "draft", "suffix"]
    assert merged.scores == pytest.approx([0.8, 0.64, 0.25])


def test_duplicate_siblings_become_one_with_both_their_subtrees() -> None:
    merged = merge_trees([DraftTree([4, 4, 5, 6], [-1, -1, 0, 1], [0.5, 0.7, 0.4, 0.3], ["x"] * 4)], **LIMITS)
    assert sorted(paths(merged)) == [(4,), (4, 5), (4, 6)]


def test_what_hangs_on_a_bad_id_is_left_out() -> None:
    merged = merge_trees([DraftTree([100, 1, -1, 2, 3], [-1, 0, -1, 2, -1], [0.9] * 5, ["x"] * 5)], **LIMITS)
    assert paths(merged) == [(3,)]


def test_first_child_listed_is_the_best() -> None:
    tree = DraftTree([1, 2, 3, 4], [-1, -1, 0, 0], [0.3, 0.6, 0.1, 0.2], ["x"] * 4)
    assert paths(merge_trees([tree], **LIMITS)) == [(2,), (1,), (1, 4), (1, 3)]


def test_values_of_the_wrong_type_do_no_harm() -> None:
    tree = DraftTree([1, None, "2", 3.5], [-1, -1, -1, -1], [None, 0.5, "x", 1], ["x"] * 4)  # type: ignore[list-item]
    assert paths(merge_trees([tree], **LIMITS)) == [(1,)]


def test_a_clean_tree_is_returned_as_it_is() -> None:
    tree = chain([1, 2, 3])
    assert merge_trees([tree, EMPTY_TREE], **LIMITS) is tree


@settings(max_examples=80)
@given(st.lists(trees(), max_size=4), st.integers(0, 30))
def test_selection_keeps_the_best_nodes_of_all_requests(drafts: list[DraftTree], budget: int) -> None:
    merged = [merge_trees([tree], nodes=10, width=3, depth=5, vocab_size=VOCABULARY) for tree in drafts]
    chosen = select_nodes(merged, budget)
    everything = [score for tree in merged for score in tree.scores]
    assert sum(map(len, chosen)) == min(budget, len(everything))
    kept = sorted((score for tree in chosen for score in tree.scores), reverse=True)
    assert kept == sorted(everything, reverse=True)[: len(kept)]
    for before, after in zip(merged, chosen, strict=True):
        assert paths(after) == paths(before)[: len(after)]


@settings(max_examples=100)
@given(st.lists(trees(), max_size=4), st.integers(0, 30))
def test_selection_from_raw_trees_keeps_parents(drafts: list[DraftTree], budget: int) -> None:
    chosen = select_nodes(drafts, budget)
    assert sum(map(len, chosen)) <= budget
    for before, after in zip(drafts, chosen, strict=True):
        remaining = paths(before)
        for path in paths(after):
            remaining.remove(path)
