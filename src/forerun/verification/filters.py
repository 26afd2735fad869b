"""Which tokens may be sampled: top-k, top-p and min-p. Pure functions of one row of logits; nothing here draws.

Every filter keeps a definite set of tokens: where equals stand at its edge, the lower ids are kept.
"""

import numpy as np
from numpy.typing import NDArray

from forerun.kernels.native_rows import native_rows
from forerun.verification.noise import Ids
from forerun.verification.sampling import SamplingParams

Logits = NDArray[np.float32]

SMALLEST_FLOAT32_TEMPERATURE = 1e-30
_LOWEST = float(np.finfo(np.float32).min)


def at_least(values: Logits, threshold: float) -> Ids:
    """Ids of the values that reach a threshold, which is rounded to float32; ascending."""
    native = native_rows()
    if native and native.takes(values):
        return native.at_least(values, threshold)
    return np.flatnonzero(values >= np.float32(threshold))


def largest(values: Logits, count: int) -> Ids:
    """Ids of the `count` largest values, in ascending order of id; the lower ids among equals. No NaN allowed."""
    size = len(values)
    if count >= size:
        return np.arange(size)
    if count == 1:
        return np.array([values.argmax()])
    native = native_rows()
    if native and native.takes(values):
        # As many values as there are blocks whose highest reaches an edge reach it too: few others need be looked at.
        maxima = native.block_maxima(values)
        if count < len(maxima):
            candidates = native.at_least(values, float(np.partition(maxima, -count)[-count]))
            return candidates[_largest(values[candidates], count)]
    return _largest(values, count)


def _largest(values: Logits, count: int) -> Ids:
    size = len(values)
    if count >= size:
        return np.arange(size)
    edge = np.partition(values, size - count)[size - count]
    above = np.flatnonzero(values > edge)
    level = np.flatnonzero(values == edge)[: count - len(above)]
    return np.sort(np.concatenate([above, level]))


def ranked(values: Logits, ids: Ids) -> Ids:
    """The ids (ascending) ordered by falling value; the lower id first among equals."""
    order: Ids = ids[np.argsort(-values[ids], kind="stable")]
    return order


def scores(logits: Logits, best: float, temperature: float) -> NDArray[np.float64]:
    """(logits - best) / temperature: float64, at most 0, the logarithm of the probability but for a constant."""
    with np.errstate(over="ignore"):  # at a temperature near 0 the others fall to -inf, as they should
        result: NDArray[np.float64] = (logits.astype(np.float64) - best) / temperature
    return result


def rough_scores(logits: Logits, best: float, temperature: float) -> Logits:
    """The same in float32, good to a relative 2e-7, at a third of the cost."""
    with np.errstate(over="ignore"):
        result: Logits = (logits - np.float32(best)) / np.float32(max(temperature, SMALLEST_FLOAT32_TEMPERATURE))
    return result


def survivors(logits: Logits, best: float, params: SamplingParams) -> Ids | None:
    """Ids that top_k, top_p and min_p leave, applied in this order, each to what the one before left; None = all.

    logits: float32 [vocabulary] after bias and penalties, without NaN; best: the highest of them, finite.
    top_p counts probabilities at the temperature, renormalised over what top_k left; the token that reaches it stays.
    """
    ids: Ids | None = None
    if 0 < params.top_k < len(logits):
        ids = largest(logits, params.top_k)
    if params.top_p < 1.0:
        kept = logits if ids is None else logits[ids]
        likely = largest(kept, _nucleus_size(kept, best, params))
        ids = likely if ids is None else ids[likely]
    if params.min_p > 0.0:
        kept = logits if ids is None else logits[ids]
        likely = _likely(kept, best, params)
        ids = likely if ids is None else ids[likely]
    return ids


def _likely(logits: Logits, best: float, params: SamplingParams) -> Ids:
    """Ids of the tokens at least min_p times as likely as the likeliest, decided in double precision."""
    edge = np.log(params.min_p)
    reach = params.temperature * float(edge)
    # What lies below this by more than any rounding is left out before.
    rough = max(best + reach - 1e-6 * (abs(best) - reach), _LOWEST)
    ids = at_least(logits, rough)
    kept: Ids = ids[scores(logits[ids], best, params.temperature) >= edge]
    return kept


def _nucleus_size(logits: Logits, best: float, params: SamplingParams) -> int:
    """How many of the likeliest tokens it takes for their probabilities to reach top_p.

    Terms in float32 and sums in float64: an error of 1e-7 of the sum, which decides rounding cases, and always alike.
    """
    size = len(logits)
    wanted = params.top_p * np.exp(rough_scores(logits, best, params.temperature)).sum(dtype=np.float64)
    for count in (256, 4096, size):  # most nuclei are small, and sorting everything is dear
        head = np.sort(logits[largest(logits, count)] if count < size else logits)[::-1]
        mass = np.cumsum(np.exp(rough_scores(head, best, params.temperature)), dtype=np.float64)
        if mass[-1] >= wanted:
            return int(np.searchsorted(mass, wanted)) + 1
    return size
