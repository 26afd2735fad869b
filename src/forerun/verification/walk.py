"""Verification: the target's choices made again down a draft tree. Nothing here scores guesses or changes a choice."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.drafting.tree import DraftTree
from forerun.errors import EngineError
from forerun.verification.choice import SamplingState, check_highest, checked_best, choose
from forerun.verification.logprobs import TokenLogprob, token_logprob

TARGET = "target"
"""The source of a token that no drafter guessed."""


class LogitRows:
    """The target's logits at the root and at every node of one draft tree, fetched only when they are looked at."""

    def __init__(self, logits: Tensor) -> None:
        """logits: float32 [nodes + 1, vocabulary] on any device; row 0 is the root, row i + 1 is node i of the tree."""
        if logits.dim() != 2:
            raise EngineError(f"logits have shape {tuple(logits.shape)}; verification needs [nodes + 1, vocabulary]")
        self._logits = logits if logits.dtype is torch.float32 and not logits.requires_grad else logits.detach().float()
        self._host = self._logits.numpy() if logits.is_cpu else None
        self._best: tuple[list[int], list[float]] | None = None
        self._size = len(logits)

    def part(self, start: int, end: int) -> "LogitRows":
        """Rows start ... end - 1. In host memory that takes a tenth of what torch needs to cut a tensor."""
        if self._host is None:
            return LogitRows(self._logits[start:end])
        part = LogitRows.__new__(LogitRows)
        part._logits, part._best = self._logits, None  # which are not looked at where there is a host copy
        part._host, part._size = self._host[start:end], end - start
        return part

    def __len__(self) -> int:
        """Number of rows."""
        return self._size

    def row(self, index: int) -> NDArray[np.float32]:
        """Logits of one row: float32 [vocabulary], in host memory; not to be written to."""
        row: NDArray[np.float32] = self._logits[index].cpu().numpy() if self._host is None else self._host[index]
        return row

    def argmax(self, index: int) -> int:
        """Id of the highest logit of one row, the lowest id among equals.

        Raises EngineError when the row holds NaN or nothing finite to choose.
        """
        if self._host is not None:  # a visited row costs microseconds here, and the others nothing
            return checked_best(self._host[index])
        if (
            self._best is None
        ):  # one call and one transfer for the whole tree: on a device these cost more than the work
            values, indices = self._logits.max(dim=1)  # propagates NaN; the first index among equals
            self._best = indices.tolist(), values.tolist()
        token = self._best[0][index]
        check_highest(self._best[1][index], token)
        return token


@dataclass(frozen=True)
class Verdict:
    """What the target said about one draft tree.

    tree: the tree that was verified. path: the accepted nodes, from a child of the root downwards.
    bonus: the last choice, which no child of the path's end holds; None when the answer ended on the path's last token.
    logprobs: for each emitted token, when they were asked for.
    tokens: what is emitted, the path's tokens and then the bonus. sources: for each of them the drafter that guessed
        it, "target" for the bonus. drafted: how many nodes were verified.

    Raises ValueError when the path is not a path of the tree that begins at its root, or nothing would be emitted.
    """

    tree: DraftTree
    path: tuple[int, ...]
    bonus: int | None
    logprobs: tuple[TokenLogprob, ...] | None = None
    tokens: tuple[int, ...] = field(init=False)
    sources: tuple[str, ...] = field(init=False)
    drafted: int = field(init=False)

    def __post_init__(self) -> None:
        """Check the path against the tree and read off it what is emitted."""
        tree, above = self.tree, -1
        for node in self.path:
            if not 0 <= node < len(tree) or tree.parents[node] != above:
                raise ValueError(
                    f"path {self.path} leaves the draft tree of {len(tree)} nodes: {node} is no child of {above}"
                )
            above = node
        emitted = () if self.bonus is None else (self.bonus,)
        tokens = (*(tree.tokens[node] for node in self.path), *emitted)
        if not tokens:
            raise ValueError("a verdict emits at least one token, but the path is empty and there is no bonus token")
        if self.logprobs is not None and len(self.logprobs) != len(tokens):
            raise ValueError(
                f"{len(self.logprobs)} log-probabilities for {len(tokens)} tokens; there must be one for each"
            )
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "sources", (*(tree.source[node] for node in self.path), *(TARGET for _ in emitted)))
        object.__setattr__(self, "drafted", len(tree))

    @property
    def accepted(self) -> int:
        """How many of the emitted tokens came from the draft."""
        return len(self.path)


def verify(
    tree: DraftTree, logits: LogitRows, state: SamplingState, stop: Callable[[int], bool] | None = None
) -> Verdict:
    """Make the target's choices from the root down as long as the tree holds them; `state` gets every emitted token.

    stop: called with each emitted token, in order; where it returns True the walk ends, without a bonus token.
    Choices are made only at the nodes walked through, so that unvisited ones cost nothing. Where children hold the same
    token, the first of them is taken.

    Raises EngineError when the logits at a visited node cannot be chosen from; tokens before it are already in `state`.
    """
    if len(logits) != len(tree) + 1:
        raise EngineError(
            f"{len(logits)} rows of logits for a draft tree of {len(tree)} nodes; there must be {len(tree) + 1}"
        )
    children = tree.links
    path: list[int] = []
    logprobs: list[TokenLogprob] | None = None if state.params.logprobs is None else []
    node, bonus = -1, None
    while True:
        token = choose(logits.row(node + 1), state) if state.needs_logits else logits.argmax(node + 1)
        if logprobs is not None:
            logprobs.append(token_logprob(logits.row(node + 1), token, state.params.logprobs or 0))
        state.append(token)
        ended = stop is not None and stop(token)
        child = children.get((node, token))
        if child is None:
            bonus = token
            break
        path.append(child)
        if ended:
            break
        node = child
    return Verdict(tree, tuple(path), bonus, None if logprobs is None else tuple(logprobs))
