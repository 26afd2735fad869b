"""How the reference lays out attention: pairs of a query tile and a key block, all of one shape.

Key block b of a path holds its absolute positions b * KEY_BLOCK ... (b + 1) * KEY_BLOCK - 1, whoever computes it and
whenever. A query tile holds QUERY_TILE rows that see the same block. Blocks of the committed context are shared by all
paths of a group (one tile serves rows of several branches); blocks that reach into a draft tree belong to one path.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.batch import AttentionPath, IntArray, TokenBatch
from forerun.kernels.reference.tiles import padded_rows

KEY_BLOCK = 64
QUERY_TILE = 16


@dataclass(frozen=True)
class AttentionLayout:
    """Pairs of (query tile, key block) for one step and one window, and how a row's parts are put together.

    tile_rows: int64 [pairs, QUERY_TILE], rows of the batch (0 where a lane is unused).
    key_slots: int64 [pairs, KEY_BLOCK].
    visible:   bool [pairs, QUERY_TILE, KEY_BLOCK].
    parts:     int64 [rows', blocks], for each row its lanes (pair * QUERY_TILE + lane) in the order of key positions,
               filled up with the null lane pairs * QUERY_TILE; blocks is a power of two.
    """

    tile_rows: Tensor
    key_slots: Tensor
    visible: Tensor
    parts: Tensor


def attention_layout(batch: TokenBatch, window: int | None, scratch: int, device: torch.device) -> AttentionLayout:
    """Lay out `batch` for layers that see `window` positions (None = all). Unused keys point to slot `scratch`."""
    tile_rows: list[IntArray] = []
    key_slots: list[IntArray] = []
    visible: list[np.ndarray] = []
    lanes: dict[int, list[int]] = defaultdict(list)
    for block, slots, rows in sorted(_blocks(batch, window, scratch), key=lambda entry: entry[0]):
        for start in range(0, len(rows), QUERY_TILE):
            members = rows[start : start + QUERY_TILE]
            for lane, row in enumerate(members):
                lanes[int(row)].append(len(tile_rows) * QUERY_TILE + lane)
            tile = np.zeros(QUERY_TILE, np.int64)
            tile[: len(members)] = members
            tile_rows.append(tile)
            key_slots.append(slots)
            visible.append(_visible(batch.positions[tile], block, window, len(members)))
    parts = _parts(lanes, padded_rows(batch.rows), null=len(tile_rows) * QUERY_TILE)
    return AttentionLayout(*(torch.from_numpy(a).to(device) for a in (
        np.stack(tile_rows), np.stack(key_slots), np.stack(visible), parts
    )))  # fmt: skip


def _blocks(batch: TokenBatch, window: int | None, scratch: int) -> Iterator[tuple[int, IntArray, IntArray]]:
    """(block number, slots of its keys, rows that see it), shared blocks once per group."""
    together: dict[tuple[int, int], list[IntArray]] = defaultdict(list)
    path_of: dict[int, AttentionPath] = {}
    for path in batch.paths:
        positions = batch.positions[path.rows]
        first = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
        for block in range(int(first.min()) // KEY_BLOCK, int(positions.max()) // KEY_BLOCK + 1):
            sees = (first // KEY_BLOCK <= block) & (block <= positions // KEY_BLOCK)
            if not sees.any():
                continue
            if (block + 1) * KEY_BLOCK <= path.shared:
                together[path.group, block].append(path.rows[sees])
                path_of.setdefault(path.group, path)
            else:
                yield block, _slots(path, block, scratch), path.rows[sees]
    for (group, block), rows in together.items():
        yield block, _slots(path_of[group], block, scratch), np.concatenate(rows)


def _slots(path: AttentionPath, block: int, scratch: int) -> IntArray:
    slots = np.full(KEY_BLOCK, scratch, np.int64)
    known = path.slots[block * KEY_BLOCK : (block + 1) * KEY_BLOCK]
    slots[: len(known)] = known
    return slots


def _visible(positions: IntArray, block: int, window: int | None, used: int) -> np.ndarray:
    keys = block * KEY_BLOCK + np.arange(KEY_BLOCK)
    visible = keys[None, :] <= positions[:, None]
    if window is not None:
        visible &= keys[None, :] > positions[:, None] - window
    visible[used:] = False
    return visible


def _parts(lanes: dict[int, list[int]], rows: int, null: int) -> IntArray:
    blocks = max(map(len, lanes.values()))
    parts = np.full((rows, 1 << (blocks - 1).bit_length()), null, np.int64)
    for row, own in lanes.items():
        parts[row, : len(own)] = own
    return parts
