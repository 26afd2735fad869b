"""Building and finding the native library: what is missing or of another version is said, and never called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.kernels import choose_kernels
from forerun.kernels.cpu import binding, build, load_cpu_kernels, unavailable_reason
from forerun.kernels.reference import ReferenceKernels

ROOT = Path(__file__).parents[2]
needs_library = pytest.mark.skipif(not binding.supported(), reason="no native kernels on this machine")
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


@pytest.fixture
def library_at(monkeypatch):
    """Makes binding.py look for the library elsewhere."""

    def look(path):
        monkeypatch.setattr(binding, "LIBRARY", path)
        binding.library.cache_clear()

    monkeypatch.delenv("FORERUN_CPU_ISA", raising=False)
    yield look
    binding.library.cache_clear()


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """A copy of the package's C++ sources, which identity() looks at."""
    copy = tmp_path / "forerun" / "kernels" / "cpu"
    shutil.copytree(build.SOURCES, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(build.SOURCES.parents[1] / "__init__.py", tmp_path / "forerun")
    monkeypatch.setattr(build, "SOURCES", copy)
    return copy


def compile_c(source, target):
    target.with_suffix(".c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", target.with_suffix(".c"), "-o", target], check=True)
    return target


# Which library belongs to these sources


def test_identity_changes_with_every_source_and_with_nothing_else(sources):
    own = build.identity()
    (sources / "kernels.py").write_text("")
    assert build.identity() == own
    seen = {own}
    for name in ("operations.h", "library.cpp", "build.py"):
        with open(sources / name, "a") as file:
            file.write("\n")
        seen.add(build.identity())
    (sources / "work.h").rename(sources / "labour.h")
    seen.add(build.identity())
    assert len(seen) == 5


def test_identity_without_the_sources_is_the_version(sources):
    version, _, own = build.identity().partition("/")
    assert own
    for path in [*sources.glob("*.cpp"), *sources.glob("*.h")]:
        path.unlink()
    assert build.identity() == version


@needs_library
def test_a_library_of_other_sources_is_refused_with_the_remedy(library_at, monkeypatch, caplog):
    monkeypatch.setattr(binding, "identity", lambda: "0.1.0/0123456789abcdef")
    library_at(binding.LIBRARY)
    with caplog.at_level("WARNING"):
        assert isinstance(choose_kernels("cpu"), ReferenceKernels)
    assert "of another version" in caplog.text
    assert "0.1.0/0123456789abcdef" in caplog.text
    assert "install forerun again" in caplog.text


@needs_library
@pytest.mark.parametrize(("suffix", "taken"), [("", True), (".post1", False)])
def test_without_the_sources_the_version_decides(library_at, monkeypatch, suffix, taken):
    version = build.identity().partition("/")[0] + suffix
    monkeypatch.setattr(binding, "identity", lambda: version)
    library_at(binding.LIBRARY)
    assert bool(binding.supported()) == taken


@needs_compiler
def test_a_library_from_before_identities_is_refused(library_at, tmp_path):
    library_at(compile_c("int forerun_supported(void) { return 7; }", tmp_path / "old.so"))
    assert load_cpu_kernels() is None
    assert "of another version (unknown)" in unavailable_reason()


@needs_compiler
def test_a_library_that_lacks_a_function_is_refused(library_at, tmp_path):
    source = f'const char* forerun_identity(void) {{ return "{build.identity()}"; }}'
    library_at(compile_c(source, tmp_path / "partial.so"))
    assert load_cpu_kernels() is None
    assert "forerun_supported" in unavailable_reason()


def test_a_file_that_is_no_library_is_refused(library_at, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"not a library")
    library_at(tmp_path / "broken.so")
    assert load_cpu_kernels() is None
    assert "cannot be used" in unavailable_reason()


def test_asking_for_an_instruction_set_of_a_missing_library_says_why(library_at, tmp_path, monkeypatch):
    library_at(tmp_path / "missing.so")
    monkeypatch.setenv("FORERUN_CPU_ISA", "avx2")
    with pytest.raises(
        ConfigError, match=r"possible here: reference \(the native library was not built; install a C\+\+17"
    ):
        load_cpu_kernels()


# Installing without a compiler


def test_without_a_compiler_the_remedy_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler found \(set CXX, or install g\+\+\)"):
        build.build(tmp_path / "library.so")


def test_another_machine_is_named(library_at, tmp_path, monkeypatch):
    library_at(tmp_path / "missing.so")
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    assert load_cpu_kernels() is None
    assert unavailable_reason() == "native CPU kernels are for x86-64, not riscv64"


def test_building_without_a_compiler_succeeds_says_so_and_leaves_no_earlier_library(tmp_path):
    built = tmp_path / "lib" / "forerun" / "kernels" / "cpu" / "libforerun_cpu.so"
    built.parent.mkdir(parents=True)
    built.write_bytes(b"of an earlier build")
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"],
        env=os.environ | {"PATH": str(tmp_path), "CXX": "/nonexistent"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the torch reference will be used" in done.stdout + done.stderr
    assert not built.exists()
