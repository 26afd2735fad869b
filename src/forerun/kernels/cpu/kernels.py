"""`CpuKernels`: the operations of `base.Kernels` by the native library. What it does not cover, the reference does.

Rows are never padded here: the native operations keep a row's bits whatever the number of rows.
"""

from collections.abc import Callable, Sequence
from ctypes import byref, pointer
from functools import partial

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ConfigError, EngineError
from forerun.kernels.base import Activation, AttentionSpec, Mixture, Norm
from forerun.kernels.batch import TokenBatch
from forerun.kernels.cpu import binding
from forerun.kernels.cpu.binding import (
    AttentionArgument,
    ProjectionArgument,
    RotationArgument,
    floats,
    is_bf16,
    norm_argument,
)
from forerun.kernels.cpu.prepared import PreparedBatch, StoreLayout, prepare
from forerun.kernels.cpu.weights import PackedLinear, Packer, memory_runs
from forerun.kernels.kv_store import KVStore
from forerun.kernels.mixture import mix
from forerun.kernels.quantized import ActivationBits, QuantizedWeight
from forerun.kernels.reference import ReferenceKernels
from forerun.kernels.reference.tiles import pad_rows

MAX_HEAD_DIM = 256  # of operations.h
MAX_QUERIES = 64


def load_cpu_kernels(threads: int | None = None) -> "CpuKernels | None":
    """The native kernels with that many threads (None = as many as torch uses), or None if there are none here.

    FORERUN_CPU_ISA forces an instruction set, or the reference. Raises ConfigError if it names one that is not possible
    here, or if threads < 1.
    """
    isa = binding.chosen()
    return None if isa == "reference" else CpuKernels(isa, threads)


def unavailable_reason() -> str | None:
    """Why `load_cpu_kernels` returns None, for people; None if it does not."""
    if binding.chosen() != "reference":
        return None
    if binding.supported():
        return f"{binding.VARIABLE}=reference asks for the torch reference"
    try:
        binding.library()
    except (OSError, AttributeError) as error:
        if binding.LIBRARY.exists():
            return f"the native library cannot be loaded ({error}); install forerun again"
        return "the native library was not built; install a C++17 compiler (g++) and then forerun again"
    return "this processor has neither AVX2 with FMA nor AVX-512"


class CpuKernels:
    """Native kernels of one instruction set. Every method's meaning is said in `base.Kernels`."""

    def __init__(self, isa: str, threads: int | None = None, activation_bits: ActivationBits = 16) -> None:
        threads = torch.get_num_threads() if threads is None else threads
        if threads < 1:
            raise ConfigError(f"threads is {threads}; at least 1 is needed")
        self.name, self.threads, self.activation_bits = isa, threads, activation_bits
        self._context = binding.context(isa, threads)
        self._library = binding.library()
        self._packer = Packer(self._context, activation_bits)
        self._reference = ReferenceKernels("cpu")

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
        return self._packer.pack(weight, bias)

    def prepare(self, batch: TokenBatch, store: KVStore, rotary: Sequence[tuple[Tensor, Tensor]]) -> PreparedBatch:
        return prepare(batch, store, rotary)

    def embed(self, table: Tensor, prepared: PreparedBatch, scale: float) -> Tensor:
        bf16, (entries, size) = is_bf16(table, 2), table.shape
        token_ids = binding.integers(prepared.token_ids, 0, entries, "token ids")
        x = torch.empty(prepared.rows, size)
        self._library.forerun_embed(
            self._context, table.data_ptr(), bf16, token_ids.ctypes.data, prepared.rows, size, scale, x.data_ptr()
        )
        return x

    def norm_project(self, x: Tensor, norm: Norm | None, packed: PackedLinear) -> Tensor:
        return self._linear(x, packed, before=norm)

    def rotate_and_write(
        self, qkv: Tensor, spec: AttentionSpec, layer: int, prepared: PreparedBatch, store: KVStore
    ) -> Tensor:
        size, half = spec.head_dim, prepared.rotary[spec.rotary][0].shape[1]
        qkv = floats(qkv, prepared.rows, (spec.heads + 2 * spec.kv_heads) * size)
        if size > MAX_HEAD_DIM:
            q = self._reference.rotate_and_write(pad_rows(qkv), spec, layer, prepared.reference, store)
            return q[: prepared.rows].contiguous()
        if 2 * half > size:
            raise EngineError(f"RoPE turns {2 * half} features of heads that have {size}; at most all can turn")
        keys, values = _of_the_batch(store, prepared).layer(layer, spec)
        cosines, sines = prepared.rotary[spec.rotary]
        q = torch.empty(prepared.rows, spec.heads * size)
        job = RotationArgument(
            *(qkv.data_ptr(), q.data_ptr(), keys, values, cosines.data_ptr(), sines.data_ptr()),
            *(prepared.at.positions, prepared.at.slots),
            *(norm_argument(spec.query_norm, size), norm_argument(spec.key_norm, size)),
            *(spec.heads, spec.kv_heads, size, half, prepared.layout.bf16),
        )
        self._library.forerun_rotate(self._context, byref(job), prepared.rows)
        return q

    def attend(self, q: Tensor, spec: AttentionSpec, layer: int, prepared: PreparedBatch, store: KVStore) -> Tensor:
        q = floats(q, prepared.rows, spec.heads * spec.head_dim)
        if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM or spec.heads // spec.kv_heads > MAX_QUERIES:
            out = self._reference.attend(pad_rows(q), spec, layer, prepared.reference, store)
            return out[: prepared.rows].contiguous()
        keys, values = _of_the_batch(store, prepared).layer(layer, spec)
        out, at = torch.empty(q.shape), prepared.at
        job = AttentionArgument(
            *(q.data_ptr(), out.data_ptr(), keys, values, at.paths, at.positions, at.order, at.path_of),
            *(spec.heads, spec.kv_heads, spec.head_dim, spec.window or 0),
            *(spec.scale, spec.softcap or 0.0, prepared.layout.bf16),
        )
        _check(self._library.forerun_attend(self._context, byref(job), at.groups, len(prepared.groups) - 1))
        return out

    def project_add(self, x: Tensor, packed: PackedLinear, residual: Tensor, norm: Norm | None = None) -> Tensor:
        return self._linear(x, packed, residual=residual, after=norm)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        gate_up = floats(gate_up, rows, 2 * size)
        out = torch.empty(rows, size)
        gelu = activation == "gelu_tanh"
        self._library.forerun_gate(self._context, gate_up.data_ptr(), rows, size, gelu, out.data_ptr())
        return out

    def mixture(self, x: Tensor, norm: Norm | None, mixture: Mixture, activation: Activation) -> Tensor:
        return mix(self._norm(x, norm), mixture, self._linear, partial(self.gate, activation=activation))

    def logits(
        self, x: Tensor, norm: Norm, packed: PackedLinear, prepared: PreparedBatch, softcap: float | None
    ) -> Tensor:
        x = floats(x, prepared.rows, packed.columns)
        return self._linear(x, packed, before=norm, index=prepared.logit_rows, softcap=softcap)

    def weight_reader(self, packed: Sequence[PackedLinear]) -> Callable[[], int]:
        runs = memory_runs(packed)

        def read() -> int:
            for at, size in runs:
                self._library.forerun_read(self._context, at, size)
            return sum(size for _, size in runs)

        return read

    def _norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x
        rows, size = x.shape
        x, out = floats(x, rows, size), torch.empty(rows, size)
        self._library.forerun_norm(self._context, x.data_ptr(), rows, size, *norm_argument(norm, size), out.data_ptr())
        return out

    def _linear(
        self,
        x: Tensor,
        packed: PackedLinear,
        before: Norm | None = None,
        index: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None,
        residual: Tensor | None = None,
        after: Norm | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Softcap(residual + after(before(x[index]) W^T + bias)); index: rows of x, checked by `prepare`."""
        x = floats(x, x.shape[0], packed.columns)
        rows = x.shape[0] if index is None else len(index)
        y = torch.empty(rows, packed.rows)
        if residual is not None:
            residual = floats(residual, rows, packed.rows)
        job = ProjectionArgument(
            *(x.data_ptr(), None if index is None else index.ctypes.data),
            *(norm_argument(before, packed.columns), pointer(packed.argument), norm_argument(after, packed.rows)),
            *(None if residual is None else residual.data_ptr(), y.data_ptr(), rows, softcap or 0.0),
        )
        _check(self._library.forerun_linear(self._context, byref(job)))
        return y


def _of_the_batch(store: KVStore, prepared: PreparedBatch) -> StoreLayout:
    if store is not prepared.store:
        raise EngineError("a batch works on the store that it was prepared for; prepare it again for another one")
    return prepared.layout


def _check(failed: int) -> None:
    if failed:
        raise EngineError("no memory for a native kernel's working space; lower the tokens per step")
