"""Writes tiny models as GGUF files, the way llama.cpp's converter lays them out. For tests of reading them back."""

import json
import re

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.models.tiny import tiny_config, tiny_tensors

ARCHITECTURES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "mixtral": "llama"}
_STORED = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_STORED_SANDWICH = {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}


def stored_tensors(config, tensors):
    """GGUF's names and values for a model's tensors: RoPE pairs side by side, Gemma's norms plus 1, experts stacked."""
    family = config["model_type"]
    stored, experts = {}, {}
    for name, tensor in tensors.items():
        value = tensor.numpy()
        if name.endswith("norm.weight") and "gemma" in family:
            value = value + np.float32(1)
        outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        outer["lm_head.weight"] = "output.weight"
        if name in outer:
            stored[outer[name]] = value
            continue
        _, _, layer, rest = name.split(".", 3)
        inner, kind = rest.rsplit(".", 1)
        if found := re.fullmatch(r".*experts\.(\d+)\.(\w+)", inner):
            experts.setdefault(f"blk.{layer}.ffn_{_EXPERTS[found[2]]}_exps.{kind}", {})[int(found[1])] = value
            continue
        if family in ("llama", "mixtral") and inner in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in inner else "num_key_value_heads"]
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        names = _STORED | (_STORED_SANDWICH if "gemma" in family else {})
        stored[f"blk.{layer}.{names[inner]}.{kind}"] = value
    return stored | {name: np.stack([by_id[i] for i in sorted(by_id)]) for name, by_id in experts.items()}


def write_gguf(
    path, family="llama", *, quantisation="F32", kinds=None, tokenizer=True, drop=(), metadata=None, seed=0, **overrides
):
    """Write a tiny model; returns its config and its tensors (float32, under transformers' names).

    quantisation: of matrices, by gguf's name. kinds: of those of a certain stored name, such as "attn_q". drop: stored
    names to leave out. metadata: entries to add or replace.
    """
    config = tiny_config(family, **overrides)
    tensors = tiny_tensors(config, seed)
    architecture = ARCHITECTURES.get(family, family)
    writer = gguf.GGUFWriter(path, architecture)
    _add_settings(writer, architecture, config)
    if tokenizer:
        add_byte_level_tokenizer(writer)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for name, value in stored_tensors(config, tensors).items():
        if name in drop:
            continue
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name.split(".")[-2], quantisation)]
        if value.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(value, np.float32), kind), raw_dtype=kind)
    _finish(writer)
    return config, tensors


def write_tokenizer_only(path, add):
    """A GGUF without tensors whose tokenizer is what `add(writer)` adds."""
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.add_tensor("unused", np.zeros(4, np.float32))
    _finish(writer)


def _finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer, key, value):
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _add_settings(writer, architecture, config):
    settings = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "attention.key_length": config.get("head_dim"),
        "attention.sliding_window": config.get("sliding_window") if "gemma" in architecture else None,
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "expert_count": config.get("num_experts", config.get("num_local_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    for key, value in settings.items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)


def byte_level_tokenizer():
    """A small byte-level BPE with the pre-tokenizer of SmolLM: <s>, </s>, <|im_end|>, the bytes, some merges."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = [
        "the quick brown fox jumps over the lazy dog",
        "das Wetter ist schön, 1234 mal 5678",
        "日本語 😀 😀 naïve café",
    ]
    inner.train_from_iterator(text, trainer)
    return inner


def add_byte_level_tokenizer(writer, inner=None):
    """Add a byte-level tokenizer's metadata, padded to 512 tokens as models pad their embeddings."""
    inner = inner or byte_level_tokenizer()
    model = json.loads(inner.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [3] * 3 + [1] * (len(tokens) - 3)
    padding = range(len(tokens), 512)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *(f"[PAD{index}]" for index in padding)])
    writer.add_token_types([*types, *(5 for _ in padding)])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


PIECES = ["▁", "a", "b", "c", "d", "e", "▁a", "ab", "bc", "abc", "▁ab", "cd", "de", "▁d", "cde", "bcd", "▁abc", "é"]


def add_sentencepiece_tokenizer(writer, *, add_space_prefix=True):
    """Add a SentencePiece BPE: <unk>, <s>, </s>, a user-defined line of two spaces, the bytes, PIECES."""
    tokens = ["<unk>", "<s>", "</s>", "  ", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [2, 3, 3, 4, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 260 + [-float((7 * index) % len(PIECES)) for index in range(len(PIECES))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(add_space_prefix)
    return tokens, scores
