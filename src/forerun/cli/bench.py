"""`forerun bench`: plain and speculative decoding of the same requests, side by side."""

import json
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from forerun.cli.loading import load_llm
from forerun.cli.options import CommandLine, with_options
from forerun.config import ResolvedConfig
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.measure import Group
    from forerun.engine.llm import LLM
    from forerun.verification.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 128
DEFAULT_SEED = 0
WARM_UP_PROMPT = "List the numbers from one to ten, then list them again."


@with_options(without=("n", "logprobs"))
def bench(
    given: CommandLine,
    workload: Annotated[
        list[Path] | None,
        typer.Option("--workload", help="JSON lines with a `prompt` each; repeatable. Default: the packaged prompts."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first so many requests of each file.")] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Requests that run at the same time.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file; `-` prints it instead of the table.")
    ] = None,
) -> None:
    """Compare speculative with plain decoding.

    Every request is answered both ways in one process, in turns, without the prefix cache, so that neither way profits
    from the other. Exits with 1 when the tokens of any request differ.
    """
    from forerun.bench.measure import run_task, warm_up
    from forerun.bench.report import report_json, report_table, report_task
    from forerun.bench.workload import read_workloads

    resolved = _resolve(given, concurrency)
    _check_writable(json_file)
    workloads = read_workloads(workload or [], limit)
    seed = DEFAULT_SEED if resolved.config.seed is None else resolved.config.seed
    params = given.params(seed, max_tokens=DEFAULT_MAX_TOKENS)
    out, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    llm = load_llm(resolved.config)
    tasks = {}
    with Progress(console=notes, disable=not notes.is_terminal, transient=True) as progress:
        warm_up(llm, params, WARM_UP_PROMPT)
        for task in workloads:
            bar = progress.add_task(task.name, total=len(task.requests))
            groups = run_task(llm, task, params, concurrency=concurrency, advance=partial(progress.advance, bar))
            tasks[task.name] = report_task(groups, concurrency)
            if task.repeated:
                notes.print(f"note: {task.name} repeats {task.repeated} prompts, which flatters drafters with a memory")
            _tell_differences(task.name, groups, notes)
    report = report_json(_head(llm, resolved, params, concurrency, limit), tasks)
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    if json_file == Path("-"):
        typer.echo(text)
    else:
        out.print(report_table(tasks))
        if json_file is not None:
            json_file.write_text(text + "\n", encoding="utf-8")
    if not all(task.identical for task in tasks.values()):
        raise typer.Exit(1)


def _resolve(given: CommandLine, concurrency: int) -> ResolvedConfig:
    """Effective settings, always without the prefix cache: the second run of a prompt would profit from the first."""
    if concurrency < 1:
        raise ConfigError(f"--concurrency is {concurrency}; it must be at least 1")
    asked = given.resolve()
    if asked.config.cache.prefix and asked.origin["cache.prefix"] != "default":
        raise ConfigError(
            f"cache.prefix is on ({asked.origin['cache.prefix']}), but bench answers each prompt twice, and the second "
            "run would profit from the first; leave the setting out or off"
        )
    if asked.config.batching.max_batch < concurrency:
        raise ConfigError(
            f"--concurrency is {concurrency}, more than batching.max_batch ({asked.config.batching.max_batch}); lower "
            "the one or raise the other"
        )
    cache = asked.config.cache.model_copy(update={"prefix": False})
    origin = {**asked.origin, "cache.prefix": "bench"}
    return ResolvedConfig(asked.config.model_copy(update={"cache": cache}), origin)


def _head(
    llm: "LLM", resolved: ResolvedConfig, params: "SamplingParams", concurrency: int, limit: int | None
) -> dict[str, Any]:
    return {
        "model": llm.model.name,
        "precision": str(llm.model.precision),
        "device": str(llm.model.device),
        "version": version("forerun"),
        "concurrency": concurrency,
        "limit": limit,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "settings": resolved.effective(),
    }


def _tell_differences(task: str, groups: "list[Group]", notes: Console) -> None:
    for pair in (pair for group in groups for pair in group.pairs):
        if pair.failed:
            notes.print(f"{task}, {pair.id}: failed: {pair.plain.error or pair.speculative.error}", markup=False)
        elif not pair.identical:
            notes.print(f"{task}, {pair.id}: the tokens with speculation differ from those without", markup=False)


def _check_writable(file: Path | None) -> None:
    """Find out before the measurement, not after it."""
    if file is None or file == Path("-"):
        return
    try:
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"cannot write the report to {file}: {error}; choose another place with --json") from error
