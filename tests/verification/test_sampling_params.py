"""Every bad parameter is an error that names the parameter, the value, what is allowed, and what to do."""

import math
import pickle

import numpy as np
import pytest

from forerun.errors import InvalidRequestError
from forerun.verification.sampling import SamplingParams

NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, "1", None, [1]]

BAD = [
    *(("temperature", value) for value in [-0.1, -1, *NOT_NUMBERS]),
    *(("top_p", value) for value in [0, 0.0, -0.5, 1.0001, 2, *NOT_NUMBERS]),
    *(("top_k", value) for value in [-2, 1.5, 5.0, *NOT_NUMBERS]),
    *(("min_p", value) for value in [-0.01, 1.01, *NOT_NUMBERS]),
    *(("repetition_penalty", value) for value in [0, -1, *NOT_NUMBERS]),
    *(("presence_penalty", value) for value in [-2.1, 2.1, *NOT_NUMBERS]),
    *(("frequency_penalty", value) for value in [-2.1, 2.1, *NOT_NUMBERS]),
    *(("seed", value) for value in [2**64, -(2**63) - 1, 1.0, True, "1", math.nan]),
    *(("n", value) for value in [0, -1, 1025, 1.0, True, None]),
    *(("max_tokens", value) for value in [0, -5, 1.5, True, None, math.inf]),
    *(("min_tokens", value) for value in [-1, 129, 1.5, True, None]),
    *(("stop", value) for value in ["", [""], ["a", ""], [1], 5, b"a", [None]]),
    *(("stop_token_ids", value) for value in [[-1], [1.5], [True], ["1"], 3, "12", None]),
    *(("logprobs", value) for value in [-1, 21, True, 1.0, "5"]),
    *(("ignore_eos", value) for value in [1, 0, "yes", None]),
    *(("include_stop", value) for value in [1, None]),
]

BAD_BIASES = [
    {1: math.nan},
    {1: math.inf},
    {1: 100.5},
    {1: -101},
    {-1: 1},
    {"1": 1},
    {1.0: 1},
    {True: 1},
    {1: True},
    [1],
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda x: repr(x))
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "allowed" in message
    shown = value[-1] if isinstance(value, list) and name.startswith("stop") and value else value
    assert repr(shown) in message
    assert ";" in message.split("allowed", 1)[1], "the message ends with a remedy"


@pytest.mark.parametrize("bias", BAD_BIASES, ids=repr)
def test_a_bad_logit_bias_is_refused(bias):
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_the_message_for_min_tokens_gives_both_numbers():
    with pytest.raises(InvalidRequestError, match=r"min_tokens is 9.*max_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_tokens=8)


@pytest.mark.parametrize(
    "allowed",
    [
        {"temperature": 0},
        {"temperature": 100.0},
        {"temperature": np.float32(0.5)},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 10**9},
        {"top_k": np.int64(5)},
        {"min_p": 1.0},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"n": 4},
        {"min_tokens": 128},
        {"stop": "END"},
        {"stop": ["a", "b"]},
        {"stop": None},
        {"logprobs": 0},
        {"logprobs": 20},
        {"logit_bias": {5: -100, 6: 100.0}},
    ],
    ids=repr,
)
def test_what_is_allowed_is_accepted(allowed):
    SamplingParams(**allowed)


def test_values_come_out_in_their_plain_types():
    params = SamplingParams(
        temperature=1, top_k=np.int64(3), stop="END", stop_token_ids=[np.int32(4)], logit_bias={np.int64(2): 1}
    )
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert params.stop == ("END",)
    assert params.stop_token_ids == (4,)
    assert params.logit_bias == {2: 1.0}
    assert type(next(iter(params.logit_bias))) is int


def test_parameters_are_values():
    params = SamplingParams(temperature=0.5, logit_bias={1: 2})
    assert params == SamplingParams(temperature=0.5, logit_bias={1: 2})
    assert hash(params) == hash(SamplingParams(temperature=0.5, logit_bias={1: 2}))
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(AttributeError):
        params.temperature = 1.0


def test_a_later_change_of_the_caller_s_bias_changes_nothing():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize("params", [SamplingParams(logit_bias={50: 1}), SamplingParams(stop_token_ids=[3, 50])])
def test_ids_outside_the_vocabulary_are_refused_with_both_numbers(params):
    params.check_vocabulary(51)
    with pytest.raises(InvalidRequestError, match=r"50.*0 \.\. 49"):
        params.check_vocabulary(50)
