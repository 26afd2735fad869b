"""`forerun bench`: plain and speculative decoding of the same requests, side by side; or the kernels alone."""

import json
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from forerun.cli.loading import load_llm, load_target, set_log_level
from forerun.cli.options import CommandLine, with_options
from forerun.config import ResolvedConfig
from forerun.errors import ConfigError
from forerun.settings_names import flag_of

if TYPE_CHECKING:
    from rich.table import Table

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
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Requests that run at the same time. Default: 1.")
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Measure whole steps of the model by their number of rows instead.")
    ] = False,
    context: Annotated[
        int | None, typer.Option("--context", help="With --kernels: tokens before the step. Default: 512.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="With --kernels: how often all is measured. Default: 15.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file; `-` prints it instead of the table.")
    ] = None,
) -> None:
    """Compare speculative with plain decoding, or measure the kernels.

    Every request is answered both ways in one process, in turns, without the prefix cache, so that neither way profits
    from the other. Exits with 1 when the tokens of any request differ.

    With --kernels no request runs: whole steps of the model, its linear layers alone and one reading of its weights are
    measured in turns.
    """
    requests = {"--workload": workload or None, "--limit": limit, "--concurrency": concurrency}
    if kernels:
        _refuse({**requests, **{flag_of(name): value for name, value in given.sampling.items()}}, "with --kernels")
        _bench_kernels(given, context, rounds, json_file)
    else:
        _refuse({"--context": context, "--rounds": rounds}, "without --kernels")
        _bench_requests(given, workload or [], limit, 1 if concurrency is None else concurrency, json_file)


def _bench_requests(
    given: CommandLine, files: list[Path], limit: int | None, concurrency: int, json_file: Path | None
) -> None:
    from forerun.bench.measure import run_task, warm_up
    from forerun.bench.report import report_json, report_table, report_task
    from forerun.bench.workload import read_workloads

    resolved = _resolve(given, concurrency)
    _check_writable(json_file)
    workloads = read_workloads(files, limit)
    seed = DEFAULT_SEED if resolved.config.seed is None else resolved.config.seed
    params = given.params(seed, max_tokens=DEFAULT_MAX_TOKENS)
    notes = Console(stderr=True, highlight=False)
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
    _publish(report_json(_head(llm, resolved, params, concurrency, limit), tasks), report_table(tasks), json_file)
    if not all(task.identical for task in tasks.values()):
        raise typer.Exit(1)


def _bench_kernels(given: CommandLine, context: int | None, rounds: int | None, json_file: Path | None) -> None:
    from forerun.bench.kernels import DEFAULT_CONTEXT, DEFAULT_ROUNDS, measure_kernels

    config = given.resolve().config
    context = DEFAULT_CONTEXT if context is None else context
    rounds = DEFAULT_ROUNDS if rounds is None else rounds
    for flag, value in (("--context", context), ("--rounds", rounds)):
        if value < 1:
            raise ConfigError(f"{flag} is {value}; it must be at least 1")
    _check_writable(json_file)
    set_log_level(config.log_level)
    model = load_target(config)
    notes = Console(stderr=True, highlight=False)
    with Progress(console=notes, disable=not notes.is_terminal, transient=True) as progress:
        bar = progress.add_task("rounds", total=rounds)
        report = measure_kernels(
            model,
            context=context,
            prefill_rows=config.batching.token_limit,
            rounds=rounds,
            advance=partial(progress.advance, bar),
        )
    caption = (
        f"{model.name}, context {context}, {rounds} rounds in turns; prompt in steps of {config.batching.token_limit}"
    )
    _publish(report.json(), report.table(caption), json_file)


def _publish(report: dict[str, Any], table: "Table", json_file: Path | None) -> None:
    """The report to its file and the table to the terminal, or the report alone to the terminal."""
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    if json_file == Path("-"):
        typer.echo(text)
        return
    Console(highlight=False).print(table)
    if json_file is not None:
        json_file.write_text(text + "\n", encoding="utf-8")


def _refuse(flags: dict[str, Any], where: str) -> None:
    """Flags that would do nothing are mistakes."""
    useless = [flag for flag, value in flags.items() if value is not None]
    if useless:
        raise ConfigError(f"{', '.join(useless)}: no effect {where}; leave it out")


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
