"""Number formats of weights: what a precision means for a model's linear layers, and which one `auto` takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.kernels.quantized import QuantizedWeight
from forerun.models.parameters import stack_rows
from forerun.models.quantization import BLOCK_TYPES, fits_groups, quantize, quantize_groups, stack

Precision = Literal["fp32", "bf16", "int8", "int4"]
CachePrecision = Literal["bf16", "fp32", "int8"]
CACHE_DTYPES: dict[CachePrecision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int8": torch.int8,
}
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class WeightFormat:
    """How a decoder holds its weights.

    dtype: float32 or bfloat16, of the embedding table, the routers of mixtures and the cache, and of linear layers that
    are not quantised. bits: what floating-point weights of linear layers are quantised to; None = they are not.
    blocks: whether weights that come quantised are used as they are.
    """

    dtype: torch.dtype
    bits: Literal[4, 8] | None = None
    blocks: bool = False

    @property
    def quantized(self) -> bool:
        """Whether linear layers may be quantised."""
        return self.blocks or self.bits is not None

    def linear(self, parts: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
        """One linear layer's weight out of its parts, which stand one under the other.

        Raises WeightsError if a weight that would be quantised is not finite.
        """
        stored = [part for part in parts if isinstance(part, QuantizedWeight)]
        if self.blocks and stored:
            joined = self._around_blocks(parts, max(part.bits for part in stored))
            if joined is not None:
                return joined
        values = [part.dequantized() if isinstance(part, QuantizedWeight) else part for part in parts]
        if self.bits is None:
            return stack_rows(values, self.dtype)
        kinds = {value.dtype for value in values}
        return quantize(stack_rows(values, kinds.pop() if len(kinds) == 1 else torch.float32), self.bits)

    def _around_blocks(self, parts: Sequence[Tensor | QuantizedWeight], widest: int) -> QuantizedWeight | None:
        """Blocks as they are, and floating-point neighbours quantised to fit beside them, if that is allowed."""
        fitting: list[QuantizedWeight] = []
        for part in parts:
            if isinstance(part, QuantizedWeight):
                fitting.append(part)
            elif self.bits is None or not fits_groups(part):
                return None
            else:
                fitting.append(quantize_groups(part, 8 if widest == 8 else self.bits))
        return stack(fitting)


@dataclass(frozen=True)
class ChosenPrecision:
    """A precision, how weights are then held, and why it is this one, as a sentence."""

    name: Precision
    format: WeightFormat
    reason: str


def check_precision(asked: str) -> None:
    """Raises ConfigError if there is no precision of that name."""
    if asked != "auto" and asked not in PRECISIONS:
        raise ConfigError(f"precision {asked!r} is not supported; allowed: auto, {', '.join(PRECISIONS)}")


def check_cache_precision(asked: str) -> None:
    """Raises ConfigError if keys and values cannot be held so."""
    if asked != "auto" and asked not in CACHE_DTYPES:
        raise ConfigError(f"cache_precision {asked!r} is not supported; allowed: auto, {', '.join(CACHE_DTYPES)}")


def choose_cache_precision(asked: CachePrecision | Literal["auto"], weights: torch.dtype) -> CachePrecision:
    """What a precision of the cache means; auto is that of the weights that are not quantised."""
    if asked != "auto":
        return asked
    return "fp32" if weights is torch.float32 else "bf16"


def choose_precision(
    asked: Precision | Literal["auto"], *, native: bool, stored: Callable[[], Mapping[str, int]]
) -> ChosenPrecision:
    """What a precision means for a model.

    native: whether the kernels are native code. stored: bytes of the linear layers' weights in the model's file by
    GGUF's name of their type, empty if it is no GGUF; called only if it matters.

    int8 is one scale per output, unless most of the file are 8-bit blocks, which are kept. int4 keeps all blocks.
    auto takes the blocks of a file that mostly consists of them, and bf16 for anything else: it adds no loss.
    """
    check_precision(asked)
    if asked == "fp32":
        return ChosenPrecision("fp32", WeightFormat(torch.float32), "It was asked for.")
    if asked == "bf16":
        return ChosenPrecision("bf16", WeightFormat(torch.bfloat16), "It was asked for.")
    if asked == "auto":
        return _automatic(native, stored)
    kinds = stored()
    kept = _blocks(kinds) if asked == "int4" or _majority(kinds) == "int8" else {}
    reason = "It was asked for."
    if kept:
        reason = f"It was asked for; the file's {_names(kept)} blocks are used as they are."
    # Where all are blocks nothing is quantised, and the format is the one that auto takes: packed once for both.
    bits: Literal[4, 8] | None = None if kinds and kept == dict(kinds) else 4 if asked == "int4" else 8
    return ChosenPrecision(asked, WeightFormat(torch.bfloat16, bits, blocks=bool(kept)), reason)


def _automatic(native: bool, stored: Callable[[], Mapping[str, int]]) -> ChosenPrecision:
    plain = WeightFormat(torch.bfloat16)
    if not native:
        return ChosenPrecision("bf16", plain, "These kernels are not faster with quantised weights.")
    kinds = stored()
    majority = _majority(kinds)
    if majority is None:
        held = "is no GGUF" if not kinds else f"mostly holds {max(kinds, key=lambda name: kinds[name])}"
        return ChosenPrecision("bf16", plain, f"The model {held}, and auto adds no loss of its own.")
    rest = kinds.keys() - _blocks(kinds).keys()
    beside = f"; its {_names(rest)} weights are held in bf16" if rest else ""
    reason = f"The file's {_names(_blocks(kinds))} blocks are used as they are, which loses nothing{beside}."
    return ChosenPrecision(majority, WeightFormat(torch.bfloat16, blocks=True), reason)


_BITS = {kind.name: kind.bits for kind in BLOCK_TYPES.values()}


def _blocks(kinds: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in kinds.items() if name in _BITS}


def _majority(kinds: Mapping[str, int]) -> Literal["int8", "int4"] | None:
    """What most of a file's blocks are, if they are most of the file."""
    blocks = _blocks(kinds)
    if 2 * sum(blocks.values()) <= sum(kinds.values()):
        return None
    four = sum(size for name, size in blocks.items() if _BITS[name] == 4)
    return "int4" if 2 * four > sum(blocks.values()) else "int8"


def _names(kinds: Mapping[str, int] | set[str]) -> str:
    return " and ".join(sorted(kinds))
