"""Loading a model: from a name to a decoder with its tokenizer and chat template, ready to run.

Each step lives in its own module; here they are only put together.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from forerun.errors import ConfigError, ModelError
from forerun.kernels.base import Kernels
from forerun.models.architecture import Architecture
from forerun.models.chat_template import ChatTemplate
from forerun.models.decoder import Decoder
from forerun.models.locate import locate
from forerun.models.parameters import parameter_count
from forerun.models.tokenizer import Tokenizer, read_json
from forerun.models.weights import load_tensors

Precision = Literal["fp32", "bf16"]
_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model that can run.

    name: as it was asked for. path: the directory that it was read from (for a GGUF its conversion).
    precision: of weights and cache. file_bytes: size of the weight files it came from. weight_bytes: size of its
    weights in memory; both in bytes.
    """

    name: str
    path: Path
    architecture: Architecture
    decoder: Decoder
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    precision: Precision
    device: torch.device
    file_bytes: int
    weight_bytes: int


def load_model(
    name: str,
    *,
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    device: torch.device | str = "auto",
    kernels: Kernels | None = None,
    context_length: int | None = None,
    progress: bool | None = None,
) -> LoadedModel:
    """Load the model called `name` (see `locate`).

    precision: of weights and cache; auto = bf16. device: auto = cuda if there is one, else cpu. kernels: None = the
    best for the device. context_length: positions to provide for; None = as many as the model allows. progress: show a
    bar while a GGUF is converted; None = if stderr is a terminal.

    Raises ModelNotFoundError, WeightsError, TokenizerError, UnsupportedModelError for the model, ConfigError for a
    precision, device or context length that cannot be had.
    """
    chosen_precision, chosen_device = _choose_precision(precision), choose_device(device)
    if context_length is not None and context_length < 1:
        raise ConfigError(f"context_length is {context_length}; it must be at least 1")
    files = locate(name)
    directory, source_bytes = files.path, 0
    if files.kind == "gguf":
        from forerun.models.gguf_import import converted

        directory = converted(files.parts, chosen_precision, progress=progress)
        source_bytes = sum(part.stat().st_size for part in files.parts)
    architecture = Architecture.from_config(_read_config(directory))
    tokenizer = Tokenizer.from_directory(directory)
    _check_vocabulary(directory, architecture, tokenizer)
    template = ChatTemplate.from_directory(directory, tokenizer.special_tokens)
    tensors = load_tensors(directory)
    if kernels is None:
        from forerun.kernels import choose_kernels

        kernels = choose_kernels(chosen_device)
    dtype = _DTYPES[chosen_precision]
    return LoadedModel(
        name=name,
        path=directory,
        architecture=architecture,
        decoder=Decoder(architecture, tensors, kernels, dtype, chosen_device, context_length),
        tokenizer=tokenizer,
        chat_template=template,
        precision=chosen_precision,
        device=chosen_device,
        file_bytes=source_bytes or tensors.file_bytes,
        weight_bytes=parameter_count(architecture) * dtype.itemsize,
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


def _choose_precision(precision: str) -> Precision:
    if precision == "auto":
        return "bf16"
    if precision not in ("fp32", "bf16"):
        raise ConfigError(f"precision {precision!r} is not supported; allowed: auto, fp32, bf16")
    return "fp32" if precision == "fp32" else "bf16"


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
