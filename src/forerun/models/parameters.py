"""Which tensors a model is made of: their names in Hugging Face files, their shapes, and which make one packed layer.

Derived from an `Architecture` alone; reading files and arithmetic live elsewhere.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import WeightsError
from forerun.kernels.quantized import QuantizedWeight
from forerun.models.architecture import Architecture

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LinearParts:
    """The tensors whose rows, one under the other, make one linear layer.

    names: without ".weight" or ".bias". rows: how many output features each has. columns: input features.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool = False


@dataclass(frozen=True)
class MlpParts:
    """The two linear layers of a gated MLP, or of one expert."""

    gate_up: LinearParts
    down: LinearParts


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer. Norms by the full name of their weight, None where the family has none.

    The MLP is either dense, or a router and experts.
    """

    attention_norm: str
    qkv: LinearParts
    query_norm: str | None
    key_norm: str | None
    output: LinearParts
    output_norm: str | None
    mlp_norm: str
    dense: MlpParts | None
    down_norm: str | None
    router: LinearParts | None = None
    experts: tuple[MlpParts, ...] = ()

    @property
    def linears(self) -> Iterator[LinearParts]:
        """Every linear layer."""
        yield from (self.qkv, self.output)
        if self.router is not None:
            yield self.router
        for mlp in (self.dense, *self.experts):
            if mlp is not None:
                yield from (mlp.gate_up, mlp.down)


def layer_parts(architecture: Architecture, layer: int) -> LayerParts:
    """The tensors of one layer."""
    a, at = architecture, f"model.layers.{layer}."
    sandwich = a.sandwich_norms
    dense = None if a.layers[layer].sparse else _dense_parts(a, at)
    router, experts = _mixture_parts(a, at) if dense is None else (None, ())
    return LayerParts(
        attention_norm=f"{at}input_layernorm.weight",
        qkv=_qkv(a, at),
        query_norm=f"{at}self_attn.q_norm.weight" if a.head_norms else None,
        key_norm=f"{at}self_attn.k_norm.weight" if a.head_norms else None,
        output=LinearParts((f"{at}self_attn.o_proj",), (a.hidden_size,), a.heads * a.head_dim, a.output_bias),
        output_norm=f"{at}post_attention_layernorm.weight" if sandwich else None,
        mlp_norm=f"{at}{'pre_feedforward' if sandwich else 'post_attention'}_layernorm.weight",
        dense=dense,
        down_norm=f"{at}post_feedforward_layernorm.weight" if sandwich else None,
        router=router,
        experts=experts,
    )


def tensor_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name and shape of every tensor of the model, under its name in a file of the plain text model."""
    hidden = architecture.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (architecture.vocab_size, hidden), FINAL_NORM: (hidden,)}
    for layer in range(len(architecture.layers)):
        parts = layer_parts(architecture, layer)
        for linear in parts.linears:
            shapes.update(linear_shapes(linear))
        for name in (parts.attention_norm, parts.output_norm, parts.mlp_norm, parts.down_norm):
            shapes.update({name: (hidden,)} if name else {})
        for name in (parts.query_norm, parts.key_norm):
            shapes.update({name: (architecture.head_dim,)} if name else {})
    if not architecture.tied_embeddings:
        shapes[f"{LM_HEAD}.weight"] = (architecture.vocab_size, hidden)
    return shapes


def parameter_count(architecture: Architecture) -> int:
    """How many numbers the model's weights are, tied embeddings counted once."""
    return sum(math.prod(shape) for shape in tensor_shapes(architecture).values())


def norm_bytes(architecture: Architecture) -> int:
    """Bytes that the norms take, in float32."""
    return 4 * sum(shape[0] for name, shape in tensor_shapes(architecture).items() if name.endswith("norm.weight"))


def quantizable(architecture: Architecture) -> set[str]:
    """Names of the matrices that may be held quantised: linear layers without the routers, and an untied head."""
    names = set() if architecture.tied_embeddings else {f"{LM_HEAD}.weight"}
    for layer in range(len(architecture.layers)):
        parts = layer_parts(architecture, layer)
        names.update(
            f"{name}.weight" for linear in parts.linears if linear is not parts.router for name in linear.names
        )
    return names


def linear_shapes(linear: LinearParts) -> dict[str, Shape]:
    """Name and shape of each tensor of a linear layer."""
    shapes: dict[str, Shape] = {}
    for name, rows in zip(linear.names, linear.rows, strict=True):
        shapes[f"{name}.weight"] = (rows, linear.columns)
        if linear.bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


class Weights:
    """A model's tensors under the names of `tensor_shapes`, checked as they are taken.

    Understands files of Gemma 3 with vision (the text model under a prefix) and transformers 5's stacked experts. Each
    tensor is looked up once, and no reference to it is kept. stored: weights of linear layers that come in another form
    than `tensors`, and go before them; that of the embedding table is the tied head's.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        architecture: Architecture,
        stored: Mapping[str, Tensor | QuantizedWeight] | None = None,
    ) -> None:
        self._tensors = tensors
        self._stored = stored or {}
        self._shapes = tensor_shapes(architecture)
        self._prefix = _text_model_prefix(tensors)
        self._architecture = architecture
        self._refuse_leftovers()

    def take(self, name: str) -> Tensor:
        """The tensor of that name, as the file has it. Raises WeightsError if it is missing or not what it must be."""
        expected = self._shapes[name]
        stored = self._stored_name(name)
        tensor = self._tensors[stored] if stored in self._tensors else self._restacked(name)
        if tensor is None:
            raise WeightsError(
                f"the weights lack the tensor '{stored}' of shape {list(expected)}; fetch the model again, or check "
                "that config.json belongs to these weights"
            )
        if tuple(tensor.shape) != expected or not tensor.is_floating_point():
            raise WeightsError(
                f"tensor '{stored}' has shape {list(tensor.shape)} and type {tensor.dtype}; expected is shape "
                f"{list(expected)} of floating point numbers: check that config.json belongs to these weights"
            )
        return tensor.detach()

    def take_linear(self, name: str) -> Tensor | QuantizedWeight:
        """The weight of a linear layer, in the form in which it is stored. Raises WeightsError as `take` does."""
        if name not in self._stored:
            return self.take(name)
        weight, expected = self._stored[name], self._shapes[name]
        if tuple(weight.shape) != expected:
            raise WeightsError(
                f"tensor '{name}' has shape {list(weight.shape)}; expected is {list(expected)}: check that the "
                "settings in the file belong to its weights"
            )
        return weight

    def is_stored(self, name: str) -> bool:
        """Whether `take_linear` finds that weight in another form than `take`."""
        return name in self._stored

    def _stored_name(self, name: str) -> str:
        prefix = self._prefix
        if name.startswith("model."):
            return prefix + name.removeprefix("model.")
        # the head stands beside the text model: language_model.lm_head beside language_model.model
        beside = prefix.removesuffix("model.") + name
        return beside if beside in self._tensors else name

    def _restacked(self, name: str) -> Tensor | None:
        """A tensor of a mixture as transformers 5 holds it in memory: one [experts, out, in] for all, gate above up."""
        experts = self._architecture.experts
        if experts is None or f".{experts.names.block}." not in name:
            return None
        layer, _, rest = name.partition(f"{experts.names.block}.")
        if rest == "gate.weight":
            return self._tensors.get(self._stored_name(f"{layer}mlp.gate.weight"))
        if not rest.startswith("experts."):
            return None
        _, expert, role, _ = rest.split(".")
        stack = "down_proj" if role == experts.names.down else "gate_up_proj"
        stacked = self._tensors.get(self._stored_name(f"{layer}mlp.experts.{stack}"))
        if stacked is None or stacked.dim() != 3 or len(stacked) != experts.count:
            return None
        matrix, size = stacked[int(expert)], experts.intermediate_size
        return {experts.names.gate: matrix[:size], experts.names.up: matrix[size:]}.get(role, matrix)

    def _refuse_leftovers(self) -> None:
        """Biases and norms of the file that the architecture has no place for would change the answer unseen."""
        known = {self._stored_name(name) for name in self._shapes}
        first = f"{self._prefix}layers."
        for name in self._tensors:
            if name.startswith(first) and name.endswith((".bias", "norm.weight")) and name not in known:
                layer = name.removeprefix(first).partition(".")[0]
                if layer.isdigit() and int(layer) < len(self._architecture.layers):
                    raise WeightsError(
                        f"the weights hold a tensor '{name}' that a {self._architecture.family} with this config.json "
                        "does not have; check that config.json belongs to these weights"
                    )


def _text_model_prefix(tensors: Mapping[str, Tensor]) -> str:
    """What stands before `embed_tokens` in this file's names."""
    prefixes = ("model.", "language_model.model.", "model.language_model.", "")
    return next((prefix for prefix in prefixes if f"{prefix}embed_tokens.weight" in tensors), "model.")


def stack_rows(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The parts one under the other in `dtype`; a single part of that type is not copied."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    return torch.cat([part.to(dtype) for part in parts])


def _qkv(a: Architecture, at: str) -> LinearParts:
    rows = (a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim)
    if a.fused:
        return LinearParts((f"{at}self_attn.qkv_proj",), (sum(rows),), a.hidden_size, a.qkv_bias)
    names = (f"{at}self_attn.q_proj", f"{at}self_attn.k_proj", f"{at}self_attn.v_proj")
    return LinearParts(names, rows, a.hidden_size, a.qkv_bias)


def _dense_parts(a: Architecture, at: str) -> MlpParts:
    names, inner = (f"{at}mlp.gate_proj", f"{at}mlp.up_proj"), a.intermediate_size
    gate_up = LinearParts(names, (inner, inner), a.hidden_size, a.mlp_bias)
    if a.fused:
        gate_up = LinearParts((f"{at}mlp.gate_up_proj",), (2 * inner,), a.hidden_size, a.mlp_bias)
    return MlpParts(gate_up, LinearParts((f"{at}mlp.down_proj",), (a.hidden_size,), inner, a.mlp_bias))


def _mixture_parts(a: Architecture, at: str) -> tuple[LinearParts, tuple[MlpParts, ...]]:
    assert a.experts is not None
    names, inner = a.experts.names, a.experts.intermediate_size
    experts = []
    for number in range(a.experts.count):
        expert = f"{at}{names.block}.experts.{number}."
        gate_up = LinearParts((expert + names.gate, expert + names.up), (inner, inner), a.hidden_size)
        experts.append(MlpParts(gate_up, LinearParts((expert + names.down,), (a.hidden_size,), inner)))
    return LinearParts((f"{at}{names.block}.gate",), (a.experts.count,), a.hidden_size), tuple(experts)
