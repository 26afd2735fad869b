"""Compiles the native library: once per instruction set, the one to use is chosen at run time.

The library is loaded with ctypes, so it needs neither Python's headers nor torch's: only a C++17 compiler for x86-64.
setup.py runs this file by its path, before anything is installed: only the standard library may be imported here.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
PORTABLE = ("library", "mixture", "pool", "program", "work")  # compiled for any x86-64
# Multiplications and additions are fused where the source says so and nowhere else: -ffp-contract=off. Integers wrap
# around (exponents are made by adding to the bits of a float): -fwrapv.
_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fwrapv", "-fno-math-errno", "-Wall")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
# GCC 12 warns about its own headers here.
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")), "-Wno-maybe-uninitialized")


class BuildError(Exception):
    """The library could not be built; the message says why."""


@dataclass(frozen=True)
class Variant:
    """How to compile: flags for every source, for linking, and for each instruction set by its name."""

    flags: Sequence[str]
    link: Sequence[str]
    instruction_sets: Mapping[str, Sequence[str]]


RELEASE = Variant(
    flags=("-O3",),
    link=(),
    instruction_sets={
        "avx2": _AVX2,
        "avx512": _AVX512,
        "amx": (*_AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-DFORERUN_AMX"),
    },
)
# For tests: AVX2 stands in for what the other instruction sets add, so that their code runs anywhere.
_EMULATED_SETS = {
    "avx2": _AVX2,
    "avx512": (*_AVX2, "-DFORERUN_LANES=16"),
    "amx": (*_AVX2, "-DFORERUN_LANES=16", "-DFORERUN_AMX", "-DFORERUN_EMULATE_AMX"),
}
EMULATED = Variant(("-O1", "-Wno-psabi", "-DFORERUN_EMULATE"), (), _EMULATED_SETS)
# For tests, and small: the sanitizers make a compiler slow.
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
SANITIZED = Variant(("-O1", "-g1", "-DFORERUN_AVX2_ALONE", *_SANITIZERS), _SANITIZERS, {"avx2": _AVX2})


def identity() -> str:
    """What a library of these sources is known by: forerun's version, "/" and a hash of the sources.

    The version alone where the C++ sources are not beside this file, as a packager may have it.
    """
    version = re.search(r'^__version__ = "(.+)"$', (SOURCES.parents[1] / "__init__.py").read_text(), re.MULTILINE)
    if version is None:
        raise BuildError("forerun/__init__.py says no __version__")
    if not any(SOURCES.glob("*.cpp")):
        return version[1]
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), SOURCES / "build.py"]):
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)}\n".encode() + text)
    return f"{version[1]}/{digest.hexdigest()[:16]}"


def check_machine() -> None:
    """Raises BuildError if the machine is not an x86-64."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise BuildError(f"native CPU kernels are for x86-64, not {platform.machine()}")


def compiler() -> list[str]:
    """The command of the C++ compiler. Raises BuildError if there is none, or if the machine is not an x86-64."""
    check_machine()
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    command = next((name.split() for name in names if name and shutil.which(name.split()[0])), None)
    if command is None:
        raise BuildError("no C++ compiler found (set CXX, or install g++)")
    return command


def build(target: Path, variant: Variant = RELEASE) -> None:
    """Compile and link the library to `target`. Raises BuildError; what the compiler says goes to stderr."""
    command = compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        units: dict[str, tuple[str, Sequence[str]]] = {name: (name, ()) for name in PORTABLE}
        units["library"] = ("library", (f'-DFORERUN_IDENTITY="{identity()}"',))
        units["choice"] = "choice", _AVX2  # which every machine has that can run any of the library
        for name, flags in variant.instruction_sets.items():
            named = (f"-DFORERUN_OPERATIONS={name}_operations", f'-DFORERUN_OPERATIONS_NAME="{name}"')
            units[name] = ("operations", (*flags, *named))
        objects = [f"{directory}/{name}.o" for name in units]
        running = [
            subprocess.Popen([*command, *_FLAGS, *variant.flags, *own, "-c", str(SOURCES / f"{source}.cpp"), "-o", to])
            for (source, own), to in zip(units.values(), objects, strict=True)
        ]
        if sum([process.wait() != 0 for process in running]):
            raise BuildError(f"{command[0]} could not compile the native CPU kernels")
        if subprocess.call([*command, "-shared", "-pthread", *variant.link, *objects, "-o", str(target)]):
            raise BuildError(f"{command[0]} could not link the native CPU kernels")
