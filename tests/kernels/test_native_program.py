"""The checks of tests/kernels/native, compiled here and run on every instruction set that this machine has."""

import subprocess
from pathlib import Path

import pytest

from forerun.kernels.cpu import binding, build

NATIVE = Path(__file__).with_name("native")


@pytest.mark.skipif(not binding.supported(), reason="no native kernels on this machine")
def test_scalar_code_agrees_with_every_instruction_set(tmp_path):
    try:
        compiler = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    program = tmp_path / "instruction_sets"
    sources = ["-I", build.SOURCES, NATIVE / "instruction_sets.cpp", binding.LIBRARY.resolve()]
    subprocess.run([*compiler, "-std=c++17", "-O1", "-Wall", *sources, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert all(f"{isa} " in done.stdout for isa in binding.supported())
