"""The memory that attention reads and writes. Who owns which slot is the business of the cache room."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
        """Zero-filled storage for `slots` usable slots."""
        shape = (layers, slots + 1, kv_heads, head_dim)
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    @property
    def slots(self) -> int:
        """Usable slots (the scratch slot is not counted)."""
        return self.keys.shape[1] - 1

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy slots `source` onto slots `destination` in every layer; both int64 [n]. They may overlap."""
        self.keys[:, destination] = self.keys[:, source]
        self.values[:, destination] = self.values[:, source]
