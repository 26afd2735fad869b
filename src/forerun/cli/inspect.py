"""`forerun inspect`: what a model is, and what every setting is and where it was set."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun.cli.loading import load_target, set_log_level
from forerun.cli.options import CommandLine, with_options

if TYPE_CHECKING:
    from forerun.models.loader import LoadedModel


@with_options(sampling=False)
def inspect(
    given: CommandLine,
    model_name: Annotated[str | None, typer.Argument(metavar="MODEL", help="As with -m/--model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show a model and the effective settings."""
    resolved = given.resolve(model=model_name)
    set_log_level(resolved.config.log_level)
    described = describe(load_target(resolved.config))
    settings = {path: {"value": value, "origin": resolved.origin[path]} for path, value in resolved.effective().items()}
    if as_json:
        typer.echo(json.dumps({"model": described, "settings": settings}, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    console.print(_table(("model", ""), [(name, _show(name, value)) for name, value in described.items()]))
    rows = [(path, _show(path, one["value"]), str(one["origin"])) for path, one in settings.items()]
    console.print(_table(("setting", "value", "set by"), rows))


def describe(model: "LoadedModel") -> dict[str, Any]:
    """What a loaded model is, as plain data. size: bytes of the weights in memory."""

    from forerun.models.parameters import parameter_count

    architecture = model.architecture
    return {
        "name": model.name,
        "path": str(model.path),
        "architecture": architecture.family,
        "parameters": parameter_count(architecture),
        "size": model.weight_bytes,
        "precision": str(model.precision),
        "precision_reason": model.precision_reason,
        "device": str(model.device),
        "kernels": model.decoder.kernels.name,
        "context": model.decoder.context_limit,
        "layers": len(architecture.layers),
        "hidden_size": architecture.hidden_size,
        "vocabulary": architecture.vocab_size,
        "cache_precision": model.cache_precision,
        "kv_bytes_per_token": model.decoder.kv_bytes_per_token,
        "chat_template": model.chat_template.source,
    }


_CHOSEN_LATER = ("threads", "context_length", "seed")


def _show(name: str, value: Any) -> str:
    if value is None:
        return "auto" if name in _CHOSEN_LATER else "none"
    if name == "size":
        return f"{value / 1e6:,.0f} MB"
    if name == "chat_template":
        return f"yes, {len(value)} characters (--json shows it)"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(*headings)
    for row in rows:
        table.add_row(*map(escape, row))
    return table
