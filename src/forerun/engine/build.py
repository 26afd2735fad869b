"""From settings to a running engine: load the models, size the cache, choose drafters and policy."""

import logging
from dataclasses import dataclass

import torch

from forerun.config import EngineConfig
from forerun.control.fixed import FixedController
from forerun.drafting.base import Drafter, DraftLimit
from forerun.drafting.draft_model import DraftModelDrafter, check_same_vocabulary, warn_if_large
from forerun.drafting.suffix import SuffixDrafter
from forerun.engine.engine import Engine
from forerun.engine.memory import cache_slots
from forerun.errors import ForerunError
from forerun.models.loader import LoadedModel, load_model
from forerun.models.parameters import parameter_count

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine, the target it serves, and why a drafter that was asked for is missing (by its name)."""

    engine: Engine
    model: LoadedModel
    missing_drafters: dict[str, str]


def load_target(config: EngineConfig, *, progress: bool | None = None) -> LoadedModel:
    """The target alone, on the threads that `config` sets: no cache, no drafters. Raises the errors of loading one."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return load_model(
        config.model,
        precision=config.precision,
        cache_precision=config.cache.precision,
        activation_bits=config.activation_bits,
        device=config.device,
        context_length=config.context_length,
        progress=progress,
    )


def build_engine(config: EngineConfig, *, progress: bool | None = None) -> BuiltEngine:
    """Load what `config` names and put an engine together.

    Raises the errors of loading a model, ConfigError for settings that do not fit together, CacheMemoryError.
    """
    model = load_target(config, progress=progress)
    missing: dict[str, str] = {}
    draft = _load_draft(config, model, missing) if "draft" in config.drafters else None
    context = min(model.decoder.context_limit, config.context_length or model.decoder.context_limit)
    slots = _slots(config, model, draft, context)
    engine = Engine(
        model.decoder,
        slots=slots,
        controller=FixedController(_limit(config), config.speculation.step_nodes),
        drafters=_drafters(config, model, draft, slots),
        tokenizer=model.tokenizer,
        context_length=context,
        batching=config.batching,
        cache=config.cache,
        seed=config.seed,
    )
    if engine.context_limit < context:
        logger.warning(
            "the key/value cache holds %d tokens, so the context is cut from %d to that; raise cache.memory (a request "
            "of full length needs %.0f MiB)",
            engine.context_limit,
            context,
            context * _bytes_per_slot(model, draft) / 2**20,
        )
    if config.context_length and config.context_length > model.architecture.context_limit:
        logger.warning(
            "context_length is %d, but %s allows %d; that is what holds",
            config.context_length,
            model.name,
            model.architecture.context_limit,
        )
    return BuiltEngine(engine, model, missing)


def _limit(config: EngineConfig) -> DraftLimit:
    return DraftLimit(config.speculation.width, config.speculation.depth, config.speculation.nodes)


def _bytes_per_slot(model: LoadedModel, draft: LoadedModel | None) -> int:
    """Bytes that one token takes in the caches of target and draft model together."""
    return model.decoder.kv_bytes_per_token + (draft.decoder.kv_bytes_per_token if draft else 0)


def _slots(config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, context: int) -> int:
    return cache_slots(
        None if config.cache.memory == "auto" else config.cache.memory,
        bytes_per_slot=_bytes_per_slot(model, draft),
        page_size=config.cache.page_size,
        wanted=config.batching.max_batch * (context + config.cache.page_size),
        context=context,
        device=torch.device(model.device),
    )


def _drafters(config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, slots: int) -> list[Drafter]:
    speculation = config.speculation
    drafters: list[Drafter] = []
    if "suffix" in config.drafters:
        drafters.append(
            SuffixDrafter(history_tokens=speculation.history_tokens, share_history=speculation.share_history)
        )
    if draft:
        drafters.append(DraftModelDrafter(draft.decoder, slots=slots, target_vocab_size=model.decoder.vocab_size))
    return drafters


def _load_draft(config: EngineConfig, model: LoadedModel, missing: dict[str, str]) -> LoadedModel | None:
    """The draft model; None when it cannot serve and `on_draft_error` allows to go on (the reason is in `missing`)."""
    name, precision = config.speculation.draft_model, config.speculation.draft_precision
    assert name is not None, "the settings do not name the drafter 'draft' without a draft_model"
    try:
        draft = load_model(
            name,
            precision=config.precision if precision == "auto" else precision,
            cache_precision=config.cache.precision,
            activation_bits=config.activation_bits,
            device=model.device,
        )
        check_same_vocabulary(model.tokenizer, draft.tokenizer)
    except ForerunError as error:
        if config.speculation.on_draft_error == "fail":
            raise type(error)(f"speculation.draft_model {name!r}: {error}") from error
        missing["draft"] = str(error)
        return None
    warn_if_large(parameter_count(model.architecture), parameter_count(draft.architecture))
    return draft
