"""Making quantised weights: from floating point by least error, from GGUF blocks without any.

Pure functions. What the numbers mean is said in `kernels.quantized`; which layers become what, in `precision`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import WeightsError
from forerun.kernels.quantized import QuantizedWeight

QUANTIZATION = 1
"""Part of the key of packed weights on disk: raise it when weights would come out different."""

BLOCK = 32
"""Values of a GGUF block, and our own group. On weights of real models 64 has 22% more error for 10% less memory."""

_SHRINK = (1.0, 0.9, 0.8)  # of a group's range, where the search for its scale begins
_FITS = 2  # least-squares fits from each beginning
_CHUNK_VALUES = 1 << 17  # what a processor's cache holds while a group's candidates are tried
_MOST_HALF = 60_000.0  # larger weights do not fit the float16 of scales and minima


def quantize(weight: Tensor, bits: Literal[4, 8]) -> QuantizedWeight:
    """A floating-point weight [out, in] in 8 bits with a scale per output, or in 4 with scale and minimum per group.

    Four bits become eight where groups do not fit: `in` is no multiple of 32, or a weight exceeds the range of float16.
    Raises WeightsError if a weight is not finite.
    """
    if bits == 4 and fits_groups(weight):
        return quantize_groups(weight, 4)
    return quantize_rows(weight)


def fits_groups(weight: Tensor) -> bool:
    """Whether `quantize_groups` can hold a weight [out, in]. Raises WeightsError if a weight is not finite."""
    return weight.shape[1] % BLOCK == 0 and _largest(weight) < _MOST_HALF


def quantize_rows(weight: Tensor) -> QuantizedWeight:
    """Eight bits, symmetric, scale = largest of the row / 127: a tighter scale that clips gains less than 0.01%.

    Raises WeightsError if a weight is not finite.
    """
    _largest(weight)
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=torch.float32)
    for rows in _chunks(weight):
        part = weight[rows].float()
        scales[rows] = part.abs().amax(-1) / 127
        codes[rows] = _divided(part, scales[rows, None]).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(codes, scales)


def quantize_groups(weight: Tensor, bits: Literal[4, 8], group: int = BLOCK) -> QuantizedWeight:
    """Four bits with a scale and a minimum per group of inputs, or eight with a scale; both in float16.

    weight: [out, in] that `fits_groups` approves. The four bits' scale and minimum are searched for the least squared
    error, as llama.cpp's quantisers do: round to codes, fit scale and minimum to them, round again, from several
    beginnings.
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // group, group, dtype=torch.uint8 if bits == 4 else torch.int8)
    scales = torch.empty(rows, columns // group, dtype=torch.float16)
    minima = torch.empty_like(scales) if bits == 4 else None
    for chunk in _chunks(weight):
        part = weight[chunk].float().view(-1, columns // group, group)
        if minima is None:
            scales[chunk] = (part.abs().amax(-1) / 127).half()
            codes[chunk] = _divided(part, scales[chunk, :, None].float()).round_().clamp_(-127, 127).to(codes.dtype)
        else:
            scale, minimum = _search(part)
            scales[chunk], minima[chunk] = scale, minimum
            codes[chunk] = _codes(part, scale, minimum).to(codes.dtype)
    return QuantizedWeight(codes.view(rows, columns), scales, minima, group, bits)


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The parts one under the other, exactly; None if their groups differ.

    Where forms differ, 4 bits become 8 and missing minima become 0, or the codes' zero becomes a minimum.
    """
    first = parts[0]
    if any(part.group != first.group for part in parts):
        return None
    forms = {(part.bits, part.zero) for part in parts}
    if len(forms) > 1 and {bits for bits, _ in forms} == {4}:
        parts = [_zero_as_minimum(part) for part in parts]
    if len({(part.bits, part.zero) for part in parts}) > 1:
        parts = [_in_eight_bits(part) for part in parts]
    minima = None
    if any(part.minima is not None for part in parts):
        minima = torch.cat([torch.zeros_like(part.scales) if part.minima is None else part.minima for part in parts])
    return QuantizedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        minima,
        first.group,
        parts[0].bits,
        parts[0].zero,
    )


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF whose blocks of 32 values are a scale (float16), a minimum if it has one, and codes.

    bits: of the QuantizedWeight that it becomes. size: bytes of a block. code_bits: of a stored code. zero: the stored
    code that stands for 0.
    """

    name: str
    bits: Literal[4, 8]
    size: int
    code_bits: int
    zero: int = 0
    minima: bool = False


BLOCK_TYPES: dict[int, BlockType] = {
    2: BlockType("Q4_0", 4, 18, 4, zero=8),
    3: BlockType("Q4_1", 4, 20, 4, minima=True),
    6: BlockType("Q5_0", 8, 22, 5, zero=16),
    7: BlockType("Q5_1", 8, 24, 5, minima=True),
    8: BlockType("Q8_0", 8, 34, 8),
}
"""By ggml's number. Layouts: block_q4_0 and the like in ggml's ggml-common.h."""


def from_blocks(kind: BlockType, data: NDArray[np.uint8]) -> QuantizedWeight:
    """The weight that a GGUF tensor's bytes [rows, bytes per row] stand for, without rounding anything."""
    rows = data.shape[0]
    blocks = np.ascontiguousarray(data).reshape(rows, -1, kind.size)

    def half(first: int) -> Tensor:
        return torch.from_numpy(blocks[..., first : first + 2].copy().view("<f2")[..., 0])

    packed = blocks[..., 4 if kind.minima else 2 :]
    if kind.code_bits == 8:
        codes = packed.view(np.int8).copy()  # the mapped file is read-only
    else:
        nibbles = packed[..., -BLOCK // 2 :]  # the low halves of these bytes are values 0 to 15, the high ones 16 to 31
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
        if kind.code_bits == 5:
            fifth = np.unpackbits(np.ascontiguousarray(packed[..., :4]), axis=-1, bitorder="little")
            codes = (codes | fifth << 4).view(np.int8) - np.int8(kind.zero)
    return QuantizedWeight(
        torch.from_numpy(codes.reshape(rows, -1)),
        half(0),
        half(2) if kind.minima else None,
        BLOCK,
        kind.bits,
        kind.zero if kind.bits == 4 else 0,
    )


def _chunks(weight: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK_VALUES // weight.shape[1])
    for begin in range(0, weight.shape[0], step):
        yield slice(begin, begin + step)


def _largest(weight: Tensor) -> float:
    largest = max(weight[rows].abs().amax().item() for rows in _chunks(weight))
    if not largest < float("inf"):  # NaN, too
        raise WeightsError(
            "a weight that is not finite cannot be quantised; fetch the model again, or load it with precision=bf16"
        )
    return largest


def _divided(values: Tensor, scales: Tensor) -> Tensor:
    return values / torch.where(scales > 0, scales, torch.inf)


def _search(values: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum, numbers of float16 in float32, for each group of values [rows, groups, group]."""
    low, high = values.amin(-1), values.amax(-1)
    least, best_scale, best_minimum = torch.full_like(low, torch.inf), torch.zeros_like(low), low.half().float()
    for shrink in _SHRINK:
        scale, minimum = (high - low) * (shrink / 15), low + (high - low) * ((1 - shrink) / 2)
        for _ in range(_FITS):
            scale, minimum = _fit(values, _codes(values, scale, minimum))
        scale, minimum = scale.half().float(), minimum.half().float()
        restored = _codes(values, scale, minimum).mul_(scale[..., None]).add_(minimum[..., None])
        error = restored.sub_(values).square_().sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best_scale, best_minimum = torch.where(better, scale, best_scale), torch.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def _codes(values: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return _divided(values - minimum[..., None], scale[..., None]).round_().clamp_(0, 15)


def _fit(values: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum of least squared error for given codes; scale 0 where all codes are alike."""
    count = values.shape[-1]
    code_sum, value_sum = codes.sum(-1), values.sum(-1)
    spread = count * codes.square().sum(-1) - code_sum.square()
    product = count * (codes * values).sum(-1) - code_sum * value_sum
    scale = torch.where(spread > 0, product / spread.clamp_min(1.0), 0.0)
    return scale, (value_sum - scale * code_sum) / count


def _zero_as_minimum(part: QuantizedWeight) -> QuantizedWeight:
    """A 4-bit weight whose zero is 8, with zero 0 and minima; as it is where float16 cannot hold them."""
    minima = part.scales * -part.zero  # exact: 8 is a power of two
    if not part.zero or not minima.isfinite().all():
        return part
    return QuantizedWeight(part.codes, part.scales, minima, part.group, part.bits)


def _in_eight_bits(part: QuantizedWeight) -> QuantizedWeight:
    if part.bits == 8:
        return part
    return QuantizedWeight(part.codes.to(torch.int8) - part.zero, part.scales, part.minima, part.group, 8)
