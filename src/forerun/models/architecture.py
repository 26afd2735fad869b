"""What a model is, as data: from config.json to an `Architecture`. A new family is one entry of `FAMILIES`.

No tensors and no arithmetic on activations here; the decoder reads this and nothing else about the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from forerun.errors import ModelError, UnsupportedModelError
from forerun.kernels.base import Activation
from forerun.models.config_fields import ConfigFields
from forerun.models.rotary import Rotary, rotary_from_parameters

LayerKind = Literal["full_attention", "sliding_attention"]

MOST_LAYERS = 10_000  # far more than any model has: stops a broken file from filling the memory
MOST_EXPERTS = 10_000

ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class ExpertNames:
    """How a family names the tensors of a mixture of experts: `block`.gate and `block`.experts.N.`gate`, ..."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    """What distinguishes one family of models from Llama.

    defaults: fields that its config.json may leave out, with the values that are then meant.
    windows: which layers see a sliding window: none; every one; all but each `sliding_window_pattern`-th; those from
        `max_window_layers` on. `use_sliding_window: false` switches windows off, `layer_types` overrides the last two.
    activation_field, expert_size_field: the fields' names in config.json.
    norm_offset: added to every norm's weight. sandwich_norms: norms also after attention and MLP, before the sum.
    head_norms: RMS norm over each head of queries and keys.
    scaled_embeddings: embeddings are multiplied by sqrt(hidden_size).
    qkv_bias: queries, keys and values have a bias whatever `attention_bias` says.
    fused: the files hold q, k, v as one tensor, and gate, up as one.
    local_rope: layers with a window have a RoPE base of their own, unscaled.
    stretched_context: `max_position_embeddings` already counts what RoPE scaling adds.
    experts: names of the experts' tensors, if it is a mixture.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: Literal["none", "every", "pattern", "upper"] = "none"
    activation_field: str = "hidden_act"
    expert_size_field: str = "moe_intermediate_size"
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    head_norms: bool = False
    scaled_embeddings: bool = False
    qkv_bias: bool = False
    fused: bool = False
    local_rope: bool = False
    stretched_context: bool = False
    experts: ExpertNames | None = None


COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "use_sliding_window": True,
    "max_window_layers": 28,
}

_QWEN_DEFAULTS: Mapping[str, Any] = {"use_sliding_window": False, "sliding_window": 4096}

_GEMMA_DEFAULTS: Mapping[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

_GEMMA3 = Family(
    defaults={
        **_GEMMA_DEFAULTS,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    windows="pattern",
    activation_field="hidden_activation",
    norm_offset=1.0,
    sandwich_norms=True,
    head_norms=True,
    scaled_embeddings=True,
    local_rope=True,
    stretched_context=True,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(defaults={"sliding_window": 4096}, windows="every"),
    "qwen2": Family(defaults=_QWEN_DEFAULTS, windows="upper", qkv_bias=True),
    "qwen3": Family(defaults={**_QWEN_DEFAULTS, "head_dim": 128}, windows="upper", head_norms=True),
    "gemma2": Family(
        defaults={
            **_GEMMA_DEFAULTS,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        windows="pattern",
        activation_field="hidden_activation",
        norm_offset=1.0,
        sandwich_norms=True,
        scaled_embeddings=True,
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi3": Family(defaults={"rms_norm_eps": 1e-5}, windows="every", fused=True),
    "mixtral": Family(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "norm_topk_prob": True},
        windows="every",
        expert_size_field="intermediate_size",
        experts=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    "qwen3_moe": Family(
        defaults=_QWEN_DEFAULTS,
        windows="every",
        head_norms=True,
        experts=ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
}


@dataclass(frozen=True)
class LayerShape:
    """What differs from layer to layer. window: positions a token sees, None = all. rotary: index into `rotaries`.
    sparse: the MLP is a mixture of experts.
    """

    window: int | None
    rotary: int
    sparse: bool


@dataclass(frozen=True)
class ExpertShape:
    """A mixture's counts: experts, experts per token, features inside one; renormalise as in `kernels.base.Mixture`."""

    count: int
    per_token: int
    intermediate_size: int
    renormalise: bool
    names: ExpertNames


@dataclass(frozen=True)
class Architecture:
    """Everything about a model but its weights. Counts and sizes are in features or tokens.

    context_limit: how many positions it can use, RoPE scaling included. experts: set if any layer is sparse.
    The other fields are what `Family` and `kernels.base.AttentionSpec` say of the same name.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerShape, ...]
    context_limit: int
    activation: Activation
    norm_epsilon: float
    norm_offset: float
    sandwich_norms: bool
    head_norms: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    fused: bool
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    embedding_scale: float
    tied_embeddings: bool
    rotaries: tuple[Rotary, ...]
    experts: ExpertShape | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Architecture":
        """Read a Hugging Face config.json, of transformers 5 or older; a Gemma 3 with vision by its text part.

        Raises UnsupportedModelError for a family or feature that is not supported, ModelError for missing or senseless
        fields.
        """
        if isinstance(config.get("text_config"), Mapping):
            config = {"model_type": config.get("model_type"), **config["text_config"]}
        name = str(config.get("model_type"))
        if name not in FAMILIES:
            raise UnsupportedModelError(
                f"config.json: model_type is '{name}', which is not supported; supported are: {', '.join(FAMILIES)}"
            )
        family = FAMILIES[name]
        fields = ConfigFields({**COMMON_DEFAULTS, **family.defaults, **config})
        _refuse_unsupported(fields)
        hidden_size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        head_dim = fields.optional_integer("head_dim") or hidden_size // heads
        kinds = _layer_kinds(fields, family)
        rotary_of, context_limit = _rotaries(fields, family, kinds, head_dim)
        rotaries = tuple(dict.fromkeys(rotary_of.values()))
        experts, sparse = _experts(fields, family, len(kinds))
        architecture = cls(
            family=name,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            heads=heads,
            kv_heads=fields.optional_integer("num_key_value_heads") or heads,
            head_dim=head_dim,
            layers=tuple(
                LayerShape(_window(fields, kind), rotaries.index(rotary_of[kind]), layer in sparse)
                for layer, kind in enumerate(kinds)
            ),
            context_limit=context_limit,
            activation=_activation(fields, family),
            norm_epsilon=fields.number("rms_norm_eps"),
            norm_offset=family.norm_offset,
            sandwich_norms=family.sandwich_norms,
            head_norms=family.head_norms,
            qkv_bias=family.qkv_bias or fields.flag("attention_bias"),
            output_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            fused=family.fused,
            attention_scale=(fields.optional_number("query_pre_attn_scalar") or head_dim) ** -0.5,
            attention_softcap=fields.optional_number("attn_logit_softcapping"),
            logit_softcap=fields.optional_number("final_logit_softcapping"),
            embedding_scale=hidden_size**0.5 if family.scaled_embeddings else 1.0,
            tied_embeddings=fields.flag("tie_word_embeddings"),
            rotaries=rotaries,
            experts=experts,
        )
        if architecture.heads % architecture.kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads is {architecture.heads}, which is not a multiple of "
                f"num_key_value_heads, {architecture.kv_heads}; it must be"
            )
        return architecture


def _refuse_unsupported(fields: ConfigFields) -> None:
    if fields.flag("use_bidirectional_attention"):
        raise UnsupportedModelError("config.json: use_bidirectional_attention is true; only causal models can generate")
    quantisation = fields.mapping("quantization_config")
    if quantisation:
        raise UnsupportedModelError(
            f"config.json: the weights are quantised as '{quantisation.get('quant_method')}', which is not supported; "
            "use the original (bf16 or fp32) safetensors or a GGUF of this model"
        )


def _activation(fields: ConfigFields, family: Family) -> Activation:
    name = fields.text(family.activation_field)
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: {family.activation_field} is '{name}', which is not supported; supported are: "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _layer_kinds(fields: ConfigFields, family: Family) -> list[LayerKind]:
    """For each layer whether it sees a window; without a window in force every layer is full."""
    count = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
    stated = list(map(str, fields.sequence("layer_types")))
    if stated:
        if len(stated) != count:
            raise ModelError(f"config.json: layer_types has {len(stated)} entries; it must have one per layer, {count}")
        unknown = set(stated) - {"full_attention", "sliding_attention"}
        if unknown:
            raise UnsupportedModelError(
                f"config.json: layer_types holds {sorted(unknown)}; supported are: full_attention, sliding_attention"
            )
    if stated and family.windows != "every":
        return [cast(LayerKind, kind) for kind in stated]
    if family.windows == "none":
        return ["full_attention"] * count
    if family.windows == "every":
        kind: LayerKind = "full_attention" if _window(fields, "sliding_attention") is None else "sliding_attention"
        if set(stated) - {kind}:
            raise UnsupportedModelError(
                f"config.json: layer_types differ, or differ from what sliding_window says, in a model of type "
                f"'{fields.value('model_type')}'; this family has one kind of layer, here {kind}"
            )
        return [kind] * count
    if family.windows == "pattern":
        period = fields.integer("sliding_window_pattern")
        return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(count)]
    first = fields.integer("max_window_layers", minimum=0)
    windowed = _window(fields, "sliding_attention") is not None
    return ["sliding_attention" if windowed and layer >= first else "full_attention" for layer in range(count)]


def _window(fields: ConfigFields, kind: LayerKind) -> int | None:
    if kind == "full_attention" or not fields.flag("use_sliding_window"):
        return None
    return fields.optional_integer("sliding_window")


def _rotaries(
    fields: ConfigFields, family: Family, kinds: list[LayerKind], head_dim: int
) -> tuple[dict[LayerKind, Rotary], int]:
    """The rotary setting of each kind of layer that occurs, and how many positions the model can use."""
    context = fields.integer("max_position_embeddings")
    settings = {
        kind: rotary_from_parameters(_rope_parameters(fields, family, kind), head_dim, context)
        for kind in dict.fromkeys(kinds)
    }
    if family.stretched_context:
        return settings, context
    return settings, min(setting.scaling.reach(context) for setting in settings.values())


def _rope_parameters(fields: ConfigFields, family: Family, kind: LayerKind) -> dict[str, Any]:
    """One kind's RoPE parameters, from `rope_parameters` (flat or by kind) or the older fields."""
    stated = fields.mapping("rope_parameters")
    nested = "full_attention" in stated or "sliding_attention" in stated
    if nested:
        stated = ConfigFields(stated, "rope_parameters in config.json").mapping(kind)
    local = family.local_rope and kind == "sliding_attention"
    if local and not nested:
        stated = {}
    parameters = {
        "rope_theta": fields.number("rope_local_base_freq" if local else "rope_theta", above=1.0),
        "partial_rotary_factor": fields.value("partial_rotary_factor"),
        **stated,
        **({} if local else fields.mapping("rope_scaling")),
    }
    if fields.value("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = fields.value("original_max_position_embeddings")
    return parameters


def _experts(fields: ConfigFields, family: Family, layers: int) -> tuple[ExpertShape | None, set[int]]:
    """The shape of the mixtures, and which layers are mixtures."""
    if family.experts is None:
        return None, set()
    count_field = "num_local_experts" if fields.value("num_experts") is None else "num_experts"
    experts = ExpertShape(
        count=fields.integer(count_field, maximum=MOST_EXPERTS),
        per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer(family.expert_size_field),
        renormalise=fields.flag("norm_topk_prob"),
        names=family.experts,
    )
    if experts.per_token > experts.count:
        raise ModelError(
            f"config.json: num_experts_per_tok is {experts.per_token}; it must be at most the number of experts, "
            f"{experts.count}"
        )
    step = fields.optional_integer("decoder_sparse_step") or 1
    dense = fields.sequence("mlp_only_layers")
    return experts, {layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0}
