"""Packed weights on disk: written when a model was packed for the first time, mapped at every start after that.

A file holds the memory of each layer's packed form and a description of it, whatever that form is: the fields of
`WeightArgument`, pointers as places in the file. Layout: magic, length and SHA-256 of the index, the index (JSON), and
from DATA on the regions, each on a multiple of ALIGNMENT.
"""

import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_uint8, c_void_p
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forerun.kernels.cpu.binding import LIBRARY, WeightArgument, library
from forerun.kernels.cpu.kernels import CpuKernels
from forerun.kernels.cpu.weights import HUGE_PAGE, PackedLinear
from forerun.kernels.linears import Linears, MadeLinear

logger = logging.getLogger(__name__)

MAGIC = b"forerunW"
LAYOUT = 2  # of the file; raise it when files are laid out differently
DATA = (
    8 * HUGE_PAGE
)  # room for the index of some 70,000 layers; the regions begin at a multiple of it, so that huge pages can map them
ALIGNMENT = 128
_HEADER = struct.Struct("<8sQ32s")
_STALE_SECONDS = 24 * 3600
_POINTERS = [name for name, kind, *_ in WeightArgument._fields_ if kind is c_void_p]
_NUMBERS = [name for name, kind, *_ in WeightArgument._fields_ if kind is not c_void_p]


class PackedFile(Linears):
    """Linear layers out of a file, or packed anew and then written to it.

    place: where the file is kept, without what the kernels add to its name. It must name everything that the weights
    depend on; what the packed form depends on besides, instruction set and library, is added here. A file that is
    missing, truncated or of another form is packed anew; where none can be written, a warning says so.
    """

    def __init__(self, kernels: CpuKernels, place: Path) -> None:
        super().__init__(kernels)
        self._prefix = f"{place.name}-{kernels.name}-{kernels.activation_bits}-"
        self.path = place.with_name(f"{self._prefix}{_packing()}.bin")
        self._mapped = _map(self.path)
        self._layers: dict[str, _Layer] = {}
        self._made = False

    def linear(self, name: str, make: Callable[[], MadeLinear]) -> PackedLinear:
        """The packed layer of that name, unique in its model; `make` is called if the file does not have it."""
        layer = None if self._mapped is None else self._mapped.layer(name)
        if layer is None:
            before = self.weight_bytes
            packed: PackedLinear = super().linear(name, make)
            layer, self._made = _Layer(packed, self.weight_bytes - before, _pointed(packed)), True
        else:
            self.weight_bytes += layer.size
        self._layers[name] = layer
        return layer.packed

    def finish(self) -> None:
        """All layers have been asked for: write the file, if one of them was not in it."""
        layers, self._layers = self._layers, {}
        if not self._made:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(self.path.parent)
            _write(self.path, layers)
            for other in self.path.parent.iterdir():
                if other.name.startswith(self._prefix) and other != self.path:  # of a library that has been replaced
                    other.unlink(missing_ok=True)
        except OSError as error:
            logger.warning(
                "packed weights cannot be kept in %s (%s), so every start packs them anew; make room there, or let the "
                "environment variable FORERUN_CACHE name another directory",
                self.path.parent,
                error.strerror or error,
            )


@dataclass(frozen=True)
class _Layer:
    """A packed layer, the bytes of its weight, and the memory behind each pointer of its argument that is set."""

    packed: PackedLinear
    size: int
    memory: dict[str, memoryview]


@dataclass(frozen=True)
class _Mapped:
    """A file that was checked. memory: uint8, all of it, read-only."""

    memory: np.ndarray[Any, np.dtype[np.uint8]]
    layers: dict[str, Any]

    @cached_property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def layer(self, name: str) -> _Layer | None:
        """The layer of that name, if the file has it."""
        described = self.layers.get(name)
        if described is None:
            return None
        argument, memory = WeightArgument(**described["numbers"]), {}
        regions = described["regions"]
        for pointer, (offset, size) in regions.items():
            setattr(argument, pointer, self.address + offset)
            memory[pointer] = self.memory[offset : offset + size].data
        places = tuple((self.address + offset, size) for offset, size in regions.values())
        packed = PackedLinear(described["rows"], described["columns"], argument, places, held=self.memory)
        return _Layer(packed, described["bytes"], memory)


def _packing() -> str:
    """A key of all that the packed form depends on, beside the instruction set and the activations' bits."""
    identity = (LAYOUT, _NUMBERS, _POINTERS)
    return hashlib.sha256(repr(identity).encode() + LIBRARY.read_bytes()).hexdigest()[:8]


def _map(path: Path) -> _Mapped | None:
    """The file, mapped; None if it is not there or cannot be what was written."""
    try:
        with path.open("rb") as file:
            index = _read_index(file)
            size = os.fstat(file.fileno()).st_size
            if index["size"] != size:
                raise ValueError(f"it has {size} bytes instead of {index['size']}")
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            memory = np.frombuffer(mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ), np.uint8)
    except OSError:  # not there yet, or not readable: then it cannot be written either, and that is said
        return None
    except (ValueError, LookupError, TypeError, struct.error) as error:
        logger.warning("%s is not the file of packed weights that was written (%s); it is made anew", path, error)
        return None
    library().forerun_huge_pages(memory.ctypes.data, size)
    return _Mapped(memory, index["layers"])


def _read_index(file: BinaryIO) -> dict[str, Any]:
    magic, length, digest = _HEADER.unpack(file.read(_HEADER.size))
    if length > os.fstat(file.fileno()).st_size:
        raise ValueError("its index is longer than the file")
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}")
    encoded = file.read(length)
    if hashlib.sha256(encoded).digest() != digest:
        raise ValueError("its index is damaged")
    index: dict[str, Any] = json.loads(encoded)
    return index


def _write(path: Path, layers: dict[str, _Layer]) -> None:
    """Write the file; it appears complete or not at all."""
    regions: list[tuple[int, memoryview]] = []
    described = {name: _describe(layer, regions) for name, layer in layers.items()}
    end = regions[-1][0] + regions[-1][1].nbytes if regions else 0
    encoded = json.dumps({"size": end, "layers": described}).encode()
    if _HEADER.size + len(encoded) > DATA:
        raise OSError(f"their index takes {len(encoded)} bytes, more than {DATA}")
    handle, partial = tempfile.mkstemp(prefix=".partial-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_HEADER.pack(MAGIC, len(encoded), hashlib.sha256(encoded).digest()) + encoded)
            for offset, memory in regions:
                file.seek(offset)
                file.write(memory)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # other users of the cache read it, too
            os.fsync(file.fileno())  # a crash must not leave a file of the right size that holds zeros
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def _describe(layer: _Layer, regions: list[tuple[int, memoryview]]) -> dict[str, Any]:
    """A layer for the index; its memory is appended to the regions of the file, each with its offset."""
    places: dict[str, tuple[int, int]] = {}
    for name, memory in layer.memory.items():
        after = regions[-1][0] + regions[-1][1].nbytes if regions else DATA
        offset = -(-after // ALIGNMENT) * ALIGNMENT
        regions.append((offset, memory))
        places[name] = (offset, memory.nbytes)
    packed = layer.packed
    numbers = {name: getattr(packed.argument, name) for name in _NUMBERS}
    return {"rows": packed.rows, "columns": packed.columns, "bytes": layer.size, "numbers": numbers, "regions": places}


def _pointed(packed: PackedLinear) -> dict[str, memoryview]:
    """Each pointer that is set, and the memory that it points to."""
    sizes = dict(packed.regions)
    addresses = {name: getattr(packed.argument, name) for name in _POINTERS}
    return {
        name: memoryview((c_uint8 * sizes[address]).from_address(address)).cast("B")
        for name, address in addresses.items()
        if address is not None
    }


def _remove_stale(directory: Path) -> None:
    """Delete what killed writers left behind."""
    for partial in directory.glob(".partial-*"):
        with suppress(OSError):  # another process may be doing the same
            if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                partial.unlink()
