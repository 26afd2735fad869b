"""The suffix drafter: proposes what followed the longest match, learns, forgets, and stays within its bounds."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forerun.drafting.base import DraftContext, DraftLimit
from forerun.drafting.suffix import SuffixDrafter
from forerun.drafting.tree import DraftTree
from forerun.verification.sampling import SamplingParams
from forerun.verification.walk import Verdict

LIMIT = DraftLimit(width=3, depth=8, nodes=15)
VERDICT = Verdict(DraftTree(), (), 0)


def context(
    tokens: list[int], *, request_id: int = 0, prompt: int | None = None, room: int = 100, tenant: str = ""
) -> DraftContext:
    length = len(tokens) if prompt is None else prompt
    return DraftContext(request_id, tokens, length, SamplingParams(), 0, room, tenant)


def propose(drafter: SuffixDrafter, asked: DraftContext, limit: DraftLimit = LIMIT) -> DraftTree:
    return drafter.propose([asked], limit)[0]


def first_path(tree: DraftTree) -> list[int]:
    path, node = [], -1
    while (child := next((at for at, parent in enumerate(tree.parents) if parent == node), None)) is not None:
        path.append(tree.tokens[child])
        node = child
    return path


def answer(
    drafter: SuffixDrafter, request_id: int, prompt: Sequence[int], tokens: Sequence[int], tenant: str = ""
) -> None:
    """One request from its first step to its end."""
    known = list(prompt)
    asked = context(known, request_id=request_id, tenant=tenant)
    for token in tokens:
        propose(drafter, asked)
        known.append(token)
        drafter.observe(asked, VERDICT)
    drafter.forget(request_id)


def longest_match(tokens: Sequence[int]) -> int:
    """Where the longest earlier occurrence of the end of `tokens` ends: the plain definition."""

    def length(end: int) -> int:
        size = 0
        while size < end and tokens[end - 1 - size] == tokens[-1 - size]:
            size += 1
        return size

    return max(range(1, len(tokens)), key=length)


@settings(max_examples=100)
@given(
    st.integers(4, 25),
    st.lists(st.integers(1, 25), min_size=1, max_size=8, unique=True),
    st.lists(st.integers(0, 30), max_size=20),
)
def test_first_path_follows_the_longest_own_match(size: int, lengths: list[int], noise: list[int]) -> None:
    stem = list(range(100, 100 + size))
    tokens = list(noise)
    for number, length in enumerate(min(length, size) for length in lengths):
        tokens += [200 + number, *stem[size - length :], 300 + number, 400 + number]
    tokens += [500, *stem]
    best = longest_match(tokens)
    assume([min(length, size) for length in lengths].count(size) <= 1)
    path = first_path(propose(SuffixDrafter(), context(tokens)))
    assert path == tokens[best : best + len(path)]
    assert path or max(lengths) < 4


@settings(max_examples=100)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 9), st.integers(1, 5), st.integers(0, 20))
def test_every_guess_is_something_that_stood_after_the_same_token(
    tokens: list[int], room: int, width: int, nodes: int
) -> None:
    limit = DraftLimit(width, 6, nodes)
    tree = propose(SuffixDrafter(), context(tokens, room=room), limit)
    followers = {(tokens[at], tokens[at + 1]) for at in range(len(tokens) - 1)}
    assert all(depth <= min(room, 6) for depth in tree.depths())
    assert len(tree) <= nodes
    assert all(len(children) <= width for children in tree.children())
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        assert (tokens[-1] if parent < 0 else tree.tokens[parent], token) in followers
    assert list(tree.scores) == sorted(tree.scores, reverse=True)


def test_a_long_match_is_drafted_to_the_depth_limit_and_a_short_one_is_not() -> None:
    text = list(range(100, 160))
    assert first_path(propose(SuffixDrafter(), context([*text, 1, *text[:40]]))) == text[40:48]
    assert len(first_path(propose(SuffixDrafter(), context([*text, 1, text[20]])))) < 4


def test_text_without_repetition_gets_no_drafts() -> None:
    assert len(propose(SuffixDrafter(), context(list(range(500))))) == 0


def test_random_text_soon_gets_few_drafts() -> None:
    draw, drafter = random.Random(1), SuffixDrafter()
    known = [draw.randrange(60) for _ in range(300)]
    asked, drafted = context(known), []
    for _ in range(300):
        drafted.append(len(propose(drafter, asked)))
        known.append(draw.randrange(60))
        drafter.observe(asked, VERDICT)
    assert sum(drafted[100:]) < 0.2 * len(drafted[100:])


def test_continuations_that_differ_become_branches_by_how_often_they_were_seen() -> None:
    stem = [50, 51, 52, 53, 54]
    tokens = [*stem, 1, *stem, 2, *stem, 1, *stem, 1, *stem]
    tree = propose(SuffixDrafter(), context(tokens))
    roots = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent < 0]
    assert roots == [1, 2]


def test_own_text_goes_before_earlier_traffic_at_the_same_length() -> None:
    drafter = SuffixDrafter()
    stem = [50, 51, 52, 53, 54]
    answer(drafter, 0, [7], [*stem, 1, 1, 1])
    assert first_path(propose(drafter, context([*stem, 2, 3, *stem], request_id=1)))[0] == 2


def test_room_is_never_exceeded_and_nothing_is_drafted_without_room() -> None:
    tokens = list(range(20)) * 3
    assert len(propose(SuffixDrafter(), context(tokens, room=0))) == 0
    assert max(propose(SuffixDrafter(), context(tokens, room=3)).depths()) == 3


def test_an_earlier_answer_is_proposed_to_the_same_prompt() -> None:
    drafter = SuffixDrafter()
    prompt, reply = list(range(100, 120)), list(range(200, 220))
    answer(drafter, 0, prompt, reply)
    tree = propose(drafter, context(list(prompt), request_id=1))
    assert first_path(tree)[:4] == reply[:4]
    drafter.clear_history()
    assert len(propose(drafter, context(list(prompt), request_id=2))) == 0


def test_without_history_requests_do_not_learn_from_each_other() -> None:
    drafter = SuffixDrafter(history_tokens=0)
    answer(drafter, 0, list(range(20)), list(range(100, 120)))
    assert len(propose(drafter, context(list(range(20)), request_id=1))) == 0


@pytest.mark.parametrize(("share", "seen"), [(True, True), (False, False)])
def test_tenants_learn_from_each_other_only_when_history_is_shared(share: bool, seen: bool) -> None:
    drafter = SuffixDrafter(share_history=share)
    prompt = list(range(100, 120))
    answer(drafter, 0, prompt, list(range(200, 220)), tenant="one")
    assert bool(len(propose(drafter, context(list(prompt), request_id=1, tenant="two")))) == seen
    assert len(propose(drafter, context(list(prompt), request_id=2, tenant="one")))


def test_tokens_that_were_never_committed_are_never_proposed() -> None:
    drafter = SuffixDrafter()
    known = [1, 2, 3, 9, 1, 2, 3]
    asked = context(known)
    assert first_path(propose(drafter, asked))[0] == 9  # rejected: 4 is committed in its place
    known.append(4)
    drafter.observe(asked, VERDICT)
    drafter.forget(0)
    other = context([1, 2, 3, 9, 1, 2, 3], request_id=1)
    assert set(propose(drafter, other).tokens) <= {1, 2, 3, 4, 9}


def test_forgetting_releases_the_requests_own_state() -> None:
    drafter = SuffixDrafter(history_tokens=0)
    for number in range(50):
        propose(drafter, context(list(range(300)), request_id=number))
    assert drafter.memory_bytes() > 0
    for number in range(50):
        drafter.forget(number)
    drafter.forget(999)
    assert drafter.memory_bytes() == 0


def test_a_request_that_never_drafts_builds_no_index() -> None:
    drafter = SuffixDrafter(history_tokens=0)
    drafter.observe(context(list(range(1000))), VERDICT)
    assert drafter.memory_bytes() == 0


@pytest.mark.parametrize("share", [True, False])
def test_memory_is_bounded_over_many_requests_and_tenants(share: bool) -> None:
    draw = random.Random(0)
    drafter = SuffixDrafter(history_tokens=20_000, share_history=share)
    sizes = []
    for number in range(2_000):
        known = [draw.randrange(1000) for _ in range(60)]
        asked = context(known, request_id=number, prompt=10, tenant=f"tenant {number % 40}")
        propose(drafter, asked)
        drafter.forget(number)
        sizes.append(drafter.memory_bytes())
    assert max(sizes[1000:]) == max(sizes[:1000]) <= 40 * 20_000


def test_a_very_long_prompt_is_handled() -> None:
    draw = random.Random(0)
    known = [draw.randrange(50_000) for _ in range(100_000)]
    asked = context([*known, *known[500:540]])
    drafter = SuffixDrafter()
    assert first_path(propose(drafter, asked)) == known[540:548]
    assert drafter.memory_bytes() < 40 * len(known)
    drafter.forget(0)


def test_acceptance_of_one_request_does_not_depend_on_those_before_it() -> None:
    draw = random.Random(3)
    drafter = SuffixDrafter(history_tokens=0)
    shapes = []
    for number in range(20):
        offset = 1000 * number
        known = [offset + draw.randrange(400) for _ in range(300)]
        asked = context([*known, *known[100:120]], request_id=number)
        shapes.append(
            [token - offset for token in first_path(propose(drafter, asked))] == [t - offset for t in known[120:128]]
        )
        drafter.forget(number)
    assert all(shapes)


def test_same_calls_give_the_same_proposals() -> None:
    def run() -> list[DraftTree]:
        draw, drafter, trees = random.Random(5), SuffixDrafter(history_tokens=500), []
        for number in range(30):
            known = [draw.randrange(8) for _ in range(30)]
            asked = context(known, request_id=number, prompt=10)
            for _ in range(10):
                trees.append(propose(drafter, asked))
                known.append(draw.randrange(8))
                drafter.observe(asked, VERDICT)
            drafter.forget(number)
        return trees

    assert run() == run()


calls = st.lists(
    st.tuples(st.sampled_from(["propose", "observe", "forget", "clear"]), st.integers(0, 3), st.integers(0, 6)),
    max_size=60,
)


@settings(max_examples=100)
@given(calls, st.booleans())
def test_calls_in_any_order_never_fail(script: list[tuple[str, int, int]], share: bool) -> None:
    drafter = SuffixDrafter(history_tokens=200, share_history=share)
    texts: dict[int, list[int]] = {}
    for call, number, amount in script:
        known = texts.setdefault(number, [1, 2, 3, 1, 2])
        asked = context(known, request_id=number, prompt=5, room=amount, tenant=str(number % 2))
        if call == "propose":
            assert all(depth <= amount for depth in propose(drafter, asked).depths())
        elif call == "observe":
            known += [amount % 4] * amount
            drafter.observe(asked, VERDICT)
        elif call == "forget":
            drafter.forget(number)
            del texts[number]
        else:
            drafter.clear_history()
