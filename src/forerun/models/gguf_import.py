"""A GGUF model, converted once into a directory in transformers' layout and kept in the cache.

Afterwards a GGUF is such a directory like any other; nothing outside this module knows the difference. Where linear
layers are quantised, their weights are left out of the directory and read from the GGUF itself (`stored_linears`), so
that its blocks can be used as they are.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import UnsupportedModelError, WeightsError
from forerun.kernels.quantized import QuantizedWeight
from forerun.models.architecture import Architecture
from forerun.models.gguf_config import GgufFamily, config_from_gguf, family_of
from forerun.models.gguf_file import GgufFile, GgufTensor, read_gguf
from forerun.models.locate import cache_key, cache_root, cache_writes
from forerun.models.parameters import EMBEDDING, quantizable, tensor_shapes
from forerun.models.quantization import BLOCK_TYPES, from_blocks
from forerun.models.weights import SINGLE_FILE, PlannedTensor, write_safetensors

# Part of the cache key: raise it when a conversion would come out different.
CONVERSION = 1
_CHUNK_VALUES = 1 << 23
_STALE_SECONDS = 24 * 3600

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_NAMES = {"ffn_up": "mlp.gate_up_proj"}
# For each mixture: the router, and the experts' gate, up and down.
_EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp.gate", "mlp.experts.{}.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
# Not weights: tables that config.json describes.
_TABLES = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_IN_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<name>[a-z_]+)(?:\.(?P<expert>\d+))?\.(?P<kind>weight|bias)")
_EXPERT = re.compile(r"ffn_(gate|up|down)(_exps)?")


def converted(
    parts: Sequence[Path],
    precision: Literal["fp32", "bf16"],
    *,
    linears: bool = True,
    progress: bool | None = None,
) -> Path:
    """The directory of the GGUF model in `parts`, converting it if it is not in the cache yet.

    Matrices are stored in `precision`, vectors (norms, biases) in fp32; with linears=False the matrices that may be
    held quantised are left out. The directory appears complete or not at all, whoever else converts the same file at
    the same time. progress: show a bar; None = if stderr is a terminal.
    Raises WeightsError, TokenizerError or UnsupportedModelError for a bad file, ModelError if the cache is read-only.
    """
    target = _cached(parts, precision if linears else f"{precision}-without-linears")
    if target.is_dir():
        return target
    with _told_as_corrupt(parts[0]):
        source = read_gguf(parts)
    with cache_writes(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
        try:
            partial.chmod(0o755)
            with _told_as_corrupt(parts[0]):
                _convert(source, partial, precision, linears, progress)
            try:
                os.rename(partial, target)
            except OSError:
                if not target.is_dir():  # otherwise another process was first, with the same content
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


@contextmanager
def _told_as_corrupt(path: Path) -> Iterator[None]:
    """A net under the checks: whatever trips over senseless metadata says so, and names the file."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise WeightsError(f"{path} is corrupt ({type(error).__name__}: {error}); download it again") from error


def stored_linears(parts: Sequence[Path], architecture: Architecture) -> "StoredLinears":
    """The weights of a GGUF model's linear layers, in the form in which the file has them."""
    return StoredLinears(parts, _stored_names(architecture))


def stored_types(parts: Sequence[Path]) -> dict[str, int]:
    """Bytes of a GGUF model's linear layers by GGUF's name of their type; kept in the cache, as reading takes a while.

    Raises WeightsError or UnsupportedModelError for a bad file.
    """
    target = _cached(parts, "types")
    with suppress(OSError, ValueError, AttributeError, TypeError):
        return {str(name): int(size) for name, size in json.loads(target.read_text("utf-8")).items()}
    with _told_as_corrupt(parts[0]):
        source = read_gguf(parts)
        config = config_from_gguf(source)
        names = _stored_names(Architecture.from_config(config))
        sizes: Counter[str] = Counter()
        for name, piece, _ in _placed(source, config):
            if name in names:
                sizes[piece.type_name] += piece.data.nbytes
    with suppress(OSError):  # a cache that cannot be written only costs time here
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
        (partial / target.name).write_text(json.dumps(sizes), "utf-8")
        os.replace(partial / target.name, target)
        partial.rmdir()
    return dict(sizes)


def _stored_names(architecture: Architecture) -> set[str]:
    return quantizable(architecture) | ({EMBEDDING} if architecture.tied_embeddings else set())


class StoredLinears(Mapping[str, Tensor | QuantizedWeight]):
    """Weights of linear layers under transformers' names; that of the embedding table is the tied head's.

    Blocks of 4, 5 and 8 bits come as they are, any other type as float32. Each is made anew when it is looked up; the
    file is read when the first one is. Raises WeightsError or UnsupportedModelError then if it is bad.
    """

    def __init__(self, parts: Sequence[Path], names: set[str]) -> None:
        self._parts, self._names = parts, names

    @cached_property
    def _found(self) -> "dict[str, tuple[GgufTensor, NDArray[np.int64] | None]]":
        with _told_as_corrupt(self._parts[0]):
            source = read_gguf(self._parts)
            placed = _placed(source, config_from_gguf(source))
            return {name: (piece, order) for name, piece, order in placed if name in self._names}

    def __getitem__(self, name: str) -> Tensor | QuantizedWeight:
        tensor, order = self._found[name]
        if kind := BLOCK_TYPES.get(tensor.type_id):
            return from_blocks(kind, tensor.data if order is None else tensor.data[order])
        return torch.cat(list(_Chunks(tensor, order, 0.0)))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _cached(parts: Sequence[Path], kind: str) -> Path:
    return cache_root() / "converted" / f"{parts[0].stem}-{kind}-{cache_key(parts, CONVERSION, kind)}"


def _remove_stale(directory: Path) -> None:
    """Delete what killed conversions left behind."""
    for partial in directory.glob(".partial-*"):
        with suppress(OSError):  # another process may be doing the same
            if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _convert(source: GgufFile, directory: Path, precision: str, linears: bool, progress: bool | None) -> None:
    from forerun.models.gguf_tokenizer import save_tokenizer

    config = config_from_gguf(source)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config["dtype"] = "bfloat16" if precision == "bf16" else "float32"
    save_tokenizer(source.metadata, source.path, directory)
    left_out = set() if linears else quantizable(Architecture.from_config(config))
    planned = [tensor for tensor in plan_tensors(source, config, dtype) if tensor.name not in left_out]
    (directory / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    with _progress_bar(f"Converting {source.path.name}", sum(tensor.nbytes for tensor in planned), progress) as advance:
        for written in write_safetensors(directory / SINGLE_FILE, planned):
            advance(written)


@contextmanager
def _progress_bar(title: str, total: int, wanted: bool | None) -> Iterator[Any]:
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda written: bar.advance(task, written)


def plan_tensors(source: GgufFile, config: dict[str, Any], dtype: torch.dtype) -> list[PlannedTensor]:
    """The model's tensors under transformers' names, to be dequantised when they are written.

    Raises WeightsError for a tensor that is missing or has the wrong shape, UnsupportedModelError for one too many.
    """
    family = family_of(source)
    planned: dict[str, PlannedTensor] = {}
    for name, piece, order in _placed(source, config):
        kept = dtype if len(piece.shape) > 1 else torch.float32
        planned[name] = PlannedTensor(name, kept, piece.shape, _Chunks(piece, order, _offset(name, family)))
    _check_complete(source, family, config, planned)
    return list(planned.values())


def _placed(source: GgufFile, config: dict[str, Any]) -> "Iterator[tuple[str, GgufTensor, NDArray[np.int64] | None]]":
    """Every weight under its new name, and the order in which its rows are wanted (None: as they are)."""
    family = family_of(source)
    for tensor in source.tensors.values():
        if tensor.name in _TABLES or tensor.name.endswith(".attn_rot_embd"):
            continue
        for name, piece in _renamed(tensor, family):
            yield name, piece, _row_order(name, piece, family, config)


def _renamed(tensor: GgufTensor, family: GgufFamily) -> Iterator[tuple[str, GgufTensor]]:
    """The tensor under its new name; one that stacks experts is several."""
    if outer := _OUTER_NAMES.get(tensor.name):
        yield outer, tensor
        return
    found = _IN_LAYER.fullmatch(tensor.name)
    names = dict(_LAYER_NAMES)
    names |= _SANDWICH_NAMES if family.sandwich else {}
    names |= _PHI3_NAMES if family.model_type == "phi3" else {}
    if found:
        prefix, suffix = f"model.layers.{found['layer']}.", f".{found['kind']}"
        expert = _EXPERT.fullmatch(found["name"])
        mixture = _EXPERT_NAMES.get(family.model_type)
        if mixture and found["name"] == "ffn_gate_inp":
            yield f"{prefix}{mixture[0]}{suffix}", tensor
            return
        if mixture and expert and found["expert"]:
            yield f"{prefix}{mixture[1].format(found['expert'])}{mixture[2][expert[1]]}{suffix}", tensor
            return
        if mixture and expert and expert[2]:
            for index in range(tensor.shape[0]):
                yield f"{prefix}{mixture[1].format(index)}{mixture[2][expert[1]]}{suffix}", _one_expert(tensor, index)
            return
        if not found["expert"] and (inner := names.get(found["name"])):
            yield f"{prefix}{inner}{suffix}", tensor
            return
    raise UnsupportedModelError(
        f"tensor {tensor.name!r} of {tensor.path} has no place in a {family.model_type} model; a feature of "
        "this model is not supported"
    )


def _one_expert(tensor: GgufTensor, index: int) -> GgufTensor:
    rows = tensor.shape[1]
    data = tensor.data[index * rows : (index + 1) * rows]
    return GgufTensor(f"{tensor.name}[{index}]", tensor.type_id, tensor.shape[1:], data, tensor.path)


def _row_order(name: str, tensor: GgufTensor, family: GgufFamily, config: dict[str, Any]) -> "NDArray[np.int64] | None":
    """Which stored row becomes which: undoes the interleaving of RoPE pairs in the q and k of Llama's family.

    Stored rows of a head are 0, h, 1, h + 1, ... for h = half of its size; transformers wants 0, 1, 2, ...
    """
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if not family.rotated_pairs or heads is None:
        return None
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise WeightsError(f"{tensor.path} is corrupt: tensor {tensor.name!r} has {rows} rows for {heads} heads")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()


def _offset(name: str, family: GgufFamily) -> float:
    """What to add to a stored tensor: takes back the 1 that Gemma's files have in their norms."""
    return -1.0 if family.offset_norms and name.endswith("norm.weight") else 0.0


class _Chunks:
    """A tensor's values, dequantised some rows at a time whenever it is iterated."""

    def __init__(self, tensor: GgufTensor, order: "NDArray[np.int64] | None", offset: float) -> None:
        self._tensor, self._order, self._offset = tensor, order, offset

    def __iter__(self) -> Iterator[Tensor]:
        data, tensor = self._tensor.data, self._tensor
        if len(tensor.shape) == 1 and self._order is not None:  # a bias is one row; its values are reordered
            yield torch.from_numpy(tensor.rows_as_float(data).ravel()[self._order])
            return
        step = max(1, _CHUNK_VALUES // tensor.shape[-1])
        for begin in range(0, len(data), step):
            rows = data[begin : begin + step] if self._order is None else data[self._order[begin : begin + step]]
            values = tensor.rows_as_float(np.ascontiguousarray(rows))
            # The mapped file is read-only, which torch does not know.
            yield torch.from_numpy(values.copy() if not self._offset else values + np.float32(self._offset))


def _check_complete(
    source: GgufFile, family: GgufFamily, config: dict[str, Any], planned: dict[str, PlannedTensor]
) -> None:
    """Every tensor that the architecture needs is there, with its shape."""
    for name, shape in tensor_shapes(Architecture.from_config(config)).items():
        if name not in planned:
            raise WeightsError(f"tensor {_stored_name(name, family)!r} is missing in {source.path} (for {name})")
        if planned[name].shape != shape:
            raise WeightsError(
                f"{source.path} is corrupt: tensor {_stored_name(name, family)!r} has shape {planned[name].shape}, "
                f"its metadata asks for {shape}"
            )


def _stored_name(name: str, family: GgufFamily) -> str:
    """What GGUF calls one of transformers' tensors, for messages."""
    for stored, outer in _OUTER_NAMES.items():
        if outer == name:
            return stored
    names = _LAYER_NAMES | (_SANDWICH_NAMES if family.sandwich else {})
    names |= _PHI3_NAMES if family.model_type == "phi3" else {}
    _, _, layer, inner = name.split(".", 3)
    inner, _, kind = inner.rpartition(".")
    for stored, known in names.items():
        if known == inner:
            return f"blk.{layer}.{stored}.{kind}"
    return f"blk.{layer}.ffn_gate_inp.{kind}" if inner.endswith(".gate") else f"blk.{layer}.ffn_*_exps.{kind}"
