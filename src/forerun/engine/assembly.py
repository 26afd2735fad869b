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
    positions: list[IntArray] = []
    slots: list[IntArray] = []
    paths: list[AttentionPath] = []
    logit_rows: list[int] = []
    for group, part in enumerate(parts):
        first, count, tree = part.work.first, part.work.count, part.tree
        row = len(token_ids)
        root = first + count - 1
        token_ids += part.work.request.tokens[first : first + count]
        token_ids += tree.tokens
        positions.append(np.arange(first, first + count))
        positions.append(root + np.asarray(tree.depths(), np.int64))
        committed = part.work.request.slots.slots[: root + 1]
        slots += [committed[first:], part.tree_slots]
        paths += _paths(part, row, group, committed)
        if part.work.emits:
            logit_rows += range(row + count - 1, len(token_ids))
    return TokenBatch(
        np.asarray(token_ids, np.int64),
        np.concatenate(positions),
        np.concatenate(slots),
        paths,
        np.asarray(logit_rows, np.int64),
    )


def _paths(part: StepWork, row: int, group: int, committed: IntArray) -> list[AttentionPath]:
    """One path per leaf of the tree; the first one also carries the committed rows."""
    chunk = np.arange(row, row + part.work.count)
    tree = part.tree
    if not len(tree):
        return [AttentionPath(committed, chunk, group, len(committed))]
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
        rows = row + part.work.count + np.asarray([node for node in branch if node not in placed], np.int64)
        placed.update(branch)
        slots = np.concatenate([committed, part.tree_slots[branch]])
        paths.append(AttentionPath(slots, rows if paths else np.concatenate([chunk, rows]), group, len(committed)))
    return paths
