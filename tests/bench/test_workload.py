"""Workload files: read as they are, refused with file and line when they are wrong."""

import json
import re
from pathlib import Path

import pytest

from forerun.bench.workload import WorkloadRequest, packaged_workloads, read_workload, read_workloads
from forerun.errors import ConfigError


def write(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_file_is_read_in_order_and_its_stem_is_the_task(tmp_path: Path) -> None:
    file = write(tmp_path / "json.jsonl", '{"id": "a", "prompt": "one", "schema": {}}', "", '{"prompt": "two"}')
    task = read_workload(file)
    assert task.name == "json"
    assert task.requests == (WorkloadRequest("a", "one"), WorkloadRequest("json-3", "two"))


def test_the_limit_takes_the_first_rows_and_looks_no_further(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", *(json.dumps({"prompt": name}) for name in "abc"), "not json")
    assert [request.prompt for request in read_workload(file, 2).requests] == ["a", "b"]
    assert len(read_workload(file, 3).requests) == 3
    with pytest.raises(ConfigError, match="line 4"):
        read_workload(file, 4)


def test_a_line_separator_inside_a_prompt_does_not_split_the_line(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n', encoding="utf-8")
    assert [request.prompt for request in read_workload(file).requests] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not well-formed JSON"),
        ("[1]", "a list, but a request is a JSON object"),
        ("{}", "`prompt` is None"),
        ('{"prompt": 3}', "`prompt` is 3"),
        ('{"prompt": " "}', "must be a text that is not empty"),
    ],
)
def test_a_malformed_line_is_named_with_its_file(line: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "bad.jsonl", '{"prompt": "fine"}', line)
    with pytest.raises(ConfigError, match=re.escape(f"{file}, line 2: ") + ".*" + re.escape(message)):
        read_workload(file)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the workload"):
        read_workload(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="holds no request"):
        read_workload(write(tmp_path / "empty.jsonl", ""))


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = [write(folder / "json.jsonl", '{"prompt": "a"}') for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(ConfigError, match="both named 'json'"):
        read_workloads(files)


def test_the_package_ships_a_dozen_distinct_prompts() -> None:
    tasks = packaged_workloads()
    assert [(task.name, len(task.requests), task.repeated) for task in tasks] == [
        ("json", 4, 0),
        ("code", 4, 0),
        ("prose", 4, 0),
    ]
    assert [len(task.requests) for task in read_workloads([], 1)] == [1, 1, 1]


def test_repeated_prompts_are_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", *(json.dumps({"prompt": prompt}) for prompt in "abca"))
    assert read_workload(file).repeated == 1
