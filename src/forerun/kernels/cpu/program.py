"""A model's operations, recorded once and replayed by the library in one call per step.

`Recorder` stands in for the kernels while the model's code runs once, on values that have a width and no rows; what it
was asked for becomes the list that program.cpp goes through. Which batch it is, and where keys and values lie, the step
says. Nothing here computes anything.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_int64
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from forerun.errors import EngineError
from forerun.kernels.base import Activation, AttentionSpec, Kernels, Mixture, Norm, Operations
from forerun.kernels.batch import IntArray
from forerun.kernels.cpu import arguments
from forerun.kernels.cpu.binding import (
    Instruction,
    ProgramArgument,
    RotaryTableArgument,
    StepArgument,
    address,
    integers,
    library,
    new_floats,
)
from forerun.kernels.cpu.prepared import PreparedBatch
from forerun.kernels.cpu.weights import PackedLinear
from forerun.kernels.kv_store import KVStore

EMBED, LINEAR, ROTATE, ATTEND, GATE, MIXTURE = range(6)  # `Code` of program.h
NOTHING, LOGITS = -1, -2


class UncoveredError(EngineError):
    """The model asks for something that a program does not have; it then runs operation by operation."""


class Value:
    """What an operation returned while it was recorded: float32 [rows of the batch, width], or the logits.

    Anything but handing it to another operation raises UncoveredError.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def _uncovered(self, *_: Any, **__: Any) -> NoReturn:
        raise UncoveredError("a program has no other operations on values than those of the kernels")

    __getattr__ = __getitem__ = __len__ = __bool__ = __iter__ = __neg__ = _uncovered
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _uncovered

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise UncoveredError("a program has no operations of torch")


@dataclass(frozen=True, eq=False)
class _Recorded:
    code: int
    argument: Any
    x: Value | None
    residual: Value | None
    y: Value
    layer: int
    rotary: int


@dataclass
class Recorder:
    """`base.Kernels` for one call of a model's operations. Batch and store are not looked at.

    held: what the instructions point to. heads: (kv_heads, head_dim) of the layers. turned: (rotary table, head_dim).
    """

    name: str
    instructions: list[_Recorded] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    layers: int = 0
    entries: int = 0
    heads: set[tuple[int, int]] = field(default_factory=set)
    turned: set[tuple[int, int]] = field(default_factory=set)
    logits_value: Value | None = None

    def pack(self, *_: Any) -> NoReturn:
        raise UncoveredError("weights are packed when the model is loaded")

    prepare = record = weight_reader = pack

    def embed(self, table: Tensor, _: Any, scale: float) -> Any:
        self.entries = min(len(table), self.entries or len(table))
        return self._add(EMBED, arguments.embedding(table, scale), table.shape[1], held=table)

    def norm_project(self, x: Any, norm: Norm | None, packed: PackedLinear) -> Any:
        return self._linear(x, packed, norm)

    def rotate_and_write(self, qkv: Any, spec: AttentionSpec, layer: int, _: Any, __: Any) -> Any:
        _expect(qkv, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
        if not arguments.covers_rotation(spec):
            raise UncoveredError(f"heads of {spec.head_dim} features")
        self.turned.add((spec.rotary, spec.head_dim))
        return self._attention(ROTATE, arguments.rotation(spec), qkv, spec, layer)

    def attend(self, q: Any, spec: AttentionSpec, layer: int, _: Any, __: Any) -> Any:
        _expect(q, spec.heads * spec.head_dim)
        if not arguments.covers_attention(spec):
            raise UncoveredError(f"{spec.heads} heads of {spec.head_dim} features, {spec.kv_heads} of them with keys")
        return self._attention(ATTEND, arguments.attention(spec), q, spec, layer)

    def project_add(self, x: Any, packed: PackedLinear, residual: Any, norm: Norm | None = None) -> Any:
        return self._linear(x, packed, residual=_expect(residual, packed.rows), after=norm)

    def gate(self, gate_up: Any, activation: Activation) -> Any:
        size = gate_up.width // 2
        return self._add(GATE, arguments.gate(size, activation), size, _expect(gate_up, 2 * size))

    def mixture_add(self, x: Any, norm: Norm | None, mixture: Mixture, activation: Activation, residual: Any) -> Any:
        if not arguments.covers_mixture(mixture):
            raise UncoveredError("experts that take their inputs in different forms")
        features = mixture.router.columns
        argument = arguments.mixture(mixture, norm, activation)
        values = _expect(x, features), _expect(residual, features)
        return self._add(MIXTURE, argument, features, *values, held=(norm, mixture, argument))

    def logits(self, x: Any, norm: Norm, packed: PackedLinear, _: Any, softcap: float | None) -> Any:
        if self.logits_value is not None:
            raise UncoveredError("logits are asked for twice")
        self.logits_value = self._linear(x, packed, norm, softcap=softcap)
        return self.logits_value

    def _linear(
        self,
        x: Any,
        packed: PackedLinear,
        before: Norm | None = None,
        residual: Any = None,
        after: Norm | None = None,
        softcap: float | None = None,
    ) -> Any:
        argument = arguments.projection(packed, before, after, softcap)
        x = _expect(x, packed.columns)
        return self._add(LINEAR, argument, packed.rows, x, residual, held=(packed, before, after))

    def _attention(self, code: int, argument: Any, x: Any, spec: AttentionSpec, layer: int) -> Any:
        self.layers = max(self.layers, layer + 1)
        self.heads.add((spec.kv_heads, spec.head_dim))
        return self._add(code, argument, spec.heads * spec.head_dim, x, held=spec, layer=layer, rotary=spec.rotary)

    def _add(
        self,
        code: int,
        argument: Any,
        width: int,
        x: Value | None = None,
        residual: Value | None = None,
        held: Any = None,
        layer: int = 0,
        rotary: int = 0,
    ) -> Value:
        if self.logits_value in (x, residual) and self.logits_value is not None:
            raise UncoveredError("the logits are the last of the operations")
        y = Value(width)
        self.instructions.append(_Recorded(code, argument, x, residual, y, layer, rotary))
        self.held.append(held)
        return y


class Program:
    """Recorded operations, ready to be replayed: a function of a prepared batch and its store."""

    def __init__(self, context: int, recorder: Recorder, result: Any) -> None:
        if recorder.logits_value is None or result is not recorder.logits_value:
            raise UncoveredError("a program ends with the logits")
        numbers, widths = assign_buffers(recorder.instructions, result)
        instructions = (Instruction * len(recorder.instructions))()
        for into, recorded in zip(instructions, recorder.instructions, strict=True):
            into.code, into.layer, into.rotary = recorded.code, recorded.layer, recorded.rotary
            into.x, into.residual, into.y = (
                NOTHING if value is None else numbers[value] for value in (recorded.x, recorded.residual, recorded.y)
            )
            field_type = type(recorded.argument)
            ctypes.pointer(field_type.from_buffer(into, Instruction.operation.offset))[0] = recorded.argument
        self.widths = widths
        self._argument = ProgramArgument(instructions, len(instructions), (c_int64 * len(widths))(*widths), len(widths))
        self._context, self._run = context, library().forerun_run
        self._held = (recorder.held, instructions)
        self._layers, self._entries, self._heads = recorder.layers, recorder.entries, recorder.heads
        self._turned, self._vocabulary = recorder.turned, result.width
        self._tables: Sequence[Tensor] = ()
        self._table_array = (RotaryTableArgument * 0)()

    def __call__(self, prepared: PreparedBatch, store: KVStore) -> Tensor:
        """Run the batch. Float32 [wanted, vocabulary]. Raises EngineError if batch or store do not fit the model."""
        token_ids = self._check(prepared, store)
        layout, at = prepared.layout, prepared.at
        wanted = len(prepared.logit_rows)
        logits = new_floats(wanted, self._vocabulary)
        step = StepArgument(
            *(address(token_ids), at.positions, at.slots, at.logit_rows, at.order, at.path_of, at.groups, at.paths),
            *(prepared.rows, wanted, len(prepared.groups) - 1),
            *(layout.keys, layout.values, layout.key_scales, layout.value_scales),
            *(layout.layer_bytes, layout.layer_scales, self._rotary(prepared.rotary)),
            *(logits.data_ptr(), layout.format),
        )
        if self._run(self._context, byref(self._argument), byref(step)):
            raise EngineError("no memory for a native step's working space; lower the tokens per step")
        return logits

    def _check(self, prepared: PreparedBatch, store: KVStore) -> IntArray:
        """The token ids, contiguous."""
        prepared.of(store).check(self._layers, self._heads)
        for rotary, head_dim in self._turned:
            prepared.check_rotary(rotary, head_dim)
        return integers(prepared.token_ids, 0, self._entries, "token ids")

    def _rotary(self, tables: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Where the tables lie; the same tables come with every batch."""
        flat = [table for pair in tables for table in pair]
        if len(flat) != len(self._tables) or any(new is not old for new, old in zip(flat, self._tables, strict=True)):
            rows = [RotaryTableArgument(c.data_ptr(), s.data_ptr(), c.shape[1]) for c, s in tables]
            self._tables, self._table_array = flat, (RotaryTableArgument * len(rows))(*rows)
        return self._table_array


class Recorded:
    """`Kernels.record` of the native kernels: records at the first batch, or runs one by one what cannot be."""

    def __init__(self, kernels: Kernels, context: int, operations: Operations) -> None:
        self._begin: Callable[[], Callable[[Any, KVStore], Tensor]] | None = partial(
            _program_of, kernels, context, operations
        )
        self._run: Callable[[Any, KVStore], Tensor] | None = None

    def __call__(self, prepared: Any, store: KVStore) -> Tensor:
        """Run the batch."""
        if self._run is None:
            assert self._begin is not None
            self._run, self._begin = self._begin(), None  # the model's code is not needed, nor held, any more
        return self._run(prepared, store)

    @property
    def program(self) -> Program | None:
        """The program, if there is one by now."""
        return self._run if isinstance(self._run, Program) else None


def _program_of(kernels: Kernels, context: int, operations: Operations) -> Callable[[Any, KVStore], Tensor]:
    recorder: Any = Recorder(kernels.name)
    nothing: Any = None
    try:
        return Program(context, recorder, operations(recorder, nothing, nothing))
    except UncoveredError:
        return partial(operations, kernels)


def assign_buffers(instructions: Sequence[_Recorded], result: Value) -> tuple[dict[Value, int], list[int]]:
    """A buffer for every value, LOGITS for the result; and how wide each buffer is.

    A value keeps its buffer from the instruction that makes it to the last that reads it, that one included; of the
    buffers that are free the next value takes the one that fits best.
    """
    last = {value: number for number, i in enumerate(instructions) for value in (i.x, i.residual) if value is not None}
    numbers: dict[Value, int] = {}
    widths: list[int] = []
    free: list[int] = []
    for number, instruction in enumerate(instructions):
        y = instruction.y
        if y is result:
            numbers[y] = LOGITS
        else:
            if not free:
                free.append(len(widths))
                widths.append(0)
            # The narrowest that is wide enough, or else the widest, which then grows.
            best = min(free, key=lambda b: (widths[b] < y.width, widths[b] if widths[b] >= y.width else -widths[b]))
            free.remove(best)
            widths[best] = max(widths[best], y.width)
            numbers[y] = best
        read = {value for value in (instruction.x, instruction.residual) if value is not None}
        done = [value for value in (*read, y) if last.get(value, number) == number]
        free.extend(numbers[value] for value in done if value is not result)
    return numbers, widths


def _expect(x: Any, width: int) -> Value:
    if not isinstance(x, Value) or x.width != width:
        raise EngineError(f"a native kernel got {getattr(x, 'width', type(x))} features; it takes {width}")
    return x
