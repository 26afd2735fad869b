"""`forerun bench`: the report as JSON and as a table, and what it refuses to measure."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fake_llm import FakeLLM
from tests.cli.running import Run


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    file = tmp_path / "greetings.jsonl"
    file.write_text("".join(json.dumps({"id": name, "prompt": f"hello {name}"}) + "\n" for name in "abcd"))
    return file


def test_the_report_has_the_agreed_shape(run: Run, workload: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = run("bench", "--workload", str(workload), "--limit", "3", "--max-tokens", "16", "--json", str(report))
    assert result.exit_code == 0, result.output
    content = json.loads(report.read_text())
    assert (content["model"], content["precision"], content["device"]) == ("fake", "fp32", "cpu")
    assert (content["max_tokens"], content["temperature"], content["seed"]) == (16, 0.0, 0)
    (name, task), *_ = content["tasks"].items()
    assert (name, task["requests"], task["identical"], task["identical_requests"]) == ("greetings", 3, True, 3)
    side = {"tokens_per_s", "ttft_ms", "tpot_ms", "output_tokens"}
    rates = {"acceptance_rate", "mean_accepted_length", "decoding_efficiency"}
    assert set(task["baseline"]) == side
    assert set(task["speculative"]) == side | rates
    assert set(task["baseline"]["ttft_ms"]) == set(task["speculative"]["tpot_ms"]) == {"p50", "p90", "p99"}
    assert task["speedup"] == pytest.approx(15 / 8)
    assert task["speculative"]["acceptance_rate"] == pytest.approx(0.5)
    assert task["speculative"]["mean_accepted_length"] == pytest.approx(15 / 8)
    assert task["speculative"]["decoding_efficiency"] == pytest.approx(15 / 22)


def test_people_get_a_table(run: Run, workload: Path) -> None:
    result = run("bench", "--workload", str(workload), "--max-tokens", "16", env={"COLUMNS": "200"})
    for text in ("greetings", "1.88x", "50%", "4/4"):
        assert text in result.stdout


def test_the_packaged_prompts_are_used_when_no_workload_is_named(run: Run) -> None:
    result = run("bench", "--max-tokens", "8", "--json", "-")
    assert {name: task["requests"] for name, task in json.loads(result.stdout)["tasks"].items()} == {
        "json": 4,
        "code": 4,
        "prose": 4,
    }


def test_rates_are_null_without_drafts(run: Run, workload: Path) -> None:
    result = run("bench", "--workload", str(workload), "--max-tokens", "1", "--json", "-")
    task = json.loads(result.stdout)["tasks"]["greetings"]
    assert task["speedup"] is None
    assert task["speculative"]["acceptance_rate"] is None
    assert task["baseline"]["tpot_ms"] == {"p50": None, "p90": None, "p99": None}


def test_different_tokens_are_reported_and_fail_the_command(
    run: Run, workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["forerun.cli.bench"], "load_llm", lambda config: FakeLLM(config, differs="hello b"))
    result = run("bench", "--workload", str(workload), "--json", "-")
    task = json.loads(result.stdout)["tasks"]["greetings"]
    assert (result.exit_code, task["identical"], task["identical_requests"]) == (1, False, 3)
    assert "greetings, b: the tokens with speculation differ" in result.stderr


def test_a_failed_request_is_named_and_left_out(run: Run, workload: Path) -> None:
    with workload.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "x" * 1001}) + "\n")
    result = run("bench", "--workload", str(workload), "--json", "-")
    task = json.loads(result.stdout)["tasks"]["greetings"]
    assert (result.exit_code, task["requests"], task["failed"], task["identical"]) == (0, 4, 1, True)
    assert "greetings, long: failed: the prompt has" in result.stderr


def test_the_prefix_cache_is_off_so_that_no_run_profits_from_the_other(
    run: Run, workload: Path, loaded: list[Any]
) -> None:
    run("bench", "--workload", str(workload), "--limit", "1")
    assert loaded[0].config.cache.prefix is False
    result = run("bench", "--workload", str(workload), "--cache-prefix", "true")
    assert (result.exit_code, "cache.prefix is on" in result.stderr) == (2, True)


def test_repeated_prompts_are_pointed_out(run: Run, workload: Path) -> None:
    workload.write_text(workload.read_text() * 2)
    assert "greetings repeats 4 prompts" in run("bench", "--workload", str(workload)).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "0"], "--limit is 0"),
        (["--concurrency", "0"], "--concurrency is 0"),
        (["--concurrency", "64"], "more than batching.max_batch (32)"),
        (["--workload", "none.jsonl"], "cannot read the workload none.jsonl"),
        (["--json", "no/such/folder/report.json"], "cannot write the report"),
        (["--context", "100"], "--context: no effect without --kernels"),
        (["--rounds", "3"], "--rounds: no effect without --kernels"),
        (["--kernels", "--json", "no/such/folder/report.json"], "cannot write the report"),
        (["--kernels", "--context", "0"], "--context is 0; it must be at least 1"),
        (["--kernels", "--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--kernels", "--precision", "fp7"], "precision is 'fp7'"),
        (["--kernels", "--limit", "3", "--top-k", "5"], "--limit, --top-k: no effect with --kernels"),
        (["--kernels", "--workload", "none.jsonl"], "--workload: no effect with --kernels"),
    ],
)
def test_impossible_wishes_are_refused_before_a_model_is_loaded(
    run: Run, loaded: list[Any], words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["forerun.cli.bench"], "load_target", loaded.append)
    result = run("bench", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not loaded
