"""Flags: each exists, reaches its setting or sampling parameter, and is understood in either spelling."""

import dataclasses
from typing import Any

import pytest

from forerun.cli.options import SAMPLING_OPTIONS
from forerun.config import effective, resolve, settings
from forerun.settings_names import ALIASES, flag_of
from forerun.verification.sampling import SamplingParams
from tests.cli.running import Run

SETTING_FLAGS = [
    ("--model", "other", "model", "other"),
    ("-m", "other", "model", "other"),
    ("--precision", "int8", "precision", "int8"),
    ("--activation-bits", "8", "activation_bits", 8),
    ("--device", "cpu", "device", "cpu"),
    ("--threads", "3", "threads", 3),
    ("--context-length", "512", "context_length", 512),
    ("--seed", "7", "seed", 7),
    ("--log-level", "error", "log_level", "error"),
    ("--cache-memory", "256MiB", "cache.memory", "256MiB"),
    ("--cache-precision", "int8", "cache.precision", "int8"),
    ("--cache-page-size", "8", "cache.page_size", 8),
    ("--cache-prefix", "false", "cache.prefix", False),
    ("--batching-max-batch", "4", "batching.max_batch", 4),
    ("--batching-min-batch", "2", "batching.min_batch", 2),
    ("--batching-max-wait-ms", "5", "batching.max_wait_ms", 5.0),
    ("--batching-token-limit", "99", "batching.token_limit", 99),
    ("--speculation", "suffix", "speculation.method", ["suffix"]),
    ("--speculation-method", "off", "speculation.method", "off"),
    ("--speculation-draft-model", "small", "speculation.draft_model", "small"),
    ("--speculation-draft-precision", "int4", "speculation.draft_precision", "int4"),
    ("--speculation-width", "5", "speculation.width", 5),
    ("--speculation-depth", "6", "speculation.depth", 6),
    ("--speculation-nodes", "9", "speculation.nodes", 9),
    ("--speculation-step-nodes", "0", "speculation.step_nodes", 0),
    ("--speculation-share-history", "false", "speculation.share_history", False),
    ("--speculation-history-tokens", "10", "speculation.history_tokens", 10),
    ("--speculation-on-draft-error", "off", "speculation.on_draft_error", "off"),
    ("--decoding-method", "plain", "speculation.method", "off"),
    ("--decoding.method", "plain", "speculation.method", "off"),
    ("--speculative_decoding", "false", "speculation.method", "off"),
    ("--speculative-decoding", "false", "speculation.method", "off"),
    ("--draft_model_path", "small", "speculation.draft_model", "small"),
    ("--draft-model", "small", "speculation.draft_model", "small"),
    ("--draft-precision", "bf16", "speculation.draft_precision", "bf16"),
    ("--num_drafts", "5", "speculation.width", 5),
    ("--candidate_num", "5", "speculation.width", 5),
    ("--speculative_degree", "5", "speculation.width", 5),
    ("--base_length", "6", "speculation.depth", 6),
    ("--max_batch", "4", "batching.max_batch", 4),
    ("--min-batch", "2", "batching.min_batch", 2),
    ("--max-wait-ms", "5", "batching.max_wait_ms", 5.0),
    ("--timeout", "5", "batching.max_wait_ms", 5.0),
]
ONE_VALUE_SO_FAR = {
    "--speculation-acceptance",
    "--speculation-acceptance-threshold",
    "--speculation-device",
    "--speculation-fallback",
    "--fallback-strategy",
    "--control-policy",
    "--parallel-tensor",
    "--acceptance-threshold",
    "--accept-threshold",
    "--verify-threshold",
    "--adjust-speculative-degree",
}
SAMPLING_FLAGS: list[tuple[list[str], str, Any]] = [
    (["--max-tokens", "5"], "max_tokens", 5),
    (["--min_tokens", "2"], "min_tokens", 2),
    (["--temperature", "0.5"], "temperature", 0.5),
    (["--top-p", "0.9"], "top_p", 0.9),
    (["--top_k", "4"], "top_k", 4),
    (["--min-p", "0.1"], "min_p", 0.1),
    (["--repetition-penalty", "1.1"], "repetition_penalty", 1.1),
    (["--presence-penalty", "-0.5"], "presence_penalty", -0.5),
    (["--frequency-penalty", "0.5"], "frequency_penalty", 0.5),
    (["--logit-bias", "4=-100", "--logit-bias", "5=1.5"], "logit_bias", {4: -100.0, 5: 1.5}),
    (["--stop", "END", "--stop", "\n\n"], "stop", ("END", "\n\n")),
    (["--stop-token-ids", "3", "--stop-token-ids", "4"], "stop_token_ids", (3, 4)),
    (["--ignore-eos"], "ignore_eos", True),
    (["--include-stop"], "include_stop", True),
    (["--logprobs", "2"], "logprobs", 2),
    (["-n", "2"], "n", 2),
    (["--seed", "9"], "seed", 9),
]


def test_the_tables_above_hold_every_flag() -> None:
    tested = {flag.replace("_", "-").replace(".", "-") for flag, *_ in SETTING_FLAGS} | ONE_VALUE_SO_FAR
    assert {flag_of(name) for name in [*settings(), *(alias.name for alias in ALIASES)]} <= tested
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {option.name for option in SAMPLING_OPTIONS} | {"seed"} == fields
    assert {name for _, name, _ in SAMPLING_FLAGS} == fields


@pytest.mark.parametrize(("flag", "value", "path", "expected"), SETTING_FLAGS)
@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_each_setting_flag_reaches_the_engine(
    run: Run, loaded: list[Any], command: str, flag: str, value: str, path: str, expected: Any
) -> None:
    words = {"generate": ["-p", "a"], "chat": [], "bench": ["--limit", "1", "--max-tokens", "4"]}[command]
    result = run(command, *words, flag, value, stdin="")
    assert result.exit_code == 0, result.output
    assert effective(loaded[0].config)[path] == expected
    changed = {other for other, now in effective(loaded[0].config).items() if now != resolve(env={}).effective()[other]}
    assert changed - {"cache.prefix"} == {path} - {"cache.prefix"}


@pytest.mark.parametrize("flag", sorted(ONE_VALUE_SO_FAR))
def test_a_flag_whose_values_come_later_says_what_is_allowed(run: Run, flag: str) -> None:
    value = {"--parallel-tensor": "2", "--adjust-speculative-degree": "true", "--speculation-device": "cpu"}.get(flag)
    value = value or ("off" if "fallback" in flag else None)
    value = value or ("0.7" if "threshold" in flag else "rules" if "policy" in flag else "typical")
    result = run("generate", "-p", "a", flag, value)
    assert result.exit_code == 2
    assert "allowed now:" in result.stderr


@pytest.mark.parametrize(("words", "name", "expected"), SAMPLING_FLAGS)
def test_each_sampling_flag_reaches_the_request(
    run: Run, loaded: list[Any], words: list[str], name: str, expected: Any
) -> None:
    result = run("generate", "-p", "a", *words)
    assert result.exit_code == 0, result.output
    (params,) = loaded[0].params
    assert getattr(params, name) == expected
    for field in dataclasses.fields(SamplingParams):
        if field.name not in (name, "max_tokens"):
            assert getattr(params, field.name) == getattr(SamplingParams(), field.name)


def test_a_setting_flag_with_a_wrong_value_is_one_clear_line(run: Run) -> None:
    result = run("generate", "-p", "a", "--num-drafts", "0")
    assert result.exit_code == 2
    assert result.stderr == "error: speculation.width is '0' (flag --num-drafts); it must be at least 1\n"


def test_a_wrong_sampling_parameter_is_one_clear_line(run: Run) -> None:
    result = run("generate", "-p", "a", "--top-p", "2")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: top_p is 2.0")
    assert result.stderr.count("\n") == 1
    result = run("generate", "-p", "a", "--logit-bias", "4")
    assert (result.exit_code, "TOKEN_ID=BIAS" in result.stderr) == (2, True)


def test_an_unknown_flag_or_variable_is_an_error(run: Run) -> None:
    result = run("generate", "-p", "a", "--num-draft", "3")
    assert result.exit_code == 2
    assert "--num-drafts" in result.stderr
    result = run("generate", "-p", "a", env={"FORERUN_NUM_DRAFT": "3"})
    assert result.exit_code == 2
    assert "FORERUN_NUM_DRAFTS" in result.stderr


def test_contradicting_flags_are_refused(run: Run) -> None:
    result = run("generate", "-p", "a", "--num_drafts", "3", "--candidate-num", "5")
    assert result.exit_code == 2
    assert "both set speculation.width" in result.stderr
