"""How much to guess: what the engine asks before and after it drafts, and what it reports back.

Policies live beside this file. A policy never sees text or keys and values, only trees, counts and times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.drafting.base import DraftLimit
from forerun.drafting.tree import DraftTree


@dataclass(frozen=True)
class StepRecord:
    """What one step did.

    requests: requests that decoded. rows: tokens the target computed, draft nodes included. drafted: draft nodes
    verified. accepted: draft nodes whose token was emitted. emitted: tokens emitted by decoding requests.
    draft_s, forward_s, total_s: seconds spent in drafters, in the target, in the whole step.
    """

    requests: int
    rows: int
    drafted: int
    accepted: int
    emitted: int
    draft_s: float
    forward_s: float
    total_s: float


class Controller(Protocol):
    """Decides the budget of each step."""

    def limit(self, requests: int) -> DraftLimit:
        """How large the tree of each of `requests` decoding requests may be; nodes = 0 means: do not draft."""
        ...

    def plan(self, trees: Sequence[DraftTree], free_rows: int) -> list[DraftTree]:
        """Cut the merged trees of all requests to the step's budget; at most `free_rows` nodes in all may stay."""
        ...

    def observe(self, step: StepRecord) -> None:
        """Learn from a finished step."""
        ...
