"""The choice: which token the target emits after a node, and a drafter's guess at it. Pure functions.

The order is logit_bias, penalties, min_tokens, temperature, top_k, top_p, min_p, then argmax(score + noise).
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from forerun.errors import EngineError
from forerun.kernels.native_rows import native_rows
from forerun.verification.filters import (
    SMALLEST_FLOAT32_TEMPERATURE,
    Logits,
    at_least,
    largest,
    ranked,
    rough_scores,
    scores,
    survivors,
)
from forerun.verification.noise import Ids, ceiling_terms, gumbel, gumbel_ceiling
from forerun.verification.sampling import SamplingParams

DISAGREEMENT = 0.7
"""How far, in nats of logit, a drafter and its target are taken to differ: the scale of a Gumbel law."""

_FIELD = 8  # candidates among which `propose` shares out the chance
_LEAST_CHANCE = 1e-9
_SMALL = 2048  # so few ids are cheaper to perturb than to bound
_SLACK = np.float32(1e-3)  # the ceiling's and the rough scores' rounding, with room


class SamplingState:
    """What the choice of one sequence's next token depends on besides the logits: parameters, seed, tokens so far.

    Whoever emits a token appends it, once; nothing is ever taken back, as drafts are not counted.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_tokens: Sequence[int],
        vocab_size: int,
        end_token_ids: Collection[int] = (),
    ) -> None:
        """The state before the first token of an answer.

        seed: of this very answer. prompt_tokens: they count for the repetition penalty and for positions.
        end_token_ids: the tokens that end the answer; these and `stop_token_ids` are banned until `min_tokens` tokens
        are emitted.
        """
        self.params = params
        self.seed = seed
        self.vocab_size = vocab_size
        self.emitted = 0
        self._prompt_length = len(prompt_tokens)
        ends = {token for token in (*end_token_ids, *params.stop_token_ids) if token < vocab_size}
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._bias = _bias(params)
        self._tally = _Tally()
        if params.repetition_penalty != 1.0:
            for token in dict.fromkeys(prompt_tokens):
                self._tally.add(token, 0)

    @property
    def position(self) -> int:
        """How many tokens, prompt and answer, stand before the one to be chosen."""
        return self._prompt_length + self.emitted

    @property
    def needs_logits(self) -> bool:
        """Whether the next choice may differ from the plain argmax, so that the whole row of logits is needed."""
        return not self.params.greedy or self._bias is not None or self._penalises or self._bans_ends

    def append(self, token: int) -> None:
        """Count an emitted token."""
        self.emitted += 1
        if self.params.penalises:
            self._tally.add(token, 1)

    def processed(self, logits: Logits) -> Logits:
        """The logits after logit_bias, penalties and min_tokens: the same array when none is active, else a new one.

        Penalties are those of transformers (repetition) and of the OpenAI API (presence, frequency), in this order.
        """
        if not (self._bias is not None or self._penalises or self._bans_ends):
            return logits
        logits = logits.copy()
        if self._bias is not None:
            tokens, values = self._bias
            logits[tokens] += values
        if self._penalises:
            tokens, counts = self._tally.read()
            logits[tokens] = _penalised(logits[tokens], counts, self.params)
        if self._bans_ends:
            logits[self._ends] = -np.inf
        return logits

    @property
    def _penalises(self) -> bool:
        return len(self._tally) > 0

    @property
    def _bans_ends(self) -> bool:
        return self.emitted < self.params.min_tokens and len(self._ends) > 0


def choose(logits: Logits, state: SamplingState) -> int:
    """The token that the target emits. logits: float32 [vocabulary], not written to; `state` is not changed.

    Greedy: the highest processed logit, the lowest id among equals. Else the argmax of log-probability plus noise
    (Gumbel-max) over the tokens that the filters leave, which follows their renormalised distribution exactly.

    Raises EngineError when a logit is NaN, the highest is infinite, none may be chosen, or their number is wrong.
    """
    if len(logits) != state.vocab_size:
        raise EngineError(
            f"{len(logits)} logits for a vocabulary of {state.vocab_size}; the model's output has a wrong shape"
        )
    params = state.params
    logits = state.processed(logits)
    top = checked_best(logits)
    if params.greedy:
        return top
    tokens, _ = _race(logits, float(logits[top]), params, state.seed, state.position, 1)
    return int(tokens[0])


def propose(logits: Logits, params: SamplingParams, seed: int, position: int, width: int) -> list[tuple[int, float]]:
    """A drafter's best `width` guesses at the target's choice, best first, each with its estimated chance to be right.

    The drafter makes the choice on its own logits with the target's noise (common random numbers, arXiv 2504.15475):
    where both models agree on the order of the perturbed scores, the guess is the choice. logits: float32 [vocabulary].
    position: how many tokens stand before the guessed one. logit_bias and filters are applied; penalties, which need
    the sequence, are not. Fewer than `width` guesses come back when the filters leave fewer tokens.

    The chance of a greedy guess is its probability under the draft model. For a sampled guess the noise is already
    known, and what is not known is by how much the target's logits differ. If the differences are independent and
    follow a Gumbel law of scale DISAGREEMENT, the chance is a softmax of the perturbed scores at a temperature of that
    scale; the sum is taken over the best few candidates. Both are first guesses, to be calibrated by what is accepted.

    Raises EngineError when the logits cannot be chosen from.
    """
    bias = _bias(params)
    if bias is not None:
        logits = logits.copy()
        logits[bias[0]] += bias[1]
    top = checked_best(logits)
    best = float(logits[top])
    if params.greedy:
        tokens = ranked(logits, largest(logits, width))
        weights = np.exp(rough_scores(logits, best, 1.0))
        chances = weights[tokens] / weights.sum(dtype=np.float64)
    else:
        tokens, perturbed = _race(logits, best, params, seed, position, max(width, _FIELD))
        with np.errstate(over="ignore"):
            weights = np.exp((perturbed - perturbed[0]) * (params.temperature / DISAGREEMENT))
        chances = weights / weights.sum()
    pairs = zip(tokens[:width].tolist(), chances[:width].tolist(), strict=True)
    return [(token, max(chance, _LEAST_CHANCE)) for token, chance in pairs if logits[token] > -np.inf]


def checked_best(logits: Logits) -> int:
    """Id of the highest logit, the lowest id among equals. Raises EngineError unless that logit is finite."""
    top = int(logits.argmax())  # which is the first NaN, if there is one
    check_highest(logits.item(top), top)
    return top


def check_highest(value: float, token: int) -> None:
    """Raise EngineError unless the highest logit of a row, found at `token`, is finite."""
    if math.isfinite(value):
        return
    if value == -np.inf:
        raise EngineError(
            "no token may be chosen: every logit is -inf; allow more tokens (min_tokens bans end and stop tokens), or "
            "check the model's weights"
        )
    raise EngineError(
        f"the logit of token {token} is {value}; the highest logit must be finite; check the model's weights, or use a "
        "higher precision"
    )


def _race(
    logits: Logits, best: float, params: SamplingParams, seed: int, position: int, count: int
) -> tuple[Ids, NDArray[np.float64]]:
    """The `count` best tokens by score + noise, best first, and those sums; fewer when fewer survive the filters.

    Exact, though most noise is never computed: what cannot be among the best is left out by an upper bound of its sum.
    """
    ids = survivors(logits, best, params)
    if len(logits if ids is None else ids) > _SMALL:
        ids, sums = _contenders(logits, ids, best, params.temperature, seed, position, count)
    else:
        ids = np.arange(len(logits)) if ids is None else ids
        sums = _sums(logits, ids, best, params.temperature, seed, position)
    order = np.argsort(-sums, kind="stable")[:count] if count > 1 else np.array([sums.argmax()])
    return ids[order], sums[order]


def _sums(logits: Logits, ids: Ids, best: float, temperature: float, seed: int, position: int) -> NDArray[np.float64]:
    """Score + noise of some tokens."""
    return scores(logits[ids], best, temperature) + gumbel(seed, position, ids)


def _contenders(
    logits: Logits, ids: Ids | None, best: float, temperature: float, seed: int, position: int, count: int
) -> tuple[Ids, NDArray[np.float64]]:
    """Those of `ids` (None = all), ascending, that hold the `count` best by score + noise, and not many more.

    Their sums too.
    """
    ceiling = _score_ceilings(logits, best, temperature, seed, position)
    if ids is not None:
        ceiling = ceiling[ids]
    places = largest(ceiling, count)
    front = places if ids is None else ids[places]
    # At least `count` tokens reach the least sum of these: a token whose ceiling lies below it is not among the best.
    sums = _sums(logits, front, best, temperature, seed, position)
    places = at_least(ceiling, float(np.float32(sums.min()) - _SLACK))
    if len(places) == len(front):  # which are always among them
        return front, sums
    ids = places if ids is None else ids[places]
    return ids, _sums(logits, ids, best, temperature, seed, position)


def _score_ceilings(logits: Logits, best: float, temperature: float, seed: int, position: int) -> Logits:
    """For every token a number that its score + noise exceeds by rounding alone: float32 [vocabulary]."""
    native = native_rows()
    if native and native.takes(logits):
        floored = max(temperature, SMALLEST_FLOAT32_TEMPERATURE)
        return native.score_ceilings(logits, best, floored, ceiling_terms(seed, position))
    return gumbel_ceiling(seed, position, len(logits)) + rough_scores(logits, best, temperature)


def _bias(params: SamplingParams) -> tuple[Ids, Logits] | None:
    if not params.logit_bias:
        return None
    return np.array(list(params.logit_bias), dtype=np.int64), np.array(
        list(params.logit_bias.values()), dtype=np.float32
    )


def _penalised(logits: Logits, counts: NDArray[np.int64], params: SamplingParams) -> NDArray[np.float64]:
    """Logits of the tokens seen, penalised. counts: how often each stands in the answer (0 = in the prompt alone)."""
    values = logits.astype(np.float64)
    penalty = params.repetition_penalty
    values = np.where(values > 0, values / penalty, values * penalty)
    result: NDArray[np.float64] = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return result


class _Tally:
    """How often each token has been seen: adding costs the same whatever is in it, and reading gives arrays."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._tokens = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def add(self, token: int, count: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token
        self._counts[place] += count

    def read(self) -> tuple[Ids, NDArray[np.int64]]:
        """Tokens [distinct] and their counts [distinct]; to be read before the next `add`."""
        size = len(self._places)
        return self._tokens[:size], self._counts[:size]
