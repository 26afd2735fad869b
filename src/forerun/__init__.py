"""forerun: the same words, sooner. What a Python user imports; everything heavy loads when it is first used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.config import EngineConfig
    from forerun.engine.async_engine import AsyncEngine
    from forerun.engine.llm import LLM
    from forerun.engine.outputs import Completion, RequestOutput, TokenChunk
    from forerun.errors import ForerunError
    from forerun.verification.sampling import SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "forerun.engine.llm",
    "AsyncEngine": "forerun.engine.async_engine",
    "SamplingParams": "forerun.verification.sampling",
    "EngineConfig": "forerun.config",
    "RequestOutput": "forerun.engine.outputs",
    "Completion": "forerun.engine.outputs",
    "TokenChunk": "forerun.engine.outputs",
    "ForerunError": "forerun.errors",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Completion",
    "EngineConfig",
    "ForerunError",
    "RequestOutput",
    "SamplingParams",
    "TokenChunk",
]


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives; torch is not loaded before it is needed."""
    if name not in _HOME:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
