"""The engine's side of drafting: ask every drafter, merge, cut to the budget; and survive drafters that fail."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from forerun.control.base import Controller
from forerun.drafting.base import DraftContext, Drafter, DraftLimit
from forerun.drafting.merge import merge_trees
from forerun.drafting.tree import EMPTY_TREE, DraftTree
from forerun.engine.request import Request
from forerun.verification.walk import Verdict

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Speculation:
    """The drafters in use and the policy that bounds them.

    A drafter that raises is switched off and logged, with the reason in `disabled`; answers go on without it.
    """

    def __init__(self, drafters: Sequence[Drafter], controller: Controller, vocab_size: int) -> None:
        self.drafters = list(drafters)
        self.controller = controller
        self.disabled: dict[str, str] = {}
        self._vocab_size = vocab_size

    def propose(self, requests: Sequence[Request], free_rows: int) -> list[DraftTree]:
        """One tree per request, at most `free_rows` nodes in all; empty for requests that do not want or need one."""
        trees = [EMPTY_TREE] * len(requests)
        asking = [at for at, request in enumerate(requests) if request.speculate and request.room > 0]
        limit = self.controller.limit(len(requests))
        if not (asking and self.drafters and limit.nodes > 0 and free_rows > 0):
            return trees
        contexts = [requests[at].draft_context() for at in asking]
        proposals = [proposal for drafter in list(self.drafters) if (proposal := self._ask(drafter, contexts, limit))]
        for at, context, *guesses in zip(asking, contexts, *proposals, strict=True):
            trees[at] = guesses[0] if len(guesses) == 1 else self._merge(guesses, context, limit)
        return self.controller.plan(trees, free_rows)

    def observe(self, request: Request, verdict: Verdict) -> None:
        """Tell the drafters what became of a step of this request."""
        if request.speculate and self.drafters:
            context = request.draft_context()
            for drafter in list(self.drafters):
                self._guard(drafter, partial(drafter.observe, context, verdict))

    def forget(self, request: Request) -> None:
        """The request ended; drafters drop what they keep for it."""
        if request.speculate:
            for drafter in list(self.drafters):
                self._guard(drafter, partial(drafter.forget, request.request_id))

    def clear_history(self) -> None:
        """Drafters forget what earlier requests taught them."""
        for drafter in list(self.drafters):
            self._guard(drafter, drafter.clear_history)

    def _ask(self, drafter: Drafter, contexts: Sequence[DraftContext], limit: DraftLimit) -> list[DraftTree] | None:
        """A drafter's trees within the limits; None when it failed, or when what it returned are no such trees."""

        def ask() -> list[DraftTree]:
            trees = drafter.propose(contexts, limit)
            if len(trees) != len(contexts):
                raise ValueError(f"it returned {len(trees)} trees for {len(contexts)} requests")
            return [self._merge([tree], context, limit) for tree, context in zip(trees, contexts, strict=True)]

        return self._guard(drafter, ask)

    def _merge(self, trees: Sequence[DraftTree], context: DraftContext, limit: DraftLimit) -> DraftTree:
        depth = min(limit.depth, context.room)
        return merge_trees(trees, nodes=limit.nodes, width=limit.width, depth=depth, vocab_size=self._vocab_size)

    def _guard(self, drafter: Drafter, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:
            self._disable(drafter, f"{type(error).__name__}: {error}")
            return None

    def _disable(self, drafter: Drafter, reason: str) -> None:
        logger.warning("drafter %s is switched off, answers go on without it: %s", drafter.name, reason)
        self.disabled[drafter.name] = reason
        self.drafters.remove(drafter)
