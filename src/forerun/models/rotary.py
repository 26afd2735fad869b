"""Rotary position embedding: from a setting to its tables of cosines and sines, for every kind of scaling.

How a table is applied to queries and keys is the kernels' business.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ModelError, UnsupportedModelError
from forerun.models.config_fields import ConfigFields


@dataclass(frozen=True)
class Scaling:
    """How the frequencies differ from plain RoPE (arXiv 2104.09864); this base class is plain RoPE itself."""

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines."""
        return 1.0

    def frequencies(self, theta: float, dim: int, positions: Tensor) -> Tensor:
        """Angle per position: float64 [dim / 2], or [positions, dim / 2] where it depends on the position."""
        return plain_frequencies(theta, dim)

    def reach(self, context: int) -> int:
        """How many positions a model whose config.json states `context` can use."""
        return context


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Positions divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float

    def frequencies(self, theta: float, dim: int, positions: Tensor) -> Tensor:
        """See `Scaling`."""
        return plain_frequencies(theta, dim) / self.factor

    def reach(self, context: int) -> int:
        """See `Scaling`."""
        return max(context, int(context * self.factor))


@dataclass(frozen=True)
class DynamicScaling(Scaling):
    """Dynamic NTK: beyond the `trained` length the base grows with the length of the sequence.

    The length that counts for position p is p + 1, always. That is what decoding token by token computes, keys being
    cached as they were rotated; it makes a key a function of its position alone, so that neither chunks of a prompt nor
    draft trees can change a number. (A prompt longer than `trained`, run in one pass by transformers, rotates all its
    positions by the length of the prompt instead.)
    """

    factor: float
    trained: int

    def frequencies(self, theta: float, dim: int, positions: Tensor) -> Tensor:
        """See `Scaling`."""
        length = (positions + 1).clamp_min(self.trained)
        growth = self.factor * length / self.trained - (self.factor - 1)
        bases = theta * growth ** (dim / (dim - 2))
        return bases[:, None] ** -_exponents(dim)

    def reach(self, context: int) -> int:
        """See `Scaling`."""
        return max(context, int(context * self.factor))


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between are blended.

    Wavelengths count as long above trained / low, as short below trained / high (the released model's own code).
    """

    factor: float
    low: float
    high: float
    trained: int

    def frequencies(self, theta: float, dim: int, positions: Tensor) -> Tensor:
        """See `Scaling`."""
        plain = plain_frequencies(theta, dim)
        turns = self.trained * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return plain * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN (arXiv 2309.00071): dimensions that turn often are kept, rare ones interpolated.

    attention: factor on cosines and sines. fast, slow: turns over the `trained` length at which the ramp between kept
    and interpolated begins and ends. whole: it begins and ends at whole dimensions.
    """

    factor: float
    attention: float
    fast: float
    slow: float
    trained: int
    whole: bool

    @property
    def magnitude(self) -> float:
        """See `Scaling`."""
        return self.attention

    def frequencies(self, theta: float, dim: int, positions: Tensor) -> Tensor:
        """See `Scaling`."""
        low, high = self._dimension(self.fast, theta, dim), self._dimension(self.slow, theta, dim)
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low or 0.001
        interpolated = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0.0, 1.0)
        return plain_frequencies(theta, dim) * (1 - interpolated + interpolated / self.factor)

    def reach(self, context: int) -> int:
        """See `Scaling`."""
        return max(context, int(self.trained * self.factor))

    def _dimension(self, turns: float, theta: float, dim: int) -> float:
        """The dimension that makes `turns` turns over the trained length."""
        return dim * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True)
class Rotary:
    """One rotary setting of a model. dim: how many leading features of a head turn (even)."""

    dim: int
    theta: float
    scaling: Scaling = Scaling()


def plain_frequencies(theta: float, dim: int) -> Tensor:
    """Angle per position of each pair of features: float64 [dim / 2]."""
    return torch.tensor(theta, dtype=torch.float64) ** -_exponents(dim)


def rotary_table(rotary: Rotary, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 ... positions - 1, computed in float64: float32 [positions, dim / 2] each."""
    steps = torch.arange(positions, dtype=torch.float64)
    angles = steps[:, None] * rotary.scaling.frequencies(rotary.theta, rotary.dim, steps)
    magnitude = rotary.scaling.magnitude
    return (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()


def rotary_from_parameters(parameters: Mapping[str, Any], head_dim: int, context: int) -> Rotary:
    """Read a setting in the form of transformers' `rope_parameters`; older names of the same things are understood.

    context: the `max_position_embeddings` of the model, which stands in for a missing trained length.
    Raises UnsupportedModelError for a kind of scaling that is not supported, ModelError for values without sense.
    """
    fields = ConfigFields(parameters, "the RoPE parameters in config.json")
    kind = str(fields.value("rope_type") or fields.value("type") or "default")
    if fields.value("long_factor") is not None:  # some Phi-3 files call longrope by another kind's name
        kind = "longrope"
    if kind not in SCALINGS:
        raise UnsupportedModelError(
            f"config.json: RoPE scaling '{kind}' is not supported; supported are: {', '.join(SCALINGS)}"
        )
    dim = int(head_dim * (fields.optional_number("partial_rotary_factor") or 1.0))
    if dim % 2 or not 2 <= dim <= head_dim or (kind == "dynamic" and dim == 2):
        raise ModelError(
            f"config.json: RoPE turns {dim} of {head_dim} features per head; it must be an even number from 2 to "
            f"{head_dim} (at least 4 with dynamic scaling): check head_dim and partial_rotary_factor"
        )
    return Rotary(dim, fields.number("rope_theta", above=1.0), SCALINGS[kind](fields, context))


def _linear(fields: ConfigFields, context: int) -> Scaling:
    return LinearScaling(fields.number("factor"))


def _dynamic(fields: ConfigFields, context: int) -> Scaling:
    return DynamicScaling(fields.number("factor"), context)


def _llama3(fields: ConfigFields, context: int) -> Scaling:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise ModelError(f"config.json: high_freq_factor is {high:g}; it must be greater than low_freq_factor, {low:g}")
    return Llama3Scaling(fields.number("factor"), low, high, _trained(fields, context))


def _yarn(fields: ConfigFields, context: int) -> Scaling:
    trained = _trained(fields, context)
    factor = fields.optional_number("factor") or context / trained
    attention = fields.optional_number("attention_factor")
    if attention is None:
        attention = _yarn_magnitude(
            factor, *(fields.optional_number(n, above=-1.0) for n in ("mscale", "mscale_all_dim"))
        )
    return YarnScaling(
        factor=factor,
        attention=attention,
        fast=fields.optional_number("beta_fast") or 32.0,
        slow=fields.optional_number("beta_slow") or 1.0,
        trained=trained,
        whole=fields.value("truncate") is not False,
    )


def _yarn_magnitude(factor: float, weight: float | None, divisor_weight: float | None) -> float:
    """The paper's 0.1 ln(factor) + 1 (section 3.4), or the quotient of two such terms where weights are stated."""
    logarithm = 0.1 * math.log(max(factor, 1.0))
    if weight and divisor_weight:
        return (weight * logarithm + 1) / (divisor_weight * logarithm + 1)
    return logarithm + 1


def _trained(fields: ConfigFields, context: int) -> int:
    return fields.optional_integer("original_max_position_embeddings") or context


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float64) / dim


SCALINGS: Mapping[str, Callable[[ConfigFields, int], Scaling]] = {
    "default": lambda fields, context: Scaling(),
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
