"""`CpuKernels`: the operations of `base.Kernels` by the native library. What it does not cover, the reference does.

Rows are never padded here: the native operations keep a row's bits whatever the number of rows.
"""

import logging
from collections.abc import Callable, Sequence
from ctypes import byref
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ConfigError, EngineError
from forerun.kernels.base import Activation, AttentionSpec, Mixture, Norm, Operations
from forerun.kernels.batch import TokenBatch
from forerun.kernels.cpu import arguments, binding
from forerun.kernels.cpu.binding import floats, new_floats
from forerun.kernels.cpu.prepared import PreparedBatch, prepare
from forerun.kernels.cpu.program import Recorded
from forerun.kernels.cpu.weights import PackedLinear, Packer, memory_runs
from forerun.kernels.kv_store import KVStore
from forerun.kernels.mixture import mix
from forerun.kernels.quantized import ActivationBits, QuantizedWeight
from forerun.kernels.reference import ReferenceKernels
from forerun.kernels.reference.kernels import rms_norm
from forerun.kernels.reference.tiles import pad_rows

logger = logging.getLogger(__name__)

MOST_THREADS = 1024  # more than any machine that this is for


def load_cpu_kernels(threads: int | None = None, activation_bits: ActivationBits = 16) -> "CpuKernels | None":
    """The native kernels with that many threads (None = as many as torch uses), or None if there are none here.

    FORERUN_CPU_ISA forces an instruction set, or the reference; else it is the best that computes rightly. Raises
    ConfigError if it names one that is not possible here, or if threads is out of 1 .. MOST_THREADS.
    """
    isa = binding.chosen()
    if isa == "reference":
        return None
    if not binding.forced():
        possible = binding.supported()
        isa = next((name for name in reversed(possible) if name == possible[0] or _computes_rightly(name)), isa)
    return CpuKernels(isa, threads, activation_bits)


@cache
def _computes_rightly(isa: str) -> bool:
    """A small product on this instruction set, compared with the reference: a machine may differ from what it says."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (48, 192), generator=generator).to(torch.int8)
    weight, x = (
        QuantizedWeight(codes, torch.rand(48, generator=generator, dtype=torch.float32)),
        torch.randn(17, 192, generator=generator, dtype=torch.float32),
    )
    native, reference = CpuKernels(isa, 1), ReferenceKernels("cpu")
    right = torch.equal(
        native.norm_project(x, None, native.pack(weight)), reference.norm_project(x, None, reference.pack(weight))
    )
    plain = weight.dequantized().bfloat16()
    product, true = native.norm_project(x, None, native.pack(plain)), x @ plain.float().T
    right = right and bool((product - true).norm() < 1e-3 * true.norm())
    if not right:
        logger.warning("the %s kernels compute wrongly on this processor and are not used; please report it", isa)
    return right


def unavailable_reason() -> str | None:
    """Why `load_cpu_kernels` returns None, for people; None if it does not."""
    if binding.chosen() != "reference":
        return None
    return binding.missing_reason() or f"{binding.VARIABLE}=reference asks for the torch reference"


class CpuKernels:
    """Native kernels of one instruction set. Every method's meaning is said in `base.Kernels`.

    program: whether a model's operations are recorded and replayed in one call per step, or called one by one.
    """

    def __init__(
        self, isa: str, threads: int | None = None, activation_bits: ActivationBits = 16, *, program: bool = True
    ) -> None:
        threads = torch.get_num_threads() if threads is None else threads
        if not 1 <= threads <= MOST_THREADS:
            raise ConfigError(f"threads is {threads}; allowed are 1 .. {MOST_THREADS}")
        self.name, self.threads, self.activation_bits, self._records = isa, threads, activation_bits, program
        self._context = binding.context(isa, threads)
        self._library = binding.library()
        self._packer = Packer(self._context, activation_bits)
        self._reference = ReferenceKernels("cpu")

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
        return self._packer.pack(weight, bias)

    def prepare(self, batch: TokenBatch, store: KVStore, rotary: Sequence[tuple[Tensor, Tensor]]) -> PreparedBatch:
        return prepare(batch, store, rotary)

    def record(self, operations: Operations) -> Callable[[Any, KVStore], Tensor]:
        return Recorded(self, self._context, operations) if self._records else partial(operations, self)

    def embed(self, table: Tensor, prepared: PreparedBatch, scale: float) -> Tensor:
        job = arguments.embedding(table, scale)
        token_ids = binding.integers(prepared.token_ids, 0, len(table), "token ids")
        x = new_floats(prepared.rows, table.shape[1])
        job.token_ids, job.y, job.rows = token_ids.ctypes.data, x.data_ptr(), prepared.rows
        _check(self._library.forerun_embed(self._context, byref(job)))
        return x

    def norm_project(self, x: Tensor, norm: Norm | None, packed: PackedLinear) -> Tensor:
        return self._linear(x, packed, before=norm)

    def rotate_and_write(
        self, qkv: Tensor, spec: AttentionSpec, layer: int, prepared: PreparedBatch, store: KVStore
    ) -> Tensor:
        size = spec.head_dim
        qkv = floats(qkv, prepared.rows, (spec.heads + 2 * spec.kv_heads) * size)
        if not arguments.covers_rotation(spec):
            q = self._reference.rotate_and_write(pad_rows(qkv), spec, layer, prepared.reference, store)
            return q[: prepared.rows].contiguous()
        q, job = new_floats(prepared.rows, spec.heads * size), arguments.rotation(spec)
        job.qkv, job.q, job.rows = qkv.data_ptr(), q.data_ptr(), prepared.rows
        prepared.of(store).place(job, layer, spec)
        cosines, sines = prepared.check_rotary(spec.rotary, size)
        job.cosines, job.sines, job.half = cosines.data_ptr(), sines.data_ptr(), cosines.shape[1]
        job.positions, job.slots = prepared.at.positions, prepared.at.slots
        _check(self._library.forerun_rotate(self._context, byref(job)))
        return q

    def attend(self, q: Tensor, spec: AttentionSpec, layer: int, prepared: PreparedBatch, store: KVStore) -> Tensor:
        q = floats(q, prepared.rows, spec.heads * spec.head_dim)
        if not arguments.covers_attention(spec):
            out = self._reference.attend(pad_rows(q), spec, layer, prepared.reference, store)
            return out[: prepared.rows].contiguous()
        out, at, job = new_floats(*q.shape), prepared.at, arguments.attention(spec)
        job.q, job.out = q.data_ptr(), out.data_ptr()
        prepared.of(store).place(job, layer, spec)
        job.paths, job.positions, job.rows, job.path_of = at.paths, at.positions, at.order, at.path_of
        _check(self._library.forerun_attend(self._context, byref(job), at.groups, len(prepared.groups) - 1))
        return out

    def project_add(self, x: Tensor, packed: PackedLinear, residual: Tensor, norm: Norm | None = None) -> Tensor:
        return self._linear(x, packed, residual=residual, after=norm)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        gate_up, out, job = floats(gate_up, rows, 2 * size), new_floats(rows, size), arguments.gate(size, activation)
        job.gate_up, job.y, job.rows = gate_up.data_ptr(), out.data_ptr(), rows
        _check(self._library.forerun_gate(self._context, byref(job)))
        return out

    def mixture_add(
        self, x: Tensor, norm: Norm | None, mixture: Mixture, activation: Activation, residual: Tensor
    ) -> Tensor:
        if not arguments.covers_mixture(mixture):
            gate = partial(self.gate, activation=activation)
            return residual + mix(rms_norm(x, norm), mixture, self._linear, gate)
        job, shape = arguments.mixture(mixture, norm, activation), (x.shape[0], mixture.router.columns)
        x, residual, y = floats(x, *shape), floats(residual, *shape), new_floats(*shape)
        job.x, job.residual, job.y, job.rows = x.data_ptr(), residual.data_ptr(), y.data_ptr(), shape[0]
        _check(self._library.forerun_mixture(self._context, byref(job)))
        return y

    def logits(
        self, x: Tensor, norm: Norm, packed: PackedLinear, prepared: PreparedBatch, softcap: float | None
    ) -> Tensor:
        x = floats(x, prepared.rows, packed.columns)
        return self._linear(x, packed, before=norm, index=prepared.logit_rows, softcap=softcap)

    def weight_reader(self, packed: Sequence[PackedLinear]) -> Callable[[], int]:
        held = tuple(packed)  # the weights live as long as their reader
        runs = memory_runs(held)

        def read(_held: object = held) -> int:
            for at, size in runs:
                self._library.forerun_read(self._context, at, size)
            return sum(size for _, size in runs)

        return read

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
        y = new_floats(rows, packed.rows)
        if residual is not None:
            residual = floats(residual, rows, packed.rows)
        job = arguments.projection(packed, before, after, softcap)
        job.x, job.y, job.rows = x.data_ptr(), y.data_ptr(), rows
        job.row_index = None if index is None else index.ctypes.data
        job.residual = None if residual is None else residual.data_ptr()
        _check(self._library.forerun_linear(self._context, byref(job)))
        return y


def _check(failed: int) -> None:
    if failed:
        raise EngineError("no memory for a native kernel's working space; lower the tokens per step")
