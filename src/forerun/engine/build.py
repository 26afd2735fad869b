"""From settings to a running engine: load the models, size the cache, choose drafters and policy."""

from dataclasses import dataclass

import torch

from forerun.config import EngineConfig
from forerun.control.fixed import FixedController
from forerun.drafting.base import Drafter, DraftLimit
from forerun.drafting.draft_model import DraftModelDrafter, check_same_vocabulary, warn_if_large
from forerun.drafting.suffix import SuffixDrafter
from forerun.engine.engine import Engine
from forerun.engine.memory import cache_slots
from forerun.errors import ConfigError, ForerunError
from forerun.models.loader import LoadedModel, load_model
from forerun.models.parameters import parameter_count


@dataclass(frozen=True)
class BuiltEngine:
    """An engine, the target it serves, and why a drafter that was asked for is missing (by its name)."""

    engine: Engine
    model: LoadedModel
    missing_drafters: dict[str, str]


def build_engine(config: EngineConfig, *, progress: bool | None = None) -> BuiltEngine:
    """Load what `config` names and put an engine together.

    Raises the errors of loading a model, ConfigError for settings that do not fit together, CacheMemoryError.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = load_model(
        config.model,
        precision=config.precision,
        device=config.device,
        context_length=config.context_length,
        progress=progress,
    )
    context = min(model.decoder.context_limit, config.context_length or model.decoder.context_limit)
    slots = _slots(config, model, context)
    missing: dict[str, str] = {}
    drafters = [] if config.speculation.method == "off" else _drafters(config, model, slots, missing)
    limit = DraftLimit(config.speculation.width, config.speculation.depth, config.speculation.nodes)
    engine = Engine(
        model.decoder,
        slots=slots,
        controller=FixedController(limit, config.speculation.step_nodes),
        drafters=drafters,
        tokenizer=model.tokenizer,
        context_length=context,
        batching=config.batching,
        cache=config.cache,
        seed=config.seed,
    )
    return BuiltEngine(engine, model, missing)


def _slots(config: EngineConfig, model: LoadedModel, context: int) -> int:
    return cache_slots(
        None if config.cache.memory == "auto" else config.cache.memory,
        bytes_per_slot=model.decoder.kv_bytes_per_token,
        page_size=config.cache.page_size,
        wanted=config.batching.max_batch * (context + config.cache.page_size),
        context=context,
        device=torch.device(model.device),
    )


def _drafters(config: EngineConfig, model: LoadedModel, slots: int, missing: dict[str, str]) -> list[Drafter]:
    speculation = config.speculation
    names = _drafter_names(config)
    drafters: list[Drafter] = []
    if "suffix" in names:
        drafters.append(
            SuffixDrafter(history_tokens=speculation.history_tokens, share_history=speculation.share_history)
        )
    if "draft" in names:
        try:
            drafters.append(_draft_model(config, model, slots))
        except ForerunError as error:
            if speculation.on_draft_error == "fail":
                raise
            missing["draft"] = str(error)
    return drafters


def _drafter_names(config: EngineConfig) -> list[str]:
    method = config.speculation.method
    if method == "auto":
        return ["suffix", "draft"] if config.speculation.draft_model else ["suffix"]
    if "draft" in method and not config.speculation.draft_model:
        raise ConfigError(
            "speculation.method names the drafter 'draft', but speculation.draft_model is not set; set it"
        )
    return list(method)


def _draft_model(config: EngineConfig, model: LoadedModel, slots: int) -> Drafter:
    assert config.speculation.draft_model is not None
    precision = config.speculation.draft_precision
    draft = load_model(
        config.speculation.draft_model,
        precision=config.precision if precision == "auto" else precision,
        device=model.device,
    )
    check_same_vocabulary(model.tokenizer, draft.tokenizer)
    warn_if_large(parameter_count(model.architecture), parameter_count(draft.architecture))
    return DraftModelDrafter(draft.decoder, slots=slots, target_vocab_size=model.decoder.vocab_size)
