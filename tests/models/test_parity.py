"""Our decoder computes what transformers computes, from the same files, and the same bits however a text is cut."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from forerun.kernels.batch import AttentionPath, TokenBatch
from forerun.models.architecture import Architecture
from tests.models.tiny import (
    FAMILIES,
    VOCABULARY,
    WINDOW,
    run_on,
    save_tiny_model,
    tiny_config,
    tiny_decoder,
    tiny_tensors,
)

ROPE_SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, old name of the type": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn, mscale, not truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
    },
}

CASES = {
    **{family: (family, {}) for family in FAMILIES},
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, own head size": ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama, a key head per query head": ("llama", {"num_key_value_heads": None}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2, windows in the upper layers": ("qwen2", {"use_sliding_window": True}),
    "qwen3, windows, biases": ("qwen3", {"use_sliding_window": True, "attention_bias": True}),
    "qwen3, yarn": ("qwen3", {"rope_scaling": ROPE_SCALINGS["yarn"]}),
    "gemma2, layers stated": ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}),
    "gemma3, global layers stretched": ("gemma3_text", {"rope_scaling": ROPE_SCALINGS["linear"]}),
    "phi3, partial rotary, window": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": WINDOW}),
    "mixtral, window": ("mixtral", {"sliding_window": WINDOW}),
    "qwen3_moe, shares not renormalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, some layers dense": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts_per_tok": 3},
    ),
    **{f"llama, {name}": ("llama", {"rope_scaling": scaling}) for name, scaling in ROPE_SCALINGS.items()},
}


def transformers_model(directory):
    """The model in `directory` as transformers runs it; every tensor of the file must have found its place."""
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def load(directory, dtype=torch.float32):
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    return run_on(Architecture.from_config(config), tensors, dtype)


def some_tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, count)


def chunk(tokens, first, last, slots):
    """Tokens first ... last - 1 of one sequence as a batch, logits of all of them wanted; slots: of the sequence."""
    rows = np.arange(last - first)
    path = AttentionPath(slots[:last], rows, 0, last)
    return TokenBatch(tokens[first:last], np.arange(first, last), slots[first:last], [path], rows)


def one_shot(decoder, tokens):
    slots = np.arange(len(tokens))
    return decoder.forward(chunk(tokens, 0, len(tokens), slots), decoder.new_store(len(tokens)))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, tmp_path):
    family, overrides = CASES[case]
    save_tiny_model(tmp_path, family, **overrides)
    ours, theirs = load(tmp_path), transformers_model(tmp_path)
    for count in (1, 17, 130):  # the longest is past the window and past one block of keys
        tokens = some_tokens(count, seed=count)
        with torch.no_grad():
            expected = theirs(torch.from_numpy(tokens)[None], use_cache=False).logits[0]
        assert expected.std() > 0.3
        torch.testing.assert_close(one_shot(ours, tokens).cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_dynamic_rope_is_that_of_decoding_token_by_token(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 3.0}
    save_tiny_model(tmp_path, "llama", max_position_embeddings=32, rope_scaling=scaling)
    ours, theirs = load(tmp_path), transformers_model(tmp_path)
    tokens = some_tokens(80)
    assert ours.context_limit == 96
    cache, expected = None, []
    with torch.no_grad():
        for token in tokens:
            step = theirs(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            expected.append(step.logits[0, 0])
    torch.testing.assert_close(one_shot(ours, tokens).cpu(), torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_written_by_transformers_means_the_same(family):
    """transformers 5 writes rope_parameters and layer_types where older files have other fields."""
    transformers = pytest.importorskip("transformers")
    config = tiny_config(family)
    kind = {key: value for key, value in config.items() if key != "model_type"}
    rewritten = transformers.AutoConfig.for_model(family, **kind).to_dict()
    assert "rope_parameters" in rewritten
    assert Architecture.from_config(json.loads(json.dumps(rewritten))) == Architecture.from_config(config)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_stacked_by_transformers_are_understood(family, tmp_path):
    save_tiny_model(tmp_path, family)
    stacked = transformers_model(tmp_path).state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in stacked)
    architecture = Architecture.from_config(tiny_config(family))
    ours = run_on(architecture, stacked, torch.float32)
    tokens = some_tokens(20)
    assert torch.equal(one_shot(ours, tokens), one_shot(load(tmp_path), tokens))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_text_part_of_a_gemma_3_with_vision_runs(prefix, tmp_path):
    text = tiny_config("gemma3_text")
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    inner = prefix if prefix.endswith("model.language_model.") else prefix + "model."
    tensors = {inner + name.removeprefix("model."): tensor for name, tensor in tiny_tensors(text).items()}
    tensors["vision_tower.encoder.layers.0.mlp.fc1.bias"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = some_tokens(40)
    assert torch.equal(one_shot(load(tmp_path), tokens), one_shot(tiny_decoder("gemma3_text"), tokens))


DTYPES = [torch.float32, torch.bfloat16]
QUANTIZED = [(family, bits) for bits in (8, 4) for family in ("llama", "gemma2", "mixtral")]
LENGTH = 90


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_token_by_token_as_in_one_shot(family, dtype):
    decoder, tokens = tiny_decoder(family, dtype=dtype), some_tokens(LENGTH)
    expected = one_shot(decoder, tokens)
    slots = np.random.default_rng(1).permutation(LENGTH + 10)[:LENGTH]
    store = decoder.new_store(LENGTH + 10)
    for position in range(LENGTH):
        logits = decoder.forward(chunk(tokens, position, position + 1, slots), store)
        assert torch.equal(logits[0], expected[position])


@pytest.mark.parametrize(("family", "bits"), QUANTIZED)
def test_same_bits_from_quantised_weights_however_a_prompt_is_cut(family, bits):
    decoder, tokens = tiny_decoder(family, dtype=torch.bfloat16, bits=bits), some_tokens(LENGTH)
    expected = one_shot(decoder, tokens)
    slots, store = np.arange(LENGTH), decoder.new_store(LENGTH)
    for first, last in pairwise([0, 1, 2, 19, 64, 65, LENGTH]):
        assert torch.equal(decoder.forward(chunk(tokens, first, last, slots), store), expected[first:last])


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=6), seed=st.integers(0, 99))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_however_a_prompt_is_cut(family, dtype, cuts, seed):
    decoder, tokens = tiny_decoder(family, dtype=dtype), some_tokens(LENGTH, seed)
    expected = one_shot(decoder, tokens)
    slots = np.random.default_rng(seed).permutation(LENGTH)
    store = decoder.new_store(LENGTH)
    borders = [0, *sorted(cuts), LENGTH]
    for first, last in pairwise(borders):
        assert torch.equal(decoder.forward(chunk(tokens, first, last, slots), store), expected[first:last])


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(context=st.integers(1, 70), parents=st.lists(st.integers(-1, 11), max_size=12), seed=st.integers(0, 99))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_in_a_tree_as_in_each_branch_alone(family, dtype, context, parents, seed):
    """Node i of the tree hangs on an earlier node, or on the last committed token (-1), which is in the batch too."""
    decoder = tiny_decoder(family, dtype=dtype)
    committed, drafted = some_tokens(context, seed), some_tokens(len(parents), seed + 1)
    parents = [min(parent, node - 1) for node, parent in enumerate(parents)]
    branches = [branch_to(node, parents) for node in range(len(parents))]
    slots = np.random.default_rng(seed).permutation(context + len(parents))
    store = decoder.new_store(len(slots))
    if context > 1:
        decoder.forward(chunk(committed, 0, context - 1, slots[:context]), store)
    logits = decoder.forward(tree_batch(committed, drafted, branches, slots), store)
    assert torch.equal(logits[0], one_shot(decoder, committed)[-1])
    for node, branch in enumerate(branches):
        alone = np.concatenate([committed, drafted[branch]])
        assert torch.equal(logits[1 + node], one_shot(decoder, alone)[-1])


def branch_to(node, parents):
    """The nodes from the root's child down to `node`."""
    branch = []
    while node >= 0:
        branch.append(node)
        node = parents[node]
    return branch[::-1]


def tree_batch(committed, drafted, branches, slots):
    """The last committed token and the tree on it; row 0 is that token, row 1 + i is node i."""
    context = len(committed)
    leaves = [node for node in range(len(branches)) if not any(node in b[:-1] for b in branches)]
    paths, placed = [], set()
    for leaf in leaves:
        rows = [0] if not paths else []
        rows += [1 + node for node in branches[leaf] if node not in placed]
        placed.update(branches[leaf])
        path_slots = np.concatenate([slots[:context], slots[context + np.array(branches[leaf])]])
        paths.append(AttentionPath(path_slots, np.array(rows), 0, context))
    if not leaves:
        paths = [AttentionPath(slots[:context], np.array([0]), 0, context)]
    return TokenBatch(
        np.concatenate([committed[-1:], drafted]),
        np.array([context - 1] + [context - 1 + len(branch) for branch in branches]),
        np.concatenate([slots[context - 1 : context], slots[context:]]),
        paths,
        np.arange(1 + len(drafted)),
    )
