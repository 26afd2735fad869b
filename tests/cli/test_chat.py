"""`forerun chat`: a conversation through a pipe, as a person would have it."""

import sys
from typing import Any

import pytest
from rich.console import Console

from forerun.cli.chat import Conversation, Reply, token_splitter
from forerun.engine.outputs import TokenChunk
from forerun.verification.sampling import SamplingParams
from tests.bench.fake_llm import FakeLLM
from tests.cli.running import Run


def prompts(llm: Any) -> list[str]:
    return [what for call, what in llm.calls if call == "stream"]


def test_answers_are_streamed_and_remembered(run: Run, loaded: list[Any]) -> None:
    result = run("chat", stdin="hi\n\nmore\n")
    assert result.exit_code == 0, result.output
    assert "echo <user>hi" in result.stdout
    assert prompts(loaded[0]) == ["<user>hi", "<user>hi<assistant>echo <user>hi<user>more"]


def test_reset_forgets_all_but_the_system_message(run: Run, loaded: list[Any]) -> None:
    run("chat", "--system", "s", stdin="one\n/reset\ntwo\n/quit\nthree\n")
    assert prompts(loaded[0]) == ["<system>s<user>one", "<system>s<user>two"]


def test_speed_and_acceptance_stand_below_each_reply(run: Run) -> None:
    assert "[12 tokens, " in (output := run("chat", "--max-tokens", "12", stdin="hi\n").stdout)
    assert "tokens/s, 50% accepted from drafts]" in output


def test_a_failed_question_is_told_and_forgotten(run: Run, loaded: list[Any]) -> None:
    result = run("chat", stdin="x" * 1001 + "\nshort\n/nonsense\n")
    assert result.exit_code == 1
    assert "error: the prompt has" in result.stdout
    assert "unknown command /nonsense" in result.stdout
    assert prompts(loaded[0]) == ["<user>short"]


def test_markup_in_an_answer_is_printed_as_it_is(run: Run) -> None:
    assert "echo <user>[bold]x[/bold] :smile:" in run("chat", stdin="[bold]x[/bold] :smile:\n").stdout


def test_show_drafts_colours_each_token_by_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, color_system="standard", file=sys.stdout, width=200)
    talk = Conversation(FakeLLM(), SamplingParams(max_tokens=4), None, show_drafts=True, console=console)
    talk.answer("hi")
    printed = capsys.readouterr().out
    assert printed.startswith("e\x1b[32mc\x1b[0mh\x1b[32mo\x1b[0m")


def test_text_that_cannot_be_told_apart_takes_the_commonest_colour() -> None:
    split = token_splitter(FakeLLM())
    held_back = TokenChunk(0, 0, "a", (97, 98, 99), ("target", "suffix", "suffix"))
    assert split(held_back) == [("a", "suffix")]
    assert split(TokenChunk(0, 0, "rest", (), ())) == [("rest", "target")]


def test_a_reply_of_one_chunk_has_no_speed() -> None:
    reply = Reply()
    list(reply.follow(iter([TokenChunk(0, 0, "a", (97,), ("target",))])))
    assert reply.summary() == "[1 tokens, - tokens/s, 0% accepted from drafts]"


def test_an_interrupted_answer_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()

    def interrupted(*_: Any, **__: Any) -> Any:
        yield TokenChunk(0, 0, "so far", (1, 2), ("target", "target"))
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "stream", interrupted)
    talk = Conversation(llm, SamplingParams(), None)
    talk.answer("hi")
    assert talk.messages[-1] == {"role": "assistant", "content": "so far"}
