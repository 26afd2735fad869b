"""How often the text goes on as it did where the same words stood before: measured, by the length of the match.

Only counting happens here. Matches are found and trees are built elsewhere.
"""

from dataclasses import dataclass, field

from forerun.drafting.token_index import LONGEST_MATCH

_LENGTHS = (1, 2, 3, 4, 5, 7, 10, 16, 24, LONGEST_MATCH)
_BUCKET = [max(at for at, low in enumerate(_LENGTHS) if low <= max(length, 1)) for length in range(LONGEST_MATCH + 1)]
_PRIOR = (0.22, 0.45, 0.6, 0.7, 0.76, 0.85, 0.9, 0.94, 0.97, 0.985)
_KINDS = 4  # own or earlier text, one occurrence or several

PRIOR_WEIGHT = 12.0
REQUEST_WEIGHT = 8.0
FULL = 400.0


def match_kind(length: int, *, own: bool, several: bool) -> int:
    """The class of a match: by length, by whose text it is, and by whether it occurred more than once."""
    bucket = _BUCKET[length if length < LONGEST_MATCH else LONGEST_MATCH]
    return bucket * _KINDS + 2 * own + several


@dataclass
class _Counts:
    """For each class of match: expected hits of what was listed (`trials`), and hits. Old ones fade."""

    trials: list[float] = field(default_factory=lambda: [0.0] * (len(_LENGTHS) * _KINDS))
    hits: list[float] = field(default_factory=lambda: [0.0] * (len(_LENGTHS) * _KINDS))

    def add(self, kind: int, trials: float, hit: bool) -> None:
        """Count one match."""
        self.trials[kind] += trials
        self.hits[kind] += hit
        if self.trials[kind] > FULL:
            self.trials[kind] /= 2
            self.hits[kind] /= 2


class MatchStatistics:
    """Chances by class of match, over all requests and, leaning on those, for one request.

    Without a parent the statistics lean on figures measured on JSON, code and prose answers.
    """

    def __init__(self, parent: "MatchStatistics | None" = None) -> None:
        self._parent = parent
        self._counts = _Counts()

    def chance(self, kind: int) -> float:
        """The estimated chance that the next token is one of those that followed such a match."""
        if self._parent is None:
            expected, weight = _PRIOR[kind // _KINDS], PRIOR_WEIGHT
        else:
            expected, weight = self._parent.chance(kind), REQUEST_WEIGHT
        counts = self._counts
        chance = (counts.hits[kind] + weight * expected) / (counts.trials[kind] + weight)
        return chance if chance < 0.999 else 0.999

    def add(self, kind: int, listed: float, hit: bool) -> None:
        """Count a match. listed: the part (0, 1] of its votes that was proposed; hit: whether one of them was right."""
        self._counts.add(kind, listed, hit)
        if self._parent is not None:
            self._parent.add(kind, listed, hit)
