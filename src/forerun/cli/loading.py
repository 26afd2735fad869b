"""Starting the engine for a command. torch is imported here, when a command needs it, and not before."""

import logging
from typing import TYPE_CHECKING

import typer

from forerun.config import EngineConfig

if TYPE_CHECKING:
    from forerun.engine.llm import LLM
    from forerun.models.loader import LoadedModel


def set_log_level(level: str) -> None:
    """Log to stderr, so that stdout holds nothing but answers."""
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")


def load_llm(config: EngineConfig) -> "LLM":
    """The engine for `config`; a drafter that is missing by permission is said so on stderr."""
    from forerun.engine.llm import LLM

    set_log_level(config.log_level)
    llm = LLM(config)
    for drafter, reason in llm.missing_drafters.items():
        typer.echo(f"warning: the drafter {drafter!r} is off: {reason}", err=True)
    return llm


def load_target(config: EngineConfig) -> "LoadedModel":
    """The target alone: no cache, no drafters."""
    from forerun.engine.build import load_target as load

    return load(config)
