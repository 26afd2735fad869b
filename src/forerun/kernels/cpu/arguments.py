"""What an operation of the native library is told about the model; where activations lie is for the caller to add.

An operation that comes alone (kernels.py) and one in a program (program.py) are told the same. Everything that an
argument points to must be held by whoever uses it.
"""

from ctypes import POINTER, pointer

from torch import Tensor

from forerun.errors import EngineError
from forerun.kernels.base import Activation, AttentionSpec, Mixture, Norm
from forerun.kernels.cpu.binding import (
    AttentionArgument,
    EmbeddingArgument,
    GateArgument,
    MixtureArgument,
    NormArgument,
    ProjectionArgument,
    RotationArgument,
    WeightArgument,
    is_bf16,
    norm_argument,
)
from forerun.kernels.cpu.weights import PackedLinear

MAX_HEAD_DIM = 256  # of operations.h
MAX_QUERIES = 64


def covers_rotation(spec: AttentionSpec) -> bool:
    """Whether the library can rotate and write heads of this size."""
    return spec.head_dim <= MAX_HEAD_DIM


def covers_attention(spec: AttentionSpec) -> bool:
    """Whether the library has attention for heads of this size and number."""
    return spec.head_dim % 8 == 0 and spec.head_dim <= MAX_HEAD_DIM and spec.heads // spec.kv_heads <= MAX_QUERIES


def covers_mixture(mixture: Mixture) -> bool:
    """Whether the library has it: the experts must take their inputs in the same form."""
    return all(
        len({(packed.argument.format, packed.argument.activation_bits) for packed in experts}) == 1
        for experts in (mixture.gate_up, mixture.down)
    )


def embedding(table: Tensor, scale: float) -> EmbeddingArgument:
    """Rows of table [entries, size], float32 or bfloat16, times scale."""
    bf16 = is_bf16(table, 2)
    return EmbeddingArgument(table=table.data_ptr(), size=table.shape[1], scale=scale, bf16=bf16)


def projection(
    packed: PackedLinear, before: Norm | None = None, after: Norm | None = None, softcap: float | None = None
) -> ProjectionArgument:
    """Softcap(residual + after(before(x) W^T + bias)); which of them there are."""
    return ProjectionArgument(
        before=NormArgument(*norm_argument(before, packed.columns)),
        weight=pointer(packed.argument),
        after=NormArgument(*norm_argument(after, packed.rows)),
        softcap=softcap or 0.0,
    )


def rotation(spec: AttentionSpec) -> RotationArgument:
    """Head norms and RoPE of a layer."""
    return RotationArgument(
        query_norm=NormArgument(*norm_argument(spec.query_norm, spec.head_dim)),
        key_norm=NormArgument(*norm_argument(spec.key_norm, spec.head_dim)),
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
    )


def attention(spec: AttentionSpec) -> AttentionArgument:
    """Attention of a layer."""
    return AttentionArgument(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        window=spec.window or 0,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
    )


def gate(size: int, activation: Activation) -> GateArgument:
    """The activation of `size` gates, times as many other features."""
    return GateArgument(size=size, gelu=activation == "gelu_tanh")


def mixture(mixture: Mixture, before: Norm | None, activation: Activation) -> MixtureArgument:
    """A mixture of experts. Raises EngineError if the experts do not have one shape that fits the router's."""
    experts, features = mixture.router.rows, mixture.router.columns
    inner = mixture.down[0].columns if mixture.down else 0
    shapes = (
        [(packed.rows, packed.columns) for packed in (*mixture.gate_up, *mixture.down)],
        [*[(2 * inner, features)] * experts, *[(features, inner)] * experts],
    )
    if shapes[0] != shapes[1] or not 1 <= mixture.top_k <= experts:
        raise EngineError(
            f"a mixture of {experts} experts on {features} features, of which {mixture.top_k} serve a token, has "
            f"experts of the shapes {sorted(set(shapes[0]))}; all must be {sorted(set(shapes[1]))}: check the model"
        )
    return MixtureArgument(
        before=NormArgument(*norm_argument(before, features)),
        router=pointer(mixture.router.argument),
        gate_up=(POINTER(WeightArgument) * experts)(*[pointer(packed.argument) for packed in mixture.gate_up]),
        down=(POINTER(WeightArgument) * experts)(*[pointer(packed.argument) for packed in mixture.down]),
        experts=experts,
        top_k=mixture.top_k,
        renormalise=mixture.renormalise,
        gelu=activation == "gelu_tanh",
    )
