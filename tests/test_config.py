"""Every setting, from every source, under every name."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from forerun.config import EngineConfig, ResolvedConfig, configure, effective, resolve, settings, show_size
from forerun.errors import ConfigError
from forerun.settings_names import ALIASES, flag_of, names_of, variable_of
from forerun.settings_sources import RESERVED_VARIABLES

CHANGED: dict[str, tuple[Any, Any]] = {
    "model": ("other-model", "other-model"),
    "precision": ("int8", "int8"),
    "activation_bits": ("8", 8),
    "device": ("cpu", "cpu"),
    "threads": ("3", 3),
    "context_length": ("512", 512),
    "seed": ("7", 7),
    "log_level": ("debug", "debug"),
    "cache.memory": ("256MiB", "256MiB"),
    "cache.precision": ("int8", "int8"),
    "cache.page_size": ("8", 8),
    "cache.prefix": ("false", False),
    "batching.max_batch": ("4", 4),
    "batching.min_batch": ("2", 2),
    "batching.max_wait_ms": ("12.5", 12.5),
    "batching.token_limit": ("99", 99),
    "speculation.method": ("suffix", ["suffix"]),
    "speculation.draft_model": ("small-model", "small-model"),
    "speculation.draft_precision": ("int4", "int4"),
    "speculation.width": ("5", 5),
    "speculation.depth": ("6", 6),
    "speculation.nodes": ("9", 9),
    "speculation.step_nodes": ("0", 0),
    "speculation.share_history": ("false", False),
    "speculation.history_tokens": ("1000", 1000),
    "speculation.on_draft_error": ("off", "off"),
}
ONE_VALUE_SO_FAR = {
    "speculation.acceptance": "exact",
    "speculation.acceptance_threshold": None,
    "speculation.device": "auto",
    "speculation.fallback": "auto",
    "control.policy": "fixed",
    "parallel.tensor": 1,
}


def from_arguments(**arguments: Any) -> ResolvedConfig:
    return resolve(env={}, arguments=arguments)


def test_the_tables_above_hold_every_setting() -> None:
    assert set(CHANGED) | set(ONE_VALUE_SO_FAR) == set(settings())
    assert {path: effective(EngineConfig())[path] for path in ONE_VALUE_SO_FAR} == ONE_VALUE_SO_FAR


@pytest.mark.parametrize("path", CHANGED)
@pytest.mark.parametrize("source", ["yaml", "environment", "flag", "argument"])
def test_a_changed_value_is_effective_from_every_source(path: str, source: str, tmp_path: Path) -> None:
    text, value = CHANGED[path]
    file = tmp_path / "settings.yaml"
    file.write_text(f"{path}: {text}\n")
    resolved = {
        "yaml": lambda: resolve(file, env={}),
        "environment": lambda: resolve(env={variable_of(path): text}),
        "flag": lambda: resolve(env={}, flags={path: text}),
        "argument": lambda: from_arguments(**{path: text}),
    }[source]()
    assert resolved.effective()[path] == value
    assert resolved.effective()[path] != effective(EngineConfig())[path]
    assert resolved.origin[path] != "default"
    assert {origin for other, origin in resolved.origin.items() if other != path} == {"default"}


@pytest.mark.parametrize(
    ("name", "value", "path", "expected"),
    [
        ("decoding.method", "speculative", "speculation.method", "auto"),
        ("speculative_decoding", "true", "speculation.method", "auto"),
        ("speculative_decoding", "false", "speculation.method", "off"),
        ("speculative-decoding", True, "speculation.method", "auto"),
        ("speculation", "off", "speculation.method", "off"),
        ("speculation", False, "speculation.method", "off"),
        ("draft_model_path", "small", "speculation.draft_model", "small"),
        ("draft-model-path", "small", "speculation.draft_model", "small"),
        ("draft_model", "small", "speculation.draft_model", "small"),
        ("draft_precision", "bf16", "speculation.draft_precision", "bf16"),
        ("num_drafts", 5, "speculation.width", 5),
        ("candidate_num", "5", "speculation.width", 5),
        ("speculative_degree", 4, "speculation.width", 4),
        ("base_length", 8, "speculation.depth", 8),
        ("fallback_strategy", "auto", "speculation.fallback", "auto"),
        ("adjust_speculative_degree", False, "control.policy", "fixed"),
        ("max_batch", 16, "batching.max_batch", 16),
        ("min_batch", 4, "batching.min_batch", 4),
        ("max_wait_ms", 50, "batching.max_wait_ms", 50.0),
        ("timeout", 50, "batching.max_wait_ms", 50.0),
    ],
)
def test_the_specification_s_names_are_accepted_everywhere(
    name: str, value: Any, path: str, expected: Any, tmp_path: Path
) -> None:
    file = tmp_path / "settings.yaml"
    section, _, key = name.rpartition(".")
    file.write_text(f"{section}:\n  {key}: {value}\n" if section else f"{name}: {value}\n")
    for resolved in (
        resolve(file, env={}),
        resolve(env={variable_of(name.replace("-", "_")): str(value)}),
        resolve(env={}, flags={name: str(value)}),
        from_arguments(**{name: value}),
    ):
        assert resolved.effective()[path] == expected
        assert name.replace("-", "_") in re.sub(r"[-.]", "_", resolved.origin[path].lower()) or section


@pytest.mark.parametrize("name", ["acceptance_threshold", "accept_threshold", "verify_threshold"])
def test_a_threshold_is_refused_while_acceptance_is_exact(name: str) -> None:
    with pytest.raises(ConfigError, match=r"acceptance_threshold is 0\.7.*'exact'.*leave it unset"):
        from_arguments(**{name: 0.7})
    with pytest.raises(ConfigError, match="at most 1"):
        from_arguments(**{name: 1.5})


def test_every_name_has_a_flag_and_a_variable_of_its_own() -> None:
    names = names_of(settings())
    assert len({flag_of(name) for name in names}) == len({variable_of(name) for name in names}) == len(names)
    assert not RESERVED_VARIABLES & {variable_of(name) for name in names}
    assert {alias.path for alias in ALIASES} <= set(settings())


@pytest.mark.parametrize(
    "variable", ["FORERUN_SPECULATION__METHOD", "FORERUN_SPECULATION_METHOD", "FORERUN_SPECULATION"]
)
def test_the_environment_may_write_sections_either_way(variable: str) -> None:
    resolved = resolve(env={variable: "suffix"})
    assert resolved.config.speculation.method == ("suffix",)
    assert resolved.origin["speculation.method"] == f"environment {variable}"


def test_the_process_s_own_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FORERUN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FORERUN_THREADS", "1")
    assert configure("a").threads == 1


def test_a_complete_configuration_is_changed_by_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_SEED", "9")
    base = EngineConfig(model="a", threads=2)
    assert configure(base) == base
    changed = configure(base, num_drafts=5, speculation={"method": "off"})
    assert (changed.threads, changed.seed, changed.speculation.width) == (2, None, 5)
    assert changed.speculation.method == "off"


def test_reserved_empty_and_foreign_variables_are_left_alone() -> None:
    env = {"FORERUN_CACHE": "/somewhere", "FORERUN_CPU_ISA": "avx2", "FORERUN_THREADS": " ", "PATH": "/bin"}
    assert resolve(env=env).config == EngineConfig()


def test_flags_beat_the_environment_which_beats_yaml_which_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("threads: 1\nseed: 1\nspeculation:\n  width: 1\n")
    resolved = resolve(file, env={"FORERUN_SEED": "2", "FORERUN_NUM_DRAFTS": "2"}, flags={"speculative_degree": "4"})
    assert (resolved.config.threads, resolved.config.seed, resolved.config.speculation.width) == (1, 2, 4)
    assert resolved.origin["threads"] == f"{file}: threads"
    assert resolved.origin["seed"] == "environment FORERUN_SEED"
    assert resolved.origin["speculation.width"] == "flag --speculative-degree"
    assert resolved.origin["speculation.depth"] == "default"


def test_arguments_may_be_nested_dotted_or_dashed() -> None:
    for arguments in (
        {"speculation": {"method": ["suffix"], "width": 2}},
        {"speculation.method": "suffix", "speculation.width": 2},
        {"speculation": {"method": ("suffix",)}, "candidate-num": 2},
        {"speculation__method": "suffix", "num_drafts": 2},
    ):
        speculation = from_arguments(**arguments).config.speculation
        assert (speculation.method, speculation.width) == (("suffix",), 2)


def test_two_values_for_one_setting_in_one_source_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_drafts=3 and candidate_num=5 .* speculation\.width"):
        from_arguments(num_drafts=3, candidate_num=5)
    with pytest.raises(ConfigError, match="--speculation-width=5 and --num-drafts=3"):
        resolve(env={}, flags={"speculation.width": "5", "num_drafts": "3", "threads": None})
    with pytest.raises(ConfigError, match=r"both set speculation\.width"):
        resolve(env={"FORERUN_NUM_DRAFTS": "3", "FORERUN_CANDIDATE_NUM": "5"})
    assert from_arguments(num_drafts=3, candidate_num="3").config.speculation.width == 3


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("presicion", "precision"),
        ("speculation.widht", "speculation.width"),
        ("width", "speculation.width"),
        ("max_batches", "max_batch"),
        ("draft_model_paht", "draft_model_path"),
    ],
)
def test_an_unknown_setting_names_the_nearest(name: str, nearest: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{re.escape(name)}'.*did you mean .*{re.escape(nearest)}"):
        from_arguments(**{name: 1})
    file = tmp_path / "settings.yaml"
    file.write_text(f"{name}: 1\n")
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        resolve(file, env={})
    with pytest.raises(ConfigError, match=variable_of(nearest)):
        resolve(env={variable_of(name): "1"})
    with pytest.raises(ConfigError, match=flag_of(nearest)):
        resolve(env={}, flags={name: "1"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp8-e4m3"}, "quantised kernels for CUDA; allowed now: auto, fp32, bf16, int8, int4"),
        ({"draft_precision": "fp8_e4m3"}, "draft_precision is 'fp8_e4m3'.*quantised kernels for CUDA"),
        ({"activation_bits": 9}, "activation_bits is 9.*must be one of 8, 16"),
        ({"activation_bits": "many"}, "activation_bits is 'many'.*must be"),
        ({"activation_bits": True}, "activation_bits is True.*must be a number"),
        ({"precision": "fp7"}, "precision is 'fp7'.*must be one of auto, fp32, bf16, int8, int4"),
        ({"speculation": {"acceptance": "two-stage"}}, "lossy acceptance rules; allowed now: exact"),
        ({"speculation": {"device": "cuda"}}, "beside the target; allowed now: auto"),
        ({"control": {"policy": "rules"}}, "adaptive controller; allowed now: fixed"),
        ({"adjust_speculative_degree": True}, "adaptive controller"),
        ({"parallel": {"tensor": 2}}, "tensor parallelism; allowed now: 1"),
        ({"base_length": {"json": 8, "code": 6}}, "'rules' control policy; allowed now: one whole number"),
        ({"base_length": '{"json": 8}'}, "'rules' control policy"),
        ({"base_length": [4, 12]}, "allowed now: one whole number"),
        ({"base_length": "4-12"}, "allowed now: one whole number"),
        ({"base_length": "[4"}, "neither a number nor"),
        ({"speculation": "eagle"}, "names 'eagle', but must be auto, off, or a list of drafters"),
        ({"speculation": "suffix,off"}, "must be auto, off, or a list"),
        ({"speculation": "draft"}, "set speculation.draft_model"),
        ({"speculation.method": 3}, "must be auto, off, or a list"),
        ({"num_drafts": 0}, "speculation.width is 0 .*num_drafts.* must be at least 1"),
        ({"num_drafts": True}, "must be a number"),
        ({"num_drafts": 2.5}, "must be a whole number"),
        ({"num_drafts": "many"}, "must be a whole number"),
        ({"timeout": -1}, "must be at least 0"),
        ({"timeout": float("nan")}, "must be a finite number|must be at least 0"),
        ({"threads": 0}, "threads is 0.*must be at least 1"),
        ({"min_batch": 8, "max_batch": 4}, "min_batch is 8, more than batching.max_batch"),
        ({"cache": {"memory": "12 parsecs"}}, "must be 'auto' or a size such as 512MiB"),
        ({"cache": {"precision": "int4"}}, "cache.precision is 'int4'.*must be one of auto, bf16, fp32, int8"),
        ({"cache": {"memory": 0}}, "more than nothing"),
        ({"cache": {"prefix": "maybe"}}, "must be true or false"),
        ({"cache": 3}, "is a section, not a setting; it holds cache.memory"),
        ({"model": ""}, "model is ''.*must not be empty"),
        ({"device": "tpu"}, "must be one of auto, cpu, cuda"),
        ({"log_level": "loud"}, "must be one of debug, info, warning, error"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_with_what_is_allowed(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        from_arguments(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "just words\n"])
def test_a_broken_yaml_file_is_named(content: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        resolve(file, env={})
    with pytest.raises(ConfigError, match=r"cannot read.*missing\.yaml"):
        resolve(tmp_path / "missing.yaml", env={})


def test_an_empty_yaml_file_and_an_empty_section_set_nothing(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    for content in ("", "speculation:\n", "# nothing\n"):
        file.write_text(content)
        assert resolve(file, env={}).config == EngineConfig()


def test_a_bare_off_in_yaml_is_off_though_yaml_reads_it_as_false(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("speculation:\n  method: off\n  on_draft_error: off\n")
    speculation = resolve(file, env={}).config.speculation
    assert (speculation.method, speculation.on_draft_error) == ("off", "off")


def test_a_configuration_cannot_be_changed_or_hold_unknown_names() -> None:
    with pytest.raises(ValidationError):
        EngineConfig().threads = 2  # type: ignore[misc]
    with pytest.raises(ValidationError):
        EngineConfig.model_validate({"thread": 2})


def test_drafters_follow_from_the_method_and_the_draft_model() -> None:
    assert from_arguments().config.drafters == ("suffix",)
    assert from_arguments(draft_model="small").config.drafters == ("suffix", "draft")
    assert from_arguments(speculation="off", draft_model="small").config.drafters == ()
    assert from_arguments(speculation="draft", draft_model="small").config.drafters == ("draft",)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5 gib", 3 << 29), ("4096", 4096), (4096, 4096), ("1k", 1024)],
)
def test_sizes_are_read_in_the_usual_units(text: str | int, size: int) -> None:
    cache = from_arguments(cache={"memory": text}).config.cache
    assert cache.memory == size


def test_cache_memory_is_left_to_the_machine_by_default() -> None:
    assert from_arguments().config.cache.memory == "auto"
    assert from_arguments(cache={"memory": "AUTO"}).config.cache.memory == "auto"


@given(st.integers(1, 2**50))
def test_a_size_survives_being_shown_and_read_again(size: int) -> None:
    assert from_arguments(cache={"memory": show_size(size)}).config.cache.memory == size


@given(
    st.dictionaries(
        st.sampled_from([path for path, (text, _) in CHANGED.items() if text.isdigit() and path != "activation_bits"]),
        st.integers(33, 64),
        max_size=6,
    )
)
def test_what_is_effective_can_be_given_again(arguments: dict[str, int]) -> None:
    arguments.pop("batching.min_batch", None)
    first = from_arguments(**arguments)
    assert from_arguments(**first.effective()).config == first.config
