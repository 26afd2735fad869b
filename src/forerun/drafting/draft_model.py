"""The draft model: a small model with the target's tokenizer that guesses trees, level by level, for all requests.

Trees grow as in EAGLE-2 (arXiv 2406.16858, section 3): the likeliest nodes of a level are expanded, the best nodes of
all levels are proposed. Its own KV cache holds committed tokens only. Nothing here verifies a guess.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forerun.cache import PagePool, SequenceSlots
from forerun.drafting.merge import merge_trees
from forerun.drafting.tree import EMPTY_TREE, DraftTree
from forerun.errors import DraftModelError
from forerun.kernels.batch import AttentionPath, IntArray, TokenBatch
from forerun.verification.choice import propose

if TYPE_CHECKING:
    from forerun.drafting.base import DraftContext, DraftLimit
    from forerun.models.decoder import Decoder
    from forerun.models.tokenizer import Tokenizer
    from forerun.verification.walk import Verdict

FloatArray: TypeAlias = NDArray[np.float32]

logger = logging.getLogger(__name__)

NAME = "draft"
GREATEST_SHARE = 0.3
"""A draft larger than this part of the target seldom pays."""


def check_same_vocabulary(target: "Tokenizer", draft: "Tokenizer") -> None:
    """Raise DraftModelError unless both tokenizers give the same ids to the same text."""
    different = target.same_vocabulary(draft)
    if different:
        raise DraftModelError(
            f"the draft model's tokenizer is not the target's: {'; '.join(different)}; take a draft model of the "
            "target's family, or speculate without one (speculation.method: suffix)"
        )


def warn_if_large(target_size: int, draft_size: int) -> bool:
    """Log a warning when the draft is larger than 30% of the target (both in parameters, or both in bytes)."""
    large = draft_size > GREATEST_SHARE * target_size
    if large:
        logger.warning(
            "the draft model has %.0f%% of the target's size; above %.0f%% drafting seldom pays: take a smaller one, "
            "or a lower draft_precision",
            100 * draft_size / target_size,
            100 * GREATEST_SHARE,
        )
    return large


@dataclass
class _Growth:
    """One request's tree while it grows. nodes are kept in the order of their making, parents first.

    tree_slots: where expanded nodes keep keys and values: `width` slots for each level, from level 1 on.
    """

    context: "DraftContext"
    slots: SequenceSlots
    depth: int
    tree_slots: IntArray
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    slot_paths: dict[int, list[int]] = field(default_factory=lambda: {-1: []})  # of expanded nodes
    frontier: list[int] = field(default_factory=list)  # nodes to expand next

    def add(self, parent: int, guesses: Sequence[tuple[int, float]]) -> range:
        """Append a node's children; their indices."""
        first = len(self.tokens)
        above = 1.0 if parent < 0 else self.scores[parent]
        for token, chance in guesses:
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(above * chance)
        return range(first, len(self.tokens))


class DraftModelDrafter:
    """Guesses with a model of its own.

    decoder: the draft model. slots: size of its KV cache, in tokens. target_vocab_size: ids from there on are never
    proposed (vocabularies may be padded differently). min_score: nodes whose estimated chance is smaller are not
    expanded. chunk: most tokens of one forward pass.

    A request whose context outgrows the draft's context limit, or for which the draft's cache has no room (the youngest
    first), gets an empty tree; the others are not concerned.
    """

    name = NAME

    def __init__(
        self,
        decoder: "Decoder",
        *,
        slots: int,
        target_vocab_size: int | None = None,
        page_size: int = 16,
        min_score: float = 0.05,
        chunk: int = 512,
    ) -> None:
        if slots < page_size:
            raise DraftModelError(
                f"the draft model's cache has {slots} slots; it needs at least one page of {page_size}"
            )
        self._decoder = decoder
        self._vocab_size = target_vocab_size or decoder.vocab_size
        self._pool = PagePool(slots // page_size, page_size)
        self._store = decoder.new_store(self._pool.pages * page_size)
        self._min_score = min_score
        self._chunk = chunk
        self._sequences: dict[int, SequenceSlots] = {}
        self._outgrown: set[int] = set()  # requests that this model can do nothing more for

    def propose(self, contexts: "Sequence[DraftContext]", limit: "DraftLimit") -> list[DraftTree]:
        """One tree per context, grown in min(depth, room) forward passes over all requests together."""
        growing: dict[int, _Growth] = {}
        if limit.nodes > 0 and limit.width > 0:
            for context in sorted(contexts, key=lambda context: context.request_id):
                growth = self._start(context, limit)
                if growth is not None:
                    growing[context.request_id] = growth
            growths = list(growing.values())
            self._catch_up(growths, limit)
            self._deepen(growths, limit)
            for growth in growths:
                growth.slots.commit(len(growth.context.tokens))
        return [self._tree(growing.get(context.request_id), limit) for context in contexts]

    def observe(self, context: "DraftContext", verdict: "Verdict") -> None:
        """Nothing to learn: the cache catches up with the committed tokens at the next proposal."""

    def forget(self, request_id: int) -> None:
        """Give the request's pages back."""
        self._outgrown.discard(request_id)
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            sequence.release()

    def clear_history(self) -> None:
        """Nothing is kept of earlier requests."""

    def cached(self, request_id: int) -> int:
        """How many of a request's tokens the draft's cache holds."""
        sequence = self._sequences.get(request_id)
        return 0 if sequence is None else sequence.computed

    def check(self) -> None:
        """Raise AssertionError unless every page of the draft's cache is accounted for exactly once."""
        self._pool.check(sequence.owned_pages for sequence in self._sequences.values())

    def _start(self, context: "DraftContext", limit: "DraftLimit") -> _Growth | None:
        """Make room for a request's tokens and tree; None when the draft cannot serve it now."""
        tokens = context.tokens
        depth = min(limit.depth, context.room)
        sequence = self._sequences.get(context.request_id)
        if sequence is None:
            sequence = self._sequences[context.request_id] = SequenceSlots(self._pool, keep_prefix=False)
        fresh = tokens[sequence.computed :]
        if len(tokens) > self._decoder.context_limit or (fresh and max(fresh) >= self._decoder.vocab_size):
            sequence.release()  # for good: a context only grows
            if context.request_id not in self._outgrown:
                self._outgrown.add(context.request_id)
                logger.info(
                    "request %d goes on without the draft model, which allows %d tokens and a vocabulary of %d",
                    context.request_id,
                    self._decoder.context_limit,
                    self._decoder.vocab_size,
                )
            return None
        if depth < 1 or not self._reserve(context.request_id, sequence, len(tokens)):
            return None
        # The root is computed anew if it was before, so that there are logits for it.
        sequence.computed = min(sequence.computed, len(tokens) - 1)
        return _Growth(context, sequence, depth, np.empty(0, np.int64))

    def _reserve(self, request_id: int, sequence: SequenceSlots, length: int) -> bool:
        """Room for `length` tokens, taken from younger requests if there is no other way."""
        while not sequence.reserve(length):
            youngest = max((number for number, other in self._sequences.items() if other.owned_pages), default=-1)
            if youngest <= request_id:
                sequence.release()
                return False
            self._sequences[youngest].release()
        return True

    def _catch_up(self, growths: Sequence[_Growth], limit: "DraftLimit") -> None:
        """Compute the committed tokens that the cache lacks, in chunks; the children of each root."""
        queue = list(growths)
        while queue:
            batch = _Batch()
            finished: list[_Growth] = []
            while queue and batch.rows < self._chunk:
                growth = queue[0]
                slots, tokens = growth.slots, growth.context.tokens
                end = min(len(tokens), slots.computed + self._chunk - batch.rows)
                batch.add(
                    tokens[slots.computed : end], slots.computed, slots.slots[:end], end, wanted=end == len(tokens)
                )
                if end < len(tokens):
                    slots.computed = end
                    break
                slots.computed = len(tokens) - 1
                finished.append(queue.pop(0))
            logits = self._forward(batch)
            for growth, row in zip(finished, logits, strict=True):
                self._add_children(growth, -1, row, 0, limit)
                growth.frontier = list(range(len(growth.tokens)))

    def _deepen(self, growths: Sequence[_Growth], limit: "DraftLimit") -> None:
        """Expand the likeliest nodes of one level after another."""
        for growth in growths:
            levels = min(growth.depth - 1, self._decoder.context_limit - len(growth.context.tokens))
            wanted = [level for level in range(1, levels + 1) for _ in range(limit.width)]
            growth.tree_slots = growth.slots.place_tree(wanted)
        for level in range(1, limit.depth):
            batch = _Batch()
            expanded: list[tuple[_Growth, int]] = []
            for growth in growths:
                slots = growth.tree_slots[(level - 1) * limit.width : level * limit.width].tolist()
                length = len(growth.context.tokens)
                committed = growth.slots.slots[:length]
                for node, slot in zip(self._worth_expanding(growth, limit), slots, strict=False):
                    path = growth.slot_paths[node] = [*growth.slot_paths[growth.parents[node]], slot]
                    all_slots = np.concatenate([committed, np.asarray(path, np.int64)])
                    batch.add([growth.tokens[node]], length + level - 1, all_slots, length, group=id(growth))
                    expanded.append((growth, node))
                growth.frontier = []
            if not expanded:
                return
            for (growth, node), row in zip(expanded, self._forward(batch), strict=True):
                growth.frontier += self._add_children(growth, node, row, level, limit)

    def _worth_expanding(self, growth: _Growth, limit: "DraftLimit") -> list[int]:
        """The frontier's best nodes that are likely enough, and among the best of the tree; at most `width`."""
        best = sorted(range(len(growth.scores)), key=lambda node: (-growth.scores[node], node))[: limit.nodes]
        frontier = set(growth.frontier)
        likely = [node for node in best if node in frontier and growth.scores[node] >= self._min_score]
        return likely[: limit.width]

    def _add_children(self, growth: _Growth, node: int, logits: FloatArray, level: int, limit: "DraftLimit") -> range:
        context = growth.context
        position = len(context.tokens) + level
        guesses = propose(logits, context.sampling, context.seed, position, limit.width)
        return growth.add(node, guesses)

    def _forward(self, batch: "_Batch") -> FloatArray:
        """Logits over the target's vocabulary; -inf for ids that the draft model does not have."""
        logits = self._decoder.forward(batch.build(), self._store).float().cpu().numpy()[:, : self._vocab_size]
        missing = self._vocab_size - logits.shape[1]
        return np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf) if missing else logits

    def _tree(self, growth: _Growth | None, limit: "DraftLimit") -> DraftTree:
        if growth is None or not growth.tokens:
            return EMPTY_TREE
        tree = DraftTree(growth.tokens, growth.parents, growth.scores, [NAME] * len(growth.tokens))
        return merge_trees(
            [tree], nodes=limit.nodes, width=limit.width, depth=growth.depth, vocab_size=self._vocab_size
        )


class _Batch:
    """A TokenBatch in the making."""

    def __init__(self) -> None:
        self.rows = 0
        self._token_ids: list[int] = []
        self._positions: list[IntArray] = []
        self._slots: list[IntArray] = []
        self._paths: list[AttentionPath] = []
        self._logit_rows: list[int] = []
        self._groups: dict[int, int] = {}

    def add(
        self,
        tokens: Sequence[int],
        position: int,
        slots: IntArray,
        shared: int,
        *,
        group: int | None = None,
        wanted: bool = True,
    ) -> None:
        """Add tokens from `position` on.

        slots: of their whole path. group: the same for all paths of a request; None = the only path of its request.
        wanted: whether the logits of the last token are.
        """
        count = len(tokens)
        number = self._groups.setdefault(-1 - len(self._paths) if group is None else group, len(self._groups))
        self._token_ids += tokens
        self._positions.append(np.arange(position, position + count))
        self._slots.append(slots[position : position + count])
        self._paths.append(AttentionPath(slots, np.arange(self.rows, self.rows + count), number, shared))
        self.rows += count
        if wanted:
            self._logit_rows.append(self.rows - 1)

    def build(self) -> TokenBatch:
        """The finished batch."""
        return TokenBatch(
            np.asarray(self._token_ids, np.int64),
            np.concatenate(self._positions),
            np.concatenate(self._slots),
            self._paths,
            np.asarray(self._logit_rows, np.int64),
        )
