"""What a user may ask of the choice of tokens. Only data and its checks: nothing here chooses."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.errors import InvalidRequestError

SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
MAX_LOGPROBS = 20
MAX_ANSWERS = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when its answer ends.

    temperature: 0 = greedy (the highest logit, ties to the lowest id); above 0 the logits are divided by it.
    top_p: sample from the smallest set of tokens whose probability reaches top_p; 1 = off. top_k: from the k likeliest
        tokens; 0 or -1 = off. min_p: from tokens at least min_p times as likely as the likeliest; 0 = off.
    repetition_penalty: logits of tokens in the prompt or the answer are divided by it (if positive) or multiplied (if
        negative); 1 = off. presence_penalty: subtracted from the logits of tokens in the answer. frequency_penalty:
        subtracted once for each time the token stands in the answer.
    logit_bias: added to the logits of these token ids, -100 .. 100.
    seed: the same seed gives the same answer; None = a fresh one for each request. Negative seeds count modulo 2**64.
    n: how many answers. max_tokens, min_tokens: most and fewest tokens of an answer; before min_tokens neither end
        tokens, stop tokens nor stop strings end it.
    stop: strings that end the answer; include_stop keeps them in the text. stop_token_ids: tokens that end the answer.
    ignore_eos: the model's own end tokens may be chosen, but do not end the answer.
    logprobs: report the log-probability of each token and of this many likeliest ones; None = off.

    Raises InvalidRequestError when a value is not allowed.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every value and bring it to its plain type (float, int, tuple, dict)."""
        self._number("temperature", "finite numbers from 0 up", lambda x: x >= 0, "use 0 for greedy decoding")
        self._number("top_p", "above 0, up to 1", lambda x: 0 < x <= 1, "use 1 to turn the filter off")
        self._integer("top_k", -1, None, "use 0 or -1 to turn the filter off")
        self._number("min_p", "0 .. 1", lambda x: 0 <= x <= 1, "use 0 to turn the filter off")
        self._number("repetition_penalty", "0.01 .. 100", lambda x: 0.01 <= x <= 100, "use 1 to turn the penalty off")
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, "-2 .. 2", lambda x: -2 <= x <= 2, "use 0 to turn the penalty off")
        self._set("logit_bias", _checked_bias(self.logit_bias))
        if self.seed is not None:
            self._integer("seed", SEED_MIN, SEED_MAX, "leave it out for a random seed")
        self._integer("n", 1, MAX_ANSWERS, "send the prompt again for more answers")
        self._integer("max_tokens", 1, None, "ask for at least one token")
        self._integer("min_tokens", 0, None, "use 0 for no lower limit")
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}; allowed: 0 .. max_tokens ({self.max_tokens}); "
                "lower it, or raise max_tokens"
            )
        self._set("stop", _checked_stop(self.stop))
        self._set("stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name)!r}; allowed: True or False; give one of them"
                )
        if self.logprobs is not None:
            self._integer("logprobs", 0, MAX_LOGPROBS, "leave it out to turn log-probabilities off")

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is chosen, without noise."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether any penalty is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError when a token id in logit_bias or stop_token_ids is not below `vocab_size`."""
        for name, ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids)):
            wrong = next((token for token in ids if token >= vocab_size), None)
            if wrong is not None:
                raise InvalidRequestError(
                    f"{name} has token id {wrong}; allowed: 0 .. {vocab_size - 1}, the model's vocabulary; "
                    "use ids of this model's tokenizer"
                )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _number(self, name: str, allowed: str, accepts: Callable[[float], bool], remedy: str) -> None:
        value = getattr(self, name)
        number = _as_float(value)
        if number is None or not accepts(number):
            raise InvalidRequestError(f"{name} is {value!r}; allowed: {allowed}; {remedy}")
        self._set(name, number)

    def _integer(self, name: str, low: int, high: int | None, remedy: str) -> None:
        value = getattr(self, name)
        number = _as_int(value)
        if number is None or number < low or (high is not None and number > high):
            allowed = f"whole numbers from {low} up" if high is None else f"whole numbers {low} .. {high}"
            raise InvalidRequestError(f"{name} is {value!r}; allowed: {allowed}; {remedy}")
        self._set(name, number)


def _as_float(value: object) -> float | None:
    """A finite float, or None. Booleans and text are not numbers here."""
    if isinstance(value, bool | np.bool_ | str | bytes):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # anything that is not a number raises, and that is the test
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _as_int(value: object) -> int | None:
    """An int, or None. Booleans, and floats without a fraction, are not whole numbers here."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # anything that is not a whole number raises
    except TypeError:
        return None


def _checked_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(
            f"logit_bias is {bias!r}; allowed: a mapping of token id to number; give a dict or None"
        )
    checked = {}
    for key, value in bias.items():
        token, number = _as_int(key), _as_float(value)
        if token is None or token < 0:
            raise InvalidRequestError(
                f"logit_bias has token id {key!r}; allowed: whole numbers from 0 up; use token ids as keys"
            )
        if number is None or not -100 <= number <= 100:
            raise InvalidRequestError(
                f"logit_bias is {value!r} for token id {token}; allowed: -100 .. 100; -100 all but bans a token, "
                "100 all but forces it"
            )
        checked[token] = number
    return checked or None


def _checked_stop(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Iterable) or isinstance(strings, bytes):
        raise InvalidRequestError(f"stop is {stop!r}; allowed: a string or a list of strings; give one of them")
    strings = tuple(strings)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequestError(f"stop holds {string!r}; allowed: strings that are not empty; leave this one out")
    return strings


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise InvalidRequestError(f"{name} is {ids!r}; allowed: a list of token ids; give whole numbers from 0 up")
    checked = []
    for value in ids:
        token = _as_int(value)
        if token is None or token < 0:
            raise InvalidRequestError(f"{name} holds {value!r}; allowed: whole numbers from 0 up; leave this one out")
        checked.append(token)
    return tuple(checked)
