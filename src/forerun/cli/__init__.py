"""The command line: `forerun generate`, `chat`, `bench`, `inspect`. One file beside this one per command.

Nothing here imports torch before a command runs, so that `--help` answers at once.
"""

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from forerun.cli.bench import bench
from forerun.cli.chat import chat
from forerun.cli.generate import generate
from forerun.cli.inspect import inspect
from forerun.errors import ConfigError, ForerunError

USAGE_ERROR = 2


class _ErrorsInOneLine(TyperGroup):
    """An error that forerun raises on purpose is one line for the user, and no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ForerunError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(USAGE_ERROR if isinstance(error, ConfigError) else 1) from error


app = typer.Typer(
    cls=_ErrorsInOneLine,
    no_args_is_help=True,
    add_completion=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-").replace(".", "-"),
    },
    help="Same words, sooner: language models answer several times faster, and not one token changes.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forerun {version('forerun')}")
        raise typer.Exit


@app.callback()
def _main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


for _command in (generate, chat, bench, inspect):
    app.command()(_command)

__all__ = ["app"]
