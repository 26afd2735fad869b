"""The slots of one sequence: committed tokens at their positions, and a draft tree for the length of a step."""

import hashlib
from collections.abc import Sequence

import numpy as np

from forerun.cache.pages import PagePool
from forerun.kernels.batch import IntArray

NO_SLOTS: IntArray = np.empty(0, np.int64)


class SequenceSlots:
    """Where the keys and values of one sequence live.

    `computed` tokens have their keys and values in the store; the token after them is the root of the next step. Slot
    numbers follow positions: position p is slot p % page_size of page p // page_size of this sequence.
    """

    def __init__(self, pool: PagePool, *, keep_prefix: bool = True) -> None:
        self.computed = 0
        self._pool = pool
        self._keep_prefix = keep_prefix
        self._pages: list[int] = []
        self._tree_pages: list[int] = []
        self._table: IntArray = NO_SLOTS  # slots of the positions, and room for more to come
        self._slots: IntArray = self._table  # the part of it that is in use
        self._keys: list[bytes] = []

    @property
    def owned_pages(self) -> list[int]:
        """All pages that this sequence holds now, those of its draft tree included."""
        return self._pages + self._tree_pages

    @property
    def slots(self) -> IntArray:
        """int64 [capacity]: the slot of each position that there is room for."""
        return self._slots

    def attach_prefix(self, tokens: Sequence[int]) -> int:
        """Take over kept pages that hold the beginning of `tokens`; how many tokens need not be computed.

        The last token is never taken over, since its logits are wanted. Only for a sequence that holds nothing yet.
        """
        if not self._keep_prefix:
            return 0
        size = self._pool.page_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            key = page_key(self._keys[-1] if self._keys else b"", tokens[start : start + size])
            page = self._pool.find(key)
            if page is None:
                break
            self._keys.append(key)
            self._append_pages([page])
        self.computed = len(self._keys) * size
        return self.computed

    def reserve(self, length: int) -> bool:
        """Make room for positions 0 ... length - 1; False (and nothing changed) when the pool has too few pages."""
        missing = -(-length // self._pool.page_size) - len(self._pages)
        if missing > 0:
            pages = self._pool.allocate(missing)
            if pages is None:
                return False
            self._append_pages(pages)
        return True

    def place_tree(self, depths: Sequence[int]) -> IntArray:
        """Slots for draft nodes with these depths (1 = child of the root, parents first), for as many as fit.

        The first node of each depth gets the slot of its position, so that an accepted first path needs no move; the
        others get slots of their own until `commit`. Returns int64 [n], n <= len(depths): the nodes that got a slot.
        """
        if not depths:
            return NO_SLOTS
        root = self.computed
        slots: list[int] = []
        taken: set[int] = set()
        spare: list[int] = []
        for depth in depths:
            if depth not in taken and (root + depth < len(self._slots) or self.reserve(root + depth + 1)):
                taken.add(depth)
                slots.append(int(self._slots[root + depth]))
                continue
            if not spare and (pages := self._pool.allocate(1)):
                self._tree_pages += pages
                spare = list(reversed(range(pages[0] * self._pool.page_size, (pages[0] + 1) * self._pool.page_size)))
            if depth not in taken or not spare:
                break
            slots.append(spare.pop())
        return np.array(slots, np.int64)

    def commit(self, computed: int, accepted: Sequence[int] | IntArray = ()) -> tuple[IntArray, IntArray]:
        """A step is over: the first `computed` positions hold committed tokens, once the moves are made.

        accepted: slots of the accepted draft nodes, in order; they belong to the last positions before `computed`.
        Returns the moves (source slots, destination slots) that put them where they belong. The caller makes the moves
        before anything else uses the pool; every other slot of the step is given back here.
        """
        self.computed = computed
        if not len(accepted):
            self._trim()
            return NO_SLOTS, NO_SLOTS
        source = np.asarray(accepted, np.int64)
        target = self._slots[computed - len(source) : computed]
        moved = source != target
        self._trim()
        return source[moved], target[moved]

    def release(self) -> None:
        """Give every page back. The deepest pages of a kept prefix are the first to be evicted."""
        self._pool.release(self._tree_pages)
        self._pool.release(reversed(self._pages))
        self._tree_pages, self._pages, self._keys = [], [], []
        self._table = self._slots = NO_SLOTS
        self.computed = 0

    def keep_prefix(self, tokens: Sequence[int]) -> None:
        """Make full pages of committed `tokens` findable. Only when the moves of `commit` are made."""
        if not self._keep_prefix:
            return
        size = self._pool.page_size
        for number in range(len(self._keys), self.computed // size):
            parent = self._keys[-1] if self._keys else b""
            self._keys.append(page_key(parent, tokens[number * size : (number + 1) * size]))
            self._pool.keep(self._pages[number], self._keys[-1])

    def _trim(self) -> None:
        """Keep what the committed tokens and the next root need."""
        if self._tree_pages:
            self._pool.release(self._tree_pages)
            self._tree_pages = []
        needed = self.computed // self._pool.page_size + 1
        if len(self._pages) > needed:
            self._pool.release(reversed(self._pages[needed:]))
            del self._pages[needed:]
            self._slots = self._table[: needed * self._pool.page_size]

    def _append_pages(self, pages: list[int]) -> None:
        """Append pages; what is there already is copied only when the room is used up, and the room doubles then."""
        self._pages += pages
        first, last = len(self._slots), len(self._pages) * self._pool.page_size
        if last > len(self._table):
            self._table = np.concatenate([self._slots, np.empty(2 * last - first, np.int64)])
        self._table[first:last] = self._slots_of(pages)
        self._slots = self._table[:last]

    def _slots_of(self, pages: list[int]) -> IntArray:
        size = self._pool.page_size
        return (np.asarray(pages, np.int64)[:, None] * size + np.arange(size)).ravel()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full page: a hash over its own tokens and the key of the page before it (b"" for the first)."""
    return hashlib.blake2b(parent + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()
