"""`python -m forerun.bench.demo`: three prompts on the default model, with speculation and without, side by side."""

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from forerun.bench.measure import Pair, ratio, run_task, warm_up
from forerun.bench.report import number
from forerun.bench.workload import Workload, packaged_workloads
from forerun.config import DEFAULT_MODEL, configure
from forerun.errors import ForerunError
from forerun.verification.sampling import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.llm import LLM

MAX_TOKENS = 128


def demo(llm: "LLM", console: Console, max_tokens: int = MAX_TOKENS) -> bool:
    """Answer the first packaged prompt of each task both ways and print it; whether all tokens are identical."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    console.print(
        f"{llm.model.name} ({llm.model.precision}, {llm.model.device}): the same words, sooner\n", markup=False
    )
    tasks = packaged_workloads(limit=1)
    warm_up(llm, params, tasks[0].requests[0].prompt)
    results = [_show(llm, task, params, console) for task in tasks]  # all are shown, even after a difference
    return all(results)


def _show(llm: "LLM", task: Workload, params: SamplingParams, console: Console) -> bool:
    (group,) = run_task(llm, task, params, concurrency=1)
    (pair,) = group.pairs
    console.print(f"[bold]{task.name}[/bold]")
    console.print(f"> {task.requests[0].prompt}", style="dim", markup=False)
    if pair.failed:
        console.print(f"failed: {pair.plain.error or pair.speculative.error}\n", style="red", markup=False)
        return False
    console.print(llm.tokenizer.decode(pair.speculative.token_ids), markup=False)
    console.print(_figures(pair), style="cyan", markup=False)
    console.print()
    return pair.identical


def _figures(pair: Pair) -> str:
    plain, fast = (ratio(answer.decode_tokens, answer.decode_s) for answer in (pair.plain, pair.speculative))
    accepted = ratio(pair.speculative.accepted, pair.speculative.drafted)
    return (
        f"plain {number(plain)} tokens/s, with speculation {number(fast)} tokens/s "
        f"({number(fast / plain if plain and fast else None, '{:.2f}x')}), "
        f"{pair.speculative.accepted} of {pair.speculative.drafted} guesses accepted "
        f"({number(accepted, '{:.0%}')}), tokens {'identical' if pair.identical else 'DIFFERENT'}"
    )


def main() -> int:
    """Exit status: 0 when all tokens are identical, 1 when any differ, 1 with one line when something is wrong."""
    from forerun.engine.llm import LLM

    console = Console(highlight=False)
    try:
        with LLM(configure(DEFAULT_MODEL, cache={"prefix": False})) as llm:
            identical = demo(llm, console)
    except ForerunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print("All tokens are identical." if identical else "The answers are NOT identical: this is a fault.")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
