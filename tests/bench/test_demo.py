"""`make demo`: three answers both ways, their figures, and a verdict on the tokens."""

import sys
from types import ModuleType

import pytest
from rich.console import Console

from forerun.bench.demo import demo, main
from forerun.errors import ModelNotFoundError
from tests.bench.fake_llm import FakeLLM


def test_three_answers_are_shown_with_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(FakeLLM(), Console(file=sys.stdout, width=200), max_tokens=16)
    printed = capsys.readouterr().out
    for text in ("json", "code", "prose", "echo <user>", "(1.88x), 7 of 14 guesses accepted (50%)", "tokens identical"):
        assert text in printed
    assert printed.count("tokens identical") == 3


def _use(monkeypatch: pytest.MonkeyPatch, make: object) -> None:
    module = ModuleType("forerun.engine.llm")
    module.LLM = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "forerun.engine.llm", module)


def test_the_exit_status_tells_whether_all_tokens_are_identical(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _use(monkeypatch, FakeLLM)
    assert main() == 0
    assert "All tokens are identical." in capsys.readouterr().out
    _use(monkeypatch, lambda config: FakeLLM(config, differs="<user>"))
    assert main() == 1
    printed = capsys.readouterr().out
    assert printed.count("DIFFERENT") == 3
    assert "NOT identical" in printed


def test_a_missing_model_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(config: object) -> None:
        raise ModelNotFoundError("no such model; run `make setup`")

    _use(monkeypatch, missing)
    assert main() == 1
    assert capsys.readouterr().err == "error: no such model; run `make setup`\n"
