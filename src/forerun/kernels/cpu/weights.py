"""Weights as the native kernels read them: panels of columns, in one run of memory in the order of execution."""

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.kernels.cpu.binding import WeightArgument, floats, is_bf16, library

HUGE_PAGE = 1 << 21
CHUNK = 32 << 20


FLOAT32, BFLOAT16 = 0, 1  # `Format` of operations.h


@dataclass(frozen=True)
class PackedLinear:
    """A linear layer [rows, columns] = [out, in] in panels (see operations.cpp).

    argument: what the library is told about it. held: the tensors whose memory it points to.
    """

    rows: int
    columns: int
    argument: WeightArgument
    held: tuple[Tensor | None, ...]


class Arena:
    """Hands out memory side by side in large pieces on huge pages; a piece lives as long as a weight in it."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """Uint8 [size], aligned to 128 bytes. Pages that nobody writes to take no memory."""
        size = -(-size // 128) * 128
        if self._used + size > len(self._piece):
            piece = torch.empty(max(size, CHUNK) + HUGE_PAGE, dtype=torch.uint8)
            self._piece = piece[-piece.data_ptr() % HUGE_PAGE :]
            self._used = 0
            library().forerun_huge_pages(self._piece.data_ptr(), len(self._piece))
        self._used += size
        return self._piece[self._used - size : self._used]


def pack(context: int, arena: Arena, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Copy weight [out, in] into panels. Raises EngineError for another type than float32 or bfloat16."""
    weight = weight.contiguous()
    bf16 = is_bf16(weight, 2)
    rows, columns = weight.shape
    if not rows or not columns:
        raise EngineError(f"a linear layer of shape {list(weight.shape)} has nothing to multiply; check the model")
    panel = library().forerun_panel(context)
    panels = arena.take(-(-rows // panel) * panel * columns * weight.itemsize)
    own_bias = None if bias is None else floats(bias.to(torch.float32), rows).clone()
    bias_at = None if own_bias is None else own_bias.data_ptr()
    argument = WeightArgument(panels.data_ptr(), bias_at, rows, columns, BFLOAT16 if bf16 else FLOAT32)
    library().forerun_pack(context, weight.data_ptr(), byref(argument))
    return PackedLinear(rows, columns, argument, (panels, own_bias))


def memory_runs(packed: Sequence[PackedLinear]) -> list[tuple[int, int]]:
    """Where the memory of these weights lies: (address, bytes), what lies side by side as one run, no byte twice.

    Runs of less than a thousandth of the whole (biases) are left out: going to them costs more than reading them.
    """
    places = {(held.data_ptr(), held.nbytes) for linear in packed for held in linear.held if held is not None}
    runs: list[tuple[int, int]] = []
    for at, size in sorted(places):
        start, length = runs[-1] if runs else (0, 0)
        if start + length == at:
            runs[-1] = (start, length + size)
        else:
            runs.append((at, size))
    whole = sum(size for _, size in runs)
    return [(at, size) for at, size in runs if size * 1000 >= whole]
