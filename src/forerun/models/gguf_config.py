"""A GGUF's metadata as the config.json that transformers would have written for the same model.

Only settings here; tensors are renamed in `gguf_import`, the tokenizer is rebuilt in `gguf_tokenizer`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.errors import UnsupportedModelError, WeightsError
from forerun.models.gguf_file import GgufFile

# Llama 3's frequency bands; GGUF keeps only the resulting factor per frequency (rope_freqs.weight).
_LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MOST_EXPERTS = 4096


@dataclass(frozen=True)
class GgufFamily:
    """How one GGUF architecture maps to transformers.

    model_type, class_name: what config.json says. rotated_pairs: q and k rows are stored with the two values of a RoPE
    pair side by side. offset_norms: norm weights are stored with Gemma's 1 added. sandwich: Gemma's four norms.
    fixed: config fields that GGUF leaves out because they are the same for the whole family.
    """

    model_type: str
    class_name: str
    rotated_pairs: bool = False
    offset_norms: bool = False
    sandwich: bool = False
    fixed: dict[str, Any] = field(default_factory=dict)


_LLAMA = GgufFamily("llama", "LlamaForCausalLM", rotated_pairs=True, fixed={"hidden_act": "silu"})
_MIXTRAL = GgufFamily("mixtral", "MixtralForCausalLM", rotated_pairs=True, fixed={"hidden_act": "silu"})
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}

GGUF_FAMILIES: dict[str, GgufFamily] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM", fixed={"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM", fixed={"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3moe": GgufFamily(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        fixed={
            "hidden_act": "silu",
            "use_sliding_window": False,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "gemma2": GgufFamily("gemma2", "Gemma2ForCausalLM", offset_norms=True, sandwich=True, fixed=_GEMMA),
    "gemma3": GgufFamily(
        "gemma3_text",
        "Gemma3ForCausalLM",
        offset_norms=True,
        sandwich=True,
        fixed={**_GEMMA, "rope_local_base_freq": 10_000.0},
    ),
    "phi3": GgufFamily("phi3", "Phi3ForCausalLM", fixed={"hidden_act": "silu"}),
}


class Settings:
    """Metadata of one architecture: `number("block_count")` reads `llama.block_count`."""

    def __init__(self, source: GgufFile) -> None:
        self.source = source
        self.architecture = str(source.metadata.get("general.architecture", ""))
        if self.architecture not in GGUF_FAMILIES:
            raise UnsupportedModelError(
                f"{source.path} holds a model of the architecture {self.architecture!r}; supported in GGUF: "
                f"{', '.join(GGUF_FAMILIES)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default when it is absent."""
        return self.source.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int | None = None) -> int:
        """A count, which must be there if no default is given. A list of equal counts, one per layer, is that count."""
        value = self.get(key, default)
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                raise UnsupportedModelError(
                    f"{self.source.path}: {self.architecture}.{key} differs between layers, which is not supported"
                )
            value = value[0]
        if not isinstance(value, int) or value < 1:
            raise WeightsError(
                f"{self.source.path} lacks a valid {self.architecture}.{key} in its metadata (found {value!r})"
            )
        return value


def family_of(source: GgufFile) -> GgufFamily:
    """The family of a GGUF model. Raises UnsupportedModelError when there is none for its architecture."""
    settings = Settings(source)
    return (
        _MIXTRAL
        if settings.get("expert_count") and settings.architecture in ("llama", "mistral")
        else (GGUF_FAMILIES[settings.architecture])
    )


def config_from_gguf(source: GgufFile) -> dict[str, Any]:
    """config.json for a GGUF model, in the form that transformers writes.

    Raises UnsupportedModelError for an architecture or RoPE scaling that is not supported, WeightsError for metadata or
    tensors that are missing.
    """
    settings, family = Settings(source), family_of(source)
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"tensor 'token_embd.weight' is missing in {source.path}")
    heads, hidden = settings.number("attention.head_count"), settings.number("embedding_length")
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": _layers(settings),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.number("attention.head_count_kv", heads),
        "head_dim": settings.get("attention.key_length") or hidden // heads,
        "intermediate_size": settings.number("feed_forward_length"),
        "rms_norm_eps": _decimal(settings.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "max_position_embeddings": settings.number("context_length"),
        "rope_theta": settings.get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(settings),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "attention_bias": family.rotated_pairs and "blk.0.attn_q.bias" in source.tensors,
        **family.fixed,
    }
    config |= _special_ids(source) | _attention(settings, family, config) | _experts(settings, family)
    return config


def _layers(settings: Settings) -> int:
    layers, tensors = settings.number("block_count"), len(settings.source.tensors)
    if layers > tensors:
        raise WeightsError(f"{settings.source.path} is corrupt: {layers} layers, but only {tensors} tensors")
    return layers


def _decimal(stored: float) -> float:
    """The short decimal that a stored float32 stands for (9.99999974e-06 is 1e-05)."""
    return float(str(np.float32(stored)))


def _special_ids(source: GgufFile) -> dict[str, Any]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {field_: source.metadata.get(f"tokenizer.ggml.{key}") for field_, key in names.items()}


def _attention(settings: Settings, family: GgufFamily, config: dict[str, Any]) -> dict[str, Any]:
    """Windows, soft caps, partial rotation and the scale of attention."""
    found: dict[str, Any] = {}
    window = settings.get("attention.sliding_window")
    if family.model_type == "phi3" or family.rotated_pairs:
        found["sliding_window"] = window or None
        rotary = settings.get("rope.dimension_count", config["head_dim"])
        if rotary != config["head_dim"]:
            found["partial_rotary_factor"] = rotary / config["head_dim"]
    if family.sandwich:
        layers = config["num_hidden_layers"]
        pattern = 2 if family.model_type == "gemma2" else 6
        found["sliding_window"] = window or 4096
        found["layer_types"] = [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)
        ]
        # The 27B models alone scale by the width per head; GGUF does not say so, llama.cpp knows them by their depth.
        widest = layers == {"gemma2": 46}.get(family.model_type, 62)
        per_head = config["hidden_size"] // config["num_attention_heads"]
        found["query_pre_attn_scalar"] = per_head if widest else config["head_dim"]
        found["attn_logit_softcapping"] = settings.get("attn_logit_softcapping")
        found["final_logit_softcapping"] = settings.get("final_logit_softcapping")
    return found


def _experts(settings: Settings, family: GgufFamily) -> dict[str, Any]:
    if family.model_type not in ("mixtral", "qwen3_moe"):
        return {}
    count = settings.number("expert_count")
    if count > _MOST_EXPERTS:
        raise WeightsError(f"{settings.source.path} is corrupt: {count} experts (at most {_MOST_EXPERTS} make sense)")
    found = {"num_experts_per_tok": settings.number("expert_used_count")}
    if family.model_type == "mixtral":
        return {"num_local_experts": count, **found}
    return {"num_experts": count, "moe_intermediate_size": settings.number("expert_feed_forward_length"), **found}


def _rope_scaling(settings: Settings) -> dict[str, Any] | None:
    tensors = settings.source.tensors
    if (frequencies := tensors.get("rope_freqs.weight")) is not None:
        return _llama3_scaling(settings, frequencies.rows_as_float(frequencies.data).ravel())
    original = settings.get("rope.scaling.original_context_length")
    if (long := tensors.get("rope_factors_long.weight")) is not None:
        short = tensors.get("rope_factors_short.weight", long)
        return {
            "rope_type": "longrope",
            "long_factor": long.rows_as_float(long.data).ravel().tolist(),
            "short_factor": short.rows_as_float(short.data).ravel().tolist(),
            "original_max_position_embeddings": original,
        }
    kind = settings.get("rope.scaling.type", "none")
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear", 1.0))
    if kind == "none" and not settings.get("rope.scale_linear"):
        return None
    if factor in (0.0, 1.0):
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModelError(
        f"{settings.source.path}: RoPE scaling {kind!r} is not supported in GGUF (linear, yarn are)"
    )


def _llama3_scaling(settings: Settings, stored: "np.ndarray[Any, np.dtype[np.float32]]") -> dict[str, Any] | None:
    """Find the factor of Llama 3's scaling in the divisors that GGUF stores, and check that they are that scaling."""
    factor = round(float(stored.max()), 4)
    if factor == 1.0:
        return None
    scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA3_BANDS}
    theta = settings.get("rope.freq_base", 10_000.0)
    wavelength = 2 * math.pi * theta ** (np.arange(len(stored)) / len(stored))
    low, high = _LLAMA3_BANDS["low_freq_factor"], _LLAMA3_BANDS["high_freq_factor"]
    turns = _LLAMA3_BANDS["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if not np.allclose(stored, 1.0 / ((1.0 - smooth) / factor + smooth), rtol=1e-3):
        raise UnsupportedModelError(
            f"{settings.source.path}: rope_freqs.weight is not Llama 3's RoPE scaling, and no other is known"
        )
    return scaling
