"""The n-gram index: every match it reports is true, none of the recent ones is missed, and memory stays bounded."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafting import token_index
from forerun.drafting.token_index import LONGEST_MATCH, TokenIndex

tokens_of = st.lists(st.integers(0, 3), min_size=1, max_size=90)


def common_end(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    while length < min(len(left), len(right), LONGEST_MATCH) and left[-1 - length] == right[-1 - length]:
        length += 1
    return length


def expected(stored: Sequence[int], suffix: Sequence[int], *, own: bool) -> list[tuple[int, int | None]]:
    """(match length, token after it or None) of every occurrence of the last token, latest first."""
    ends = range(len(stored) - own, 0, -1)
    found = [(common_end(stored[:end], suffix), stored[end] if end < len(stored) else None) for end in ends]
    return [match for match in found if match[0] > 0]


def index_of(tokens: Sequence[int], orders: Sequence[int] = (1,), capacity: int = 400) -> TokenIndex:
    index = TokenIndex(capacity, orders)
    assert index.start_sequence(capacity - 2)
    index.extend(tokens)
    return index


def read(index: TokenIndex, matches: list[tuple[int, int]]) -> list[tuple[int, int | None]]:
    return [(length, index.cells[cell] - 1 if index.cells[cell] else None) for length, cell in matches]


@settings(max_examples=100)
@given(tokens_of)
def test_own_matches_equal_those_of_a_plain_search(tokens: list[int]) -> None:
    index = index_of(tokens)
    assert read(index, index.matches(index.suffix(), 1000)) == expected(tokens, tokens, own=True)


@settings(max_examples=100)
@given(tokens_of, tokens_of)
def test_matches_elsewhere_equal_those_of_a_plain_search(stored: list[int], context: list[int]) -> None:
    index, other = index_of(stored), index_of(context)
    assert read(index, index.matches(other.suffix(), 1000)) == expected(stored, context, own=False)


@settings(max_examples=100)
@given(tokens_of, st.lists(st.integers(1, 60), max_size=8))
def test_pieces_and_whole_give_the_same_index(tokens: list[int], cuts: list[int]) -> None:
    whole, pieces = index_of(tokens, (3, 1)), index_of([], (3, 1))
    done = 0
    for cut in [*cuts, len(tokens)]:
        pieces.extend(tokens[done : done + cut])
        done = min(done + cut, len(tokens))
    pieces.extend(tokens[done:])
    assert pieces.matches(pieces.suffix(), 50) == whole.matches(whole.suffix(), 50)


@settings(max_examples=100)
@given(tokens_of)
def test_longest_order_that_matches_is_used(tokens: list[int]) -> None:
    index = index_of(tokens, (4, 1))
    every = expected(tokens, tokens, own=True)
    long = [match for match in every if match[0] >= 4]
    assert read(index, index.matches(index.suffix(), 1000)) == (long or every)


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), max_size=30), tokens_of)
def test_a_full_ring_reports_only_true_matches_within_one_sequence(
    sequences: list[list[int]], context: list[int]
) -> None:
    ring, other = TokenIndex(64, (2, 1)), index_of(context)
    for sequence in sequences:
        assert ring.start_sequence(len(sequence))
        ring.extend(sequence)
    possible = {match for sequence in sequences for match in expected(sequence, context, own=False)}
    found = read(ring, ring.matches(other.suffix(), 100))
    # Of a sequence whose beginning was overwritten a match may be cut short, never lengthened.
    assert all(any(token == after and length <= most for most, after in possible) for length, token in found)
    if sequences and context[-1] in sequences[-1]:
        assert found, "the last sequence stored is always searched"


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    assert not TokenIndex(16, (1,)).start_sequence(15)
    assert TokenIndex(16, (1,)).start_sequence(14)


def test_positions_that_run_out_only_cost_the_memory_of_earlier_sequences(monkeypatch) -> None:
    monkeypatch.setattr(token_index, "LAST_POSITION", 300)
    ring = TokenIndex(64, (1,))
    for _ in range(100):
        assert ring.start_sequence(3)
        ring.extend([1, 2, 3])
    other = index_of([5, 1, 2])
    assert read(ring, ring.matches(other.suffix(), 1)) == [(2, 3)]
