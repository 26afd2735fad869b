"""`forerun generate`: answer prompts, as text or as JSON."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.answers import answer_json, failure
from forerun.cli.loading import load_llm
from forerun.cli.options import CommandLine, with_options
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.engine.outputs import RequestOutput

DEFAULT_MAX_TOKENS = 256


@with_options()
def generate(
    given: CommandLine,
    prompt: Annotated[
        list[str] | None, typer.Option("-p", "--prompt", help="A prompt; repeatable; `-` reads stdin.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option("--prompt-file", help="A file that holds one prompt; repeatable.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt through the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message, with --chat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt and line.")] = False,
) -> None:
    """Answer prompts."""
    prompts = _read_prompts(prompt or [], prompt_file or [])
    if system is not None and not chat:
        raise ConfigError("--system needs --chat: a plain prompt has no system message; add --chat")
    config = given.resolve().config
    params = given.params(config.seed, max_tokens=DEFAULT_MAX_TOKENS)
    llm = load_llm(config)
    if chat:
        opening = [{"role": "system", "content": system}] if system is not None else []
        ask: Any = partial(llm.chat, [[*opening, {"role": "user", "content": prompt}] for prompt in prompts])
    else:
        ask = partial(llm.generate, prompts)
    outputs = ask(params, speculation=config.speculation.method != "off", progress=False if as_json else None)
    for number, output in enumerate(outputs, 1):
        if as_json:
            typer.echo(json.dumps(answer_json(output), ensure_ascii=False, allow_nan=False))
        else:
            _show(output, number if len(outputs) > 1 else None)
    if any(failure(output) for output in outputs):
        raise typer.Exit(1)


def _read_prompts(texts: list[str], files: list[Path]) -> list[str]:
    if not texts and not files:
        raise ConfigError("no prompt is given; give one with -p TEXT (`-p -` reads stdin) or --prompt-file FILE")
    if texts.count("-") > 1:
        raise ConfigError("`-p -` is given twice, but stdin can be read only once; keep one")
    return [sys.stdin.read() if text == "-" else text for text in texts] + [_read_file(file) for file in files]


def _read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompt file {file}: {error}") from error


def _show(output: "RequestOutput", number: int | None) -> None:
    if number is not None:
        typer.echo(f"--- prompt {number}")
    if (error := failure(output)) is not None:
        typer.echo(f"error: {error}", err=True)
    for completion in output.completions:
        typer.echo(completion.text)
