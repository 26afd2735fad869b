"""What is measured side by side, and the arithmetic and the tables of it. Nothing is run here."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Arrivals = list[tuple[float, int]]
"""(time.perf_counter(), tokens of the answer so far), whenever some arrive."""


@dataclass(frozen=True)
class Figures:
    """Tokens per second of one contender: the median over all turns, and all tokens over all their time.

    ratio: how many times as fast forerun is, the median turn by turn; forerun's suffix drafter, where it competes.
    identical: how many answers equal the same side's plain one, of how many; None for the plain ones themselves.
    """

    median_per_s: float
    overall_per_s: float
    ratio: float
    identical: tuple[int, int] | None = None


Table = dict[str, dict[str, Figures]]
"""By workload and contender. A workload without any answer that is long enough for a speed has no contenders."""


@dataclass(frozen=True)
class Speed:
    """Tokens and the seconds they took; neither, where there was nothing to measure."""

    tokens: float
    seconds: float

    @property
    def per_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Together:
    """Requests answered at once. wall_s: from the first sent to the last finished."""

    wall_s: float
    arrivals: Sequence[Arrivals]
    answers: Sequence[tuple[int, ...]] = ()

    @property
    def whole(self) -> Speed:
        """All tokens, in the whole time."""
        return Speed(sum(each[-1][1] for each in self.arrivals), self.wall_s)

    @property
    def full(self) -> Speed:
        """The tokens that came while every request decoded: after the last first token, until the first end."""
        start = max(each[0][0] for each in self.arrivals)
        end = min(each[-1][0] for each in self.arrivals)
        if end <= start:
            return Speed(0, 0.0)
        return Speed(sum(_count(each, end) - _count(each, start) for each in self.arrivals), end - start)


def _count(arrivals: Arrivals, moment: float) -> int:
    return max((tokens for at, tokens in arrivals if at <= moment), default=0)


def compare(
    turns: Sequence[Mapping[str, Speed]], ours: str, identical: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, Figures]:
    """Figures of every contender beside `ours`, from the turns in which all have a speed; none without such a turn."""
    full = [turn for turn in turns if all(speed.tokens for speed in turn.values())]
    return {
        name: Figures(
            median_per_s=statistics.median(turn[name].per_s for turn in full),
            overall_per_s=sum(turn[name].tokens for turn in full) / sum(turn[name].seconds for turn in full),
            ratio=statistics.median(turn[ours].per_s / turn[name].per_s for turn in full),
            identical=(identical or {}).get(name),
        )
        for name in (full[0] if full else ())
    }


def markdown(title: str, table: Table, *, alone: Table | None = None, bold: Mapping[str, str] | None = None) -> str:
    """The table for people.

    alone: figures at batch 1 for contenders to be compared with, where they are there. bold: a contender by workload.
    """
    headings = ["workload", "", "tok/s, median", "tok/s, overall", "forerun / it", "x batch 1", "identical"]
    lines = [f"### {title}", "", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for task, contenders in table.items():
        if not contenders:
            lines.append(f"| {task} | no answer was long enough; raise --max-tokens | | | | | |")
        for name, figures in contenders.items():
            single = (alone or {}).get(task, {}).get(name)
            cells = [
                task,
                f"**{name}**" if (bold or {}).get(task) == name else name,
                f"{figures.median_per_s:.1f}",
                f"{figures.overall_per_s:.1f}",
                f"{figures.ratio:.2f}",
                f"{figures.median_per_s / single.median_per_s:.2f}" if single else "",
                "{} of {}".format(*figures.identical) if figures.identical else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
