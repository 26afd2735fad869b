"""Commands run inside the process, against an LLM without a model."""

import os
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import forerun.cli
from tests.bench.fake_llm import FakeLLM
from tests.cli.running import Run


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FORERUN_"):
            monkeypatch.delenv(name)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The LLMs that commands have started."""
    started: list[FakeLLM] = []

    def load(config: Any) -> FakeLLM:
        started.append(FakeLLM(config))
        return started[-1]

    for command in ("generate", "chat", "bench"):
        monkeypatch.setattr(sys.modules[f"forerun.cli.{command}"], "load_llm", load)
    return started


@pytest.fixture
def run(loaded: list[FakeLLM]) -> Run:
    """Run a command line, given as words."""

    def invoke(*words: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Any:
        return CliRunner().invoke(forerun.cli.app, list(words), input=stdin, env=env)

    return invoke
