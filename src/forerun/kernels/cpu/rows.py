"""Native passes over rows of float32 numbers, and the moves of slots: `choice.h`. Their callers say what for.

Every method gives the bits that numpy gives. An array that the native code cannot read is the caller's to keep away:
`takes` tells.
"""

from ctypes import byref
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import EngineError
from forerun.kernels.batch import IntArray
from forerun.kernels.cpu import binding

Row = NDArray[np.float32]

MAXIMA_BLOCK = 32
"""As in choice.h."""

_FEW = 4096  # places that are made room for at first


class RowPasses:
    """The passes, on any number of threads at a time."""

    def __init__(self) -> None:
        self._library = binding.library()

    @staticmethod
    def takes(rows: Row) -> bool:
        """Whether this is an array that these passes can read: float32, not empty, each row in one piece."""
        return rows.dtype == np.float32 and rows.size > 0 and rows.strides[-1] == rows.itemsize

    def block_maxima(self, row: Row) -> Row:
        """The highest of every MAXIMA_BLOCK numbers (of fewer at the end), without NaN."""
        maxima = np.empty(-(-len(row) // MAXIMA_BLOCK), np.float32)
        self._library.forerun_block_maxima(binding.address(row), len(row), binding.address(maxima))
        return maxima

    def at_least(self, row: Row, threshold: float) -> IntArray:
        """Places of the numbers >= threshold, which is rounded to float32; ascending."""
        room = min(len(row), _FEW)
        while True:
            places = np.empty(room, np.int64)
            found = self._library.forerun_at_least(
                binding.address(row), len(row), threshold, binding.address(places), room
            )
            if found <= room:
                return places[:found]
            room = found

    def score_ceilings(self, row: Row, best: float, temperature: float, noise: tuple[Any, ...]) -> Row:
        """(row - best) / temperature, in float32, plus a bound of the noise of each place.

        noise: what the bound is computed from, the fields of `Hash`.
        """
        ceilings, terms = np.empty(len(row), np.float32), binding.HashArgument(*noise)
        self._library.forerun_score_ceilings(
            binding.address(row), len(row), best, temperature, byref(terms), binding.address(ceilings)
        )
        return ceilings

    def move(self, store: Tensor, sources: IntArray, targets: IntArray) -> None:
        """Copy slots onto others in every layer, all at once. store: contiguous [layers, slots, ...] on the CPU.

        Raises EngineError when a slot is not in the store, or memory is short.
        """
        layers, slots = store.shape[:2]
        sources = binding.integers(sources, 0, slots, "moved slots")
        targets = binding.integers(targets, 0, slots, "slots moved to")
        if not store.is_cpu or not store.is_contiguous() or len(sources) != len(targets):
            raise EngineError(
                f"cannot move {len(sources)} slots onto {len(targets)} in a store of shape {list(store.shape)} on "
                f"{store.device}; it takes as many slots as targets, and a contiguous store on cpu"
            )
        layer_bytes = store.stride(0) * store.itemsize
        moves = binding.MovesArgument(
            binding.address(sources),
            binding.address(targets),
            len(sources),
            layers,
            layer_bytes,
            store.stride(1) * store.itemsize,
        )
        if self._library.forerun_move_slots(store.data_ptr(), byref(moves)):
            raise EngineError("no memory to move slots of the cache; lower the tokens per step")
