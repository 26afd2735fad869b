"""Every setting of an engine, once: name, type, limits, default, and what it is for.

Flags, environment variables, YAML keys and keyword arguments are all derived from these classes (`resolve`). Only
FORERUN_CACHE and FORERUN_CPU_ISA, which are no settings of an engine, are read where they are used.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from forerun.errors import ConfigError
from forerun.settings_sources import Given, merge, read_environment, read_flags, read_mapping, read_yaml

DEFAULT_MODEL = "smollm2-135m-instruct"
DRAFTERS = ("suffix", "draft")

_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("setting", "{message}", {"message": message})


def _word(value: Any) -> Any:
    """Enumerated words in one spelling. YAML reads a bare `off` as false."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value.strip().lower().replace("-", "_") if isinstance(value, str) else value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise _wrong("must be a number")
    return value


def _number_or_auto(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in ("auto", "none", "null", "") else _number(value)


def _bits(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else _number(value)


def _text_or_none(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return None if isinstance(value, str) and value.strip().lower() in ("none", "null", "") else value


def _size(value: Any) -> Any:
    """Bytes of a size such as 512MiB, 2GB or 1048576; "auto" stays."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
    if isinstance(value, bool) or not found or found[2] not in _UNITS:
        raise _wrong("must be 'auto' or a size such as 512MiB or 2GB")
    size = int(float(found[1]) * _UNITS[found[2]])
    if size < 1:
        raise _wrong("must be more than nothing, or 'auto'")
    return size


def _drafters(value: Any) -> Any:
    """auto, off, or a list of drafters, each at most once."""
    if isinstance(value, bool):
        return "auto" if value else "off"
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise _wrong(f"must be auto, off, or a list of drafters ({', '.join(DRAFTERS)})")
    words = tuple(dict.fromkeys(_word(word) for word in words if word.strip()))
    if len(words) == 1 and words[0] in ("auto", "off"):
        return words[0]
    strangers = [word for word in words if word not in DRAFTERS]
    if strangers or not words:
        named = f"names {', '.join(map(repr, strangers))}, but " if strangers else ""
        raise _wrong(f"{named}must be auto, off, or a list of drafters ({', '.join(DRAFTERS)})")
    return words


def show_size(size: int | str) -> str:
    """A size in the largest binary unit that divides it."""
    if isinstance(size, str):
        return size
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))

Count: TypeAlias = Annotated[int, BeforeValidator(_number)]
CountOrAuto: TypeAlias = Annotated[int | None, BeforeValidator(_number_or_auto)]
Milliseconds: TypeAlias = Annotated[float, BeforeValidator(_number)]
Text: TypeAlias = Annotated[str | None, BeforeValidator(_text_or_none)]
Size: TypeAlias = Annotated[
    int | Literal["auto"], BeforeValidator(_size), PlainSerializer(show_size, return_type=str, when_used="json")
]
Method: TypeAlias = Annotated[
    Literal["auto", "off"] | tuple[Literal["suffix", "draft"], ...], BeforeValidator(_drafters)
]
Precision: TypeAlias = Annotated[Literal["auto", "fp32", "bf16", "int8", "int4"], BeforeValidator(_word)]
CachePrecision: TypeAlias = Annotated[Literal["auto", "bf16", "fp32", "int8"], BeforeValidator(_word)]
Device: TypeAlias = Annotated[Literal["auto", "cpu", "cuda"], BeforeValidator(_word)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CacheConfig(_Section):
    """Memory for keys and values."""

    memory: Size = Field(
        default="auto", description="memory for the key/value cache: auto (from the machine) or a size, 512MiB"
    )
    precision: CachePrecision = Field(
        default="auto",
        description="number format of keys and values: auto (fp32 with fp32 weights, else bf16), bf16, fp32, int8",
    )
    page_size: Count = Field(default=16, ge=1, description="tokens per page of the key/value cache")
    prefix: bool = Field(default=True, description="reuse the keys and values of prompts that begin alike")


class BatchingConfig(_Section):
    """Which requests share a step."""

    max_batch: Count = Field(default=32, ge=1, description="most requests that decode in one step")
    min_batch: Count = Field(
        default=1, ge=1, description="hold new requests until so many wait (or max_wait_ms is over)"
    )
    max_wait_ms: Milliseconds = Field(
        default=100.0, ge=0, description="longest time, in ms, to hold a request for min_batch"
    )
    token_limit: Count = Field(
        default=512, ge=1, description="most tokens that one step computes, draft nodes included"
    )

    @model_validator(mode="after")
    def _minimum_below_maximum(self) -> "BatchingConfig":
        if self.min_batch > self.max_batch:
            raise ValueError(
                f"batching.min_batch is {self.min_batch}, more than batching.max_batch ({self.max_batch}): a batch "
                "could never be full enough to start; lower min_batch or raise max_batch"
            )
        return self


class SpeculationConfig(_Section):
    """Who guesses, and how much. Never changes an answer."""

    method: Method = Field(default="auto", description="auto, off, or a list of drafters: suffix, draft")
    draft_model: Text = Field(
        default=None, min_length=1, description="small model with the target's tokenizer, for `draft`"
    )
    draft_precision: Precision = Field(default="auto", description="number format of the draft model's weights")
    width: Count = Field(default=3, ge=1, description="most children of a node of the draft tree")
    depth: Count = Field(default=12, ge=1, description="most levels of the draft tree")
    nodes: Count = Field(default=15, ge=1, description="most draft nodes per request and step")
    step_nodes: Count = Field(default=16, ge=0, description="most draft nodes per step, over all requests")
    share_history: bool = Field(
        default=True, description="let requests of different tenants learn from one another's tokens"
    )
    history_tokens: Count = Field(
        default=1_000_000, ge=0, description="most tokens of earlier traffic that drafters remember"
    )
    acceptance: Annotated[Literal["exact"], BeforeValidator(_word)] = Field(
        default="exact", description="which guesses stand: exact (the same tokens as without speculation)"
    )
    acceptance_threshold: Annotated[float | None, BeforeValidator(_number_or_auto)] = Field(
        default=None, gt=0, le=1, description="threshold of lossy acceptance; none with exact acceptance"
    )
    fallback: Annotated[Literal["auto"], BeforeValidator(_word)] = Field(
        default="auto", description="decode plainly where drafters fail or have nothing likely to offer"
    )
    device: Annotated[Literal["auto"], BeforeValidator(_word)] = Field(default="auto", description="where drafters run")
    on_draft_error: Annotated[Literal["fail", "off"], BeforeValidator(_word)] = Field(
        default="fail", description="when a drafter cannot start: fail, or go on without it"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "SpeculationConfig":
        if "draft" in self.method and self.draft_model is None:
            raise ValueError(
                "speculation.method names the drafter 'draft', but no draft model is set; set speculation.draft_model "
                "to a small model with the same tokenizer, or take 'draft' out of speculation.method"
            )
        if self.acceptance_threshold is not None:
            raise ValueError(
                f"speculation.acceptance_threshold is {self.acceptance_threshold}, but speculation.acceptance is "
                "'exact', which has no threshold; that comes with the lossy rules; allowed now: leave it unset"
            )
        return self


class ControlConfig(_Section):
    """How much to guess."""

    policy: Annotated[Literal["fixed"], BeforeValidator(_word)] = Field(
        default="fixed", description="how the size of draft trees is decided: fixed (the limits under speculation)"
    )


class ParallelConfig(_Section):
    """More than one device."""

    tensor: Count = Field(default=1, ge=1, le=1, description="devices that share the target's weights")


class EngineConfig(_Section):
    """All settings of an engine.

    Wrong values raise pydantic's ValidationError here, and a readable ConfigError from `resolve` and `configure`.
    """

    model: str = Field(
        default=DEFAULT_MODEL, min_length=1, description="alias, directory, .gguf file or hub id of the target"
    )
    precision: Precision = Field(
        default="auto", description="number format of the weights: auto, fp32, bf16, int8, int4"
    )
    activation_bits: Annotated[Literal[8, 16], BeforeValidator(_bits)] = Field(
        default=16,
        description="bits of the activations that int8 and int4 weights are multiplied with: 16, 8 (coarser)",
    )
    device: Device = Field(default="auto", description="auto, cpu or cuda")
    threads: CountOrAuto = Field(
        default=None, ge=1, le=MOST_THREADS, description="threads of the CPU kernels; auto: as many as torch uses"
    )
    context_length: CountOrAuto = Field(
        default=None, ge=1, description="most tokens of prompt and answer; auto: the model's"
    )
    seed: CountOrAuto = Field(
        default=None, ge=-(2**63), lt=2**64, description="seed of requests that bring none; auto: a random one"
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_word)] = Field(
        default="warning", description="least severe messages to log"
    )
    cache: CacheConfig = CacheConfig()
    batching: BatchingConfig = BatchingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    control: ControlConfig = ControlConfig()
    parallel: ParallelConfig = ParallelConfig()

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters that will speak: `auto` is all that need nothing more than what is set."""
        method = self.speculation.method
        if method == "off":
            return ()
        if method == "auto":
            return DRAFTERS if self.speculation.draft_model else ("suffix",)
        return method


_LATER: dict[str, dict[str, str]] = {
    "precision": {"fp8_e4m3": "the quantised kernels for CUDA"},
    "speculation.draft_precision": {"fp8_e4m3": "the quantised kernels for CUDA"},
    "speculation.acceptance": dict.fromkeys(("threshold", "typical", "two_stage"), "the lossy acceptance rules"),
    "speculation.fallback": {"off": "the adaptive controller"},
    "speculation.device": dict.fromkeys(("cpu", "cuda"), "drafters that run beside the target"),
    "control.policy": dict.fromkeys(("cost_model", "rules", "auto"), "the adaptive controller"),
}
"""Values that the specification names and that this version cannot honour yet, and what they come with."""


@dataclass(frozen=True)
class Setting:
    """One setting as the sources see it. path: dotted name. help: a phrase. choices: when it is a word."""

    path: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()


def settings() -> dict[str, Setting]:
    """Every setting by its dotted name, in the order in which the classes name them."""
    return dict(_SETTINGS)


def _list_settings(section: type[BaseModel], prefix: str) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _list_settings(field.annotation, f"{prefix}{name}.")
        else:
            choices = tuple(map(str, get_args(field.annotation))) if get_origin(field.annotation) is Literal else ()
            found[prefix + name] = Setting(prefix + name, field.default, field.description or "", choices)
    return found


_SETTINGS = _list_settings(EngineConfig, "")


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration and, for each setting by its dotted name, where its value was set ("default" when nowhere)."""

    config: EngineConfig
    origin: Mapping[str, str]

    def effective(self) -> dict[str, Any]:
        """Every setting's value by dotted name, ready for JSON."""
        return effective(self.config)


def effective(config: EngineConfig) -> dict[str, Any]:
    """Every setting's value by dotted name, ready for JSON."""
    content = config.model_dump(mode="json")
    return {path: _look_up(content, path) for path in _SETTINGS}


def resolve(
    yaml_path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Put settings together: defaults, then the YAML file, then the environment, then flags and keyword arguments.

    env: None reads the process's own environment. flags: by setting or alias name, None where unused. arguments: nested
    or dotted, under any accepted name.
    Raises ConfigError when a setting is unknown, malformed, contradicted within one source, or not possible yet.
    """
    sources = [
        read_yaml(Path(yaml_path), _SETTINGS) if yaml_path is not None else [],
        read_environment(os.environ if env is None else env, _SETTINGS),
        read_flags(flags or {}, _SETTINGS),
        read_mapping(arguments or {}, _SETTINGS, where="argument"),
    ]
    given = merge(sources)
    origin = {path: given[path].where if path in given else "default" for path in _SETTINGS}
    return ResolvedConfig(_build(given), origin)


def configure(model: str | os.PathLike[str] | EngineConfig, **arguments: Any) -> EngineConfig:
    """The configuration of `LLM(model, **arguments)`. Raises ConfigError.

    model: a name, on top of which come the environment and the arguments; or a complete configuration, which only the
    arguments change.
    """
    if not isinstance(model, EngineConfig):
        return resolve(arguments={"model": os.fspath(model), **arguments}).config
    content = model.model_dump()
    base = [Given(path, path, _look_up(content, path), "given configuration") for path in _SETTINGS]
    return _build(merge([base, read_mapping(arguments, _SETTINGS, where="argument")]))


def _build(given: Mapping[str, Given]) -> EngineConfig:
    nested: dict[str, Any] = {}
    for one in given.values():
        section, _, name = one.path.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = one.value
    try:
        return EngineConfig.model_validate(nested)
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(_explain(one, given) for one in error.errors()))) from error


def _explain(error: Any, given: Mapping[str, Given]) -> str:
    """One sentence for one of pydantic's complaints: which setting, what value, from where, what is allowed."""
    context = error.get("ctx", {})
    location = [str(part) for part in error["loc"]]
    path = next((".".join(location[:end]) for end in (2, 1) if ".".join(location[:end]) in _SETTINGS), "")
    if not path:
        return str(context.get("error", error["msg"]))
    one = given[path]
    subject = f"{path} is {one.value!r} ({one.where})"
    later = _LATER.get(path, {}).get(str(_word(one.value)))
    if later:
        return f"{subject}: that comes with {later}; allowed now: {', '.join(_SETTINGS[path].choices)}"
    if path == "parallel.tensor" and error["type"] == "less_than_equal":
        return f"{subject}: more than one device comes with tensor parallelism; allowed now: 1"
    return f"{subject}; it {_limit(error['type'], context, error['msg'])}"


def _limit(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind == "setting":
        return message
    if kind == "literal_error":
        return f"must be one of {context['expected']}".replace("'", "").replace(" or ", ", ")
    limits = {
        "greater_than_equal": "must be at least {ge}",
        "greater_than": "must be more than {gt}",
        "less_than_equal": "must be at most {le}",
        "less_than": "must be less than {lt}",
        "string_too_short": "must not be empty",
        "string_type": "must be a text",
        "finite_number": "must be a finite number",
    }
    if kind in limits:
        return limits[kind].format(**context)
    for start, sentence in (
        ("int", "must be a whole number"),
        ("float", "must be a number"),
        ("bool", "must be true or false"),
    ):
        if kind.startswith(start):
            return sentence
    return f"is not allowed: {message}"


def _look_up(content: Mapping[str, Any], path: str) -> Any:
    value: Any = content
    for part in path.split("."):
        value = value[part]
    return value
