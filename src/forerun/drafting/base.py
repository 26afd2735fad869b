"""What a drafter is, and what it is told. One file beside this one per drafter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.drafting.tree import DraftTree
from forerun.verification.sampling import SamplingParams
from forerun.verification.walk import Verdict


@dataclass(frozen=True)
class DraftContext:
    """One request, as a drafter sees it.

    request_id: unique for the life of the engine.
    tokens: every committed token, prompt and answer; the engine appends to this list, drafters only read it.
    prompt_length: how many of `tokens` are the prompt.
    sampling: the request's sampling parameters; `seed` is the resolved seed (never None).
    room: how many draft levels can still be useful; nothing deeper may be proposed (token and context limits).
    tenant: requests of different tenants never share drafting history unless sharing is on.
    """

    request_id: int
    tokens: Sequence[int]
    prompt_length: int
    sampling: SamplingParams
    seed: int
    room: int
    tenant: str = ""


@dataclass(frozen=True)
class DraftLimit:
    """How large one request's draft tree may be: children per node, levels, and nodes in all."""

    width: int
    depth: int
    nodes: int


class Drafter(Protocol):
    """Guesses the next tokens of requests. A drafter may be wrong, late or broken; it can never change an answer."""

    name: str

    def propose(self, contexts: Sequence[DraftContext], limit: DraftLimit) -> list[DraftTree]:
        """One tree per context, in order; an empty tree when there is nothing worth guessing."""
        ...

    def observe(self, context: DraftContext, verdict: Verdict) -> None:
        """Learn from a step: `context.tokens` already holds the tokens that the verdict emitted."""
        ...

    def forget(self, request_id: int) -> None:
        """The request ended (for whatever reason): drop what was kept for it alone. Unknown ids are ignored."""
        ...

    def clear_history(self) -> None:
        """Drop everything that was learnt from earlier requests."""
        ...
