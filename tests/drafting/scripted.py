"""Drafters whose guesses a test decides: right, wrong, empty, uneven, malformed or failing."""

import random
from collections.abc import Callable, Sequence

from forerun.drafting.base import DraftContext, DraftLimit
from forerun.drafting.tree import EMPTY_TREE, DraftTree
from forerun.verification.walk import Verdict

AnswerOf = Callable[[DraftContext], Sequence[int]]


def chain(tokens: Sequence[int], score: float = 0.9, source: str = "script") -> DraftTree:
    """A tree without branches."""
    size = len(tokens)
    return DraftTree(
        list(tokens), list(range(-1, size - 1)), [score**level for level in range(1, size + 1)], [source] * size
    )


class Scripted:
    """Base: one tree per context from `guess`; keeps what it was told."""

    def __init__(self, name: str = "script") -> None:
        self.name = name
        self.verdicts: list[Verdict] = []
        self.forgotten: list[int] = []

    def guess(self, context: DraftContext, limit: DraftLimit) -> DraftTree:
        raise NotImplementedError

    def propose(self, contexts: Sequence[DraftContext], limit: DraftLimit) -> list[DraftTree]:
        return [self.guess(context, limit) for context in contexts]

    def observe(self, context: DraftContext, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)

    def clear_history(self) -> None:
        """Nothing is learnt from earlier requests."""


class Oracle(Scripted):
    """Knows the whole answer to every request: `answer_of` gives its tokens, the prompt not included."""

    def __init__(self, answer_of: AnswerOf, shift: int = 0, vocab_size: int = 2**31, name: str = "oracle") -> None:
        super().__init__(name)
        self._answer_of, self._shift, self._vocab_size = answer_of, shift, vocab_size

    def guess(self, context: DraftContext, limit: DraftLimit) -> DraftTree:
        done = len(context.tokens) - context.prompt_length
        levels = max(min(limit.depth, limit.nodes, context.room), 0)
        tokens = self._answer_of(context)[done : done + levels]
        return chain([(token + self._shift) % self._vocab_size for token in tokens], source=self.name)


class Anti(Oracle):
    """The oracle's tokens plus one: always wrong."""

    def __init__(self, answer_of: AnswerOf, vocab_size: int) -> None:
        super().__init__(answer_of, shift=1, vocab_size=vocab_size, name="anti")


class Script(Scripted):
    """Proposes the given tokens at every step, as a chain."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__()
        self._tokens = tokens

    def guess(self, context: DraftContext, limit: DraftLimit) -> DraftTree:
        return chain(self._tokens)


class Empty(Scripted):
    """Never guesses."""

    def __init__(self) -> None:
        super().__init__("empty")

    def guess(self, context: DraftContext, limit: DraftLimit) -> DraftTree:
        return EMPTY_TREE


class Random(Scripted):
    """Random trees of valid tokens, within or beyond the limits."""

    def __init__(self, vocab_size: int, seed: int = 0, most: int = 24) -> None:
        super().__init__("random")
        self._vocab_size, self._random, self._most = vocab_size, random.Random(seed), most

    def guess(self, context: DraftContext, limit: DraftLimit) -> DraftTree:
        draw = self._random
        size = draw.randint(0, self._most)
        tokens = [draw.randrange(self._vocab_size) for _ in range(size)]
        parents = [draw.randint(-1, node - 1) for node in range(size)]
        return DraftTree(tokens, parents, [draw.random() for _ in range(size)], [self.name] * size)


class Ragged(Scripted):
    """Chains of 0 .. `most` tokens, by request and step; right ones where the answer is known."""

    def __init__(self, answer_of: AnswerOf, most: int = 16) -> None:
        super().__init__("ragged")
        self._answer_of, self._most = answer_of, most

    def guess(self, context: DraftContext, limit: DraftLimit) -> DraftTree:
        done = len(context.tokens) - context.prompt_length
        length = (context.request_id * 7 + done * 5) % (self._most + 1)
        return chain(self._answer_of(context)[done : done + length], source=self.name)


class Malicious(Scripted):
    """Duplicate siblings, dead branches below bad ids, scores that are none, and the right token among them."""

    def __init__(self, answer_of: AnswerOf, vocab_size: int) -> None:
        super().__init__("malicious")
        self._answer_of, self._vocab_size = answer_of, vocab_size

    def guess(self, context: DraftContext, limit: DraftLimit) -> DraftTree:
        done = len(context.tokens) - context.prompt_length
        right = [*self._answer_of(context)[done : done + 2], 0, 0][:2]
        beyond = self._vocab_size
        tokens = [beyond, right[0], right[0], -1, right[1], right[1], right[1], beyond + 5, 2**40]
        parents = [-1, 0, -1, -1, 2, 2, 3, 4, 1]
        scores = [1.0, 1.0, 0.5, float("nan"), 7.0, -1.0, float("inf"), 0.0, 1e-30]
        return DraftTree(tokens, parents, scores, [self.name] * len(tokens))


class Raising(Scripted):
    """Fails: when it proposes, or (`on`) when it observes or forgets."""

    def __init__(self, on: str = "propose") -> None:
        super().__init__("raising")
        self._on = on

    def _maybe(self, where: str) -> None:
        if where == self._on:
            raise RuntimeError(f"scripted failure in {where}")

    def guess(self, context: DraftContext, limit: DraftLimit) -> DraftTree:
        self._maybe("propose")
        return EMPTY_TREE

    def observe(self, context: DraftContext, verdict: Verdict) -> None:
        self._maybe("observe")

    def forget(self, request_id: int) -> None:
        self._maybe("forget")
