"""Builds the native CPU kernels, where a C++ compiler can. All else about the package is in pyproject.toml.

Without a compiler the install succeeds all the same, and forerun runs on its torch reference.
"""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("src/forerun/kernels/cpu")


class BuildNative(build_ext):
    """Hands over to the kernels' own build, which knows the instruction sets."""

    def get_ext_filename(self, fullname: str) -> str:
        """A plain shared library beside binding.py."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile and link. CompileError here means a warning: the extension is optional."""
        native = runpy.run_path(str(SOURCES / "build.py"))
        try:
            native["build"](Path(self.get_ext_fullpath(ext.name)))
        except native["BuildError"] as error:
            raise CompileError(f"{error}: the torch reference will be used") from error


setup(
    ext_modules=[
        Extension(
            "forerun.kernels.cpu.libforerun_cpu",
            sources=[str(path) for path in SOURCES.glob("*.cpp")],
            depends=[str(path) for path in (*SOURCES.glob("*.h"), SOURCES / "build.py")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
