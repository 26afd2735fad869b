"""`forerun generate`: what it prints, as text and as JSON, and how it fails."""

import json
from pathlib import Path
from typing import Any

from tests.cli.running import Run

TOO_LONG = "x" * 1001


def lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_text_goes_to_stdout(run: Run) -> None:
    result = run("generate", "-p", "hello")
    assert (result.exit_code, result.stdout) == (0, "echo hello\n")
    result = run("generate", "-p", "one", "-p", "two")
    assert result.stdout == "--- prompt 1\necho one\n--- prompt 2\necho two\n"


def test_json_is_one_object_per_prompt_and_line(run: Run) -> None:
    result = run("generate", "-p", "hello\nworld", "-p", "b", "--json", "--max-tokens", "12")
    assert result.exit_code == 0
    first, second = lines(result.stdout)
    assert first["text"] == "echo hello\nw"
    assert first["token_ids"] == [ord(char) for char in "echo hello\nw"]
    assert (first["finish_reason"], second["finish_reason"]) == ("length", "stop")
    assert first["usage"] == {"prompt_tokens": 11, "completion_tokens": 12}
    assert first["stats"] == {
        "steps": 6,
        "drafted": 10,
        "accepted": 5,
        "acceptance_rate": 0.5,
        "mean_accepted_length": 11 / 6,
        "decode_tokens_per_s": 11 / 0.006,
        "ttft_ms": 10.0,
    }
    assert set(first) == {"text", "token_ids", "finish_reason", "usage", "stats"}


def test_rates_are_null_when_nothing_was_drafted(run: Run) -> None:
    result = run("generate", "-p", "hello", "--json", "--speculation", "off")
    (answer,) = lines(result.stdout)
    assert answer["stats"]["drafted"] == 0
    assert answer["stats"]["acceptance_rate"] is None
    assert answer["stats"]["mean_accepted_length"] is None
    result = run("generate", "-p", "hello", "--json", "--max-tokens", "1")
    assert lines(result.stdout)[0]["stats"]["decode_tokens_per_s"] is None
    assert "NaN" not in result.stdout


def test_speculation_off_asks_for_plain_decoding(run: Run, loaded: list[Any]) -> None:
    run("generate", "-p", "a", "--speculation", "off")
    run("generate", "-p", "a")
    assert [llm.calls[0][0] for llm in loaded] == ["plain", "speculative"]


def test_logprobs_are_there_when_asked_for(run: Run) -> None:
    (answer,) = lines(run("generate", "-p", "hello", "--json", "--logprobs", "2").stdout)
    assert len(answer["logprobs"]) == len(answer["token_ids"])
    assert answer["logprobs"][0] == {"token_id": ord("e"), "logprob": -0.5, "top": [[101, -0.5], [101, -0.5]]}


def test_several_answers_are_all_there_and_counted(run: Run) -> None:
    (answer,) = lines(run("generate", "-p", "hello", "--json", "-n", "3").stdout)
    assert len(answer["completions"]) == 3
    assert answer["completions"][0]["text"] == answer["text"]
    assert answer["usage"]["completion_tokens"] == 3 * len(answer["token_ids"])


def test_a_bad_prompt_fails_alone(run: Run) -> None:
    result = run("generate", "-p", "a", "-p", TOO_LONG, "-p", "b", "--json")
    first, bad, last = lines(result.stdout)
    assert result.exit_code == 1
    assert (first["text"], last["text"]) == ("echo a", "echo b")
    assert bad["error"] == "the prompt has 1001 tokens, more than the context of 1000"
    assert (bad["text"], bad["token_ids"], bad["finish_reason"]) == ("", [], "error")
    assert bad.keys() == first.keys() | {"error"}


def test_a_bad_prompt_is_told_on_stderr_too(run: Run) -> None:
    result = run("generate", "-p", "a", "-p", TOO_LONG)
    assert result.exit_code == 1
    assert "echo a" in result.stdout
    assert result.stderr == "error: the prompt has 1001 tokens, more than the context of 1000\n"


def test_chat_goes_through_the_template(run: Run) -> None:
    assert run("generate", "-p", "a", "--chat").stdout == "echo <user>a\n"
    assert run("generate", "-p", "a", "--chat", "--system", "s").stdout == "echo <system>s<user>a\n"
    result = run("generate", "-p", "a", "--system", "s")
    assert (result.exit_code, "--chat" in result.stderr) == (2, True)


def test_prompts_come_from_stdin_and_files(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    result = run("generate", "-p", "-", "--prompt-file", str(file), "--json", stdin="from stdin\n")
    assert [answer["text"] for answer in lines(result.stdout)] == ["echo from stdin\n", "echo from a file"]
    for words in ([], ["--prompt-file", str(tmp_path / "none")], ["-p", "-", "-p", "-"]):
        result = run("generate", *words, stdin="")
        assert (result.exit_code, result.stderr[:7]) == (2, "error: ")


def test_settings_come_from_yaml_too(run: Run, loaded: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("decoding:\n  method: speculative\nnum_drafts: 5\nseed: 4\n")
    assert run("generate", "-p", "a", "--config", str(file)).exit_code == 0
    assert (loaded[0].config.speculation.width, loaded[0].config.seed) == (5, 4)
