"""From the plan of a step to the TokenBatch that the model sees."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.drafting.tree import DraftTree
from forerun.engine.scheduler import Work
from forerun.kernels.batch import AttentionPath, IntArray, TokenBatch


@dataclass(frozen=True)
class StepWork:
    """One request's part of a step: its tokens, the draft tree that hangs on the last of them, and the tree's slots."""

    work: Work
    tree: DraftTree
    tree_slots: IntArray

    @property
    def logit_rows(self) -> int:
        """How many rows of logits it needs: the root and every draft node, or none while a prompt is unfinished."""
        return 1 + len(self.tree) if self.work.emits else 0


def assemble(parts: Sequence[StepWork]) -> TokenBatch:
    """The batch of a step; the logits come back part after part, root first, then the nodes in the tree's order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[IntArray] = []
    paths: list[AttentionPath] = []
    logit_rows: list[int] = []
    for group, part in enumerate(parts):
        first, count, tree = part.work.first, part.work.count, part.tree
        row = len(token_ids)
        root = first + count - 1
        token_ids += part.work.request.tokens[first : first + count]
        token_ids += tree.tokens
        positions += range(first, first + count)
        positions += [root + depth for depth in tree.depths()]
        slots += [part.work.request.slots.slots[first : root + 1], part.tree_slots]
        paths += _paths(part, row, group)
        if part.work.emits:
            logit_rows += range(row + count - 1, len(token_ids))
    return TokenBatch(
        np.array(token_ids, np.int64),
        np.array(positions, np.int64),
        np.concatenate(slots),
        paths,
        np.array(logit_rows, np.int64),
    )


def _paths(part: StepWork, row: int, group: int) -> list[AttentionPath]:
    """One path per leaf of the tree; the first one also carries the committed rows.

    The line of nodes that lie where the sequence will go on is a piece of the sequence's own slots, without a copy.
    """
    tree, slots = part.tree, part.work.request.slots.slots
    committed = part.work.first + part.work.count
    rows = list(range(row, row + part.work.count))
    if not len(tree):
        return [AttentionPath(slots[:committed], np.array(rows, np.int64), group, committed)]
    tree_slots = part.tree_slots.tolist()
    paths: list[AttentionPath] = []
    placed: set[int] = set()
    inner = set(tree.parents)
    for leaf in range(len(tree)):
        if leaf in inner:
            continue
        branch: list[int] = []
        node = leaf
        while node >= 0:
            branch.append(node)
            node = tree.parents[node]
        branch.reverse()
        rows += [row + part.work.count + node for node in branch if node not in placed]
        placed.update(branch)
        length = committed + len(branch)
        path_slots, branch_slots = slots[:length], [tree_slots[node] for node in branch]
        if path_slots[committed:].tolist() != branch_slots:
            path_slots = np.concatenate([slots[:committed], np.array(branch_slots, np.int64)])
        paths.append(AttentionPath(path_slots, np.array(rows, np.int64), group, committed))
        rows = []
    return paths
