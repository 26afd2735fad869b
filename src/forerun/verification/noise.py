"""The noise of sampling: a pure function of (seed, position, token id), and seeds. Nothing here sees logits.

The hash is a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): seed and
position make a 64-bit key; the token id steps it by the golden ratio, as in SplitMix64 (Steele et al., 2014); and
Stafford's finaliser "Mix01" (shifts 31, 27, 33) mixes the sum. Nothing is drawn in sequence, so that a token's noise is
the same in plain decoding, in a tree, in a drafter and after a preemption.
"""

import math
import secrets
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = 0x7FB5D329728EA185, 0x81DADEF4BC2DD44D
_SHIFTS = 31, 27, 33
_ROUNDS = tuple((np.uint64(shift), np.uint64(factor)) for shift, factor in zip(_SHIFTS[:2], _FACTORS, strict=True))
_SLOPE, _OFFSET = -math.log(2) / 2**23, math.log(2) * (127 + 32)
_LANES = 16
_CHUNK = 16384


def derive_seed(seed: int, index: int) -> int:
    """Seed of the index-th answer to one prompt, 0 .. 2**64 - 1; index 0 has the request's own seed, unchanged."""
    return seed if index == 0 else _mix(_mix(seed & _MASK) + index * _GOLDEN)


def random_seed() -> int:
    """A fresh seed from the operating system, 0 .. 2**63 - 1."""
    return secrets.randbits(63)


def gumbel(seed: int, position: int, ids: Ids) -> NDArray[np.float64]:
    """Standard Gumbel noise of token ids at one position: float64 [ids].

    ids: int64 [any number], in any order; a token's noise is bit for bit the same whatever else is asked for.
    seed: any integer, taken modulo 2**64. position: how many tokens stand before the one to be chosen.
    Values lie in (-3.61, 36.74): u is an odd multiple of 2**-53, and so never 0 or 1.
    """
    size = len(ids)
    # Vector instructions may round log differently from the scalar code that handles an array's end, so no element may
    # stand at an end: the work array is filled up to whole vectors.
    bits = np.zeros(-(-size // _LANES) * _LANES, dtype=np.uint64)
    bits[:size] = ids
    bits *= np.uint64(_GOLDEN)
    bits += _key(seed, position)
    _stir(bits, np.empty_like(bits))
    bits ^= bits >> np.uint64(_SHIFTS[2])
    bits >>= np.uint64(12)
    uniform = 1.0 - (bits.astype(np.float64) + 0.5) * 2.0**-52
    exponential = -np.log(uniform)
    noise: NDArray[np.float64] = -np.log(exponential)
    return noise[:size]


def gumbel_ceiling(seed: int, position: int, vocab_size: int) -> NDArray[np.float32]:
    """For every token id a number that its noise does not exceed by more than 1e-4: float32 [vocab_size].

    At a tenth of the cost of the noise itself. With c = 1 - u, noise = -log(-log u) <= -log c; and the bits of a float,
    read as an integer, are its logarithm to base 2 with straight pieces for curves, from below. So the ceiling is at
    most 0.06 too high where noise is large, which is where it matters.
    """
    key, steps = _key(seed, position), _steps(vocab_size)
    ceiling = np.empty(vocab_size, dtype=np.float32)
    bits, scratch = np.empty(_CHUNK, dtype=np.uint64), np.empty(_CHUNK, dtype=np.uint64)
    for start in range(0, vocab_size, _CHUNK):  # in pieces that stay in the nearest caches
        step = steps[start : start + _CHUNK]
        part = bits[: len(step)]
        np.add(step, key, out=part)
        _stir(part, scratch[: len(step)])  # without the last shift, which leaves the upper half as it is
        part >>= np.uint64(32)
        complement = part.astype(np.uint32).astype(np.float32)  # c * 2**32, rounded down
        ceiling[start : start + _CHUNK] = complement.view(np.int32)
    ceiling *= np.float32(_SLOPE)
    ceiling += np.float32(_OFFSET)
    return ceiling


def ceiling_terms(seed: int, position: int) -> tuple[int, int, tuple[int, int], tuple[int, int], float, float]:
    """What `gumbel_ceiling` is computed from, for code that does it elsewhere.

    The key, the step from id to id, two factors and the shifts before each; slope and offset of the logarithm.
    """
    return int(_key(seed, position)), _GOLDEN, _FACTORS, _SHIFTS[:2], _SLOPE, _OFFSET


def _mix(value: int) -> int:
    """Stafford's Mix01 on one integer."""
    value &= _MASK
    value = (value ^ (value >> _SHIFTS[0])) * _FACTORS[0] & _MASK
    value = (value ^ (value >> _SHIFTS[1])) * _FACTORS[1] & _MASK
    return value ^ (value >> _SHIFTS[2])


def _key(seed: int, position: int) -> np.uint64:
    return np.uint64(_mix(_mix((seed & _MASK) ^ _GOLDEN) + (position + 1) * _GOLDEN))


@lru_cache(maxsize=4)
def _steps(vocab_size: int) -> NDArray[np.uint64]:
    return np.arange(vocab_size, dtype=np.uint64) * np.uint64(_GOLDEN)


def _stir(bits: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    """Mix01 in place, but for its last shift."""
    for shift, factor in _ROUNDS:
        np.right_shift(bits, shift, out=scratch)
        bits ^= scratch
        bits *= factor
