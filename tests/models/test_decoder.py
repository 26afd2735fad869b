"""The decoder as an object: its sizes, and what it says about weights that do not fit. Numbers: see test_parity."""

from collections.abc import Mapping

import pytest
import torch

from forerun.errors import ConfigError, WeightsError
from forerun.kernels.reference import ReferenceKernels
from forerun.models.architecture import Architecture
from forerun.models.decoder import Decoder
from forerun.models.precision import WeightFormat
from tests.models.test_parity import chunk, one_shot, some_tokens
from tests.models.tiny import FAMILIES, run_on, tiny_config, tiny_decoder, tiny_tensors


class ReadOnce(Mapping):
    """A file of tensors that is read lazily and counts the readings."""

    def __init__(self, tensors):
        self.tensors, self.readings = tensors, dict.fromkeys(tensors, 0)

    def __getitem__(self, name):
        tensor = self.tensors[name]
        self.readings[name] += 1
        return tensor

    def __contains__(self, name):
        return name in self.tensors

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def decode_with(family="llama", config=None, weights=torch.float32, **changes):
    """A decoder on tiny tensors of which some are replaced (None: removed)."""
    config = config or tiny_config(family)
    tensors = {**tiny_tensors(config), **changes}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return run_on(Architecture.from_config(config), tensors, weights)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_read_once(family, bits):
    config = tiny_config(family)
    tensors = ReadOnce(tiny_tensors(config))
    run_on(Architecture.from_config(config), tensors, WeightFormat(torch.bfloat16, bits))
    assert set(tensors.readings.values()) == {1}


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("llama", "model.embed_tokens.weight"),
        ("llama", "model.layers.1.self_attn.k_proj.weight"),
        ("llama", "lm_head.weight"),
        ("qwen2", "model.layers.0.self_attn.v_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.gate.weight"),
        ("gemma2", "model.layers.1.post_feedforward_layernorm.weight"),
    ],
)
def test_a_missing_tensor_is_named_with_the_shape_it_must_have(family, missing):
    shape = list(tiny_tensors(tiny_config(family))[missing].shape)
    with pytest.raises(WeightsError) as error:
        decode_with(family, **{missing: None})
    assert missing in str(error.value)
    assert str(shape) in str(error.value)


def test_a_wrong_shape_is_named_with_both_shapes():
    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.up_proj\.weight.*\[95, 64\].*\[96, 64\]"):
        decode_with(**{"model.layers.0.mlp.up_proj.weight": torch.zeros(95, 64)})


def test_tensors_of_integers_are_refused():
    with pytest.raises(WeightsError, match=r"down_proj.*torch\.int8"):
        decode_with(**{"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 96, dtype=torch.int8)})


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.k_norm.weight"])
def test_a_tensor_that_would_be_left_out_unseen_is_named(name):
    with pytest.raises(WeightsError, match=name):
        decode_with(**{name: torch.zeros(64)})


def test_tensors_that_carry_no_weights_are_left_alone():
    decode_with(
        **{
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
            "model.layers.2.self_attn.q_proj.bias": torch.zeros(8),  # a layer beyond those that config.json names
        }
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_a_dtype_that_cannot_be_held_is_refused(dtype):
    with pytest.raises(ConfigError, match="float32"):
        tiny_decoder(dtype=dtype)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_converted_to_the_dtype_asked_for(stored):
    config = tiny_config()
    tensors = {name: tensor.to(stored) for name, tensor in tiny_tensors(config).items()}
    decoder = run_on(Architecture.from_config(config), tensors, torch.bfloat16)
    assert decoder.new_store(4).keys.dtype == torch.bfloat16
    assert one_shot(decoder, some_tokens(5)).dtype == torch.float32


def test_tied_embeddings_are_not_held_twice():
    decoder = tiny_decoder("llama", tie_word_embeddings=True, kernels=ReferenceKernels())
    assert decoder.lm_head.weight.data_ptr() == decoder._embedding.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "cache"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_cache_bytes_per_token_are_what_the_store_takes(family, dtype, cache):
    decoder = tiny_decoder(family, dtype=dtype, cache=cache)
    store = decoder.new_store(10)
    assert (store.slots, store.keys.dtype) == (10, cache or dtype)
    assert store.nbytes == 11 * decoder.kv_bytes_per_token


def test_context_is_as_long_as_the_model_allows_or_as_asked_for():
    config = tiny_config()
    architecture, tensors = Architecture.from_config(config), tiny_tensors(config)
    limits = {None: 256, 100: 100, 1000: 256}
    for asked, limit in limits.items():
        decoder = Decoder(architecture, tensors, ReferenceKernels("cpu"), WeightFormat(torch.float32), "cpu", asked)
        assert decoder.context_limit == limit


def test_logits_come_for_the_rows_asked_for_in_their_order():
    decoder, tokens = tiny_decoder(), some_tokens(12)
    everything = one_shot(decoder, tokens)
    batch = chunk(tokens, 0, 12, torch.arange(12).numpy())
    for wanted in ([], [11], [7, 2, 7]):
        rows = torch.tensor(wanted, dtype=torch.int64)
        logits = decoder.forward(type(batch)(**{**vars(batch), "logit_rows": rows.numpy()}), decoder.new_store(12))
        assert logits.shape == (len(wanted), decoder.vocab_size)
        assert torch.equal(logits, everything[rows])


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_do_not_answer_alike(family):
    """Tests with these models are worth something only if greedy answers vary with what came before."""
    answers = one_shot(tiny_decoder(family), some_tokens(100)).argmax(-1)
    other = one_shot(tiny_decoder(family, seed=1), some_tokens(100)).argmax(-1)
    assert len(answers.unique()) > 50
    assert (answers != other).float().mean() > 0.9
