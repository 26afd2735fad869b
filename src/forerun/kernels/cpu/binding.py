"""The C interface of the native library, seen from Python: loading it, its argument types, pointers that were checked.

No meaning of an operation lives here, and no raw pointer outside of here and the calls that take one.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char, c_char_p, c_float, c_int, c_int32, c_int64, c_long, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import ConfigError, EngineError
from forerun.kernels.base import Norm
from forerun.kernels.batch import IntArray
from forerun.kernels.cpu.build import BuildError, check_machine, identity

LIBRARY = Path(os.environ.get("FORERUN_CPU_LIBRARY") or Path(__file__).with_name("libforerun_cpu.so"))  # tests set it
INSTRUCTION_SETS = ("avx2", "avx512", "amx")  # from plain to best; the library knows them by index
VARIABLE = "FORERUN_CPU_ISA"
# pip keeps the wheels that it builds, one without a library too.
_AGAIN = "install forerun again (pip install --force-reinstall --no-deps --no-cache-dir)"


class NormArgument(ctypes.Structure):
    """`Norm` of operations.h."""

    _fields_ = (("weight", c_void_p), ("epsilon", c_float))


class WeightArgument(ctypes.Structure):
    """`Weight` of operations.h."""

    _fields_ = (
        ("values", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("n", "k")),
        *((name, c_int32) for name in ("format", "group", "zero", "minima", "activation_bits")),
    )


class SourceArgument(ctypes.Structure):
    """`Source` of operations.h."""

    _fields_ = tuple((name, c_void_p) for name in ("values", "scales", "minima"))


class ProjectionArgument(ctypes.Structure):
    """`Projection` of operations.h."""

    _fields_ = (
        ("x", c_void_p),
        ("row_index", c_void_p),
        ("before", NormArgument),
        ("weight", POINTER(WeightArgument)),
        ("after", NormArgument),
        ("residual", c_void_p),
        ("y", c_void_p),
        ("rows", c_int64),
        ("softcap", c_float),
    )


class EmbeddingArgument(ctypes.Structure):
    """`Embedding` of operations.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("table", "token_ids", "y")),
        *((name, c_int64) for name in ("rows", "size")),
        ("scale", c_float),
        ("bf16", c_bool),
    )


class RotationArgument(ctypes.Structure):
    """`Rotation` of operations.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "q", "keys", "values", "key_scales", "value_scales")),
        *((name, c_void_p) for name in ("cosines", "sines", "positions", "slots")),
        ("query_norm", NormArgument),
        ("key_norm", NormArgument),
        *((name, c_int64) for name in ("rows", "heads", "kv_heads", "head_dim", "half")),
        ("format", c_int32),
    )


class AttentionArgument(ctypes.Structure):
    """`Attention` of operations.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "out", "keys", "values", "key_scales", "value_scales")),
        *((name, c_void_p) for name in ("paths", "positions", "rows", "path_of")),
        *((name, c_long) for name in ("heads", "kv_heads", "head_dim", "window")),
        ("scale", c_float),
        ("softcap", c_float),
        ("format", c_int32),
    )


class GateArgument(ctypes.Structure):
    """`Gate` of operations.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("gate_up", "y")),
        *((name, c_int64) for name in ("rows", "size")),
        ("gelu", c_bool),
    )


class MixtureArgument(ctypes.Structure):
    """`Mixture` of operations.h."""

    _fields_ = (
        ("x", c_void_p),
        ("before", NormArgument),
        ("router", POINTER(WeightArgument)),
        ("gate_up", POINTER(POINTER(WeightArgument))),
        ("down", POINTER(POINTER(WeightArgument))),
        ("residual", c_void_p),
        ("y", c_void_p),
        *((name, c_int64) for name in ("rows", "experts", "top_k")),
        ("renormalise", c_bool),
        ("gelu", c_bool),
    )


class _Operation(ctypes.Union):
    _fields_ = (
        ("embedding", EmbeddingArgument),
        ("projection", ProjectionArgument),
        ("rotation", RotationArgument),
        ("attention", AttentionArgument),
        ("gate", GateArgument),
        ("mixture", MixtureArgument),
    )


class Instruction(ctypes.Structure):
    """`Instruction` of program.h."""

    _anonymous_ = ("operation",)
    _fields_ = (
        *((name, c_int32) for name in ("code", "x", "residual", "y", "layer", "rotary")),
        ("operation", _Operation),
    )


class ProgramArgument(ctypes.Structure):
    """`Program` of program.h."""

    _fields_ = (
        ("instructions", POINTER(Instruction)),
        ("count", c_int64),
        ("widths", POINTER(c_int64)),
        ("buffers", c_int64),
    )


class RotaryTableArgument(ctypes.Structure):
    """`RotaryTable` of program.h."""

    _fields_ = (("cosines", c_void_p), ("sines", c_void_p), ("half", c_int64))


class StepArgument(ctypes.Structure):
    """`Step` of program.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "logit_rows")),
        *((name, c_void_p) for name in ("order", "path_of", "groups", "paths")),
        *((name, c_int64) for name in ("rows", "wanted", "group_count")),
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, c_int64) for name in ("layer_bytes", "layer_scales")),
        ("rotary", POINTER(RotaryTableArgument)),
        ("logits", c_void_p),
        ("format", c_int32),
    )


class HashArgument(ctypes.Structure):
    """`Hash` of choice.h."""

    _fields_ = (
        *((name, c_uint64) for name in ("key", "golden")),
        ("factors", c_uint64 * 2),
        ("shifts", c_int32 * 2),
        *((name, c_float) for name in ("slope", "offset")),
    )


class MovesArgument(ctypes.Structure):
    """`Moves` of choice.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("sources", "targets")),
        *((name, c_int64) for name in ("count", "layers", "layer_bytes", "slot_bytes")),
    )


_FUNCTIONS: dict[str, tuple[object, Sequence[object]]] = {
    "forerun_supported": (c_int, ()),
    "forerun_create": (c_void_p, (c_int, c_int)),
    "forerun_destroy": (None, (c_void_p,)),
    "forerun_packed_bytes": (c_int64, (c_void_p, POINTER(WeightArgument))),
    "forerun_huge_pages": (None, (c_void_p, c_long)),
    "forerun_pack": (None, (c_void_p, POINTER(SourceArgument), POINTER(WeightArgument))),
    "forerun_linear": (c_int, (c_void_p, POINTER(ProjectionArgument))),
    "forerun_rotate": (c_int, (c_void_p, POINTER(RotationArgument))),
    "forerun_attend": (c_int, (c_void_p, POINTER(AttentionArgument), c_void_p, c_long)),
    "forerun_gate": (c_int, (c_void_p, POINTER(GateArgument))),
    "forerun_embed": (c_int, (c_void_p, POINTER(EmbeddingArgument))),
    "forerun_mixture": (c_int, (c_void_p, POINTER(MixtureArgument))),
    "forerun_run": (c_int, (c_void_p, POINTER(ProgramArgument), POINTER(StepArgument))),
    "forerun_read": (c_int64, (c_void_p, c_void_p, c_long)),
    "forerun_block_maxima": (None, (c_void_p, c_int64, c_void_p)),
    "forerun_at_least": (c_int64, (c_void_p, c_int64, c_float, c_void_p, c_int64)),
    "forerun_score_ceilings": (None, (c_void_p, c_int64, c_float, c_float, POINTER(HashArgument), c_void_p)),
    "forerun_move_slots": (c_int, (c_void_p, POINTER(MovesArgument))),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises OSError if it is not there, cannot be loaded, or was not built from these sources."""
    loaded = ctypes.CDLL(str(LIBRARY))
    built, wanted = _identity_of(loaded), identity()
    if built != wanted and built.partition("/")[0] != wanted:
        raise OSError(f"{LIBRARY.name} is of another version ({built}) than forerun ({wanted})")
    for name, (result, arguments) in _FUNCTIONS.items():
        if not hasattr(loaded, name):
            raise OSError(f"{LIBRARY.name} lacks {name}")
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def _identity_of(loaded: ctypes.CDLL) -> str:
    if not hasattr(loaded, "forerun_identity"):
        return "unknown"
    loaded.forerun_identity.restype = c_char_p
    return bytes(loaded.forerun_identity()).decode()


def supported() -> tuple[str, ...]:
    """The instruction sets that the library has code for and this machine can execute; empty without a library."""
    try:
        bits = library().forerun_supported()
    except OSError:
        return ()
    return tuple(name for index, name in enumerate(INSTRUCTION_SETS) if bits >> index & 1)


def missing_reason() -> str | None:
    """Why no instruction set is supported, and what to do about it, for people; None if there is one."""
    if supported():
        return None
    try:
        check_machine()
        library()
    except BuildError as error:
        return str(error)
    except OSError as error:
        if LIBRARY.exists():
            return f"the native library cannot be used: {error}; {_AGAIN}"
        return f"the native library was not built; install a C++17 compiler (g++), then {_AGAIN}"
    return "this processor has neither AVX2 with FMA nor AVX-512"


def forced() -> bool:
    """Whether FORERUN_CPU_ISA says what to use."""
    return bool(os.environ.get(VARIABLE, "").strip())


def chosen() -> str:
    """The instruction set to use: what FORERUN_CPU_ISA says, else the best; "reference" if there is none.

    Raises ConfigError if the variable says something that is not possible here.
    """
    possible = ("reference", *supported())
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if not wanted:
        return possible[-1]
    if wanted not in possible:
        reason = missing_reason()
        because = f" ({reason})" if reason else ""
        raise ConfigError(f"{VARIABLE} is '{wanted}'; possible here: {', '.join(possible)}{because}; set one of these")
    return wanted


@functools.cache
def context(isa: str, threads: int) -> int:
    """Handle of the thread pool and the operations of an instruction set; one per process, it lives as long as that.

    Raises EngineError if threads cannot be started.
    """
    handle = library().forerun_create(INSTRUCTION_SETS.index(isa), threads)
    if not handle:
        raise EngineError(f"cannot start {threads} threads for the native kernels; set a smaller number of threads")
    return int(handle)


def new_floats(*shape: int) -> Tensor:
    """Memory for a result: float32 on the CPU, whatever torch's defaults are set to."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def floats(x: Tensor, *shape: int) -> Tensor:
    """X as a contiguous float32 CPU tensor of that shape, so that its pointer may be handed over.

    Raises EngineError for another shape, type or device.
    """
    if x.dtype is not torch.float32 or x.shape != shape or not x.is_cpu:
        raise EngineError(
            f"a native kernel got {x.dtype} {list(x.shape)} on {x.device}; it takes torch.float32 {list(shape)} on cpu"
        )
    return x if x.is_contiguous() else x.contiguous()


def is_bf16(x: Tensor, dimensions: int) -> bool:
    """Whether x holds bfloat16 (or else float32). Raises EngineError if it is neither, or not contiguous on the CPU."""
    if x.dtype not in (torch.float32, torch.bfloat16) or x.dim() != dimensions or not x.is_contiguous() or not x.is_cpu:
        raise EngineError(
            f"a native kernel got {x.dtype} {list(x.shape)} on {x.device}; it takes contiguous float32 or bfloat16 "
            f"with {dimensions} dimensions on cpu"
        )
    return x.dtype is torch.bfloat16


def norm_argument(norm: Norm | None, size: int) -> tuple[int | None, float]:
    """Pointer to the weight of a norm over `size` features, and its epsilon; None is one without a weight."""
    if norm is None:
        return None, 0.0
    if not norm.weight.is_contiguous():
        raise EngineError("the weight of a norm must be contiguous; call .contiguous() on it when the model is loaded")
    return floats(norm.weight, size).data_ptr(), norm.epsilon


def address(array: NDArray[Any]) -> int:
    """Where the values of an array begin."""
    if array.size and array.flags.c_contiguous and array.flags.writeable:
        # In a fifth of the time that array.ctypes takes.
        return ctypes.addressof(c_char.from_buffer(array))  # type: ignore[arg-type]  # arrays have the buffer protocol
    return int(array.ctypes.data)


def integers(array: IntArray, low: int, high: int, what: str) -> IntArray:
    """The array as contiguous int64 with values in low .. high - 1. Raises EngineError naming `what` otherwise."""
    array = np.ascontiguousarray(array, np.int64)
    if array.ndim != 1 or (array.size and not _within(array, low, high)):
        raise EngineError(f"{what} of a batch must be a list of integers in {low} .. {high - 1}; got {array}")
    return array


def _within(array: IntArray, low: int, high: int) -> bool:
    """Whether all values, at least one, lie in low .. high - 1."""
    if array.size <= 32:  # a list's least and greatest cost a quarter of two calls of numpy
        values: list[int] = array.tolist()
        return low <= min(values) and max(values) < high
    if low == 0:  # as unsigned numbers the negative ones are the greatest
        return int(np.maximum.reduce(array.view(np.uint64))) < high
    return low <= int(array.min()) and int(array.max()) < high
