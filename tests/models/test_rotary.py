"""Rotary tables: what each kind of scaling promises, and what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ModelError, UnsupportedModelError
from forerun.models.rotary import SCALINGS, Rotary, rotary_from_parameters, rotary_table

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


def read(context=64, head_dim=32, **parameters):
    return rotary_from_parameters({"rope_theta": 10_000.0, **parameters}, head_dim, context)


def test_plain_table_is_the_definition_within_float32():
    cos, sin = rotary_table(read(), 5000)
    angles = np.arange(5000)[:, None] * 10_000.0 ** (-np.arange(0, 32, 2) / 32)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (5000, 16)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-7)


def test_linear_scaling_divides_positions():
    scaled, plain = rotary_table(read(rope_type="linear", factor=4.0), 81), rotary_table(read(), 21)
    torch.testing.assert_close(scaled[0][::4], plain[0])
    torch.testing.assert_close(scaled[1][::4], plain[1])


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 300), longer=st.integers(0, 300), kind=st.sampled_from(sorted(SCALINGS)))
def test_a_position_is_rotated_alike_whatever_the_length_of_the_table(length, longer, kind):
    rotary = read(**{**LLAMA3, "rope_type": kind, "original_max_position_embeddings": 32})
    short, long = rotary_table(rotary, length), rotary_table(rotary, length + longer)
    assert torch.equal(short[0], long[0][:length])
    assert torch.equal(short[1], long[1][:length])


def test_dynamic_scaling_rotates_position_p_as_a_sequence_of_p_plus_1_tokens():
    cos, _ = rotary_table(read(rope_type="dynamic", factor=2.0), 200)
    plain, _ = rotary_table(read(), 200)
    assert torch.equal(cos[:64], plain[:64])
    for position in (64, 100, 199):
        base = 10_000.0 * (2.0 * (position + 1) / 64 - 1.0) ** (32 / 30)
        expected = np.cos(position * base ** (-np.arange(0, 32, 2) / 32))
        np.testing.assert_allclose(cos[position], expected, atol=1e-6)


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    rotary = read(context=8192, head_dim=128, **LLAMA3, original_max_position_embeddings=1024)
    steps = torch.zeros(1)
    ratio = rotary.scaling.frequencies(1e4, 128, steps) / read(head_dim=128).scaling.frequencies(1e4, 128, steps)
    wavelength = 2 * math.pi / read(head_dim=128).scaling.frequencies(1e4, 128, steps)
    torch.testing.assert_close(ratio[wavelength < 1024 / 4].unique(), torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(ratio[wavelength > 1024].unique(), torch.full((1,), 1 / 8, dtype=torch.float64))
    assert (ratio.diff() <= 0).all()


@pytest.mark.parametrize(
    ("parameters", "magnitude"),
    [
        (YARN, 0.1 * math.log(4) + 1),
        ({**YARN, "attention_factor": 0.9}, 0.9),
        ({**YARN, "factor": 1.0}, 1.0),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ],
)
def test_yarn_scales_what_it_rotates(parameters, magnitude):
    cos, sin = rotary_table(read(**parameters), 50)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, magnitude**2))


@pytest.mark.parametrize(
    ("parameters", "reach"),
    [
        ({}, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "dynamic", "factor": 1.5}, 96),
        ({**LLAMA3, "original_max_position_embeddings": 16}, 64),
        ({**YARN, "original_max_position_embeddings": 16}, 64),
        ({**YARN, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_scaling_says_how_far_the_model_reaches(parameters, reach):
    assert read(**parameters).scaling.reach(64) == reach


def test_part_of_a_head_turns():
    assert read(head_dim=32, partial_rotary_factor=0.5) == Rotary(16, 10_000.0)
    assert read(head_dim=32, partial_rotary_factor=None) == Rotary(32, 10_000.0)


@pytest.mark.parametrize("parameters", [{"rope_type": "longrope"}, {"type": "su"}, {**YARN, "long_factor": [1.0]}])
def test_an_unknown_scaling_is_refused_with_the_ones_that_are_known(parameters):
    with pytest.raises(UnsupportedModelError, match=r"default, linear, dynamic, llama3, yarn"):
        read(**parameters)


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -2}, "factor"),
        ({"rope_type": "linear", "factor": "two"}, "factor"),
        ({"rope_type": "dynamic", "factor": float("nan")}, "factor"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"head_dim": 33}, "head_dim"),
        ({"head_dim": 2, "rope_type": "dynamic", "factor": 2.0}, "dynamic"),
    ],
)
def test_senseless_values_are_named(parameters, names):
    with pytest.raises(ModelError, match=names):
        read(**parameters)
