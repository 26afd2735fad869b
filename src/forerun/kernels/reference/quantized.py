"""Products with quantised weights as `kernels.quantized` defines them.

The sums are integers below 2^53, which float64 adds without rounding: no order and no number of rows changes them, so
nothing is padded here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.quantized import LEVELS, QuantizedWeight


@dataclass(frozen=True)
class PackedQuantized:
    """codes: float64 [groups, group size, out], the zero subtracted. scales, minima: float64 [groups, 1, out]."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    grouped: bool
    bias: Tensor | None
    levels: int


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None, bits: int, device: torch.device) -> PackedQuantized:
    """Lay a quantised weight out for `quantized_linear`, whose activations have that many bits."""
    rows, columns = weight.shape

    def per_group(values: Tensor) -> Tensor:
        return values.to(device, torch.float64).view(rows, -1).T.unsqueeze(1).contiguous()

    codes = weight.codes.to(device, torch.float64) - weight.zero
    return PackedQuantized(
        codes=codes.view(rows, -1, weight.group or columns).permute(1, 2, 0).contiguous(),
        scales=per_group(weight.scales),
        minima=None if weight.minima is None else per_group(weight.minima),
        grouped=weight.group is not None,
        bias=None if bias is None else bias.to(device, torch.float32),
        levels=LEVELS[bits],
    )


def quantized_linear(x: Tensor, packed: PackedQuantized) -> Tensor:
    """x W^T + b, float32 [rows, out], for float32 x [rows, in]."""
    codes, scale = quantize_rows(x, packed.levels)
    groups, size, _ = packed.codes.shape
    by_group = codes.view(len(x), groups, size).transpose(0, 1)
    sums = by_group @ packed.codes
    if packed.grouped:
        y = _chain(sums, by_group.sum(-1, keepdim=True), packed) * scale[:, None]
    else:
        y = (sums[0] * (scale[:, None].double() * packed.scales[0])).float()
    return y if packed.bias is None else y + packed.bias


def quantize_rows(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Codes, whole numbers in float64 [rows, in], and the rows' scales, float32 [rows]."""
    largest = x.abs().amax(-1)
    empty = largest < torch.finfo(torch.float32).tiny * levels
    finite = x.isfinite().all(-1)
    usable = torch.where(finite & ~empty, largest, 1.0)
    most = torch.full_like(usable, levels)  # a tensor: torch would multiply by the reciprocal of a number
    factor = most / usable
    codes = torch.where((finite & ~empty)[:, None], torch.round(x * factor[:, None]), 0.0)
    scale = torch.where(finite, torch.where(empty, 0.0, largest / most), torch.nan)
    return codes.double(), scale


def _chain(sums: Tensor, totals: Tensor, packed: PackedQuantized) -> Tensor:
    """Scales times sums, plus minima times totals, over the groups one after the other, in float32."""
    y = torch.zeros(sums.shape[1:], dtype=torch.float32, device=sums.device)
    for group in range(len(sums)):
        # The product is exact in float64; the sum is rounded there and once more: a fused multiply-add but for one
        # case in 2^29.
        y = (y.double() + sums[group].float().double() * packed.scales[group]).float()
        if packed.minima is not None:
            y = (y.double() + totals[group].float().double() * packed.minima[group]).float()
    return y
