"""Tiny random models, one per family, for the tests of every room: no download, no transformers."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.kernels.base import Kernels
from forerun.kernels.reference import ReferenceKernels
from forerun.models.architecture import Architecture
from forerun.models.decoder import Decoder
from forerun.models.parameters import tensor_shapes
from forerun.models.precision import WeightFormat

WINDOW = 24
VOCABULARY = 512
CONTEXT = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": False}

_GEMMA: dict[str, Any] = {
    "head_dim": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}

_DIFFERENCES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu"},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": False, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 24, "use_sliding_window": False, "sliding_window": WINDOW, "max_window_layers": 1},
    "gemma2": {**_GEMMA, "final_logit_softcapping": 8.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_GEMMA, "sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "phi3": {"sliding_window": None},
    "mixtral": {**_EXPERTS, "num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {
        **_EXPERTS,
        "num_experts": 4,
        "head_dim": 24,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}

FAMILIES = tuple(_DIFFERENCES)

_CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """A config.json in the older form: 2 layers, vocabulary 512, context 256, hidden 64, 4 heads, 2 kv heads."""
    own = {"model_type": family, "architectures": [_CLASS_NAMES[family]]}
    return {**_COMMON, **_DIFFERENCES[family], **own, **overrides}


def tiny_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random float32 tensors of the right names and shapes, scaled so that greedy answers are not all the same.

    The layers add more to the residual than the embedding holds: otherwise tied embeddings would only echo the input.
    """
    architecture = Architecture.from_config(config)
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            louder = 2.0 if architecture.sandwich_norms and "layers" in name else 1.0
            return louder - architecture.norm_offset + 0.1 * noise
        if name.endswith(".bias"):
            return 0.3 * noise
        if "embed_tokens" in name:
            return 0.3 * noise / (3.0 if architecture.sandwich_norms else 1.0)
        return noise * (2.0 if "lm_head" in name else 1.5) / math.sqrt(shape[1])

    return {name: draw(name, shape) for name, shape in tensor_shapes(architecture).items()}


def tiny_decoder(
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels | None = None,
    bits: Literal[4, 8] | None = None,
    cache: torch.dtype | None = None,
    **overrides: Any,
) -> Decoder:
    """A tiny random model that runs, where `kernels` run (the reference, by default); `overrides` change its config.

    bits: what its linear layers are quantised to. cache: what its keys and values are held in; None = dtype.
    """
    config = tiny_config(family, **overrides)
    return run_on(
        Architecture.from_config(config), tiny_tensors(config, seed), WeightFormat(dtype, bits), kernels, cache
    )


def run_on(
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    weights: torch.dtype | WeightFormat,
    kernels: Kernels | None = None,
    cache: torch.dtype | None = None,
) -> Decoder:
    """A decoder on the given kernels; by default on the reference, on the GPU if there is one."""
    kernels = kernels or ReferenceKernels("cuda" if torch.cuda.is_available() else "cpu")
    weights = WeightFormat(weights) if isinstance(weights, torch.dtype) else weights
    return Decoder(architecture, tensors, kernels, weights, getattr(kernels, "device", "cpu"), cache_dtype=cache)


def save_tiny_model(
    directory: Path, family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> dict[str, Any]:
    """Write config.json and model.safetensors as Hugging Face would; returns the config. No tokenizer."""
    config = tiny_config(family, **overrides)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_tensors(config, seed).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return config
