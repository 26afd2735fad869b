"""Builds the native CPU kernels, where a C++ compiler can. All else about the package is in pyproject.toml.

Without a compiler the install succeeds all the same, and forerun runs on its torch reference.
"""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
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
        target = Path(self.get_ext_fullpath(ext.name))
        target.unlink(missing_ok=True)  # one of an earlier build, which must not stay if this one fails
        try:
            native["build"](target)
        except native["BuildError"] as error:
            raise CompileError(f"{error}: the torch reference will be used") from error


class PlatformWheel(bdist_wheel):
    """A wheel for any Python on this platform, as the library knows none; for any platform if nothing was compiled."""

    def get_tag(self) -> tuple[str, str, str]:
        """By what lies in the wheel: whether the library could be built is known only then."""
        self.root_is_pure = not any(Path(self.bdist_dir).rglob("libforerun_cpu.so"))
        return ("py3", "none", "any" if self.root_is_pure else super().get_tag()[2])

    def run(self) -> None:
        """Build, and say so if the wheel came out without native kernels."""
        super().run()
        if self.root_is_pure:
            self.warn("the wheel is pure: it has no native CPU kernels, the torch reference will be used")


setup(
    ext_modules=[
        Extension(
            "forerun.kernels.cpu.libforerun_cpu",
            sources=[str(path) for path in SOURCES.glob("*.cpp")],
            depends=[str(path) for path in (*SOURCES.glob("*.h"), SOURCES / "build.py")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
