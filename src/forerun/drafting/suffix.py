"""The suffix drafter: what followed the last few tokens where they occurred before, here or in earlier traffic.

After SuffixDecoding (arXiv 2411.04975), with chains of n-gram occurrences in place of suffix trees, and with the
continuations' chances measured while running. It needs no model. Nothing here looks at logits or text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

from forerun.drafting.match_statistics import MatchStatistics, match_kind
from forerun.drafting.suffix_history import SuffixHistory
from forerun.drafting.token_index import LONGEST_MATCH, TokenIndex
from forerun.drafting.tree import EMPTY_TREE, DraftTree

if TYPE_CHECKING:
    from forerun.drafting.base import DraftContext, DraftLimit
    from forerun.verification.walk import Verdict

NAME = "suffix"
ORDERS = (4, 1)  # occurrences of the last four tokens are looked for first, then of the last one
OCCURRENCES = 16  # the most recent ones that are looked at
LEAD = 16  # tokens of the prompt's end that are remembered before an answer
SHORTEST_ANSWER = 4  # shorter ones are not worth remembering
SHARED_DISCOUNT = 0.5  # of a vote from earlier traffic, beside one of the same length from the request itself

_WEIGHTS = [2.0**-shorter for shorter in range(LONGEST_MATCH + 1)]
"""The weight of a match's vote, by how many tokens it is shorter than the longest."""

_Match: TypeAlias = tuple[memoryview, int, int, float, bool]
"""One earlier occurrence: cells, where in them it goes on, its length, its vote's weight, whether it is our own."""


@dataclass(slots=True)
class _Proposal:
    """A tree, to be compared with the truth later, and two things for its root (index 0) and each node i (index i + 1).

    kinds: the class of the matches that led there. listed: the share of their votes that its children have.
    """

    tree: DraftTree
    kinds: list[int]
    listed: list[float]


@dataclass(slots=True)
class _Voters:
    """Matches whose texts went on alike so far. longest: the length of the longest; own: whether one of those is ours.

    weight: the sum of their votes.
    """

    matches: list[_Match] = field(default_factory=list)
    longest: int = 0
    own: bool = False
    weight: float = 0.0

    def add(self, match: _Match) -> None:
        """One more that went on like the others."""
        self.matches.append(match)
        _, _, length, weight, mine = match
        self.weight += weight
        if length > self.longest or (length == self.longest and mine):
            self.longest, self.own = length, mine


_Guess: TypeAlias = tuple[float, int, int, int, int, float, _Voters]
"""Minus the score, a tie-breaker, parent, level, token, share of the votes, voters."""


@dataclass
class _Request:
    """What is kept for one request. tokens: the engine's list, read only. proposal: the last one, until observed."""

    tokens: Sequence[int]
    prompt_length: int
    tenant: str
    statistics: MatchStatistics
    index: TokenIndex | None = None
    proposal: _Proposal | None = None
    proposed_at: int = 0


class SuffixDrafter:
    """Proposes the continuations of earlier occurrences of the context's longest suffix.

    history_tokens: how many tokens of earlier traffic are remembered; 0 = none. share_history: whether requests of
    different tenants learn from each other. min_score: guesses with a smaller estimated chance are not proposed.
    """

    name = NAME

    def __init__(self, *, history_tokens: int = 1_000_000, share_history: bool = True, min_score: float = 0.12) -> None:
        self.min_score = min_score
        self._history = SuffixHistory(history_tokens, share=share_history, orders=ORDERS)
        self._statistics = MatchStatistics()
        self._requests: dict[int, _Request] = {}

    def propose(self, contexts: "Sequence[DraftContext]", limit: "DraftLimit") -> list[DraftTree]:
        """One tree per context, best guesses first; empty where nothing is likely enough."""
        return [self._propose(context, limit) for context in contexts]

    def observe(self, context: "DraftContext", verdict: "Verdict") -> None:
        """Compare the last proposal with the tokens committed since; whether it was verified does not matter."""
        request = self._request(context)
        proposal, request.proposal = request.proposal, None
        if proposal is None:
            return
        links, node = proposal.tree.links, -1
        for token in request.tokens[request.proposed_at :]:
            if not (listed := proposal.listed[node + 1]):
                break
            child = links.get((node, token))
            request.statistics.add(proposal.kinds[node + 1], listed, child is not None)
            if child is None:
                break
            node = child

    def forget(self, request_id: int) -> None:
        """Drop the request's own state; its answer goes into the history."""
        request = self._requests.pop(request_id, None)
        if request is None or len(request.tokens) < request.prompt_length + SHORTEST_ANSWER:
            return
        self._history.add(request.tenant, request.tokens[max(request.prompt_length - LEAD, 0) :])

    def clear_history(self) -> None:
        """Forget earlier traffic and what was learnt from it; requests in progress keep their own tokens."""
        self._history.clear()
        self._statistics = MatchStatistics()

    def memory_bytes(self) -> int:
        """Bytes reserved for earlier traffic and for the tokens of requests in progress."""
        own = sum(request.index.memory_bytes for request in self._requests.values() if request.index)
        return own + self._history.memory_bytes

    def _request(self, context: "DraftContext") -> _Request:
        request = self._requests.get(context.request_id)
        if request is None:
            statistics = MatchStatistics(self._statistics)
            request = _Request(context.tokens, context.prompt_length, context.tenant, statistics)
            self._requests[context.request_id] = request
        request.tokens = context.tokens
        return request

    def _propose(self, context: "DraftContext", limit: "DraftLimit") -> DraftTree:
        depth = min(limit.depth, context.room)
        if depth < 1 or limit.nodes < 1 or limit.width < 1:
            return EMPTY_TREE
        request = self._request(context)
        matches = self._matches(request)
        if not matches:
            request.proposal = None
            return EMPTY_TREE
        request.proposal = grow(matches, request.statistics, self.min_score, depth, limit.nodes, limit.width)
        request.proposed_at = len(request.tokens)
        return request.proposal.tree

    def _matches(self, request: _Request) -> list[_Match]:
        index = self._indexed(request)
        suffix = index.suffix()
        own = index.matches(suffix, OCCURRENCES)
        store = self._history.store_of(request.tenant)
        shared = store.matches(suffix, OCCURRENCES) if store else []
        longest = max([length for length, _ in own + shared], default=0)
        found: list[_Match] = [(index.cells, cell, length, _WEIGHTS[longest - length], True) for length, cell in own]
        if store:
            found += [
                (store.cells, cell, length, SHARED_DISCOUNT * _WEIGHTS[longest - length], False)
                for length, cell in shared
            ]
        return found

    def _indexed(self, request: _Request) -> TokenIndex:
        """The request's index, holding all its committed tokens."""
        tokens, index = request.tokens, request.index
        if index is None or len(tokens) + 2 > index.capacity or len(tokens) < index.stored:
            capacity = 1 << (len(tokens) + 130).bit_length()
            index = request.index = TokenIndex(capacity, ORDERS)
            index.start_sequence(capacity - 2)
        if index.stored < len(tokens):
            index.extend(tokens[index.stored :])
        return index


def grow(
    matches: Sequence[_Match], statistics: MatchStatistics, min_score: float, depth: int, nodes: int, width: int
) -> _Proposal:
    """The tree of the likeliest continuations of the matches, best first, and what to compare with the truth later.

    A node's score is its parent's, times the chance that the text goes on as at one of the matches that led here, times
    the share of their votes for its token. Matches that led to a node count as one token longer there.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    kinds, listed = [0], [0.0]
    heap: list[_Guess] = []
    chances: dict[int, float] = {}  # as far as they were asked for
    voters = _Voters()
    for match in matches:
        voters.add(match)
    node, level, score = -1, 0, 1.0
    while True:
        if level < depth:
            kind = kinds[node + 1] = match_kind(voters.longest + level, own=voters.own, several=len(voters.matches) > 1)
            if (chance := chances.get(kind)) is None:
                chance = chances[kind] = statistics.chance(kind)
            if score * chance >= min_score:
                _guess(heap, voters, node, level, score * chance, min_score, width)
        if not heap or len(tokens) == nodes:
            break
        negative, _, parent, level, token, share, voters = heappop(heap)
        node, score = len(tokens), -negative
        listed[parent + 1] += share
        tokens.append(token)
        parents.append(parent)
        scores.append(score)
        kinds.append(0)
        listed.append(0.0)
    tree = DraftTree(tokens, parents, scores, [NAME] * len(tokens)) if tokens else EMPTY_TREE
    return _Proposal(tree, kinds, listed)


def _guess(
    heap: list[_Guess], voters: _Voters, node: int, level: int, score: float, min_score: float, width: int
) -> None:
    """Put the likely children of a node on the heap: what the voters' text goes on with after `level` tokens.

    score: of all of them together.
    """
    matches, order = voters.matches, len(heap) + (node + 1) * 64
    following = {cells[cell + level] for cells, cell, _, _, _ in matches}
    if len(following) == 1:  # they all agree, as they mostly do
        if cell := following.pop():  # else their sequences ended here
            heappush(heap, (-score, order, node, level + 1, cell - 1, 1.0, voters))
        return
    total = 0.0
    groups: dict[int, _Voters] = {}
    for match in matches:
        cell = match[0][match[1] + level]
        if not cell:
            continue
        if cell not in groups:
            groups[cell] = _Voters()
        groups[cell].add(match)
        total += match[3]
    for cell in sorted(groups, key=lambda cell: groups[cell].weight, reverse=True)[:width]:
        share = groups[cell].weight / total
        if score * share < min_score:
            break
        order = len(heap) + (node + 1) * 64
        heappush(heap, (-score * share, order, node, level + 1, cell - 1, share, groups[cell]))
