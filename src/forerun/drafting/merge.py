"""Merging the guesses of several drafters into one tree per request, and cutting all requests' trees to one budget.

Here a drafter's output meets the limits, whatever it was. Nothing here guesses or decides how large a limit is.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from operator import ge, index

from forerun.drafting.tree import EMPTY_TREE, DraftTree

SMALLEST_SCORE = 1e-6
"""What a score that is not above 0 (or not a number) becomes."""


def merge_trees(trees: Sequence[DraftTree], *, nodes: int, width: int, depth: int, vocab_size: int) -> DraftTree:
    """One tree of the best `nodes` nodes of all trees.

    Nodes with the same tokens from the root on are one node, with the greatest of their scores and the source that gave
    it. Scores are brought into (0, 1] and to at most the parent's. Nodes whose token is not in 0 .. vocab_size - 1 are
    left out together with all below them. At most `width` children per node and `depth` levels are kept. The result is
    ordered by falling score with parents first, so that the first child listed of any node is its best, and any head of
    the tree is the best tree of that size (the order of EAGLE-2, arXiv 2406.16858, section 3).
    """
    trees = [tree for tree in trees if len(tree)]
    if not trees or nodes < 1 or width < 1 or depth < 1:
        return EMPTY_TREE
    if len(trees) == 1 and _is_clean(trees[0], nodes, width, depth, vocab_size):
        return trees[0]
    union = _Union(vocab_size, depth)
    for tree in trees:
        union.add(tree)
    return union.best(nodes, width)


def select_nodes(trees: Sequence[DraftTree], budget: int) -> list[DraftTree]:
    """The trees cut to the `budget` nodes with the greatest scores, all requests together; parents stay with children.

    A node counts at most as its parent does. Among equal scores the nodes listed first win, then the first tree.
    """
    if sum(len(tree) for tree in trees) <= budget:
        return list(trees)
    if budget < 1:
        return [EMPTY_TREE] * len(trees)
    ranking: list[tuple[float, int, int]] = []
    for number, tree in enumerate(trees):
        reach: list[float] = []
        for node, (parent, score) in enumerate(zip(tree.parents, tree.scores, strict=True)):
            score = score if score >= SMALLEST_SCORE else SMALLEST_SCORE  # also NaN
            reach.append(score if parent < 0 else min(score, reach[parent]))
            ranking.append((-reach[node], node, number))
    ranking.sort()
    kept: list[list[int]] = [[] for _ in trees]
    for _, node, number in ranking[:budget]:
        kept[number].append(node)
    return [_part(tree, sorted(chosen)) for tree, chosen in zip(trees, kept, strict=True)]


def _is_clean(tree: DraftTree, nodes: int, width: int, depth: int, vocab_size: int) -> bool:
    """Whether merging this tree alone would give this tree: the usual case, told in a few microseconds."""
    tokens, parents, scores = tree.tokens, tree.parents, tree.scores
    return (
        len(tree) <= nodes
        and set(map(type, tokens)) == {int}
        and set(map(type, scores)) == {float}
        and min(tokens) >= 0
        and max(tokens) < vocab_size
        and scores[0] <= 1.0
        and all(map(ge, scores, scores[1:]))
        and scores[-1] >= SMALLEST_SCORE
        and max(tree.depths()) <= depth
        and max(map(parents.count, set(parents))) <= width
        and len(tree.links) == len(tree)
    )


class _Union:
    """All trees laid over each other: lists by node, and for every node its children by token."""

    def __init__(self, vocab_size: int, depth: int) -> None:
        self._vocab_size = vocab_size
        self._depth = depth
        self._tokens: list[int] = []
        self._levels: list[int] = []
        self._scores: list[float] = []
        self._source: list[str] = []
        self._children: list[dict[int, int]] = [{}]  # the root's first, node i's at i + 1

    def add(self, tree: DraftTree) -> None:
        """Lay one more tree over the others."""
        place: list[int | None] = []  # of each node of the tree, where it lies here; None = left out
        reach: list[float] = []
        for raw_token, parent, raw_score, source in zip(
            tree.tokens, tree.parents, tree.scores, tree.source, strict=True
        ):
            token = _valid_token(raw_token, self._vocab_size)
            above = -1 if parent < 0 else place[parent]
            level = 0 if above is None or above < 0 else self._levels[above]
            if token is None or above is None or level >= self._depth:
                place.append(None)
                reach.append(0.0)
                continue
            score = min(_valid_score(raw_score), 1.0 if parent < 0 else reach[parent])
            node = self._children[above + 1].get(token)
            if node is None:
                node = self._children[above + 1][token] = len(self._tokens)
                self._tokens.append(token)
                self._levels.append(level + 1)
                self._scores.append(score)
                self._source.append(source)
                self._children.append({})
            elif score > self._scores[node]:
                self._scores[node] = score
                self._source[node] = source
            place.append(node)
            reach.append(score)

    def best(self, nodes: int, width: int) -> DraftTree:
        """The `nodes` surest nodes with at most `width` children each, in falling order."""
        scores = self._scores
        heap: list[tuple[float, int, int]] = []  # (-score, node, its parent in the result)
        tokens: list[int] = []
        parents: list[int] = []
        chosen: list[int] = []

        def open_children(below: int, parent: int) -> None:
            children = [(-scores[child], child, parent) for child in self._children[below].values()]
            if len(children) > width:
                children = sorted(children)[:width]
            for child in children:
                heappush(heap, child)

        open_children(0, -1)
        while heap and len(chosen) < nodes:
            _, node, parent = heappop(heap)
            open_children(node + 1, len(chosen))
            chosen.append(node)
            tokens.append(self._tokens[node])
            parents.append(parent)
        if not chosen:
            return EMPTY_TREE
        return DraftTree(tokens, parents, [scores[node] for node in chosen], [self._source[node] for node in chosen])


def _valid_token(token: object, vocab_size: int) -> int | None:
    """The token as a plain int, or None when it is no id of the vocabulary."""
    try:
        number = index(token)  # type: ignore[arg-type]  # a broken drafter may propose anything
    except TypeError:
        return None
    return number if 0 <= number < vocab_size else None


def _valid_score(score: object) -> float:
    """The score as a float, not below the smallest; so is what is no number at all."""
    try:
        number = float(score)  # type: ignore[arg-type]  # a broken drafter may score with anything
    except (TypeError, ValueError):
        return SMALLEST_SCORE
    return number if number >= SMALLEST_SCORE else SMALLEST_SCORE  # also catches NaN


def _part(tree: DraftTree, chosen: Sequence[int]) -> DraftTree:
    """The tree of the chosen nodes: rising indices, closed under parents."""
    if len(chosen) == len(tree):
        return tree
    if not chosen:
        return EMPTY_TREE
    if chosen[-1] == len(chosen) - 1:
        return tree.head(len(chosen))
    renumbered = {-1: -1} | {node: place for place, node in enumerate(chosen)}
    return DraftTree(
        [tree.tokens[node] for node in chosen],
        [renumbered[tree.parents[node]] for node in chosen],
        [tree.scores[node] for node in chosen],
        [tree.source[node] for node in chosen],
    )
