"""A batch laid out for the native kernels: plain integer arrays whose every value has been checked."""

import ctypes
from collections.abc import Collection, Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.kernels.base import AttentionSpec
from forerun.kernels.batch import AttentionPath, IntArray, TokenBatch
from forerun.kernels.cpu.binding import AttentionArgument, RotationArgument, address, floats, integers
from forerun.kernels.cpu.weights import BFLOAT16, FLOAT32, INT8
from forerun.kernels.kv_store import KVStore
from forerun.kernels.reference import ReferenceKernels

_FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8}
_UNLIMITED = int(np.iinfo(np.int64).max)


class Addresses(NamedTuple):
    """Where the arrays of a prepared batch lie."""

    positions: int
    slots: int
    logit_rows: int
    order: int
    path_of: int
    groups: int
    paths: int


@dataclass(frozen=True)
class StoreLayout:
    """A store that was checked: where keys and values (and their scales, if any) lie, and its shape.

    layer_bytes, layer_scales: from one layer to the next, bytes of keys and number of scales. format: `Format` of
    operations.h.
    """

    keys: int
    values: int
    key_scales: int | None
    value_scales: int | None
    layers: int
    layer_bytes: int
    layer_scales: int
    heads: tuple[int, int]
    format: int

    def place(self, job: RotationArgument | AttentionArgument, layer: int, spec: AttentionSpec) -> None:
        """Tell an operation where the layer's keys and values lie.

        Raises EngineError if there is no such layer or its heads differ.
        """
        self.check(layer + 1, [(spec.kv_heads, spec.head_dim)])
        job.keys, job.values = self.keys + layer * self.layer_bytes, self.values + layer * self.layer_bytes
        job.format = self.format
        if self.key_scales is not None and self.value_scales is not None:
            before = layer * self.layer_scales * ctypes.sizeof(c_float)
            job.key_scales, job.value_scales = self.key_scales + before, self.value_scales + before

    def check(self, layers: int, heads: Collection[tuple[int, int]]) -> None:
        """Raise EngineError unless there are so many layers and all `heads`, (kv_heads, head_dim), are those here."""
        if not 0 < layers <= self.layers or any(these != self.heads for these in heads):
            raise EngineError(
                f"layer {layers - 1} with key/value heads (number, size) {list(heads)} does not fit a store of "
                f"{self.layers} layers with heads {self.heads}; use the model's own new_store()"
            )


@dataclass(frozen=True)
class PreparedBatch:
    """What `CpuKernels.prepare` returns; all arrays contiguous int64 and in range for `store`.

    order: the rows of the batch, those of a group together. path_of: for each entry of `order`, its path.
    groups: where in `order` each group begins, and its length. paths: three numbers each, `Path` of operations.h; the
    slots that it points to are kept alive by `held`. `numbers` holds positions ... paths, one behind the other.
    """

    batch: TokenBatch
    store: KVStore
    layout: StoreLayout
    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    logit_rows: IntArray
    order: IntArray
    path_of: IntArray
    groups: IntArray
    paths: IntArray
    numbers: IntArray
    held: Sequence[IntArray]
    rotary: Sequence[tuple[Tensor, Tensor]]

    @cached_property
    def rows(self) -> int:
        """Number of tokens in the batch."""
        return len(self.token_ids)

    def of(self, store: KVStore) -> StoreLayout:
        """The layout of its store. Raises EngineError if `store` is another one."""
        if store is not self.store:
            raise EngineError("a batch works on the store that it was prepared for; prepare it again for another one")
        return self.layout

    def check_rotary(self, number: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """The rotary table of that number. Raises EngineError if it turns more features than a head has."""
        cosines, sines = self.rotary[number]
        if 2 * cosines.shape[1] > head_dim:
            raise EngineError(
                f"RoPE turns {2 * cosines.shape[1]} features of heads that have {head_dim}; at most all can turn"
            )
        return cosines, sines

    @cached_property
    def at(self) -> Addresses:
        """Where the arrays lie."""
        first, size = address(self.numbers), self.numbers.itemsize
        rows, wanted, groups = size * self.rows, size * len(self.logit_rows), size * len(self.groups)
        return Addresses(*accumulate((rows, rows, wanted, rows, rows, groups), initial=first))

    @cached_property
    def reference(self) -> Any:
        """The same batch for the torch reference, made only if an operation is not covered natively."""
        return ReferenceKernels("cpu").prepare(self.batch, self.store, self.rotary)


def prepare(batch: TokenBatch, store: KVStore, rotary: Sequence[tuple[Tensor, Tensor]]) -> PreparedBatch:
    """Check the batch and lay it out. Raises EngineError if an index is out of range or a row is not on one path.

    In lists: a step has few rows, and then numpy's calls cost more than their loops (45 us a row, with arrays 100).
    """
    rows = batch.rows
    length = min((cosines.shape[0] for cosines, _ in rotary), default=_UNLIMITED)
    positions = integers(batch.positions, 0, length, "positions")
    slots = integers(batch.slots, 0, store.slots + 1, "slots")
    logit_rows = integers(batch.logit_rows, 0, rows, "logit rows")
    if not rows or len(positions) != rows or len(slots) != rows:
        raise EngineError(
            f"a batch has {rows} tokens, {len(positions)} positions and {len(slots)} slots; all must be equal"
        )
    ordered = sorted(batch.paths, key=lambda path: path.group)
    row_lists = [path.rows.tolist() for path in ordered]
    order = [row for own in row_lists for row in own]
    if sorted(order) != list(range(rows)):
        raise EngineError(f"every row of a batch lies on exactly one path; the {rows} rows lie on paths so: {order}")
    position_of = positions.tolist()
    held = [
        _path_slots(path, max((position_of[row] for row in own), default=-1), store)
        for path, own in zip(ordered, row_lists, strict=True)
    ]
    groups, shared = _groups(ordered)
    paths: list[int] = []
    for path, own in zip(ordered, held, strict=True):
        paths += address(own), len(own), shared[path.group]
    path_of = [number for number, own in enumerate(row_lists) for _ in own]
    numbers = np.concatenate([positions, slots, logit_rows, np.array([*order, *path_of, *groups, *paths], np.int64)])
    wanted = 2 * rows + len(logit_rows)
    return PreparedBatch(
        batch=batch,
        store=store,
        layout=_store_layout(store),
        token_ids=np.ascontiguousarray(batch.token_ids, np.int64),
        positions=numbers[:rows],
        slots=numbers[rows : 2 * rows],
        logit_rows=numbers[2 * rows : wanted],
        order=numbers[wanted : wanted + rows],
        path_of=numbers[wanted + rows : wanted + 2 * rows],
        groups=numbers[wanted + 2 * rows : -len(paths)],
        paths=numbers[-len(paths) :],
        numbers=numbers,
        held=held,
        rotary=[_table(cosines, sines) for cosines, sines in rotary],
    )


def _groups(ordered: Sequence[AttentionPath]) -> tuple[list[int], dict[int, int]]:
    """Where the rows of each group begin, and their number in all; how many leading slots the paths of each share."""
    starts: list[int] = []
    shared: dict[int, int] = {}
    count = 0
    for path in ordered:
        if path.group not in shared:
            starts.append(count)
        shared[path.group] = min(path.shared, shared.get(path.group, path.shared))
        count += len(path.rows)
    return [*starts, count], shared


def _store_layout(store: KVStore) -> StoreLayout:
    layers, slots, kv_heads, size = store.keys.shape
    for numbers in (store.keys, store.values):
        if numbers.shape != store.keys.shape or numbers.dtype is not store.keys.dtype or not _readable(numbers):
            raise EngineError(
                f"keys and values of a store must be contiguous on the CPU, of one shape and of one type out of "
                f"{', '.join(map(str, _FORMATS))}; got {numbers.dtype} {list(numbers.shape)} on {numbers.device}"
            )
    scales = [store.key_scales, store.value_scales]
    lacking = any(one is None or floats(one, layers, slots, kv_heads) is not one for one in scales)
    if store.keys.dtype is torch.int8 and lacking:
        raise EngineError("a store of int8 codes must have scales for them, contiguous; use KVStore.allocate()")
    return StoreLayout(
        keys=store.keys.data_ptr(),
        values=store.values.data_ptr(),
        key_scales=None if store.key_scales is None else store.key_scales.data_ptr(),
        value_scales=None if store.value_scales is None else store.value_scales.data_ptr(),
        layers=layers,
        layer_bytes=slots * kv_heads * size * store.keys.itemsize,
        layer_scales=slots * kv_heads,
        heads=(kv_heads, size),
        format=_FORMATS[store.keys.dtype],
    )


def _readable(numbers: Tensor) -> bool:
    return numbers.dtype in _FORMATS and numbers.is_contiguous() and numbers.is_cpu


def _path_slots(path: AttentionPath, reach: int, store: KVStore) -> IntArray:
    """The path's slots, checked. reach: the last position of its rows."""
    slots = integers(path.slots, 0, store.slots + 1, "slots of a path")
    if reach >= len(slots):
        raise EngineError(
            f"a path of {len(slots)} slots has a row at position {reach}; a path reaches at least to the position of "
            "its last row"
        )
    if not 0 <= path.shared <= len(slots):
        raise EngineError(
            f"a path of {len(slots)} slots shares {path.shared} with its group; allowed: 0 .. {len(slots)}"
        )
    return slots


def _table(cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    return floats(cosines, *cosines.shape), floats(sines, *cosines.shape)
