"""Quantised weights: blocks of GGUF lose nothing, our own as little as their form allows, joining nothing."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import WeightsError
from forerun.kernels.quantized import QuantizedWeight
from forerun.models.quantization import (
    BLOCK_TYPES,
    from_blocks,
    quantize,
    quantize_groups,
    quantize_rows,
    stack,
)

BLOCK_NAMES = {kind.name: kind for kind in BLOCK_TYPES.values()}


def some_weight(rows=24, columns=96, seed=0):
    """Weights with a few large ones in each row, as models have."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    weight[:, ::17] *= 4
    return weight


def blocks_of(name, weight):
    kind = gguf.GGMLQuantizationType[name]
    return from_blocks(BLOCK_NAMES[name], gguf.quants.quantize(weight.numpy(), kind))


def relative_error(found, weight):
    return ((found.dequantized() - weight).square().sum() / weight.square().sum()).sqrt().item()


def test_the_block_types_are_those_of_gguf():
    for number, kind in BLOCK_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert known.name == kind.name
        assert gguf.GGML_QUANT_SIZES[known] == (32, kind.size)


@pytest.mark.parametrize("name", BLOCK_NAMES)
def test_any_bytes_of_a_block_mean_what_gguf_says(name):
    kind = BLOCK_NAMES[name]
    raw = np.random.default_rng(1).integers(0, 256, (40, 3 * kind.size), dtype=np.uint8)
    for start in range(0, raw.shape[1], kind.size):  # finite scales of all sizes and signs
        for place in (0, 2)[: 1 + kind.minima]:
            half = np.random.default_rng(start + place).normal(size=(40, 1)).astype(np.float16)
            raw[:, start + place : start + place + 2] = half.view(np.uint8)
    found = from_blocks(kind, raw)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert torch.equal(found.dequantized(), torch.from_numpy(expected.astype(np.float32)))
    assert (found.bits, found.group) == (kind.bits, 32)
    assert (found.minima is not None) == kind.minima


def test_blocks_of_a_mapped_file_are_copied(tmp_path):
    kind = BLOCK_NAMES["Q8_0"]
    raw = np.zeros((4, kind.size), np.uint8)
    found = from_blocks(kind, raw)
    raw[:] = 1
    assert not found.codes.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eight_bits_are_right_to_half_a_step(dtype):
    weight = some_weight().to(dtype)
    found = quantize(weight, 8)
    assert (found.bits, found.group, found.zero) == (8, None, 0)
    steps = (found.dequantized() - weight.float()).abs() / found.scales[:, None]
    assert steps.max() <= 0.5 + 1e-5
    assert found.codes.abs().amax(-1).eq(127).all()


@pytest.mark.parametrize("group", [32, 64])
def test_four_bits_beat_the_plain_scale_from_smallest_to_largest(group):
    weight = some_weight(64, 512)
    grouped = weight.view(64, -1, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale = (high - low) / 15
    plain = ((grouped - low) / scale).round() * scale + low
    plain_error = ((plain - grouped).square().sum() / weight.square().sum()).sqrt().item()
    found = quantize_groups(weight, 4, group)
    assert relative_error(found, weight) < 0.96 * plain_error
    assert found.codes.max() <= 15


def test_four_bits_are_at_least_as_good_as_gguf_s_own():
    weight = some_weight(64, 512)
    assert relative_error(quantize(weight, 4), weight) < 0.96 * relative_error(blocks_of("Q4_1", weight), weight)


def test_smaller_groups_lose_less():
    weight = some_weight(64, 512)
    errors = [relative_error(quantize_groups(weight, 4, group), weight) for group in (32, 64)]
    assert errors[0] < 0.9 * errors[1]


def test_eight_bits_in_groups_lose_less_than_per_row():
    weight = some_weight(64, 512)
    assert relative_error(quantize_groups(weight, 8), weight) < 0.8 * relative_error(quantize_rows(weight), weight)


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0, 1e-9])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_that_is_everywhere_the_same_is_kept(value, bits):
    found = quantize(torch.full((3, 64), value), bits)
    torch.testing.assert_close(found.dequantized(), torch.full((3, 64), value), rtol=1e-6, atol=1e-8)


def test_four_bits_become_eight_where_groups_do_not_fit():
    assert quantize(some_weight(columns=95), 4).bits == 8
    large = some_weight()
    large[3, 5] = 1e5
    assert quantize(large, 4).bits == 8
    assert quantize(some_weight(), 4).bits == 4


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_are_not_finite_are_refused(value, bits):
    weight = some_weight()
    weight[7, 11] = value
    with pytest.raises(WeightsError, match=r"not finite.*precision=bf16"):
        quantize(weight, bits)


def test_a_large_weight_is_quantised_in_chunks_as_if_in_one(monkeypatch):
    weight = some_weight(50, 128)
    whole = quantize(weight, 4)
    monkeypatch.setattr("forerun.models.quantization._CHUNK_VALUES", 3 * 128)
    parts = quantize(weight, 4)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales, parts.scales)


@settings(max_examples=60, deadline=None)
@given(names=st.lists(st.sampled_from([*BLOCK_NAMES, "own 4", "own 8"]), min_size=1, max_size=4))
def test_stacking_loses_nothing(names):
    parts = []
    for seed, name in enumerate(names):
        weight = some_weight(4 + seed, 64, seed)
        own = {"own 4": 4, "own 8": 8}
        parts.append(quantize_groups(weight, own[name]) if name in own else blocks_of(name, weight))
    joined = stack(parts)
    assert joined is not None
    assert torch.equal(joined.dequantized(), torch.cat([part.dequantized() for part in parts]))
    assert joined.bits == max(part.bits for part in parts)


def test_a_zero_that_float16_cannot_hold_as_a_minimum_takes_eight_bits():
    tall = QuantizedWeight(
        torch.arange(32, dtype=torch.uint8).view(1, 32) % 16,
        torch.full((1, 1), 30_000.0, dtype=torch.float16),
        None,
        32,
        4,
        8,
    )
    joined = stack([tall, blocks_of("Q4_1", some_weight(2, 32))])
    assert joined is not None
    assert joined.bits == 8
    assert torch.equal(joined.dequantized()[:1], tall.dequantized())


def test_weights_of_other_groups_are_not_stacked():
    assert stack([quantize_groups(some_weight(4, 64), 4, 32), quantize_groups(some_weight(4, 64), 4, 64)]) is None
    assert stack([quantize_rows(some_weight(4, 64)), quantize_groups(some_weight(4, 64), 8)]) is None
    rows = [quantize_rows(some_weight(4, 64, seed)) for seed in range(2)]
    joined = stack(rows)
    assert joined is not None
    assert torch.equal(joined.dequantized(), torch.cat([part.dequantized() for part in rows]))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (quantize_rows(some_weight(6, 64)), 6 * 64 + 4 * 6),
        (quantize_groups(some_weight(6, 64), 4), 6 * 64 // 2 + 6 * 2 * 2 * 2),
        (quantize_groups(some_weight(6, 64), 8), 6 * 64 + 6 * 2 * 2),
    ],
)
def test_bytes_are_those_of_closely_packed_codes(weight, expected):
    assert weight.nbytes == expected
