"""Measured chances: they start at the prior, follow what is observed, and keep requests apart."""

import pytest

from forerun.drafting.match_statistics import MatchStatistics, match_kind

KIND = match_kind(3, own=True, several=False)


def test_longer_matches_are_surer_before_anything_is_observed() -> None:
    chances = [MatchStatistics().chance(match_kind(length, own=True, several=False)) for length in range(1, 33)]
    assert chances == sorted(chances)
    assert all(0 < chance < 1 for chance in chances)


@pytest.mark.parametrize(("hit", "low", "high"), [(True, 0.95, 1.0), (False, 0.0, 0.05)])
def test_estimates_follow_what_is_observed(hit: bool, low: float, high: float) -> None:
    statistics = MatchStatistics()
    for _ in range(500):
        statistics.add(KIND, 1.0, hit)
    assert low < statistics.chance(KIND) < high


def test_old_observations_fade() -> None:
    statistics = MatchStatistics()
    for hit in [True] * 5000 + [False] * 1500:
        statistics.add(KIND, 1.0, hit)
    assert statistics.chance(KIND) < 0.1


def test_a_request_learns_faster_than_everybody_and_alone() -> None:
    everybody = MatchStatistics()
    one, other = MatchStatistics(everybody), MatchStatistics(everybody)
    before = other.chance(KIND)
    for _ in range(10):
        one.add(KIND, 1.0, False)
    assert one.chance(KIND) < everybody.chance(KIND) < before
    assert other.chance(KIND) == pytest.approx(everybody.chance(KIND))
