"""KV memory: pages with owners, prefix reuse, the slots of a sequence and of its draft tree."""

from forerun.cache.pages import PagePool
from forerun.cache.sequence import SequenceSlots

__all__ = ["PagePool", "SequenceSlots"]
