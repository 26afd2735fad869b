"""The memory that attention reads and writes. Who owns which slot is the business of the cache room."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.batch import IntArray
from forerun.kernels.native_rows import native_rows


@dataclass(frozen=True)
class KVStore:
    """Keys and values of every layer.

    keys, values: [layers, slots + 1, kv_heads, head_dim], fp32 or bf16. The last slot is scratch: padding writes there,
    and nothing that matters reads it.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> "KVStore":
        """Zero-filled storage for `slots` usable slots. On a CPU a page of it takes memory once it is written to."""
        shape = (layers, slots + 1, kv_heads, head_dim)
        return cls(_zeros(shape, dtype, device), _zeros(shape, dtype, device))

    @property
    def slots(self) -> int:
        """Usable slots (the scratch slot is not counted)."""
        return self.keys.shape[1] - 1

    def move(self, source: IntArray, destination: IntArray) -> None:
        """Copy slots `source` onto slots `destination` in every layer; both int64 [n]. They may overlap."""
        native = native_rows() if self.keys.is_cpu else None
        for part in (self.keys, self.values):
            if native:
                native.move(part, source, destination)
            else:
                part[:, torch.from_numpy(destination).to(part.device)] = part[
                    :, torch.from_numpy(source).to(part.device)
                ]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zero pages; torch would write them all, which takes seconds for a large cache.
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(dtype)
