"""Where settings come from: a YAML file, FORERUN_* variables, flags, keyword arguments. Reading only, no meaning.

Each source becomes a list of `Given`; `merge` lets the later source win.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from forerun.errors import ConfigError
from forerun.settings_names import Alias, flag_of, names_of, normalise, unknown, variable_of

RESERVED_VARIABLES = frozenset({"FORERUN_CACHE", "FORERUN_CPU_ISA"})
"""Variables that other rooms read; they are not settings of an engine."""


@dataclass(frozen=True)
class Given:
    """One setting as a source gave it. path: the setting's own name. name: the one used. where: how people find it."""

    path: str
    name: str
    value: Any
    where: str


def read_yaml(file: Path, paths: Collection[str]) -> list[Given]:
    """Settings of a YAML file. Raises ConfigError when it is unreadable, no mapping, or names an unknown setting."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not well-formed YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return []
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{file} holds a {type(content).__name__}; a configuration is a mapping of settings to values"
        )
    return read_mapping(content, paths, where=str(file))


def read_environment(variables: Mapping[str, str], paths: Collection[str]) -> list[Given]:
    """Settings among environment variables. Empty ones count as unset; unknown FORERUN_ names raise ConfigError."""
    names = {variable_of(name): alias for name, alias in names_of(paths).items()}
    given = []
    for variable, value in sorted(variables.items()):
        if not variable.startswith("FORERUN_") or variable in RESERVED_VARIABLES or not value.strip():
            continue
        alias = names.get(variable.replace("__", "_"))
        if alias is None:
            name = variable.removeprefix("FORERUN_").replace("__", ".")
            raise unknown(name, f"environment variable {variable}", names_of(paths), variable_of)
        given.append(Given(alias.path, variable, alias.translate(value), f"environment {variable}"))
    return _without_contradictions(given, "the environment")


def read_flags(flags: Mapping[str, Any], paths: Collection[str]) -> list[Given]:
    """Settings given on the command line, by name (not by flag); None means that the flag was not used."""
    names = names_of(paths)
    given = []
    for name, value in flags.items():
        if value is None:
            continue
        alias = names.get(normalise(name))
        if alias is None:
            raise unknown(name, "command line", names, flag_of)
        given.append(Given(alias.path, flag_of(name), alias.translate(value), f"flag {flag_of(name)}"))
    return _without_contradictions(given, "the command line")


def read_mapping(content: Mapping[str, Any], paths: Collection[str], where: str) -> list[Given]:
    """Settings of a nested mapping, whose keys may be dotted, in either spelling. `where` names the source."""
    return _without_contradictions(list(_walk(content, "", names_of(paths), where)), where)


def merge(sources: Iterable[list[Given]]) -> dict[str, Given]:
    """The last one given for each setting."""
    return {given.path: given for source in sources for given in source}


def _walk(content: Mapping[str, Any], prefix: str, names: Mapping[str, Alias], where: str) -> Iterable[Given]:
    for key, value in content.items():
        name = prefix + normalise(str(key))
        is_section = any(known.startswith(name + ".") for known in names)
        if isinstance(value, Mapping) and is_section:
            yield from _walk(value, name + ".", names, where)
        elif is_section and value is None:
            continue  # a heading in a YAML file with nothing under it
        elif (alias := names.get(name)) is not None:
            yield Given(alias.path, name, alias.translate(value), f"{where}: {name}")
        elif is_section:
            inside = ", ".join(known for known in names if known.startswith(name + "."))
            raise ConfigError(f"{name!r} ({where}) is a section, not a setting; it holds {inside}")
        else:
            raise unknown(name, where, names)


def _without_contradictions(given: list[Given], where: str) -> list[Given]:
    seen: dict[str, Given] = {}
    for one in given:
        other = seen.setdefault(one.path, one)
        if _plain(other.value) != _plain(one.value):
            raise ConfigError(
                f"{other.name}={other.value} and {one.name}={one.value} ({where}) both set {one.path}, to different "
                "values; keep one of them"
            )
    return given


def _plain(value: Any) -> str:
    """Equal for values that mean the same in different dress: 3 and "3", ["suffix"] and "suffix"."""
    if isinstance(value, list | tuple):
        return ",".join(_plain(one) for one in value)
    return str(value).strip().lower().replace("-", "_")
