"""The reference implementation of `base.Kernels`: short, on any torch device, exact in the sense of promise 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.base import Activation, AttentionSpec, Mixture, Norm, Operations
from forerun.kernels.batch import TokenBatch
from forerun.kernels.kv_store import KVStore
from forerun.kernels.mixture import mix
from forerun.kernels.quantized import ActivationBits, QuantizedWeight
from forerun.kernels.reference.attention import attend
from forerun.kernels.reference.layout import AttentionLayout, attention_layout
from forerun.kernels.reference.quantized import PackedQuantized, pack_quantized, quantized_linear
from forerun.kernels.reference.tiles import PackedLinear, exactly, pad_rows, padded_rows
from forerun.kernels.reference.tiles import linear as float_linear


@dataclass(frozen=True)
class PreparedBatch:
    """A batch on the device, rows padded to whole tiles; padding rows write to the scratch slot.

    token_ids, positions, slots: int64 [rows']. rotary: (cos, sin) of each table, float32 [rows', 1, rotary_dim / 2].
    logit_rows: int64 [wanted]. layouts: by window, made when the first layer asks.
    """

    batch: TokenBatch
    token_ids: Tensor
    slots: Tensor
    rotary: Sequence[tuple[Tensor, Tensor]]
    logit_rows: Tensor
    scratch: int
    layouts: dict[int | None, AttentionLayout] = field(default_factory=dict)

    def layout(self, window: int | None) -> AttentionLayout:
        """The attention layout for layers with this window."""
        if window not in self.layouts:
            self.layouts[window] = attention_layout(self.batch, window, self.scratch, self.slots.device)
        return self.layouts[window]


class ReferenceKernels:
    """Plain torch. Every method's meaning is said in `base.Kernels`."""

    name = "reference"

    def __init__(self, device: torch.device | str = "cpu", activation_bits: ActivationBits = 16) -> None:
        self.device = torch.device(device)
        self.activation_bits = activation_bits

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> PackedLinear | PackedQuantized:
        if isinstance(weight, QuantizedWeight):
            return pack_quantized(weight, bias, self.activation_bits, self.device)
        weight = weight.to(self.device).contiguous()
        return PackedLinear(weight, None if bias is None else bias.to(self.device, torch.float32))

    def prepare(self, batch: TokenBatch, store: KVStore, rotary: Sequence[tuple[Tensor, Tensor]]) -> PreparedBatch:
        padding = padded_rows(batch.rows) - batch.rows
        token_ids, positions, slots = (
            F.pad(torch.from_numpy(array), (0, padding), value=fill).to(self.device)
            for array, fill in ((batch.token_ids, 0), (batch.positions, 0), (batch.slots, store.slots))
        )
        tables = [(cos[positions][:, None], sin[positions][:, None]) for cos, sin in rotary]
        logit_rows = torch.from_numpy(batch.logit_rows).to(self.device)
        return PreparedBatch(batch, token_ids, slots, tables, logit_rows, store.slots)

    def embed(self, table: Tensor, prepared: PreparedBatch, scale: float) -> Tensor:
        return table[prepared.token_ids].float() * scale

    def norm_project(self, x: Tensor, norm: Norm | None, packed: PackedLinear | PackedQuantized) -> Tensor:
        return linear(rms_norm(x, norm), packed)

    def rotate_and_write(
        self, qkv: Tensor, spec: AttentionSpec, layer: int, prepared: PreparedBatch, store: KVStore
    ) -> Tensor:
        cos, sin = prepared.rotary[spec.rotary]
        q, k, v = qkv.view(len(qkv), -1, spec.head_dim).split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        q = rotate(rms_norm(q, spec.query_norm), cos, sin)
        k = rotate(rms_norm(k, spec.key_norm), cos, sin)
        store.write(layer, prepared.slots, k, v)
        return q.flatten(1)

    def attend(self, q: Tensor, spec: AttentionSpec, layer: int, prepared: PreparedBatch, store: KVStore) -> Tensor:
        return attend(q, store, layer, spec, prepared.layout(spec.window))

    def project_add(
        self, x: Tensor, packed: PackedLinear | PackedQuantized, residual: Tensor, norm: Norm | None = None
    ) -> Tensor:
        return residual + rms_norm(linear(x, packed), norm)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.contiguous(), up.contiguous()
        return exactly(F.silu if activation == "silu" else partial(F.gelu, approximate="tanh"), gate) * up

    def mixture_add(
        self, x: Tensor, norm: Norm | None, mixture: Mixture, activation: Activation, residual: Tensor
    ) -> Tensor:
        return residual + mix(rms_norm(x, norm), mixture, _any_rows, partial(self.gate, activation=activation))

    def logits(
        self,
        x: Tensor,
        norm: Norm,
        packed: PackedLinear | PackedQuantized,
        prepared: PreparedBatch,
        softcap: float | None,
    ) -> Tensor:
        wanted = len(prepared.logit_rows)
        logits = linear(rms_norm(pad_rows(x[prepared.logit_rows]), norm), packed)[:wanted]
        return logits if softcap is None else exactly(torch.tanh, logits / softcap) * softcap

    def weight_reader(self, packed: Sequence[Any]) -> Callable[[], int]:
        tensors = [held.view(-1) for linear in packed for held in vars(linear).values() if isinstance(held, Tensor)]
        words = [held[: held.nbytes // 8 * 8 // held.itemsize].view(torch.int64) for held in tensors]

        def read() -> int:
            for held in words:
                held.sum().item()
            return sum(held.nbytes for held in words)

        return read

    def record(self, operations: Operations) -> Callable[[PreparedBatch, KVStore], Tensor]:
        return partial(operations, self)


def rms_norm(x: Tensor, norm: Norm | None) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, or x itself without a norm."""
    if norm is None:
        return x
    x = x.contiguous()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight


def linear(x: Tensor, packed: PackedLinear | PackedQuantized) -> Tensor:
    """x W^T + b, float32 [rows, out], for float32 x [rows, in] with rows a multiple of ROW_TILE."""
    return quantized_linear(x, packed) if isinstance(packed, PackedQuantized) else float_linear(x, packed)


def _any_rows(x: Tensor, packed: PackedLinear | PackedQuantized) -> Tensor:
    """`linear` for a number of rows that need not fill tiles."""
    return linear(pad_rows(x), packed)[: len(x)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [rows, heads, head_dim]; cos, sin: [rows, 1, rotary_dim / 2]. First and second half turn together."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
