"""Guesses for engine tests: what plain decoding answers, chains that are right up to a chosen token, trees by shape."""

from collections.abc import Sequence

from forerun.drafting.tree import DraftTree
from tests.drafting.scripted import Scripted, chain
from tests.engine.harness import VOCABULARY, plain


class Truth(dict):
    """The answer that plain decoding gives to each prompt; scripted drafters may also call it with a context."""

    def __call__(self, context):
        return self[tuple(context.tokens[: context.prompt_length])]


def truth_of(asks, model=None, **settings):
    """Plain answers to `asks`, in order, and what an oracle needs to know of them."""
    alone = [plain(ask, model, **settings) for ask in asks]
    return alone, Truth({tuple(ask.prompt): output.token_ids for ask, output in zip(asks, alone, strict=True)})


def coming(truth, context, count):
    """The next `count` tokens of the true answer; fewer at its end."""
    done = len(context.tokens) - context.prompt_length
    return list(truth[tuple(context.tokens[: context.prompt_length])][done : done + count])


def wrong(token):
    """Another token of the vocabulary."""
    return (token + 1) % VOCABULARY


class Guess(Scripted):
    """Proposes what a function of (context, limit) returns: a tree, or the tokens of a chain. Keeps what it saw."""

    def __init__(self, guess, name="guess"):
        super().__init__(name)
        self._guess = guess
        self.asked = []  # (request id, committed tokens, room) of every proposal

    def guess(self, context, limit):
        self.asked.append((context.request_id, len(context.tokens), context.room))
        made = self._guess(context, limit)
        return made if isinstance(made, DraftTree) else chain(made, source=self.name)


class PartlyRight(Guess):
    """Chains of `length` tokens of which the first are right: how many is the next of `counts`, over and over."""

    def __init__(self, truth, length, counts: Sequence[int]):
        super().__init__(self._next, "partly right")
        self._truth, self._length, self._counts, self._turn = truth, length, counts, {}

    def _next(self, context, limit):
        turn = self._turn.get(context.request_id, 0)
        self._turn[context.request_id] = turn + 1
        right = self._counts[turn % len(self._counts)]
        tokens = coming(self._truth, context, self._length)
        return [token if at < right else wrong(token) for at, token in enumerate(tokens)]


def tree(tokens, parents, score=0.9):
    """A draft tree whose scores fall with the depth only."""
    depths = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return DraftTree(list(tokens), list(parents), [score**depth for depth in depths], ["tree"] * len(depths))
