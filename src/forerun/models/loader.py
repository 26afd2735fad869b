"""Loading a model: from a name to a decoder with its tokenizer and chat template, ready to run.

Each step lives in its own module; here they are only put together.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from forerun.errors import ConfigError, ModelError
from forerun.kernels.base import Kernels
from forerun.kernels.linears import Linears
from forerun.kernels.quantized import ActivationBits
from forerun.models.architecture import Architecture
from forerun.models.chat_template import ChatTemplate
from forerun.models.decoder import Decoder
from forerun.models.locate import ModelFiles, cache_key, cache_root, locate
from forerun.models.precision import (
    CACHE_DTYPES,
    CachePrecision,
    ChosenPrecision,
    Precision,
    WeightFormat,
    check_cache_precision,
    check_precision,
    choose_cache_precision,
    choose_precision,
)
from forerun.models.quantization import QUANTIZATION
from forerun.models.tokenizer import Tokenizer, read_json
from forerun.models.weights import load_tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model that can run.

    name: as it was asked for. path: the directory that it was read from (for a GGUF its conversion).
    precision: of the weights. precision_reason: why it is this one, as a sentence. cache_precision: of
    keys and values. file_bytes: size of the weight files
    it came from. weight_bytes: size of its weights in memory; both in bytes.
    """

    name: str
    path: Path
    architecture: Architecture
    decoder: Decoder
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    precision: Precision
    precision_reason: str
    cache_precision: CachePrecision
    device: torch.device
    file_bytes: int
    weight_bytes: int


def load_model(
    name: str,
    *,
    precision: Precision | Literal["auto"] = "auto",
    cache_precision: CachePrecision | Literal["auto"] = "auto",
    device: torch.device | str = "auto",
    kernels: Kernels | None = None,
    activation_bits: ActivationBits = 16,
    context_length: int | None = None,
    progress: bool | None = None,
) -> LoadedModel:
    """Load the model called `name` (see `locate`).

    precision: of the weights, see `choose_precision`. cache_precision: of keys and values; auto = fp32 with fp32
    weights, else bf16. device: auto = cuda if there is one, else cpu. kernels: None = the best for the device, whose
    activations have `activation_bits` where they meet quantised weights. context_length: positions to provide for;
    None = as many as the model allows. progress: show a bar while a GGUF is converted; None = if stderr is a terminal.

    Raises ModelNotFoundError, WeightsError, TokenizerError, UnsupportedModelError for the model, ConfigError for a
    precision, device or context length that cannot be had.
    """
    check_precision(precision)
    check_cache_precision(cache_precision)
    chosen_device = choose_device(device)
    if context_length is not None and context_length < 1:
        raise ConfigError(f"context_length is {context_length}; it must be at least 1")
    files = locate(name)
    if kernels is None:
        from forerun.kernels import choose_kernels

        kernels = choose_kernels(chosen_device, activation_bits)
    chosen = choose_precision(
        precision, native=kernels.name != "reference", stored=lambda: _stored_types(files) if files.parts else {}
    )
    logger.info("%s is held in %s: %s", name, chosen.name, chosen.reason)
    directory = _converted(files, chosen.format, progress) if files.parts else files.path
    architecture = Architecture.from_config(_read_config(directory))
    tokenizer = Tokenizer.from_directory(directory)
    _check_vocabulary(directory, architecture, tokenizer)
    template = ChatTemplate.from_directory(directory, tokenizer.special_tokens)
    tensors = load_tensors(directory)
    stored = linears = None
    if chosen.format.quantized:
        linears = _open_linears(kernels, files.parts or (*tensors.paths, directory / "config.json"), chosen)
    if chosen.format.quantized and files.parts:
        from forerun.models.gguf_import import stored_linears

        stored = stored_linears(files.parts, architecture)
    held = choose_cache_precision(cache_precision, chosen.format.dtype)
    decoder = Decoder(
        architecture,
        tensors,
        kernels,
        chosen.format,
        chosen_device,
        context_length,
        cache_dtype=CACHE_DTYPES[held],
        stored=stored,
        linears=linears,
    )
    return LoadedModel(
        name=name,
        path=directory,
        architecture=architecture,
        decoder=decoder,
        tokenizer=tokenizer,
        chat_template=template,
        precision=chosen.name,
        precision_reason=chosen.reason,
        cache_precision=held,
        device=chosen_device,
        file_bytes=sum(part.stat().st_size for part in files.parts) or tensors.file_bytes,
        weight_bytes=decoder.weight_bytes,
    )


def choose_device(device: torch.device | str) -> torch.device:
    """The device that a setting means. Raises ConfigError when it is not there or not known."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not known; allowed: auto, cpu, cuda, cuda:N") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r} is not supported; allowed: auto, cpu, cuda, cuda:N")
    count = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise ConfigError(
            f"device {str(device)!r} was asked for, but this machine offers {count} CUDA devices to torch; "
            "use device=cpu or auto"
        )
    return chosen


def _stored_types(files: ModelFiles) -> dict[str, int]:
    from forerun.models.gguf_import import stored_types

    return stored_types(files.parts)


def _converted(files: ModelFiles, weight_format: WeightFormat, progress: bool | None) -> Path:
    from forerun.models.gguf_import import converted

    precision: Literal["fp32", "bf16"] = "fp32" if weight_format.dtype is torch.float32 else "bf16"
    return converted(files.parts, precision, linears=not weight_format.quantized, progress=progress)


def _open_linears(kernels: Kernels, sources: Sequence[Path], chosen: ChosenPrecision) -> Linears:
    """Quantised layers, kept on disk once they are packed. Floating-point weights pack as fast as they can be read."""
    from forerun.kernels import open_linears

    key = cache_key(sources, QUANTIZATION, chosen.format)
    stem = sources[0].stem if sources[0].suffix == ".gguf" else sources[0].parent.name
    return open_linears(kernels, cache_root() / "packed" / f"{stem}-{chosen.name}-{key}")


def _read_config(directory: Path) -> dict[str, object]:
    config = read_json(directory, "config.json", ModelError)
    if not config:
        raise ModelError(f"{directory} has no config.json (or it is empty); a model's directory needs one")
    return config


def _check_vocabulary(directory: Path, architecture: Architecture, tokenizer: Tokenizer) -> None:
    if tokenizer.highest_id >= architecture.vocab_size:
        raise ModelError(
            f"{directory}: the tokenizer has ids up to {tokenizer.highest_id}, but the model has embeddings for "
            f"{architecture.vocab_size} ids only; tokenizer.json belongs to another model"
        )
