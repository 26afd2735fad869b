"""Running a workload plain and speculative, in turns, and the arithmetic of what comes out. Nothing is printed here."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.bench.workload import Workload, WorkloadRequest

if TYPE_CHECKING:
    from forerun.engine.llm import LLM
    from forerun.engine.outputs import RequestOutput
    from forerun.verification.sampling import SamplingParams


@dataclass(frozen=True)
class Answer:
    """One measured answer. Times in seconds; decode_tokens: tokens after the first; drafted: nodes verified."""

    token_ids: tuple[int, ...] = ()
    ttft_s: float | None = None
    decode_s: float = 0.0
    decode_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Pair:
    """One request's two answers."""

    id: str
    plain: Answer
    speculative: Answer

    @property
    def failed(self) -> bool:
        """Whether either run gave no answer; such requests are counted, and left out of every figure."""
        return self.plain.error is not None or self.speculative.error is not None

    @property
    def identical(self) -> bool:
        """Whether both answers consist of the same tokens."""
        return not self.failed and self.plain.token_ids == self.speculative.token_ids


@dataclass(frozen=True)
class Group:
    """Requests that ran at the same time, and how long each of the two runs took as a whole."""

    pairs: tuple[Pair, ...]
    plain_s: float
    speculative_s: float


@dataclass(frozen=True)
class Percentiles:
    """In the unit of what was measured; None when nothing was."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True)
class Side:
    """One way of decoding, over all requests of a task. A figure without a denominator is None.

    tokens_per_s: at concurrency 1 tokens after the first per second of decoding; above, all tokens per second of the
    groups' wall-clock time. decoding_efficiency: tokens emitted / tokens that the target computed to decode them.
    """

    tokens_per_s: float | None
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    output_tokens: int
    acceptance_rate: float | None
    mean_accepted_length: float | None
    decoding_efficiency: float | None


def run_task(
    llm: "LLM",
    workload: Workload,
    params: "SamplingParams",
    *,
    concurrency: int,
    advance: Callable[[int], object] = lambda requests: None,
) -> list[Group]:
    """Answer each group of `concurrency` requests both ways; which way goes first alternates from group to group.

    Drafters start without history, and plain runs teach them nothing. advance: told the size of each finished group.
    """
    llm.clear_history()
    groups = []
    for number, requests in enumerate(_in_groups(workload.requests, concurrency)):
        prompts = [chat_prompt(llm, request.prompt) for request in requests]
        order = (False, True) if number % 2 == 0 else (True, False)
        runs = {speculation: _run(llm, prompts, params, speculation) for speculation in order}
        (plain, plain_s), (speculative, speculative_s) = runs[False], runs[True]
        pairs = zip(requests, plain, speculative, strict=True)
        groups.append(Group(tuple(Pair(r.id, a, b) for r, a, b in pairs), plain_s, speculative_s))
        advance(len(requests))
    return groups


def warm_up(llm: "LLM", params: "SamplingParams", prompt: str) -> None:
    """One request each way, so that nothing is paid for the first time under the clock."""
    for speculation in (False, True):
        _run(llm, [chat_prompt(llm, prompt)], params, speculation)
    llm.clear_history()


def chat_prompt(llm: "LLM", prompt: str) -> str | list[int]:
    """The prompt as the model wants it: through its chat template, where it has one."""
    if not llm.model.chat_template.available:
        return prompt
    return llm.chat_prompt([{"role": "user", "content": prompt}])


def summarise(groups: Sequence[Group], *, speculative: bool, concurrency: int) -> Side:
    """The figures of one way of decoding."""
    answers = [
        pair.speculative if speculative else pair.plain for group in groups for pair in group.pairs if not pair.failed
    ]
    wall_s = sum(group.speculative_s if speculative else group.plain_s for group in groups)
    tokens = sum(len(answer.token_ids) for answer in answers)
    decoded = sum(answer.decode_tokens for answer in answers)
    steps = sum(answer.steps for answer in answers)
    drafted = sum(answer.drafted for answer in answers)
    decode_s = sum(answer.decode_s for answer in answers)
    return Side(
        tokens_per_s=ratio(decoded, decode_s) if concurrency == 1 else ratio(tokens, wall_s),
        ttft_ms=percentiles([answer.ttft_s * 1e3 for answer in answers if answer.ttft_s is not None]),
        tpot_ms=percentiles([a.decode_s * 1e3 / a.decode_tokens for a in answers if a.decode_tokens]),
        output_tokens=tokens,
        acceptance_rate=ratio(sum(answer.accepted for answer in answers), drafted),
        mean_accepted_length=ratio(decoded, steps) if drafted else None,
        decoding_efficiency=ratio(decoded, steps + drafted),
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """The 50th, 90th and 99th, interpolated linearly between neighbours."""
    return Percentiles(*(_percentile(sorted(values), share) for share in (0.5, 0.9, 0.99)))


def ratio(above: float, below: float) -> float | None:
    """above / below, or None when there is nothing to divide by."""
    return above / below if below > 0 else None


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _in_groups(requests: Sequence[WorkloadRequest], size: int) -> Iterator[Sequence[WorkloadRequest]]:
    for start in range(0, len(requests), size):
        yield requests[start : start + size]


def _run(
    llm: "LLM", prompts: Sequence[str | list[int]], params: "SamplingParams", speculation: bool
) -> tuple[list[Answer], float]:
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, speculation=speculation, progress=False)
    return [_answer(output) for output in outputs], time.perf_counter() - start


def _answer(output: "RequestOutput") -> Answer:
    if output.error is not None or not output.completions:
        return Answer(error=output.error or "the request ended without an answer")
    completion = output.completions[0]
    stats = completion.stats
    return Answer(
        token_ids=completion.token_ids,
        ttft_s=stats.ttft_s,
        decode_s=stats.decode_s,
        decode_tokens=stats.decode_tokens,
        steps=stats.steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        error=completion.error,
    )
