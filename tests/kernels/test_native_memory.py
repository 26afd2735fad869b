"""The native code under address and undefined-behaviour sanitizers, and the instruction sets that this machine lacks.

The latter in a build of their own, in which AVX2 stands in for AVX-512 and AMX.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.kernels.cpu import binding
from forerun.kernels.cpu.build import EMULATED, SANITIZED, BuildError, build, compiler

ROOT = Path(__file__).parents[2]
PATHS = f"{ROOT}{os.pathsep}{ROOT / 'src'}"  # the tests, and the Python that belongs to the sources built here
pytestmark = pytest.mark.skipif(not binding.supported(), reason="no native kernels on this machine")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """Environment of a process that uses the sanitized library; the sanitizers must be loaded before all else."""
    library = tmp_path_factory.mktemp("sanitized") / "libforerun_cpu.so"
    try:
        command = compiler()
        runtimes = [
            subprocess.check_output([*command, f"-print-file-name={name}"], text=True).strip()
            for name in ("libasan.so", "libubsan.so")
        ]
        if not all(map(os.path.isabs, runtimes)):
            pytest.skip("the compiler has no sanitizers")
        build(library, SANITIZED)
    except BuildError as error:
        pytest.skip(str(error))
    return os.environ | {
        "LD_PRELOAD": ":".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own; the library's memory lives as long as the process
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "FORERUN_CPU_LIBRARY": str(library),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PATHS,
    }


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Environment of a process whose library has every instruction set."""
    library = tmp_path_factory.mktemp("emulated") / "libforerun_cpu.so"
    try:
        build(library, EMULATED)
    except BuildError as error:
        pytest.skip(str(error))
    return os.environ | {"FORERUN_CPU_LIBRARY": str(library), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(environment, *command):
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_odd_shapes_under_sanitizers(sanitized):
    assert run(sanitized, "-m", "tests.kernels.fuzz_native", "--cases", "80") == "avx2: 80 cases\n"


def test_odd_shapes_on_every_instruction_set(emulated):
    told = run(emulated, "-m", "tests.kernels.fuzz_native", "--cases", "60")
    assert told.split("\n")[:-1] == [f"{isa}: 60 cases" for isa in ("avx2", "avx512", "amx")]


def test_quantised_products_on_every_instruction_set(emulated):
    which = ("tests/kernels/test_quantized.py", "-k", "bits_of_the_reference and not avx2")
    run(emulated, "-m", "pytest", "-q", "-p", "no:cacheprovider", *which)


def test_the_same_tokens_on_every_instruction_set(emulated):
    """Promise 1, with the kernels drawn from all of them, one thread and two, weights in every format."""
    which = ("tests/engine/test_same_tokens.py", "-k", "tokens_and_logprobs")
    run(emulated | {"FORERUN_EXAMPLES": "20"}, "-m", "pytest", "-q", "-p", "no:cacheprovider", *which)


def test_a_read_past_the_end_would_be_noticed(sanitized):
    """What these tests rest on: the sanitizer sees the memory that tensors live in."""
    broken = (
        "import ctypes, torch\n"
        "from forerun.kernels.cpu import binding, CpuKernels\n"
        "kernels, x, y = CpuKernels('avx2', 1), torch.ones(1, 16), torch.ones(1, 16)\n"
        "gate = binding.GateArgument(x.data_ptr(), y.data_ptr(), 1, 1000, False)\n"
        "binding.library().forerun_gate(binding.context('avx2', 1), ctypes.byref(gate))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", broken], env=sanitized, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


@pytest.mark.parametrize("isa", binding.supported())
def test_odd_shapes_on_this_machine(isa):
    told = run(os.environ | {"PYTHONPATH": PATHS}, "-m", "tests.kernels.fuzz_native", "--cases", "60", "--seed", "1000")
    assert f"{isa}: 60 cases" in told
