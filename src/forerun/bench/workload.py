"""Reading workloads: one JSON object per line, of which `prompt` is needed. Nothing is run here."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError


@dataclass(frozen=True)
class WorkloadRequest:
    """One user message, no chat template applied. id: for people to find it in its file."""

    id: str
    prompt: str


@dataclass(frozen=True)
class Workload:
    """The requests of one file. name: the file's stem, which is the task's name in reports."""

    name: str
    requests: tuple[WorkloadRequest, ...]

    @property
    def repeated(self) -> int:
        """Requests whose prompt has occurred before: they flatter drafters that remember earlier traffic."""
        return len(self.requests) - len({request.prompt for request in self.requests})


def read_workload(file: Path, limit: int | None = None) -> Workload:
    """The first `limit` requests of a file (all when None); blank lines are skipped.

    Raises ConfigError, naming file and line, when a line is no JSON object with a non-empty text `prompt`, and when the
    file cannot be read or holds no request.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the workload {file}: {error}") from error
    return _parse(text, file.stem, str(file), limit)


def packaged_workloads(limit: int | None = None) -> list[Workload]:
    """The prompts shipped with the package: json, code, prose."""
    folder = files("forerun.bench") / "prompts"
    return [
        _parse((folder / f"{name}.jsonl").read_text(encoding="utf-8"), name, f"{name}.jsonl", limit)
        for name in ("json", "code", "prose")
    ]


def read_workloads(paths: Sequence[Path], limit: int | None = None) -> list[Workload]:
    """All files given, or the packaged ones. Raises ConfigError when two files would be the same task."""
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit is {limit}; it must be at least 1")
    if not paths:
        return packaged_workloads(limit)
    seen: dict[str, Path] = {}
    for path in paths:
        if path.stem in seen:
            raise ConfigError(
                f"{seen[path.stem]} and {path} are both named {path.stem!r}, and reports go by that name; rename one"
            )
        seen[path.stem] = path
    return [read_workload(path, limit) for path in paths]


def _parse(text: str, name: str, where: str, limit: int | None) -> Workload:
    requests: list[WorkloadRequest] = []
    for number, line in enumerate(text.split("\n"), 1):
        if limit is not None and len(requests) == limit:
            break
        if line.strip():
            requests.append(_parse_line(line, f"{where}, line {number}", f"{name}-{number}"))
    if not requests:
        raise ConfigError(f"the workload {where} holds no request; it needs one JSON object per line, with a `prompt`")
    return Workload(name, tuple(requests))


def _parse_line(line: str, where: str, default_id: str) -> WorkloadRequest:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not well-formed JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a {type(row).__name__}, but a request is a JSON object with a `prompt`")
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{where}: `prompt` is {prompt!r}; it must be a text that is not empty")
    return WorkloadRequest(str(row.get("id", default_id)), prompt)
