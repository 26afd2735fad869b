"""The commands on a real engine with a tiny model: nothing between the command line and the kernels is replaced."""

import json

import pytest
from typer.testing import CliRunner

from forerun.cli import app
from tests.engine.words import save_talking_model

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_talking_model(tmp_path_factory.mktemp("model"))


def generate(model, *words):
    result = RUNNER.invoke(app, ["generate", "-m", model, "--max-tokens", "24", "--json", "--ignore-eos", *words])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.9", "--seed", "5"]])
def test_generate_gives_the_same_tokens_with_every_method(model, sampling):
    words = ["-p", "one two three", "-p", "four", "--logprobs", "2", *sampling]
    plain = generate(model, *words, "--speculation", "off")
    assert [answer["stats"]["drafted"] for answer in plain] == [0, 0]
    assert plain[0]["stats"]["acceptance_rate"] is None
    for method in (["suffix"], ["draft", "--draft-model", model], ["suffix,draft", "--draft-model", model]):
        fast = generate(model, *words, "--speculation", *method)
        for answer, expected in zip(fast, plain, strict=True):
            for key in ("text", "token_ids", "finish_reason", "logprobs", "usage"):
                assert answer[key] == expected[key]
        assert "draft" not in method[0] or sum(answer["stats"]["accepted"] for answer in fast) > 0


def test_bench_measures_both_ways_and_writes_its_report(model, tmp_path):
    workload = tmp_path / "words.jsonl"
    workload.write_text("".join(json.dumps({"id": str(at), "prompt": "one two " * at}) + "\n" for at in range(1, 5)))
    out = tmp_path / "out.json"
    result = RUNNER.invoke(
        app,
        [
            "bench",
            "-m",
            model,
            "--workload",
            str(workload),
            "--max-tokens",
            "12",
            "--concurrency",
            "2",
            "--json",
            str(out),
        ],
    )
    assert result.exit_code == 0, result.output
    task = json.loads(out.read_text())["tasks"]["words"]
    assert task["requests"] == 4
    assert task["identical"] is True
    assert task["baseline"]["tokens_per_s"] > 0
    assert task["speculative"]["tokens_per_s"] > 0


def test_bench_measures_the_kernels_and_writes_its_report(model, tmp_path):
    out = tmp_path / "out.json"
    words = ["bench", "--kernels", "-m", model, "--precision", "fp32", "--context", "64", "--rounds", "1"]
    result = RUNNER.invoke(app, [*words, "--json", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    rows = ["1", "2", "4", "8", "16", "32", "64"]
    assert (report["precision"], list(report["step_ms"]), list(report["linear_ms"])) == ("fp32", rows, rows)
    assert "prefill" in result.stdout
    assert list(report) == list(json.loads(RUNNER.invoke(app, [*words, "--json", "-"]).stdout))


def test_bench_refuses_a_context_that_the_model_does_not_have(model):
    result = RUNNER.invoke(app, ["bench", "--kernels", "-m", model, "--context", "250"])
    assert result.exit_code == 2
    assert "--context is 250; at most 192" in result.stderr


def test_chat_answers_lines_from_standard_input(model):
    result = RUNNER.invoke(app, ["chat", "-m", model, "--max-tokens", "8"], input="one two\nthree\n/quit\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("tokens/s") == 2


def test_a_draft_model_that_is_missing_is_named_as_such(model):
    result = RUNNER.invoke(app, ["generate", "-m", model, "-p", "one", "--draft-model", "nowhere-at-all"])
    assert result.exit_code == 1
    assert "speculation.draft_model 'nowhere-at-all'" in result.stderr
