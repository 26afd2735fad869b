"""What the suffix drafter remembers of answers that have ended: bounded, and apart for each tenant when so wished.

Nothing here knows of requests in progress; only committed tokens are ever handed in.
"""

from collections import OrderedDict
from collections.abc import Sequence

from forerun.drafting.token_index import TokenIndex

TENANTS = 16
"""How many tenants are remembered when they are kept apart; each gets an equal part of the memory."""


class SuffixHistory:
    """The most recent `tokens` tokens of earlier sequences; the oldest make room.

    share: one store for all tenants. Otherwise each of the TENANTS most recent tenants has a store of its own, of
    tokens / TENANTS tokens, that no other tenant's request ever looks into.
    """

    def __init__(self, tokens: int, *, share: bool, orders: Sequence[int]) -> None:
        self._capacity = tokens if share else tokens // TENANTS
        self._share = share
        self._orders = tuple(orders)
        self._stores: OrderedDict[str, TokenIndex] = OrderedDict()

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved for all stores."""
        return sum(store.memory_bytes for store in self._stores.values())

    @property
    def enabled(self) -> bool:
        """Whether anything can be remembered at all."""
        return self._capacity > 4

    def store_of(self, tenant: str) -> TokenIndex | None:
        """Where this tenant's requests may look; None when nothing is remembered."""
        return self._stores.get("" if self._share else tenant)

    def add(self, tenant: str, tokens: Sequence[int]) -> None:
        """Remember a sequence; of one longer than half of the store, its end."""
        if not self.enabled:
            return
        key = "" if self._share else tenant
        store = self._stores.get(key)
        if store is None:
            if len(self._stores) == TENANTS:
                self._stores.popitem(last=False)
            store = self._stores[key] = TokenIndex(self._capacity, self._orders)
        self._stores.move_to_end(key)
        tokens = tokens[-max(self._capacity // 2 - 2, 1) :]
        if store.start_sequence(len(tokens)):
            store.extend(tokens)

    def clear(self) -> None:
        """Forget everything."""
        self._stores.clear()
