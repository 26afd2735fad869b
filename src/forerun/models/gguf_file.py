"""The GGUF container: metadata, and tensors as mapped bytes. What they mean is decided in `gguf_import`.

Own code, because a tokenizer's arrays have hundreds of thousands of strings, which take a general reader half a minute,
and because a damaged file has to be told apart by name, place and size. The layout is that of ggml's docs/gguf.md.
"""

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import UnsupportedModelError, WeightsError

_SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor. shape: outermost dimension first. data: its bytes as [rows, bytes per row], in file order."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    path: Path

    @property
    def type_name(self) -> str:
        """GGUF's name of the type."""
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.type_id).name

    def rows_as_float(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Dequantise some of `data`'s rows: float32 [rows, row length]. Raises UnsupportedModelError for odd types."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            kind = GGMLQuantizationType(self.type_id)
            if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
                stored = rows.view("<f4" if kind == GGMLQuantizationType.F32 else "<f2")
            else:
                stored = dequantize(rows, kind)
        except (ValueError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"tensor {self.name!r} of {self.path} cannot be dequantised: {error}"
            ) from error
        return stored.astype(np.float32, copy=False)


@dataclass(frozen=True)
class GgufFile:
    """Metadata (of the first part) and tensors (of all parts) of a GGUF model."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(parts: Sequence[Path]) -> GgufFile:
    """Map the parts of a GGUF model, usually one file.

    Raises WeightsError, which names the file and, when known, the tensor, if a part is not a GGUF file, is truncated or
    corrupt, or if the parts are not those of one model.
    """
    read = [_read_part(path) for path in parts]
    metadata = read[0].metadata
    expected = metadata.get("split.count", 1)
    if expected not in (0, len(parts)):
        raise WeightsError(
            f"{parts[0]} is the first of {expected} parts, but {len(parts)} were given; keep the parts' original names "
            "(NAME-00001-of-0000N.gguf) in one directory"
        )
    tensors: dict[str, GgufTensor] = {}
    for part in read:
        if twice := tensors.keys() & part.tensors.keys():
            raise WeightsError(f"tensor {min(twice)!r} of {part.path} is in another part, too: the parts do not match")
        tensors |= part.tensors
    return GgufFile(parts[0], metadata, tensors)


def _read_part(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    cursor = _Cursor(path, data)
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise WeightsError(f"{path} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'")
    version = cursor.scalar("<u4")
    if version not in (2, 3):
        raise WeightsError(f"{path} is GGUF version {version}; versions 2 and 3 (little-endian) can be read")
    tensor_count, entry_count = cursor.scalar("<u8"), cursor.scalar("<u8")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("<u4"))
    described = [cursor.tensor() for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32))
    if alignment < 1:
        raise WeightsError(f"{path} is corrupt: general.alignment is {alignment}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {entry[0]: _tensor(path, data, start, *entry) for entry in described}
    return GgufFile(path, metadata, tensors)


def _tensor(
    path: Path, data: mmap.mmap, start: int, name: str, type_id: int, shape: tuple[int, ...], offset: int
) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"tensor {name!r} of {path} has the unknown type {type_id}") from error
    row = shape[-1]
    if row % block:
        raise WeightsError(f"{path} is corrupt: rows of tensor {name!r} have {row} values, not a multiple of {block}")
    rows, row_bytes = int(np.prod(shape[:-1], dtype=object)), row // block * block_bytes
    end = start + offset + rows * row_bytes
    if end > len(data):
        raise WeightsError(
            f"{path} is truncated: tensor {name!r} ends at byte {end}, the file has {len(data)}; download it again"
        )
    flat = np.frombuffer(data, np.uint8, rows * row_bytes, start + offset)
    return GgufTensor(name, type_id, shape, flat.reshape(rows, row_bytes), path)


class _Cursor:
    """Reads a header from front to back; anything that reaches past the end of the file is a truncation."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.offset = path, data, 0

    def take(self, size: int) -> bytes:
        begin, self.offset = self.offset, self.offset + size
        if self.offset > len(self.data):
            raise WeightsError(
                f"{self.path} is truncated or corrupt: its header asks for byte {self.offset}, the file has "
                f"{len(self.data)}; download it again"
            )
        return self.data[begin : self.offset]

    def scalar(self, kind: str) -> Any:
        return self.array(kind, 1)[0].item()

    def array(self, kind: str, count: int) -> NDArray[Any]:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize * count), dtype)

    def text(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _BOOL:
            return bool(self.scalar("u1"))
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise WeightsError(f"{self.path} is corrupt: metadata of the unknown kind {kind} before byte {self.offset}")
        item, count = self.scalar("<u4"), self.scalar("<u8")
        if item in _SCALARS:
            values: list[Any] = self.array(_SCALARS[item], count).tolist()
            return [bool(value) for value in values] if item == _BOOL else values
        return [self.value(item) for _ in range(count)]

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Name, type, shape (outermost first) and offset in the data section."""
        name, dimensions = self.text(), self.scalar("<u4")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise WeightsError(f"{self.path} is corrupt: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed(self.array("<u8", dimensions).tolist()))
        return name, self.scalar("<u4"), shape, self.scalar("<u8")
