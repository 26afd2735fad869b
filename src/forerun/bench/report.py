"""What a benchmark says: as JSON for programs, as a table for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from forerun.bench.measure import Group, Side, ratio, summarise


@dataclass(frozen=True)
class TaskReport:
    """One task's figures. requests: answered both ways; failed: not answered, and left out of every figure."""

    requests: int
    failed: int
    baseline: Side
    speculative: Side
    identical_requests: int

    @property
    def identical(self) -> bool:
        """Whether every request's tokens were the same both ways, and there was one."""
        return self.identical_requests == self.requests > 0

    @property
    def speedup(self) -> float | None:
        """Speculative tokens per second over plain ones."""
        plain, speculative = self.baseline.tokens_per_s, self.speculative.tokens_per_s
        return None if plain is None or speculative is None else ratio(speculative, plain)


def report_task(groups: Sequence[Group], concurrency: int) -> TaskReport:
    """The figures of a task that has run."""
    pairs = [pair for group in groups for pair in group.pairs]
    failed = sum(pair.failed for pair in pairs)
    return TaskReport(
        requests=len(pairs) - failed,
        failed=failed,
        baseline=summarise(groups, speculative=False, concurrency=concurrency),
        speculative=summarise(groups, speculative=True, concurrency=concurrency),
        identical_requests=sum(pair.identical for pair in pairs),
    )


def report_json(head: Mapping[str, Any], tasks: Mapping[str, TaskReport]) -> dict[str, Any]:
    """The whole report: `head` (model, precision, device, how it was measured), then the tasks by name."""
    return {**head, "tasks": {name: _task_json(task) for name, task in tasks.items()}}


def report_table(tasks: Mapping[str, TaskReport]) -> Table:
    """The same for people, two lines a task, narrow enough for a terminal of 80 columns."""
    title = "the same requests, decoded plainly and speculatively"
    failed = ", ".join(f"{task.failed} of {name}" for name, task in tasks.items() if task.failed)
    caption = f"failed and left out: {failed}" if failed else None
    table = Table(
        Column("task", no_wrap=True),
        title=title,
        caption=caption,
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading in ("", "tokens\nper s", "speed-\nup", "TTFT\np50 ms", "TPOT\np50 ms", "TPOT\np99 ms"):
        table.add_column(heading, justify="right" if heading else "left")
    for heading in ("accep-\nted", "tokens\n/ step", "same\ntokens"):
        table.add_column(heading, justify="right")
    for name, task in tasks.items():
        fast = task.speculative
        table.add_row(name, "plain", *_speeds(task.baseline, None))
        table.add_row(
            "",
            "spec.",
            *_speeds(fast, task.speedup),
            number(fast.acceptance_rate, "{:.0%}"),
            number(fast.mean_accepted_length, "{:.2f}"),
            f"{task.identical_requests}/{task.requests}",
            end_section=True,
        )
    return table


def _speeds(side: Side, speedup: float | None) -> tuple[str, ...]:
    return (
        number(side.tokens_per_s),
        "" if speedup is None else f"{speedup:.2f}x",
        number(side.ttft_ms.p50, "{:.0f}"),
        number(side.tpot_ms.p50),
        number(side.tpot_ms.p99),
    )


def number(value: float | None, form: str = "{:.1f}") -> str:
    """A figure for people; a dash when there is none."""
    return "-" if value is None else form.format(value)


def _task_json(task: TaskReport) -> dict[str, Any]:
    baseline = asdict(task.baseline)
    for figure in ("acceptance_rate", "mean_accepted_length", "decoding_efficiency"):
        del baseline[figure]  # plain decoding has no guesses
    return {
        "requests": task.requests,
        "failed": task.failed,
        "baseline": baseline,
        "speculative": asdict(task.speculative),
        "speedup": task.speedup,
        "identical": task.identical,
        "identical_requests": task.identical_requests,
    }
