"""Products of matrices whose rows do not depend on their company.

A matrix library picks its algorithm, and with it the order of accumulation, by the number of rows. Here it never sees
any other number than ROW_TILE, so that a row's bits depend on that row alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 16


@dataclass(frozen=True)
class PackedLinear:
    """weight: [out, in], float32 or bfloat16. bias: float32 [out] or None."""

    weight: Tensor
    bias: Tensor | None


def padded_rows(rows: int) -> int:
    """The next multiple of ROW_TILE, at least one tile."""
    return max(ROW_TILE, -(-rows // ROW_TILE) * ROW_TILE)


def pad_rows(x: Tensor) -> Tensor:
    """x [rows, ...] with zero rows appended up to a whole number of tiles."""
    missing = padded_rows(len(x)) - len(x)
    return x if not missing else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """x W^T + b, float32 [rows, out], for float32 x [rows, in] with rows a multiple of ROW_TILE."""
    weight = packed.weight.float()  # products of bfloat16 would come back rounded to bfloat16, logits too
    tiles = [F.linear(tile, weight) for tile in _tiles(x)]
    y = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    return y if packed.bias is None else y + packed.bias


def exactly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of float32 x, with the same bits wherever an element stands.

    A CPU computes most elements in vectors and those at the end of a thread's share one by one, by code that may differ
    in the last bit; in double precision that difference is lost when the result is rounded to float32.
    """
    return function(x.double()).float() if x.device.type == "cpu" else function(x)


def _tiles(x: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(x), ROW_TILE):
        yield x[start : start + ROW_TILE]
