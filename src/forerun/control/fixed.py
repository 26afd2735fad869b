"""The policy that does what it is told: fixed tree limits, and the best nodes of all requests up to a fixed budget."""

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.control.base import StepRecord
from forerun.drafting.base import DraftLimit
from forerun.drafting.merge import select_nodes
from forerun.drafting.tree import DraftTree


@dataclass(frozen=True)
class FixedController:
    """limit_per_request: width, depth and nodes of each tree. step_nodes: draft nodes per step over all requests."""

    limit_per_request: DraftLimit
    step_nodes: int

    def limit(self, requests: int) -> DraftLimit:
        """The same limit whatever the load."""
        return self.limit_per_request

    def plan(self, trees: Sequence[DraftTree], free_rows: int) -> list[DraftTree]:
        """The `step_nodes` surest nodes (fewer when fewer rows are free)."""
        return select_nodes(trees, min(self.step_nodes, free_rows))

    def observe(self, step: StepRecord) -> None:
        """Nothing to learn."""
