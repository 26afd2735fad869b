"""The one decoder: packs the weights of an `Architecture` and runs a `TokenBatch` through them.

It knows nothing of requests, sampling or speculation, and no family by name: differences are data.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError, WeightsError
from forerun.kernels.base import AttentionSpec, Kernels, Mixture, Norm
from forerun.kernels.batch import TokenBatch
from forerun.kernels.kv_store import KVStore, bytes_per_head
from forerun.kernels.linears import Linears, MadeLinear
from forerun.kernels.quantized import QuantizedWeight
from forerun.models.architecture import Architecture
from forerun.models.parameters import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    LayerParts,
    LinearParts,
    Weights,
    layer_parts,
    norm_bytes,
    stack_rows,
)
from forerun.models.precision import WeightFormat
from forerun.models.rotary import rotary_table

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer, packed. Either gate_up and down are set, or mixture."""

    attention: AttentionSpec
    attention_norm: Norm
    qkv: Any
    output: Any
    output_norm: Norm | None
    mlp_norm: Norm
    gate_up: Any
    down: Any
    down_norm: Norm | None
    mixture: Mixture | None


class Decoder:
    """A decoder-only transformer.

    architecture: what it is. tensors: its weights under their Hugging Face names; each is read once, and the mapping is
    not kept, so that it may be a file that is read lazily. weight_format: how they are held.
    context_length: positions to provide for, at most (and if None) as many as the architecture allows.
    cache_dtype: of keys and values, float32, bfloat16 or int8; None = as the weights that are not quantised.
    stored: see `Weights`. linears: packs the linear layers; None = each anew.
    weight_bytes: of the weights as they are held, a floating-point head tied to the embedding table counted once.
    layers, final_norm, lm_head: its packed parts, for reading.

    Raises WeightsError for a missing or wrongly shaped tensor, ConfigError for a dtype other than float32 and bfloat16.
    """

    def __init__(
        self,
        architecture: Architecture,
        tensors: Mapping[str, Tensor],
        kernels: Kernels,
        weight_format: WeightFormat,
        device: torch.device | str = "cpu",
        context_length: int | None = None,
        *,
        cache_dtype: torch.dtype | None = None,
        stored: Mapping[str, Tensor | QuantizedWeight] | None = None,
        linears: Linears | None = None,
    ) -> None:
        dtype = weight_format.dtype
        if dtype not in DTYPES:
            raise ConfigError(f"weights cannot be held as {dtype}; allowed are {', '.join(map(str, DTYPES))}")
        self.architecture = architecture
        self.kernels = kernels
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype
        self.device = torch.device(device)
        self._context = min(context_length or architecture.context_limit, architecture.context_limit)
        linears = linears or Linears(kernels)
        packer = _Packer(architecture, Weights(tensors, architecture, stored), linears, weight_format, self.device)
        table = packer.weights.take(EMBEDDING)
        self._embedding = table.to(self.device, dtype)
        self.layers = [packer.layer(number) for number in range(len(architecture.layers))]
        self.final_norm = packer.norm(FINAL_NORM)
        self.lm_head = packer.head(table, self._embedding)
        linears.finish()
        self.weight_bytes = linears.weight_bytes + norm_bytes(architecture)
        self.weight_bytes += 0 if packer.head_is_table else self._embedding.nbytes
        self._rotary = [
            (cos.to(self.device), sin.to(self.device))
            for cos, sin in (rotary_table(rotary, self._context) for rotary in architecture.rotaries)
        ]
        self._run = kernels.record(self._operations)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.architecture.vocab_size

    @property
    def context_limit(self) -> int:
        """Positions allowed are 0 ... context_limit - 1."""
        return self._context

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of cache that one token takes, over all layers."""
        a = self.architecture
        return 2 * len(a.layers) * a.kv_heads * bytes_per_head(a.head_dim, self.cache_dtype)

    def new_store(self, slots: int) -> KVStore:
        """An empty key/value store of this model's shape, cache dtype and device."""
        a = self.architecture
        return KVStore.allocate(len(a.layers), slots, a.kv_heads, a.head_dim, self.cache_dtype, self.device)

    @torch.no_grad()
    def forward(self, batch: TokenBatch, store: KVStore) -> Tensor:
        """Run the batch: writes its keys and values into the store, returns float32 [wanted, vocab_size].

        A row's logits depend on the tokens of its path alone, bit for bit, not on how they were cut into batches.
        """
        return self._run(self.kernels.prepare(batch, store, self._rotary), store)

    def _operations(self, kernels: Kernels, prepared: Any, store: KVStore) -> Tensor:
        """The same for every batch, so that kernels may record it."""
        architecture = self.architecture
        x = kernels.embed(self._embedding, prepared, architecture.embedding_scale)
        for number, layer in enumerate(self.layers):
            qkv = kernels.norm_project(x, layer.attention_norm, layer.qkv)
            q = kernels.rotate_and_write(qkv, layer.attention, number, prepared, store)
            attended = kernels.attend(q, layer.attention, number, prepared, store)
            x = kernels.project_add(attended, layer.output, x, layer.output_norm)
            if layer.mixture is None:
                gated = kernels.gate(kernels.norm_project(x, layer.mlp_norm, layer.gate_up), architecture.activation)
                x = kernels.project_add(gated, layer.down, x, layer.down_norm)
            else:
                x = kernels.mixture_add(x, layer.mlp_norm, layer.mixture, architecture.activation, x)
        return kernels.logits(x, self.final_norm, self.lm_head, prepared, architecture.logit_softcap)


@contextmanager
def _naming(layer: str) -> Iterator[None]:
    """Says which layer's weight cannot be held."""
    try:
        yield
    except WeightsError as error:
        raise WeightsError(f"layer '{layer}': {error}") from error


@dataclass(frozen=True)
class _Packer:
    """Turns named tensors into what the kernels want."""

    architecture: Architecture
    weights: Weights
    linears: Linears
    weight_format: WeightFormat
    device: torch.device

    def layer(self, number: int) -> DecoderLayer:
        parts = layer_parts(self.architecture, number)
        return DecoderLayer(
            attention=self.attention(number, parts),
            attention_norm=self.norm(parts.attention_norm),
            qkv=self.linear(parts.qkv),
            output=self.linear(parts.output),
            output_norm=self.optional_norm(parts.output_norm),
            mlp_norm=self.norm(parts.mlp_norm),
            gate_up=None if parts.dense is None else self.linear(parts.dense.gate_up),
            down=None if parts.dense is None else self.linear(parts.dense.down),
            down_norm=self.optional_norm(parts.down_norm),
            mixture=self.mixture(parts),
        )

    def attention(self, number: int, parts: LayerParts) -> AttentionSpec:
        a, shape = self.architecture, self.architecture.layers[number]
        return AttentionSpec(
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            scale=a.attention_scale,
            window=shape.window,
            softcap=a.attention_softcap,
            query_norm=self.optional_norm(parts.query_norm),
            key_norm=self.optional_norm(parts.key_norm),
            rotary=shape.rotary,
        )

    def mixture(self, parts: LayerParts) -> Mixture | None:
        experts = self.architecture.experts
        if parts.router is None or experts is None:
            return None
        return Mixture(
            router=self.linear(parts.router, WeightFormat(self.weight_format.dtype)),
            gate_up=[self.linear(expert.gate_up) for expert in parts.experts],
            down=[self.linear(expert.down) for expert in parts.experts],
            top_k=experts.per_token,
            renormalise=experts.renormalise,
        )

    def linear(self, parts: LinearParts, weight_format: WeightFormat | None = None) -> Any:
        def make() -> MadeLinear:
            weights = [self.weights.take_linear(f"{name}.weight") for name in parts.names]
            bias = None
            if parts.bias:
                bias = stack_rows([self.weights.take(f"{name}.bias") for name in parts.names], torch.float32)
            with _naming(parts.names[0]):
                return (weight_format or self.weight_format).linear(weights), bias

        return self.linears.linear(parts.names[0], make)

    @property
    def head_is_table(self) -> bool:
        """Whether lm_head and the embedding table are the same numbers in the same form."""
        float_tied = self.architecture.tied_embeddings and self.weight_format.bits is None
        return float_tied and not self.weights.is_stored(EMBEDDING)

    def head(self, table: Tensor, embedding: Tensor) -> Any:
        """The packed lm_head. table: the embeddings as they are stored. embedding: as they are held."""

        def make() -> MadeLinear:
            if self.head_is_table:
                return embedding, None
            if not self.architecture.tied_embeddings:
                weight = self.weights.take_linear(f"{LM_HEAD}.weight")
            elif self.weights.is_stored(EMBEDDING):
                weight = self.weights.take_linear(EMBEDDING)
            else:
                weight = table
            with _naming(LM_HEAD):
                return self.weight_format.linear([weight]), None

        return self.linears.linear(LM_HEAD, make)

    def norm(self, name: str) -> Norm:
        weight = self.weights.take(name).to(self.device, torch.float32)
        return Norm(weight + self.architecture.norm_offset, self.architecture.norm_epsilon)

    def optional_norm(self, name: str | None) -> Norm | None:
        return None if name is None else self.norm(name)
