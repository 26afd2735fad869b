"""Log-probabilities of the target's own distribution, to be reported. No choice depends on them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.verification.filters import largest, ranked


@dataclass(frozen=True)
class TokenLogprob:
    """The natural logarithm of a token's probability, and the likeliest tokens at its position.

    Both are of log_softmax(logits): what the model said, before bias, penalties, temperature and filters.
    top: (token id, logprob), the likeliest first, the lower id first among equals; the chosen token may not be in it.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprob:
    """Log-probability of `token` and of the `count` likeliest tokens. logits: float32 [vocabulary], unprocessed."""
    best = float(logits.max())
    total = best + float(np.log(np.exp(logits.astype(np.float64) - best).sum()))
    top = ranked(logits, largest(logits, count)) if count else ()
    return TokenLogprob(token, float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in top))
