"""The few operations that models are made of. One folder beside this file per device; `reference` defines the meaning.

Activations travel as float32 [rows, features]. A weight keeps its own precision, and the operation accumulates in
float32. Promise of every implementation: a row's result does not depend on the other rows, on their number or on the
row's place, bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from forerun.errors import EngineError
from forerun.kernels.batch import TokenBatch
from forerun.kernels.kv_store import KVStore
from forerun.kernels.quantized import QuantizedWeight

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Norm:
    """RMS norm: x / sqrt(mean(x^2) + epsilon) * weight. weight: float32 [features], "1 +" of Gemma already added."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention is.

    heads, kv_heads, head_dim: counts; heads is a multiple of kv_heads.
    scale: factor on q.k. window: how many latest positions a token sees, itself included; None = all.
    softcap: scores become softcap * tanh(scores / softcap); None = off.
    query_norm, key_norm: RMS norm over head_dim before RoPE, or None.
    rotary: int, which of the model's rotary tables this layer uses.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotary: int = 0

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise EngineError(
                f"attention of {self.heads} heads over {self.kv_heads} key/value heads; heads must be a multiple"
            )


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts. router: packed linear to the expert logits; gate_up, down: one packed linear per expert.

    top_k experts serve a token, weighted by softmax over all experts' router logits; `renormalise` makes the chosen
    weights sum to 1.
    """

    router: Any
    gate_up: Sequence[Any]
    down: Sequence[Any]
    top_k: int
    renormalise: bool


class Operations(Protocol):
    """A model's operations, from the prepared batch to the logits: written once, for any kernels."""

    def __call__(self, kernels: "Kernels", prepared: Any, store: KVStore, /) -> Tensor:
        """Float32 [wanted, vocabulary]: what `Kernels.logits` returned."""
        ...


class Kernels(Protocol):
    """A device's operations. `Packed` weights and `Prepared` batches are opaque to models."""

    name: str

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Any:
        """Prepare a linear layer's weight [out, in] (float32, bfloat16 or quantised) for the operations below."""
        ...

    def prepare(self, batch: TokenBatch, store: KVStore, rotary: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Lay a batch out for this device, once per step.

        rotary: tables (cos, sin), each float32 [positions, rotary_dim / 2].
        """
        ...

    def embed(self, table: Tensor, prepared: Any, scale: float) -> Tensor:
        """Rows of the embedding table times scale: float32 [rows', hidden] (rows' includes any padding)."""
        ...

    def norm_project(self, x: Tensor, norm: Norm | None, packed: Any) -> Tensor:
        """Linear(norm(x)): float32 [rows', out]."""
        ...

    def rotate_and_write(self, qkv: Tensor, spec: AttentionSpec, layer: int, prepared: Any, store: KVStore) -> Tensor:
        """Apply head norms and RoPE, write k and v into the store, return q: float32 [rows', heads * head_dim].

        qkv: float32 [rows', (heads + 2 * kv_heads) * head_dim], in that order. RoPE turns feature i of a head with
        feature i + rotary_dim / 2; features past rotary_dim pass through. A value that is not finite is written as 0:
        attention gives keys that a row does not see the weight 0, and 0 times infinity would be seen. In a store of
        int8 a key's features too.
        """
        ...

    def attend(self, q: Tensor, spec: AttentionSpec, layer: int, prepared: Any, store: KVStore) -> Tensor:
        """Causal attention along each row's path: float32 [rows', heads * head_dim]."""
        ...

    def project_add(self, x: Tensor, packed: Any, residual: Tensor, norm: Norm | None = None) -> Tensor:
        """residual + norm(Linear(x)): float32 [rows', out]."""
        ...

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(first half) * second half of the features: float32 [rows', out / 2]."""
        ...

    def mixture_add(
        self, x: Tensor, norm: Norm | None, mixture: Mixture, activation: Activation, residual: Tensor
    ) -> Tensor:
        """residual + the sum of the chosen experts' gated MLPs on norm(x): float32 [rows', hidden].

        Of experts with equal logits the first is chosen.
        """
        ...

    def logits(self, x: Tensor, norm: Norm, packed: Any, prepared: Any, softcap: float | None) -> Tensor:
        """Logits of the batch's `logit_rows`, of which there may be none: float32 [wanted, vocabulary]."""
        ...

    def record(self, operations: Operations) -> Callable[[Any, KVStore], Tensor]:
        """`operations` on these kernels as a function of (prepared batch, store), which may take a shorter way.

        It gives the same bits as `operations(self, prepared, store)`. What the operations do must not depend on the
        batch: they may be called once and replayed.
        """
        ...

    def weight_reader(self, packed: Sequence[Any]) -> Callable[[], int]:
        """A function that reads the memory of these weights once and returns how many bytes it read.

        It is the measure of what a step costs: no step that uses them all can be faster.
        """
        ...
