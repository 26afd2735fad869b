"""The command as a whole: help, version, and errors without a traceback."""

import subprocess
import sys

import pytest

from forerun import __version__
from forerun.errors import ModelNotFoundError
from tests.cli.running import Run


def test_help_names_every_command(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("generate", "chat", "bench", "inspect"):
        assert command in result.stdout
        assert run(command, "--help").exit_code == 0


def test_the_version_is_the_package_s(run: Run) -> None:
    assert run("--version").stdout == f"forerun {__version__}\n"


def test_the_command_line_does_not_load_torch_before_it_is_needed() -> None:
    code = "import sys, forerun.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_error_of_ours_is_one_line_and_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(config: object) -> None:
        raise ModelNotFoundError("no model 'x' in any of: alias, directory, hub")

    monkeypatch.setattr(sys.modules["forerun.cli.generate"], "load_llm", missing)
    result = run("generate", "-p", "a", "-m", "x")
    assert result.exit_code == 1
    assert result.stderr == "error: no model 'x' in any of: alias, directory, hub\n"
    assert isinstance(result.exception, SystemExit)
