"""Weights as the native kernels read them: panels of columns, in one run of memory in the order of execution."""

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.kernels.cpu.binding import SourceArgument, WeightArgument, floats, is_bf16, library
from forerun.kernels.quantized import ActivationBits, QuantizedWeight

MOST_QUANTIZED_INPUTS = 1 << 16
HUGE_PAGE = 1 << 21
CHUNK = 32 << 20


FLOAT32, BFLOAT16, INT8, INT8_GROUPS, INT4_GROUPS = range(5)  # `Format` of operations.h


@dataclass(frozen=True)
class PackedLinear:
    """A linear layer [rows, columns] = [out, in] in panels (see linear.h and quantized_panel.h).

    argument: what the library is told about it. regions: the memory that it points to, address and bytes each.
    held: what keeps that memory.
    """

    rows: int
    columns: int
    argument: WeightArgument
    regions: tuple[tuple[int, int], ...]
    held: object


class Arena:
    """Hands out memory side by side in large pieces on huge pages; a piece lives as long as a weight in it."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    def take(self, size: int) -> Tensor:
        """Uint8 [size], aligned to 128 bytes. Pages that nobody writes to take no memory."""
        size = -(-size // 128) * 128
        if self._used + size > len(self._piece):
            piece = torch.empty(max(size, CHUNK) + HUGE_PAGE, dtype=torch.uint8, device="cpu")
            self._piece = piece[-piece.data_ptr() % HUGE_PAGE :]
            self._used = 0
            library().forerun_huge_pages(self._piece.data_ptr(), len(self._piece))
        self._used += size
        return self._piece[self._used - size : self._used]


class Packer:
    """Lays weights out for one instruction set.

    activation_bits: of the activations that quantised weights are multiplied with, 8 or 16.
    """

    def __init__(self, context: int, activation_bits: ActivationBits) -> None:
        self._context = context
        self._activation_bits = activation_bits
        self._arena = Arena()

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> PackedLinear:
        """Copy a weight [out, in] into panels. Raises EngineError for a type or shape that cannot be packed."""
        rows, columns = weight.shape
        if not rows or not columns:
            raise EngineError(f"a linear layer of shape {[rows, columns]} has nothing to multiply; check the model")
        own_bias = None if bias is None else floats(bias.to(torch.float32), rows).clone()
        argument = WeightArgument(bias=None if own_bias is None else own_bias.data_ptr(), n=rows, k=columns)
        if isinstance(weight, QuantizedWeight):
            sources = self._describe_quantized(weight, argument)
        else:
            sources = [weight.contiguous()]
            argument.format = BFLOAT16 if is_bf16(sources[0], 2) else FLOAT32
        panels = self._arena.take(library().forerun_packed_bytes(self._context, byref(argument)))
        argument.values = panels.data_ptr()
        source = SourceArgument(*(part.data_ptr() for part in sources))
        library().forerun_pack(self._context, byref(source), byref(argument))
        held = [panels] if own_bias is None else [panels, own_bias]
        return PackedLinear(rows, columns, argument, tuple((own.data_ptr(), own.nbytes) for own in held), held)

    def _describe_quantized(self, weight: QuantizedWeight, argument: WeightArgument) -> list[Tensor]:
        """Fill in what is particular to quantised weights; returns codes, scales and minima (if any) to pack."""
        columns = weight.shape[1]
        if columns > MOST_QUANTIZED_INPUTS:
            raise EngineError(
                f"a quantised layer has {columns} inputs, more than {MOST_QUANTIZED_INPUTS}, whose sums of products "
                "could overflow; load it as bf16"
            )
        argument.activation_bits = self._activation_bits
        argument.format = INT8 if weight.group is None else INT8_GROUPS if weight.bits == 8 else INT4_GROUPS
        argument.group, argument.zero = weight.group or 0, weight.zero
        argument.minima = weight.minima is not None
        parts = [part for part in (weight.codes, weight.scales, weight.minima) if part is not None]
        if not all(part.is_cpu for part in parts):
            raise EngineError("a quantised weight must lie on the cpu to be packed there; move it with .to('cpu')")
        return [part.contiguous() for part in parts]


def memory_runs(packed: Sequence[PackedLinear]) -> list[tuple[int, int]]:
    """Where the memory of these weights lies: (address, bytes), what lies side by side as one run, no byte twice.

    Runs of less than a thousandth of the whole (biases) are left out: going to them costs more than reading them.
    """
    places = {region for linear in packed for region in linear.regions}
    runs: list[tuple[int, int]] = []
    for at, size in sorted(places):
        start, length = runs[-1] if runs else (0, 0)
        if start + length == at:
            runs[-1] = (start, length + size)
        else:
            runs.append((at, size))
    whole = sum(size for _, size in runs)
    return [(at, size) for at, size in runs if size * 1000 >= whole]
