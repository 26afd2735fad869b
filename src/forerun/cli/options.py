"""Flags that commands share: every setting of `config` and every sampling parameter, each derived from one table.

`with_options` adds them to a command, which receives what was given as a `CommandLine`.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.config import ResolvedConfig, resolve, settings
from forerun.errors import ConfigError
from forerun.settings_names import flag_of, names_of

if TYPE_CHECKING:
    from forerun.verification.sampling import SamplingParams


@dataclass(frozen=True)
class SamplingOption:
    """A flag for one field of SamplingParams. kind: what typer parses; a list may be repeated."""

    name: str
    kind: Any
    help: str
    flags: tuple[str, ...] = ()


SAMPLING_OPTIONS = (
    SamplingOption("max_tokens", int, "most tokens of an answer"),
    SamplingOption("min_tokens", int, "no end before so many tokens"),
    SamplingOption("temperature", float, "0 takes the likeliest token; higher is more random"),
    SamplingOption("top_p", float, "sample from the likeliest tokens that hold this share of the probability"),
    SamplingOption("top_k", int, "sample from so many of the likeliest tokens; 0: all"),
    SamplingOption("min_p", float, "leave out tokens less likely than this share of the likeliest one"),
    SamplingOption("repetition_penalty", float, "divide the scores of tokens that have occurred; 1: off"),
    SamplingOption("presence_penalty", float, "subtract from the scores of tokens that the answer holds"),
    SamplingOption("frequency_penalty", float, "subtract for each time that the answer holds a token"),
    SamplingOption("logit_bias", list[str], "TOKEN_ID=BIAS, added to that token's score; repeatable"),
    SamplingOption("stop", list[str], "text that ends the answer; repeatable"),
    SamplingOption("stop_token_ids", list[int], "token id that ends the answer; repeatable"),
    SamplingOption("ignore_eos", bool, "go on past the model's end token", ("--ignore-eos/--no-ignore-eos",)),
    SamplingOption("include_stop", bool, "keep the stop text in the answer", ("--include-stop/--no-include-stop",)),
    SamplingOption("logprobs", int, "log-probabilities of so many likeliest tokens, 0-20, at each position"),
    SamplingOption("n", int, "answers per prompt", ("-n", "--n")),
)


@dataclass(frozen=True)
class CommandLine:
    """What the shared flags held: settings and sampling parameters, by name; those not given are absent."""

    config_file: Path | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)

    def resolve(self, **more: Any) -> ResolvedConfig:
        """The effective settings; `more` are flags by setting name, None where unused."""
        clashing = [name for name, value in more.items() if value is not None and self.flags.get(name, value) != value]
        if clashing:
            raise ConfigError(f"{clashing[0]} is given twice: {self.flags[clashing[0]]!r} and {more[clashing[0]]!r}")
        return resolve(
            self.config_file, flags=self.flags | {n: value for n, value in more.items() if value is not None}
        )

    def params(self, seed: int | None, **defaults: Any) -> "SamplingParams":
        """Sampling parameters: greedy unless the flags say otherwise. Raises InvalidRequestError."""
        from forerun.verification.sampling import SamplingParams

        return SamplingParams(**{"temperature": 0.0, **defaults, **self.sampling, "seed": seed})


def with_options(*, without: Collection[str] = (), sampling: bool = True) -> Callable[[Callable[..., None]], Any]:
    """Add the shared flags to a command, whose first parameter receives the CommandLine.

    without: sampling parameters that make no sense for the command. sampling=False: none at all.
    """
    options = [option for option in SAMPLING_OPTIONS if sampling and option.name not in without]
    shared = [_config_flag(), *map(_sampling_flag, options), *_setting_flags()]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[1:]

        def run(**given: Any) -> None:
            command(_collect(given, {parameter.name for parameter in shared}), **given)

        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *shared)]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


_SETTING, _SAMPLING = "setting:", "sampling:"
_KEYS: dict[str, str] = {}  # python parameter name -> the setting or sampling parameter it stands for


def _collect(given: dict[str, Any], shared: set[str]) -> CommandLine:
    """Take the shared flags out of `given`."""
    config_file = given.pop("config_file")
    found: dict[str, dict[str, Any]] = {_SETTING: {}, _SAMPLING: {}}
    for parameter in sorted(shared & given.keys()):
        value = given.pop(parameter)
        kind, name = _KEYS[parameter].split(":", 1)
        if value is not None and value != []:
            found[kind + ":"][name] = value
    sampling = found[_SAMPLING]
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _logit_bias(sampling["logit_bias"])
    for name in ("stop", "stop_token_ids"):
        if name in sampling:
            sampling[name] = tuple(sampling[name])
    return CommandLine(config_file, found[_SETTING], sampling)


def _logit_bias(pairs: list[str]) -> dict[int, float]:
    return dict(map(_token_bias, pairs))


def _token_bias(pair: str) -> tuple[int, float]:
    token, _, amount = pair.partition("=")
    try:
        return int(token), float(amount)
    except ValueError as error:
        raise ConfigError(f"--logit-bias is {pair!r}; it must be TOKEN_ID=BIAS, such as 42=-100") from error


def _config_flag() -> inspect.Parameter:
    return _parameter("config_file", Path, typer.Option("--config", help="YAML file with settings."))


def _sampling_flag(option: SamplingOption) -> inspect.Parameter:
    name = f"sampling_{option.name}"
    _KEYS[name] = _SAMPLING + option.name
    flags = option.flags or (flag_of(option.name),)
    return _parameter(name, option.kind, typer.Option(*flags, help=option.help, rich_help_panel="Sampling"))


def _setting_flags() -> list[inspect.Parameter]:
    known = settings()
    flags: list[inspect.Parameter] = []
    for name, alias in names_of(known).items():
        parameter = f"setting_{name.replace('.', '_')}"
        _KEYS[parameter] = _SETTING + name
        setting = known[alias.path]
        flags.append(
            _parameter(
                parameter,
                str,
                typer.Option(
                    flag_of(name),
                    *(("-m",) if name == "model" else ()),
                    help=setting.help,
                    metavar="|".join(setting.choices) or "VALUE",
                    hidden=name not in (alias.path, "speculation") or name == "speculation.method",
                    rich_help_panel="Settings (also in the --config file and as FORERUN_... variables)",
                ),
            )
        )
    return flags


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
