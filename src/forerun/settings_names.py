"""Under which names a setting is known: its own dotted one, and those of the specification that forerun implements.

Data and name matching only; what a setting means and may hold is in `config`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import yaml

from forerun.errors import ConfigError

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def _as_is(value: Any) -> Any:
    return value


def _method(value: Any) -> Any:
    """What the specification calls speculative decoding is here a choice of drafters: all that there are, or none."""
    word = str(value).strip().lower().replace("-", "_")
    if word in _TRUE | {"speculative", "speculative_decoding"}:
        return "auto"
    if word in _FALSE | {"plain", "baseline", "standard", "autoregressive"}:
        return "off"
    return value


def _depth(value: Any) -> Any:
    """One depth for all requests; a depth per task, or a moving one, is the business of a control policy."""
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        value = _read_inline(value)
    elif isinstance(value, str) and re.fullmatch(r"\s*\d+\s*-\s*\d+\s*", value):
        value = [int(end) for end in value.split("-")]
    if isinstance(value, Mapping):
        raise ConfigError(
            f"base_length is {dict(value)}: a draft length per task comes with the 'rules' control policy; allowed "
            "now: one whole number for all requests (speculation.depth)"
        )
    if isinstance(value, list | tuple):
        raise ConfigError(
            f"base_length is {list(value)}: a draft length that moves within a range comes with the adaptive control "
            "policies; allowed now: one whole number, the upper end (speculation.depth)"
        )
    return value


def _policy(value: Any) -> Any:
    word = str(value).strip().lower()
    return "rules" if word in _TRUE else "fixed" if word in _FALSE else value


def _read_inline(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is neither a number nor a well-formed list or mapping") from error


@dataclass(frozen=True)
class Alias:
    """Another name of the setting `path`; `translate` turns its values into those of the setting."""

    name: str
    path: str
    translate: Callable[[Any], Any] = _as_is


ALIASES: tuple[Alias, ...] = (
    Alias("speculation", "speculation.method", _method),
    Alias("speculation.method", "speculation.method", _method),
    Alias("decoding.method", "speculation.method", _method),
    Alias("speculative_decoding", "speculation.method", _method),
    Alias("draft_model", "speculation.draft_model"),
    Alias("draft_model_path", "speculation.draft_model"),
    Alias("draft_precision", "speculation.draft_precision"),
    Alias("num_drafts", "speculation.width"),
    Alias("candidate_num", "speculation.width"),
    Alias("speculative_degree", "speculation.width"),
    Alias("base_length", "speculation.depth", _depth),
    Alias("acceptance_threshold", "speculation.acceptance_threshold"),
    Alias("accept_threshold", "speculation.acceptance_threshold"),
    Alias("verify_threshold", "speculation.acceptance_threshold"),
    Alias("fallback_strategy", "speculation.fallback"),
    Alias("adjust_speculative_degree", "control.policy", _policy),
    Alias("max_batch", "batching.max_batch"),
    Alias("min_batch", "batching.min_batch"),
    Alias("max_wait_ms", "batching.max_wait_ms"),
    Alias("timeout", "batching.max_wait_ms"),
)
"""A name that is also a setting's own (speculation.method) only lends its translation."""


def normalise(name: str) -> str:
    """One spelling for all: lower case, underscores, dots between sections."""
    return name.strip().lower().replace("-", "_").replace("__", ".")


def names_of(paths: Collection[str]) -> dict[str, Alias]:
    """Every accepted name, own names first."""
    own = {path: Alias(path, path) for path in paths}
    return own | {alias.name: alias for alias in ALIASES}


def flag_of(name: str) -> str:
    """`speculation.draft_model` -> `--speculation-draft-model`."""
    return "--" + name.replace(".", "-").replace("_", "-")


def variable_of(name: str) -> str:
    """`speculation.draft_model` -> `FORERUN_SPECULATION_DRAFT_MODEL`."""
    return "FORERUN_" + name.replace(".", "_").upper()


def unknown(name: str, where: str, names: Collection[str], spelling: Callable[[str], str] = _as_is) -> ConfigError:
    """The error for a name that nothing is called, with the nearest names that exist."""
    wanted = normalise(name)
    by_ending = {known.rsplit(".", 1)[-1]: known for known in names if "." in known}
    near = [by_ending[wanted]] if wanted in by_ending else []
    near += [known for known in get_close_matches(wanted, list(names), n=3, cutoff=0.6) if known not in near]
    near += [by_ending[end] for end in get_close_matches(wanted, list(by_ending), n=1, cutoff=0.75)]
    near = list(dict.fromkeys(near))[:3]
    hint = (
        f"did you mean {' or '.join(spelling(known) for known in near)}?" if near else "see `forerun inspect` for all"
    )
    return ConfigError(f"unknown setting {name!r} ({where}); {hint}")
