"""The type of the `run` fixture."""

from collections.abc import Callable

from typer.testing import Result

Run = Callable[..., Result]
