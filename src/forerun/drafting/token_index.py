"""Where the last few tokens occurred before: token storage with chains of earlier occurrences, as in LZ77 coders.

Used for a request's own tokens and for earlier traffic alike. Nothing here knows of requests, scores or trees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul

import numpy as np

LONGEST_MATCH = 32
"""Matches are told apart up to this many tokens; longer ones count as this long."""

LAST_POSITION = 2**31 - 1
"""Positions are 32 bits wide; before they run out, everything is forgotten."""

_MULTIPLIERS = tuple(pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(1, LONGEST_MATCH + 1))
_BY_ORDER = [_MULTIPLIERS[:order][::-1] for order in range(LONGEST_MATCH + 1)]  # the last token's multiplier last
_WORD = (1 << 64) - 1
_BULK = 48  # from this many tokens on, numpy is quicker than a loop over them


@dataclass(frozen=True)
class Suffix:
    """The last tokens of a sequence: as one number (32 bits a token, the last token highest) and as cells.

    length: how many tokens of it there are, at most LONGEST_MATCH. home: the index it is the end of.
    """

    number: int
    cells: memoryview
    length: int
    home: "TokenIndex"
    _sums: dict[int, int] = field(default_factory=dict)

    def sum(self, order: int) -> int:
        """What the last `order` tokens are hashed by; computed once, however many indexes are searched."""
        found = self._sums.get(order)
        if found is None:
            found = self._sums[order] = _sum(self.cells[LONGEST_MATCH - order :], _BY_ORDER[order])
        return found


class TokenIndex:
    """Tokens of one or more sequences, at most `capacity`, with the earlier occurrences of every n-gram.

    A ring: when it is full the oldest tokens make room, at no cost of their own. Memory is 4 bytes for each token, and
    at most 12 for each token and order; it is touched only as it fills. `orders` are the lengths n of the n-grams,
    longest first: the first order that finds any matches is used, so no match shorter than the last one is found.

    Tokens are stored plus 1, and 0 stands between sequences. A position counts all tokens ever stored, from 1 on; it
    lives at `position % capacity`, shifted by LONGEST_MATCH cells that stay 0, so that looking back never wraps around.
    """

    def __init__(self, capacity: int, orders: Sequence[int]) -> None:
        self.capacity = capacity
        self.orders = tuple(orders)
        self._shift = 64 - max(capacity - 1, 1).bit_length()
        self._array = np.zeros(LONGEST_MATCH + capacity + 1, np.int32)
        heads = [np.zeros(1 << (64 - self._shift), np.int32) for _ in orders]
        chains = [np.zeros(capacity, np.int32) for _ in orders]
        self._bulk = list(zip(orders, heads, chains, strict=True))
        # Single numbers are read and written through memoryviews: several times quicker than through numpy.
        self.cells = self._array.data
        self._bytes = self._array.data.cast("B")
        self._single = [(order, _BY_ORDER[order], head.data, chain.data) for order, head, chain in self._bulk]
        self._end = 1  # position of the next token
        self._start = 1  # position of the current sequence's first token

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved; what is not filled yet costs no memory on systems that hand out pages on first touch."""
        return self._array.nbytes + sum(head.nbytes + chain.nbytes for _, head, chain in self._bulk)

    @property
    def stored(self) -> int:
        """Tokens of the current sequence."""
        return self._end - self._start

    def start_sequence(self, expected: int) -> bool:
        """Begin a sequence that will have `expected` tokens. False when there can never be room for so many."""
        if expected + 2 > self.capacity:
            return False
        if self._end > LAST_POSITION - 2 * self.capacity:
            self.clear()
        if self._end > self._start:
            self._put_gap()
        if (
            self._end % self.capacity + expected + 1 > self.capacity
        ):  # a sequence lies in one piece: skip to the beginning
            self._end += self.capacity - self._end % self.capacity
        self._start = self._end
        return True

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the current sequence. The caller keeps to the length it expected."""
        if len(tokens) >= _BULK:
            self._extend_bulk(np.asarray(tokens, np.int64))
            return
        cells, capacity, shift = self.cells, self.capacity, self._shift
        for token in tokens:
            position = self._end
            cell = LONGEST_MATCH + position % capacity
            cells[cell] = token + 1
            length = position - self._start + 1
            for order, multipliers, head, chain in self._single:
                if length >= order:
                    slot = (_sum(cells[cell - order + 1 : cell + 1], multipliers) & _WORD) >> shift
                    chain[position % capacity] = head[slot]
                    head[slot] = position
            self._end = position + 1
        self._put_gap()
        self._end -= 1

    def clear(self) -> None:
        """Forget every token."""
        self._array[:] = 0
        for _, head, chain in self._bulk:
            head[:] = 0
            chain[:] = 0
        self._end = self._start = 1

    def suffix(self) -> "Suffix":
        """The end of the current sequence, ready to be searched for, here and in other indexes."""
        last = LONGEST_MATCH + (self._end - 1) % self.capacity
        raw = self._bytes[4 * (last - LONGEST_MATCH + 1) : 4 * last + 4]
        cells = self.cells[last - LONGEST_MATCH + 1 : last + 1]
        return Suffix(int.from_bytes(raw, "little"), cells, min(self.stored, LONGEST_MATCH), self)

    def matches(self, suffix: "Suffix", limit: int) -> list[tuple[int, int]]:
        """Where a suffix occurred before, latest first: at most `limit` occurrences.

        Returns (length of the match, cell of the token after it); `cells[cell]` is that token plus 1, and 0 when the
        sequence ended there. The suffix's own place in the index that it comes from does not count.
        """
        oldest, newest, capacity, shift, raw = (
            self._end - self.capacity,
            self._end,
            self.capacity,
            self._shift,
            self._bytes,
        )
        if suffix.home is self:
            newest -= 1
            limit += 1
        wanted, known = suffix.number, suffix.length
        for order, _, head, chain in self._single:
            if known < order:
                continue
            found: list[tuple[int, int]] = []
            position = head[(suffix.sum(order) & _WORD) >> shift]
            left = limit
            while left and position > oldest and position:
                left -= 1
                cell = position % capacity
                if position < newest:
                    # The cells from cell + 1 on end with this occurrence. Its last token is the highest word of the
                    # number, so the highest bit that differs tells how many tokens at the end are equal.
                    there = int.from_bytes(raw[4 * cell + 4 : 4 * (cell + LONGEST_MATCH) + 4], "little")
                    length = LONGEST_MATCH - ((there ^ wanted).bit_length() + 31) // 32
                    if length >= order:  # else another n-gram with the same hash
                        found.append((length if length < known else known, cell + LONGEST_MATCH + 1))
                position = chain[cell]
            if found:
                return found
        return []

    def _put_gap(self) -> None:
        """A 0 after the current sequence, so that nobody reads on into what was stored there before."""
        self.cells[LONGEST_MATCH + self._end % self.capacity] = 0
        self._end += 1

    def _extend_bulk(self, tokens: np.ndarray) -> None:
        begin = self._end
        first = begin % self.capacity
        self._array[LONGEST_MATCH + first : LONGEST_MATCH + first + len(tokens)] = tokens + 1
        self._end += len(tokens)
        for order, head, chain in self._bulk:
            known = max(begin, self._start + order - 1)  # the first position with a whole n-gram of this sequence
            if known >= self._end:
                continue
            low, high = LONGEST_MATCH + known % self.capacity, LONGEST_MATCH + first + len(tokens)
            hashes = np.zeros(high - low, np.uint64)
            for back in range(order):
                hashes += self._array[low - back : high - back].astype(np.uint64) * np.uint64(_MULTIPLIERS[back])
            slots = (hashes >> np.uint64(self._shift)).astype(np.int64)
            ranking = np.argsort(slots, kind="stable")
            ranked = slots[ranking]
            positions = (known + ranking).astype(np.int32)
            earlier = np.empty_like(positions)
            earlier[1:] = positions[:-1]
            opens = np.ones(len(ranked), bool)  # the first of these tokens with its hash: what came before is in `head`
            opens[1:] = ranked[1:] != ranked[:-1]
            earlier[opens] = head[ranked[opens]]
            chain[positions % self.capacity] = earlier
            closes = np.ones(len(ranked), bool)
            closes[:-1] = opens[1:]
            head[ranked[closes]] = positions[closes]
        self._put_gap()
        self._end -= 1


def _sum(cells: memoryview, multipliers: Sequence[int]) -> int:
    """A sum of odd multiples of an n-gram's cells. Its 64 low bits, or the highest of them, are its hash."""
    return sum(map(mul, cells, multipliers))
