"""Safetensors: a directory's tensors, mapped into memory and read when asked for; and a writer that streams.

What the tensors mean is the decoder's business; GGUF files become safetensors in `gguf_import`.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorFiles(Mapping[str, Tensor]):
    """Tensors by name. Each is a view of the mapped file: pages are read when they are touched.

    Looking up an absent name raises WeightsError, which names tensor and directory.
    """

    def __init__(self, directory: Path, places: Mapping[str, Path]) -> None:
        self._directory = directory
        self._places = dict(places)
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        path = self._places.get(name)
        if path is None:
            raise WeightsError(f"tensor {name!r} is missing in the weights of {self._directory}")
        try:
            tensor: Tensor = self._handle(path).get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"tensor {name!r} cannot be read from {path}: {error}") from error
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def paths(self) -> list[Path]:
        """The files, in the order of their names."""
        return sorted(set(self._places.values()))

    @property
    def file_bytes(self) -> int:
        """Size of all files together, in bytes."""
        return sum(path.stat().st_size for path in self.paths)

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = _open(path)
        return self._open[path]


def load_tensors(directory: Path | str) -> TensorFiles:
    """The tensors of a directory: model.safetensors, or the shards that its index names, or all *.safetensors.

    Raises WeightsError when there are no such files, a shard is missing, or a file is truncated or corrupt.
    """
    directory = Path(directory)
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file() or not index.is_file():
        files = _unindexed(directory)
        tensors = TensorFiles(directory, _places(files))
    else:
        tensors = TensorFiles(directory, _indexed(index))
    return tensors


def _unindexed(directory: Path) -> list[Path]:
    if (single := directory / SINGLE_FILE).is_file():
        return [single]
    if files := sorted(directory.glob("*.safetensors")):
        return files
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickles:
        raise WeightsError(
            f"{directory} holds only pickled weights ({', '.join(pickles[:3])}); they are refused, as reading them "
            "can run foreign code: convert them to safetensors"
        )
    raise WeightsError(f"{directory} holds no weights: expected {SINGLE_FILE}, or shards with {INDEX_FILE}")


def _places(files: Iterable[Path]) -> dict[str, Path]:
    return {name: path for path in files for name in _open(path).keys()}  # noqa: SIM118 (not a mapping)


def _indexed(index: Path) -> dict[str, Path]:
    try:
        names: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        places = {name: index.with_name(Path(file).name) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of shards ({error}); download it again") from error
    shards = sorted(set(places.values()))
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise WeightsError(f"shard {', '.join(missing)} is missing: {index} names it; download it again")
    held = _places(shards)
    for name, path in places.items():
        if held.get(name) != path:
            raise WeightsError(f"tensor {name!r} is missing in {path}, though {index.name} places it there")
    return places


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise WeightsError(
            f"{path} ({size} bytes) is truncated or corrupt ({error}); download it again, or delete its directory if "
            "it is a cached conversion"
        ) from error


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written: its name, dtype, shape, and its rows as float32 chunks, made when needed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Iterable[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


def write_safetensors(path: Path, tensors: Iterable[PlannedTensor]) -> Iterator[int]:
    """Write a safetensors file one chunk at a time, so that no more than a chunk is in memory; yields bytes written.

    The file is complete when the iterator is exhausted. Raises ValueError when the chunks do not fill the shape.
    """
    planned = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in planned:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 64)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in planned:
            yield from _write_chunks(file, tensor)


def _write_chunks(file: BinaryIO, tensor: PlannedTensor) -> Iterator[int]:
    written = 0
    for chunk in tensor.chunks:
        raw = chunk.to(tensor.dtype).contiguous().view(torch.uint8)
        file.write(raw.numpy().data)
        written += raw.numel()
        yield raw.numel()
    if written != tensor.nbytes:
        raise ValueError(f"{tensor.name}: {written} bytes written, its shape needs {tensor.nbytes}")
