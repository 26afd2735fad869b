"""Which precision a model gets, and what its layers become."""

import re

import pytest
import torch

from forerun.errors import ConfigError, WeightsError
from forerun.kernels.quantized import QuantizedWeight
from forerun.models.precision import WeightFormat, choose_precision
from forerun.models.quantization import quantize_rows
from tests.models.test_decoder import decode_with
from tests.models.test_parity import one_shot, some_tokens
from tests.models.test_quantization import blocks_of, some_weight
from tests.models.tiny import tiny_config, tiny_decoder, tiny_tensors

FOUR = {"Q4_1": 66, "Q8_0": 30}
EIGHT = {"Q8_0": 180, "Q5_0": 43, "Q4_K": 13, "Q6_K": 10}
OTHER = {"Q4_K": 60, "Q6_K": 20, "Q8_0": 10}
INT8, INT4 = WeightFormat(torch.bfloat16, 8), WeightFormat(torch.bfloat16, 4)
BLOCKS = WeightFormat(torch.bfloat16, blocks=True)


def choose(asked, stored, *, native=True):
    return choose_precision(asked, native=native, stored=lambda: stored)


@pytest.mark.parametrize("stored", [FOUR, EIGHT, OTHER, {}])
def test_floating_point_is_floating_point_whatever_the_file_holds(stored):
    assert choose("fp32", stored).format == WeightFormat(torch.float32)
    assert choose("bf16", stored).format == WeightFormat(torch.bfloat16)


@pytest.mark.parametrize(
    ("asked", "stored", "expected"),
    [
        ("int8", FOUR, INT8),
        ("int8", OTHER, INT8),
        ("int8", {}, INT8),
        ("int8", EIGHT, WeightFormat(torch.bfloat16, 8, blocks=True)),
        ("int4", FOUR, BLOCKS),
        ("int8", {"Q8_0": 9}, BLOCKS),
        ("int4", EIGHT, WeightFormat(torch.bfloat16, 4, blocks=True)),
        ("int4", OTHER, WeightFormat(torch.bfloat16, 4, blocks=True)),
        ("int4", {"F16": 9}, INT4),
        ("int4", {}, INT4),
    ],
)
def test_what_is_asked_for_is_had_and_blocks_are_kept_where_they_lose_nothing_and_cost_nothing(asked, stored, expected):
    chosen = choose(asked, stored)
    assert (chosen.name, chosen.format) == (asked, expected)
    assert ("as they are" in chosen.reason) == expected.blocks


@pytest.mark.parametrize(
    ("stored", "native", "name", "weights", "reason"),
    [
        (FOUR, True, "int4", BLOCKS, "Q4_1 and Q8_0 blocks are used as they are, which loses nothing."),
        (EIGHT, True, "int8", BLOCKS, "Q5_0 and Q8_0 blocks.*Q4_K and Q6_K weights are held in bf16"),
        (OTHER, True, "bf16", WeightFormat(torch.bfloat16), "mostly holds Q4_K, and auto adds no loss"),
        ({}, True, "bf16", WeightFormat(torch.bfloat16), "no GGUF"),
        (FOUR, False, "bf16", WeightFormat(torch.bfloat16), "not faster with quantised"),
    ],
)
def test_auto_takes_blocks_that_are_most_of_a_file(stored, native, name, weights, reason):
    chosen = choose("auto", stored, native=native)
    assert (chosen.name, chosen.format) == (name, weights)
    assert re.search(reason, chosen.reason)


def test_an_unknown_precision_lists_the_known():
    with pytest.raises(ConfigError, match=r"'int2'.*auto, fp32, bf16, int8, int4"):
        choose("int2", {})


def test_blocks_are_used_as_they_are_only_where_the_format_says_so():
    blocks = [blocks_of("Q4_1", some_weight()), blocks_of("Q4_1", some_weight(seed=1))]
    together = torch.cat([part.dequantized() for part in blocks])
    for weights in (BLOCKS, WeightFormat(torch.bfloat16, 4, blocks=True)):
        joined = weights.linear(blocks)
        assert isinstance(joined, QuantizedWeight)
        assert (joined.bits, joined.group) == (4, 32)
        assert torch.equal(joined.dequantized(), together)
    plain = INT8.linear(blocks)
    assert isinstance(plain, QuantizedWeight)
    assert plain.group is None
    assert torch.equal(plain.codes, quantize_rows(together).codes)
    assert torch.equal(WeightFormat(torch.bfloat16).linear(blocks), together.bfloat16())


def test_a_floating_point_neighbour_of_blocks_does_not_cost_them_anything():
    weight = some_weight(seed=2)
    for name, bits in (("Q4_1", 4), ("Q8_0", 8)):
        blocks = blocks_of(name, some_weight())
        joined = WeightFormat(torch.bfloat16, 4, blocks=True).linear([blocks, weight])
        assert joined.bits == bits
        assert torch.equal(joined.dequantized()[: len(blocks.codes)], blocks.dequantized())
        assert (joined.dequantized()[len(blocks.codes) :] - weight).abs().max() < 0.5 / bits**2
    odd = torch.full((4, 96), 1e5)  # does not fit beside blocks
    assert WeightFormat(torch.bfloat16, 4, blocks=True).linear([blocks, odd]).group is None
    joined = BLOCKS.linear([blocks, weight])
    assert torch.equal(joined, torch.cat([blocks.dequantized(), weight]).bfloat16())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "phi3"])
def test_a_quantised_model_computes_about_what_it_did(family, bits):
    tokens = some_tokens(40)
    exact = one_shot(tiny_decoder(family), tokens)
    error = (one_shot(tiny_decoder(family, dtype=torch.bfloat16, bits=bits), tokens) - exact).abs().mean()
    assert error < {8: 0.15, 4: 0.6}[bits] * exact.std()
    if family != "phi3":  # its layers alone are fused already
        assert error > 0


@pytest.mark.parametrize("bits", [8, 4])
def test_embeddings_routers_and_cache_stay_in_bf16_and_linear_layers_do_not(bits):
    decoder = tiny_decoder("mixtral", dtype=torch.bfloat16, bits=bits)
    assert decoder.new_store(4).keys.dtype == torch.bfloat16
    assert decoder._embedding.dtype == torch.bfloat16
    mixture = decoder.layers[0].mixture
    assert mixture.router.weight.dtype == torch.bfloat16
    for packed in (decoder.layers[0].qkv, mixture.gate_up[1], mixture.down[3], decoder.lm_head):
        assert packed.grouped == (bits == 4)


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_are_those_of_the_form_in_which_they_are_held(tied):
    linear = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 96)
    rows = 2 * (128 + 64 + 2 * 96 + 64)
    head, norms = 512 * 64, 4 * 5 * 64

    def held(dtype, bits=None):
        return tiny_decoder(tie_word_embeddings=tied, dtype=dtype, bits=bits).weight_bytes

    for dtype in (torch.float32, torch.bfloat16):
        assert held(dtype) == (linear + head * (1 if tied else 2)) * dtype.itemsize + norms
    assert held(torch.bfloat16, 8) == linear + head + 2 * head + 4 * (rows + 512) + norms
    assert held(torch.bfloat16, 4) == (linear + head) * 5 // 8 + 2 * head + norms


def test_a_tied_head_is_quantised_from_the_table_as_it_is_stored():
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    decoder = tiny_decoder(tie_word_embeddings=True, dtype=torch.bfloat16, bits=8)
    expected = quantize_rows(tensors["model.embed_tokens.weight"]).codes
    assert torch.equal(decoder.lm_head.codes[0].T, expected.double())


def test_a_weight_that_is_not_finite_names_its_layer():
    weight = torch.zeros(64, 96)
    weight[1, 1] = float("nan")
    with pytest.raises(WeightsError, match=r"'model\.layers\.1\.mlp\.down_proj'.*not finite"):
        decode_with(weights=INT4, **{"model.layers.1.mlp.down_proj.weight": weight})
    table = torch.full((512, 64), float("inf"))
    with pytest.raises(WeightsError, match=r"'lm_head'.*not finite"):
        decode_with(weights=INT8, **{"lm_head.weight": table})
