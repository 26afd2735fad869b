"""Builds the native CPU kernels, where a C++ compiler can. All else about the package is in pyproject.toml.

The library is loaded with ctypes, so it needs neither Python's headers nor torch's: only a C++17 compiler for x86-64.
Without one the install succeeds all the same, and forerun runs on its torch reference.
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("src/forerun/kernels/cpu")
# Multiplications and additions are fused where the source says so and nowhere else: -ffp-contract=off.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall"]
INSTRUCTION_SETS = {"avx2": ["-mavx2", "-mfma"], "avx512": ["-mavx2", "-mfma", "-mavx512f"]}


class BuildNative(build_ext):
    """Runs the compiler once per source and instruction set; the machine at hand is chosen for at run time."""

    def get_ext_filename(self, fullname: str) -> str:
        """A plain shared library beside binding.py."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile and link. CompileError here means a warning: the extension is optional."""
        if platform.machine().lower() not in ("x86_64", "amd64"):
            raise CompileError(f"native CPU kernels are for x86-64, not {platform.machine()}")
        names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
        compiler = next((name for name in names if name and shutil.which(name.split()[0])), None)
        if compiler is None:
            raise CompileError("no C++ compiler found (set CXX, or install g++): the torch reference will be used")
        target = Path(self.get_ext_fullpath(ext.name))
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        commands = [[str(SOURCES / f"{name}.cpp"), "-o", str(objects / f"{name}.o")] for name in ("library", "pool")]
        for name, flags in INSTRUCTION_SETS.items():
            named = [f"-DFORERUN_OPERATIONS={name}_operations", f'-DFORERUN_OPERATIONS_NAME="{name}"']
            commands.append([*flags, *named, str(SOURCES / "operations.cpp"), "-o", str(objects / f"{name}.o")])
        running = [subprocess.Popen([*compiler.split(), *FLAGS, "-c", *command]) for command in commands]
        failures = [process.wait() for process in running]
        if any(failures):
            raise CompileError(f"{compiler} could not compile the native CPU kernels: the torch reference will be used")
        outputs = [command[-1] for command in commands]
        if subprocess.call([*compiler.split(), "-shared", "-pthread", *outputs, "-o", str(target)]):
            raise CompileError(f"{compiler} could not link the native CPU kernels: the torch reference will be used")


setup(
    ext_modules=[
        Extension(
            "forerun.kernels.cpu.libforerun_cpu",
            sources=[str(SOURCES / f"{name}.cpp") for name in ("library", "pool", "operations")],
            depends=[str(path) for path in SOURCES.glob("*.h")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
