"""Pages: every one of them is owned once, whatever happens; prefixes are found again and evicted oldest first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forerun.cache import PagePool, SequenceSlots
from forerun.cache.sequence import page_key


def test_allocation_is_all_or_nothing():
    pool = PagePool(3, 4)
    assert len(set(pool.allocate(2))) == 2
    assert pool.allocate(2) is None
    assert pool.available == 1


def test_kept_pages_are_evicted_in_the_order_of_their_release():
    pool = PagePool(2, 4)
    first, second = pool.allocate(2)
    pool.keep(first, b"first")
    pool.keep(second, b"second")
    pool.release([first])
    pool.release([second])
    assert pool.available == 2
    (taken,) = pool.allocate(1)
    assert taken == first
    assert pool.find(b"first") is None
    assert pool.find(b"second") == second


def test_a_found_page_is_shared_and_cannot_be_evicted():
    pool = PagePool(1, 4)
    (page,) = pool.allocate(1)
    pool.keep(page, b"key")
    assert pool.find(b"key") == page
    pool.release([page])
    assert pool.allocate(1) is None
    pool.release([page])
    assert pool.allocate(1) == [page]


def test_releasing_a_page_that_nobody_owns_is_an_error():
    pool = PagePool(2, 4)
    with pytest.raises(ValueError, match="nobody owns"):
        pool.release([0])


def test_the_check_notices_a_lost_and_a_doubly_owned_page():
    pool = PagePool(3, 4)
    pages = pool.allocate(2)
    pool.check([pages])
    with pytest.raises(AssertionError):
        pool.check([])
    with pytest.raises(AssertionError):
        pool.check([pages, pages[:1]])


def test_the_key_of_a_page_depends_on_everything_before_it():
    assert page_key(page_key(b"", [1, 2]), [3, 4]) != page_key(page_key(b"", [1, 9]), [3, 4])
    assert page_key(b"", [1, 2]) == page_key(b"", [1, 2])


class Sequences(RuleBasedStateMachine):
    """Sequences that begin, share prefixes, grow by steps with trees, and end, in any order, on a small pool."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(12, 4)
        self.live = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def begin(self, tokens):
        slots = SequenceSlots(self.pool)
        cached = slots.attach_prefix(tokens)
        assert cached < len(tokens)
        assert cached % 4 == 0
        if slots.reserve(len(tokens)):
            slots.commit(len(tokens) - 1)
            slots.keep_prefix(tokens)
            self.live.append((slots, list(tokens)))
        else:
            slots.release()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data):
        slots, tokens = data.draw(st.sampled_from(self.live))
        if not slots.reserve(len(tokens)):
            return
        depths = sorted(data.draw(st.lists(st.integers(1, 5), max_size=8)))
        depths = [min(depth, 1 + max(range(1, 6), key=depths.count)) for depth in depths]
        placed = slots.place_tree(depths)
        root = slots.computed
        in_use = [*slots.slots[: root + 1], *placed]
        assert len(set(in_use)) == len(in_use), "two tokens of a sequence share a slot"
        chain, wanted = [], 1
        for node in range(len(placed)):
            if depths[node] == wanted:
                chain.append(node)
                wanted += 1
        accepted = chain[: data.draw(st.integers(0, len(chain)))]
        tokens += data.draw(st.lists(st.integers(0, 1), min_size=len(accepted) + 1, max_size=len(accepted) + 1))
        source, target = slots.commit(root + 1 + len(accepted), placed[accepted])
        slots.keep_prefix(tokens)
        assert len(source) == len(target)
        assert not set(source) & set(target), "a move would overwrite what another one reads"
        assert slots.computed == len(tokens) - 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        entry = data.draw(st.sampled_from(self.live))
        self.live.remove(entry)
        entry[0].release()

    @rule()
    def forget_prefixes(self):
        self.pool.clear_kept()

    @invariant()
    def every_page_is_owned_once(self):
        self.pool.check([slots.owned_pages for slots, _ in self.live])

    @invariant()
    def computed_tokens_have_slots(self):
        for slots, tokens in self.live:
            assert len(slots.slots) >= slots.computed
            assert len(set(slots.slots)) == len(slots.slots)
            assert slots.computed == len(tokens) - 1


Sequences.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSequences = Sequences.TestCase


def test_a_sequence_finds_what_an_earlier_one_computed_generated_tokens_too():
    pool = PagePool(8, 4)
    first = SequenceSlots(pool)
    tokens = list(range(10))
    first.reserve(10)
    first.commit(9)
    first.keep_prefix(tokens)
    pages = first.owned_pages[:2]
    first.release()
    second = SequenceSlots(pool)
    assert second.attach_prefix([*tokens, 99]) == 8
    assert second.owned_pages == pages
    third = SequenceSlots(pool)
    assert third.attach_prefix(tokens[:8]) == 4, "the last token must be computed, its logits are wanted"


def test_rejected_draft_tokens_are_never_found():
    pool = PagePool(8, 4)
    slots = SequenceSlots(pool)
    slots.reserve(4)
    slots.place_tree([1, 2, 3, 4])
    slots.commit(4)
    slots.keep_prefix([1, 2, 3, 4])
    slots.release()
    assert SequenceSlots(pool).attach_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4


def test_without_prefix_reuse_nothing_is_kept():
    pool = PagePool(8, 4)
    slots = SequenceSlots(pool, keep_prefix=False)
    slots.reserve(9)
    slots.commit(8)
    slots.keep_prefix(list(range(9)))
    slots.release()
    assert SequenceSlots(pool).attach_prefix(list(range(9))) == 0


def test_a_tree_is_cut_to_the_room_there_is():
    pool = PagePool(2, 4)
    slots = SequenceSlots(pool)
    slots.reserve(4)
    slots.commit(3)
    assert len(slots.place_tree([1, 2, 3, 4, 5, 6])) == 4  # positions 4 .. 7 fit on the second page
    slots.commit(4)
    assert len(slots.place_tree([1, 1, 1])) == 1, "no page is left for siblings"
