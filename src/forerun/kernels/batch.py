"""TokenBatch: the one thing a model ever sees.

Prefill chunks, plain decoding and draft trees are the same case here. What a token may attend to is said by
*paths*; how a device lays that out in memory is the kernels' affair.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionPath:
    """One line of tokens from a sequence's first position to a leaf, and the rows of the batch that lie on it.

    slots: int64 [length], the cache slot of the key and value at absolute position 0, 1, ..., length - 1.
    rows:  int64 [n], rows of the batch on this path. Row r attends to slots[first : positions[r] + 1], where first
           is 0, or the start of the sliding window of the layer. Every row of a batch lies on exactly one path;
           a node that several leaves share is listed with one of them only.
    group: paths with the same group belong to the same sequence, so that their first `shared` slots are equal.
    shared: how many leading slots all paths of the group have in common (the committed context).
    """

    slots: IntArray
    rows: IntArray
    group: int
    shared: int


@dataclass(frozen=True)
class TokenBatch:
    """A step's tokens, over all requests, flat.

    token_ids: int64 [rows].
    positions: int64 [rows], absolute, root of a sequence = 0.
    slots:     int64 [rows], where each row's key and value are written. No slot occurs twice.
    paths:     what each row attends to.
    logit_rows: int64 [wanted], the rows whose logits are asked for, in the order in which they are returned.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    paths: Sequence[AttentionPath]
    logit_rows: IntArray

    @property
    def rows(self) -> int:
        """Number of tokens in the batch."""
        return len(self.token_ids)
