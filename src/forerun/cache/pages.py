"""Who owns which page of the KV store: free pages, pages in use (counted), and pages kept for their prefix.

A page is `page_size` consecutive slots. Nothing here touches keys or values.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class PagePool:
    """Pages with reference counts, and the prefix cache over them.

    Every page is in exactly one state: free; in use (count >= 1); or kept (count 0, findable by its key, evicted in the
    order of least recent use when pages run out).
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))
        self._count = [0] * pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + len(self._kept)

    @property
    def in_use(self) -> int:
        """Pages with at least one owner."""
        return self.pages - self.available

    def allocate(self, pages: int) -> list[int] | None:
        """`pages` pages owned by the caller, or None (and nothing changed) when there are not so many."""
        if pages > self.available:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(pages)]
        for page in taken:
            self._count[page] = 1
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back. Pages with a key stay findable; the last page given is evicted last."""
        for page in pages:
            if self._count[page] < 1:
                raise ValueError(f"page {page} is released, but nobody owns it")
            self._count[page] -= 1
            if self._count[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def find(self, key: bytes) -> int | None:
        """The page with this key, with one more owner; None when there is none."""
        page = self._page_of.get(key)
        if page is not None:
            self._kept.pop(page, None)
            self._count[page] += 1
        return page

    def keep(self, page: int, key: bytes) -> None:
        """Make a full page in use findable by its key. The first page with a key stays the one that is found."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def clear_kept(self) -> None:
        """Forget every prefix: kept pages become free, pages in use are no longer findable."""
        self._free.extend(self._kept)
        self._kept.clear()
        self._key_of.clear()
        self._page_of.clear()

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every page is accounted for exactly once, given all owners' pages."""
        owned = Counter(page for pages in owners for page in pages)
        counts = {page: count for page, count in enumerate(self._count) if count}
        assert owned == counts, f"owners hold {dict(owned)}, the pool counts {counts}"
        free, kept = set(self._free), set(self._kept)
        assert len(free) == len(self._free), "a page is free twice"
        assert free.isdisjoint(kept), "a page is free and kept"
        assert counts.keys().isdisjoint(free | kept), "a page is in use and given back"
        assert len(free) + len(kept) + len(counts) == self.pages, "a page is lost"
        assert all(self._page_of[key] == page for page, key in self._key_of.items()), "a key points to another page"
        assert len(self._page_of) == len(self._key_of), "a key points to no page"
        assert kept <= self._key_of.keys(), "a kept page has no key"

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
