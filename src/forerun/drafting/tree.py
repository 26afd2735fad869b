"""The draft tree: guessed tokens, each with a parent, and the merging of several trees into one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class DraftTree:
    """Guessed continuations of one request, as a tree whose root is the last committed token (not stored).

    tokens:  token id of each node.
    parents: index of each node's parent; -1 means the root. A parent stands before its children.
    scores:  for each node the estimated chance, in (0, 1], that it will be on the accepted path; at most its parent's.
    source:  for each node the name of the drafter that proposed it (the surest one, when several did).

    Raises ValueError when the lengths differ, or a parent is no int or does not stand before its child.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    scores: Sequence[float] = ()
    source: Sequence[str] = ()
    _size: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        size = len(self.tokens)
        if not (len(self.parents) == len(self.scores) == len(self.source) == size):
            raise ValueError(
                f"a draft tree needs as many parents ({len(self.parents)}), scores ({len(self.scores)}) and sources "
                f"({len(self.source)}) as tokens ({size})"
            )
        for node, parent in enumerate(self.parents):
            if not (isinstance(parent, int) and -1 <= parent < node):
                raise ValueError(f"node {node} of a draft tree has parent {parent}; allowed: -1 .. {node - 1}")
        object.__setattr__(self, "_size", size)

    def __len__(self) -> int:
        return self._size

    def head(self, nodes: int) -> "DraftTree":
        """The tree of the first `nodes` nodes; parents stand before children, so it is a tree."""
        return DraftTree(self.tokens[:nodes], self.parents[:nodes], self.scores[:nodes], self.source[:nodes])

    def depths(self) -> list[int]:
        """Depth of each node: 1 for a child of the root. Not to be changed."""
        return self._depths

    @cached_property
    def _depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """From a node (-1 = the root) and a token to the child that holds it, the first of several. Read only."""
        links: dict[tuple[int, int], int] = {}
        for node, link in enumerate(zip(self.parents, self.tokens, strict=True)):
            links.setdefault(link, node)
        return links

    def children(self) -> list[list[int]]:
        """For the root (index 0) and each node i (index i + 1) the indices of its child nodes."""
        below: list[list[int]] = [[] for _ in range(self._size + 1)]
        for node, parent in enumerate(self.parents):
            below[parent + 1].append(node)
        return below


EMPTY_TREE = DraftTree()
