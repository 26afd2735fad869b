"""From config.json to data: published models, what may be left out, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ForerunError, ModelError, UnsupportedModelError
from forerun.models.architecture import FAMILIES, Architecture
from forerun.models.parameters import parameter_count
from tests.models.tiny import FAMILIES as TINY_FAMILIES
from tests.models.tiny import tiny_config

SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}

GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def windows(architecture):
    return [layer.window for layer in architecture.layers]


@pytest.mark.parametrize(
    ("config", "millions"), [(SMOLLM2_135M, 134.515), (GEMMA_3_4B, 3880.263), (QWEN3_30B_A3B, 30532.123)]
)
def test_published_models_have_the_size_that_is_published(config, millions):
    assert parameter_count(Architecture.from_config(config)) / 1e6 == pytest.approx(millions, abs=0.001)


def test_what_a_gemma_3_leaves_out_is_filled_in():
    gemma = Architecture.from_config(GEMMA_3_4B)
    assert (gemma.heads, gemma.kv_heads, gemma.head_dim, gemma.vocab_size) == (8, 4, 256, 262_208)
    assert windows(gemma)[:7] == [1024] * 5 + [None] + [1024]
    local, full = (gemma.rotaries[gemma.layers[layer].rotary] for layer in (0, 5))
    assert (local.theta, local.scaling.reach(1)) == (10_000.0, 1)
    assert (full.theta, full.scaling.reach(1)) == (1_000_000.0, 8)
    assert gemma.context_limit == 131_072
    assert gemma.tied_embeddings


def test_layers_with_the_same_rotary_setting_share_a_table():
    assert len(Architecture.from_config(tiny_config("gemma2")).rotaries) == 1
    assert len(Architecture.from_config(tiny_config("gemma3_text")).rotaries) == 2


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("mistral", {}, [24, 24]),
        ("mistral", {"sliding_window": None}, [None, None]),
        ("qwen2", {}, [None, None]),
        ("qwen2", {"use_sliding_window": True}, [None, 24]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, [24, 24]),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, [24, None]),
        ("qwen3", {"use_sliding_window": False, "layer_types": ["sliding_attention", "full_attention"]}, [None] * 2),
        ("gemma2", {}, [24, None]),
        ("gemma3_text", {"sliding_window_pattern": 3}, [24, 24]),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}, [None, 24]),
    ],
)
def test_windows_are_where_the_family_puts_them(family, overrides, expected):
    assert windows(Architecture.from_config(tiny_config(family, **overrides))) == expected


def test_older_and_newer_rope_fields_mean_the_same():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    older = Architecture.from_config(tiny_config("llama", rope_theta=5e5, rope_scaling=scaling))
    flat = tiny_config("llama", rope_theta=None, rope_parameters={"rope_theta": 5e5, **scaling})
    del flat["rope_theta"]
    assert Architecture.from_config(flat) == older


def test_rope_parameters_by_layer_kind_are_understood():
    parameters = {
        "full_attention": {"rope_theta": 7e5, "rope_type": "linear", "factor": 2.0},
        "sliding_attention": {"rope_theta": 5e3, "rope_type": "default"},
    }
    newer = Architecture.from_config(tiny_config("gemma3_text", rope_parameters=parameters))
    older = tiny_config("gemma3_text", rope_theta=7e5, rope_local_base_freq=5e3)
    older["rope_scaling"] = {"type": "linear", "factor": 2.0}
    assert Architecture.from_config(older) == newer


@pytest.mark.parametrize("model_type", ["gpt2", "llama4", "mamba", None, 7])
def test_an_unknown_architecture_is_refused_with_the_ones_that_are_known(model_type):
    with pytest.raises(UnsupportedModelError) as error:
        Architecture.from_config({**tiny_config(), "model_type": model_type})
    assert str(model_type) in str(error.value)
    assert all(family in str(error.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "longrope.*llama3"),
        ({"hidden_act": "relu"}, "relu.*silu"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_unsupported_features_are_refused(overrides, names):
    with pytest.raises(UnsupportedModelError, match=names):
        Architecture.from_config(tiny_config("llama", **overrides))


def test_mixed_layers_in_a_family_with_one_kind_are_refused():
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        Architecture.from_config(tiny_config("mistral", layer_types=["full_attention", "sliding_attention"]))


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_a_missing_field_is_named(field):
    config = tiny_config()
    del config[field]
    with pytest.raises(ModelError, match=field):
        Architecture.from_config(config)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_mixture_without_its_counts_is_refused(family):
    with pytest.raises(ModelError, match="num_experts_per_tok"):
        Architecture.from_config(tiny_config(family, num_experts_per_tok=None))
    with pytest.raises(ModelError, match="num_experts_per_tok is 5"):
        Architecture.from_config(tiny_config(family, num_experts_per_tok=5))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("vocab_size", -1),
        ("num_hidden_layers", 2.5),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 0.0),
        ("tie_word_embeddings", "yes"),
        ("rope_theta", -1.0),
        ("rope_scaling", "linear"),
        ("sliding_window", 0),
        ("layer_types", ["full_attention"]),
    ],
)
def test_a_senseless_field_is_named(field, value):
    with pytest.raises(ModelError, match=field):
        Architecture.from_config(tiny_config("mistral", **{field: value}))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-2, 2), max_size=3),
    st.dictionaries(st.sampled_from(["factor", "rope_type", "full_attention"]), st.integers(), max_size=2),
)


@settings(max_examples=300, deadline=None)
@given(family=st.sampled_from(TINY_FAMILIES), data=st.data())
def test_whatever_a_config_holds_it_is_an_architecture_or_an_error_of_ours(family, data):
    config = tiny_config(family)
    for field in data.draw(st.sets(st.sampled_from([*config, "rope_scaling", "rope_parameters", "layer_types"]))):
        config[field] = data.draw(JUNK)
    try:
        Architecture.from_config(config)
    except ForerunError as error:
        assert "config.json" in str(error)  # noqa: PT017 - either outcome is right
