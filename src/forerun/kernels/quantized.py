"""QuantizedWeight: a linear layer's weight as small integers, and what the products with it are, to the last bit.

Who makes the integers from which numbers is the business of `models.quantization`; each device packs them as it likes.

Activations are quantised too, each row by itself: scale = max|x| / levels, code = round(x * (levels / max|x|)) to the
nearest, ties to even, all in float32; levels is 32512 with 16 bits (two planes of signed bytes: 256 * high + low) and
127 with 8 bits. A row without anything has scale 0; one with a value that is not finite has scale NaN.

The products: S[n, g] = sum over the k of group g of activation[k] * (code[n, k] - zero), an exact integer, whatever the
order. With one scale per output,
    y[n] = float32(float64(S[n]) * (float64(activation scale) * float64(scale[n]))).
With groups, a chain of float32 multiply-adds (each rounded once) over the groups in ascending order,
    t = fma(scale[n, g], float32(S[n, g]), t), then, if there are minima, t = fma(minimum[n, g], float32(A[g]), t),
where A[g] is the sum of the group's activations; y[n] = t * activation scale. So every instruction set gives the same
bits.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forerun.errors import EngineError

ActivationBits = Literal[8, 16]
LEVELS: dict[int, int] = {8: 127, 16: 32512}
GROUPS = (32, 64)


@dataclass(frozen=True)
class QuantizedWeight:
    """Weight[n, k] = scale * (code[n, k] - zero) + minimum.

    codes: int8 [out, in] for 8 bits; uint8 [out, in], 0 .. 15, for 4 bits.
    scales: float32 [out] without groups; float16 [out, in / group] with them.
    minima: float16 like the scales, or None; with groups only.
    group: how many inputs share a scale, 32 or 64; None = all.
    zero: the code that stands for 0 before the minimum is added: 0 for 8 bits, 0 or 8 for 4.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    group: int | None = None
    bits: Literal[4, 8] = 8
    zero: int = 0

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        if self.codes.dtype is not (torch.int8 if self.bits == 8 else torch.uint8):
            raise EngineError(f"codes of {self.bits} bits come as int8 (8) or uint8 (4), not {self.codes.dtype}")
        if self.group is None:
            expected: tuple[int, ...] = (rows,)
            kind = torch.float32
            if self.bits == 4 or self.minima is not None:
                raise EngineError("a weight of 4 bits, or with minima, needs a scale per group of inputs: set group")
        else:
            if self.group not in GROUPS or columns % self.group:
                raise EngineError(
                    f"groups of {self.group} inputs do not fit a layer of {columns}; allowed are "
                    f"{' and '.join(map(str, GROUPS))}, whole groups"
                )
            expected, kind = (rows, columns // self.group), torch.float16
        for name, values in (("scales", self.scales), ("minima", self.minima)):
            if values is not None and (values.dtype is not kind or tuple(values.shape) != expected):
                raise EngineError(
                    f"{name} of a quantised weight must be {kind} {list(expected)}, not {values.dtype} "
                    f"{list(values.shape)}"
                )
        if self.zero not in ((0,) if self.bits == 8 else (0, 8)):
            raise EngineError(f"zero of {self.bits}-bit codes is {self.zero}; allowed: 0, and 8 for 4 bits")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when its codes are packed as closely as they can be."""
        values = self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)
        return self.codes.numel() * self.bits // 8 + values

    def dequantized(self) -> Tensor:
        """The numbers that it stands for, float32 [out, in]."""
        rows, columns = self.shape
        codes = self.codes.float().view(rows, -1, self.group or columns) - self.zero
        values = codes * self.scales.float().view(rows, -1, 1)
        if self.minima is not None:
            values = values + self.minima.float()[..., None]
        return values.view(rows, columns)
