"""The memory that attention reads and writes. Who owns which slot is the business of the cache room.

Int8 keys and values are codes with a float32 scale for each vector of a slot and a head; a number is code * scale. For
a vector x with m = max|x| the scale is m / 127 and a code is x * (127 / m), rounded half to even, all in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.batch import IntArray
from forerun.kernels.native_rows import native_rows

SMALLEST = 2.0**-120  # a vector with no magnitude from here on is one of zeros: 127 / m stays finite
LARGEST_SCALE = 2.0**121  # so does 127 * scale


@dataclass(frozen=True)
class KVStore:
    """Keys and values of every layer.

    keys, values: [layers, slots + 1, kv_heads, head_dim], fp32, bf16 or int8. The last slot is scratch: padding writes
    there, and nothing that matters reads it. key_scales, value_scales: of int8, fp32 [layers, slots + 1, kv_heads].
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def allocate(
        cls, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> "KVStore":
        """Zero-filled storage for `slots` usable slots. On a CPU a page of it takes memory once it is written to."""
        shape = (layers, slots + 1, kv_heads, head_dim)
        numbers = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        if dtype is not torch.int8:
            return cls(*numbers)
        return cls(*numbers, _zeros(shape[:-1], torch.float32, device), _zeros(shape[:-1], torch.float32, device))

    @property
    def slots(self) -> int:
        """Usable slots (the scratch slot is not counted)."""
        return self.keys.shape[1] - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, scratch included."""
        return sum(part.nbytes for part in self._parts())

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write rows of one layer. slots: int64 [rows]. keys, values: float32 [rows, kv_heads, head_dim].

        A value that is not finite is written as 0, see `Kernels.rotate_and_write`; of int8 a key too.
        """
        values = torch.where(values.isfinite(), values, 0.0)
        for numbers, codes, scales in (
            (keys, self.keys[layer], self.key_scales),
            (values, self.values[layer], self.value_scales),
        ):
            if scales is None:
                codes.index_copy_(0, slots, numbers.to(codes.dtype))
            else:
                encoded, own = encode(numbers)
                codes.index_copy_(0, slots, encoded)
                scales[layer].index_copy_(0, slots, own)

    def read_keys(self, layer: int, slots: Tensor) -> Tensor:
        """Keys of one layer as numbers. slots: int64 of any shape. Float32 [*slots, kv_heads, head_dim]."""
        return _numbers(self.keys[layer], self.key_scales, layer, slots)

    def read_values(self, layer: int, slots: Tensor) -> Tensor:
        """Values of one layer, as `read_keys`."""
        return _numbers(self.values[layer], self.value_scales, layer, slots)

    def move(self, source: IntArray, destination: IntArray) -> None:
        """Copy slots `source` onto slots `destination` in every layer; both int64 [n]. They may overlap."""
        native = native_rows() if self.keys.is_cpu else None
        for part in self._parts():
            if native:
                native.move(part, source, destination)
            else:
                part[:, torch.from_numpy(destination).to(part.device)] = part[
                    :, torch.from_numpy(source).to(part.device)
                ]

    def _parts(self) -> Iterator[Tensor]:
        return (part for part in (self.keys, self.values, self.key_scales, self.value_scales) if part is not None)


def bytes_per_head(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that a key, or a value, of one head takes; of int8 its scale too."""
    return head_dim * dtype.itemsize + (torch.float32.itemsize if dtype is torch.int8 else 0)


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 x [..., size] as int8 codes [..., size] and float32 scales [...]; what is not finite counts as 0."""
    x = torch.where(x.isfinite(), x, 0.0)
    greatest = x.abs().amax(-1)
    empty = greatest < SMALLEST
    factor = torch.where(empty, 0.0, 127.0 / greatest)
    scales = torch.where(empty, 0.0, (greatest / 127.0).clamp_max(LARGEST_SCALE))
    return torch.round(x * factor[..., None]).to(torch.int8), scales


def _numbers(held: Tensor, scales: Tensor | None, layer: int, slots: Tensor) -> Tensor:
    numbers = held[slots].float()
    return numbers if scales is None else numbers * scales[layer][slots][..., None]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zero pages; torch would write them all, which takes seconds for a large cache. From 4 MB
    # on numpy (2.4 at least) asks for huge pages too: to do so here, aligned, made attention no faster.
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(dtype)
