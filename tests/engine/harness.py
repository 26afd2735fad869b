"""Engines on tiny models, driven step by step with the cache's invariant checked after every step."""

from dataclasses import dataclass, field
from functools import cache

import torch

from forerun.config import BatchingConfig, CacheConfig
from forerun.control.fixed import FixedController
from forerun.drafting.base import DraftLimit
from forerun.engine.engine import Engine
from forerun.kernels import choose_kernels
from forerun.kernels.cpu import CpuKernels, binding
from forerun.kernels.reference import ReferenceKernels
from forerun.verification.sampling import SamplingParams
from tests.models.tiny import tiny_decoder

VOCABULARY = 512
CONTEXT = 256
KERNELS = ("reference", "native")
# Every instruction set of this machine with one thread and with two, as (name, threads).
EVERY_KERNELS = ("reference", *((isa, threads) for isa in binding.supported() for threads in (1, 2)))


@cache
def decoder(family="llama", seed=0, dtype=torch.float32, kernels="reference", cache=None, bits=None):
    """A tiny decoder; loaded once per kind. "native" is whatever the machine has best. bits: of quantised layers."""
    if isinstance(kernels, tuple):
        chosen = CpuKernels(*kernels)
    else:
        chosen = ReferenceKernels(device()) if kernels == "reference" else choose_kernels(device())
    return tiny_decoder(family, seed=seed, dtype=dtype, kernels=chosen, cache=cache, bits=bits)


def device():
    """CUDA where there is one, so that the same tests run on it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Ask:
    """One request of a test."""

    prompt: list
    params: SamplingParams = field(default_factory=SamplingParams)
    speculate: bool = True
    tenant: str = ""


def engine(
    model=None,
    drafters=(),
    *,
    slots=2048,
    width=3,
    depth=8,
    nodes=16,
    step_nodes=64,
    page_size=16,
    prefix=True,
    **settings,
):
    """An engine on a tiny model; settings: of batching, or context_length, end_tokens, clock, tokenizer."""
    batching = {name: settings.pop(name) for name in list(settings) if name in BatchingConfig.model_fields}
    return Engine(
        model or decoder(),
        slots=slots,
        controller=FixedController(DraftLimit(width, depth, nodes), step_nodes),
        drafters=drafters,
        batching=BatchingConfig(**batching),
        cache=CacheConfig(page_size=page_size, prefix=prefix),
        **settings,
    )


def run(engine, asks, *, each_step=None, limit=3000):
    """Serve `asks` together; their outputs, in order. After every step each KV page must be owned once."""
    ids = [engine.add(ask.prompt, ask.params, speculate=ask.speculate, tenant=ask.tenant) for ask in asks]
    finish(engine, each_step=each_step, limit=limit)
    return [engine.collect(request_id) for request_id in ids]


def finish(engine, *, each_step=None, limit=3000):
    """Step until nothing is left to do."""
    for number in range(limit):
        if not engine.has_work:
            break
        engine.step()
        engine.check()
        if each_step:
            each_step(number)
    assert not engine.has_work, "the engine does not come to an end"
    assert engine.pool.in_use == 0, "a finished request still owns pages"


def plain(ask, model=None, **settings):
    """The reference: the same request, alone, without speculation, in a fresh engine."""
    (output,) = run(engine(model, **settings), [Ask(ask.prompt, ask.params, speculate=False)])
    return output


def same(left, right):
    """Whether two outputs hold the same answers: tokens, text, reasons and log-probabilities, bit for bit."""
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs, c.error) for c in left.completions] == [
        (c.token_ids, c.text, c.finish_reason, c.logprobs, c.error) for c in right.completions
    ]
