"""Measuring the kernels: whole steps of a loaded model by their number of rows, beside what its weights alone cost.

Everything is measured in turns within one run, so that ratios hold on a machine that others use too. Nothing is
printed here.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from forerun.bench.measure import ratio
from forerun.bench.report import number
from forerun.errors import ConfigError
from forerun.kernels.batch import AttentionPath, IntArray, TokenBatch
from forerun.kernels.kv_store import KVStore
from forerun.models.decoder import Decoder
from forerun.models.loader import LoadedModel

ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT_TOKENS = 512
DEFAULT_CONTEXT = 512
DEFAULT_ROUNDS = 15
NO_ROWS: IntArray = np.empty(0, np.int64)

Job = Callable[[], object]


@dataclass(frozen=True)
class KernelReport:
    """Medians over the rounds of a run. Times in milliseconds; `step_ms` and `linear_ms` by the number of rows.

    isa: the kernels' name. read_ms: the memory of all packed weights, read once by a plain loop. step_ms: a whole
    forward pass, logits of every row. linear_ms: the linear layers of such a pass alone.
    """

    isa: str
    precision: str
    threads: int
    read_ms: float
    step_ms: Mapping[int, float]
    linear_ms: Mapping[int, float]
    prefill_tokens_per_s: float

    def json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "isa": self.isa,
            "precision": self.precision,
            "threads": self.threads,
            "read_ms": self.read_ms,
            "step_ms": {str(rows): value for rows, value in self.step_ms.items()},
            "linear_ms": {str(rows): value for rows, value in self.linear_ms.items()},
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
        }

    def table(self, caption: str | None = None) -> Table:
        """The same for people, with the ratios to one row and to one reading of the weights."""
        title = f"{self.precision} on {self.isa}, {self.threads} threads: medians of one run"
        table = Table(title=title, caption=caption, box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for heading in ("rows", "step\nms", "/ 1 row", "/ read", "linear\nms", "/ 1 row", "/ read"):
            table.add_column(heading, justify="right")
        for rows in self.step_ms:
            table.add_row(str(rows), *self._row(self.step_ms, rows), *self._row(self.linear_ms, rows))
        table.add_section()
        table.add_row("read", number(self.read_ms, "{:.2f}"))
        table.add_row("prefill", f"{self.prefill_tokens_per_s:,.0f}", "tok/s")
        return table

    def _row(self, times: Mapping[int, float], rows: int) -> tuple[str, str, str]:
        ratios = (ratio(times[rows], times[min(times)]), ratio(times[rows], self.read_ms))
        return number(times[rows], "{:.2f}"), *(number(value, "{:.2f}x") for value in ratios)  # type: ignore[return-value]


def measure_kernels(
    model: LoadedModel,
    *,
    context: int = DEFAULT_CONTEXT,
    prefill_rows: int = PROMPT_TOKENS,
    rounds: int = DEFAULT_ROUNDS,
    advance: Callable[[], object] = lambda: None,
) -> KernelReport:
    """Measure a loaded model.

    A step is a chain of 1 to 64 rows of one sequence after `context` tokens; the prompt has PROMPT_TOKENS tokens, or as
    many as the model's context, in steps of `prefill_rows`. Each of the `rounds` measures everything once, in an order
    that is turned round from one to the next. advance: called after every round. The numbers are at least 1.

    Raises ConfigError when the model has no room for context and steps.
    """
    decoder = model.decoder
    _check(decoder, context)
    prompt = min(PROMPT_TOKENS, decoder.context_limit)
    store = decoder.new_store(max(context + max(ROWS), prompt))
    tokens = np.random.default_rng(0).integers(0, decoder.vocab_size, store.slots)
    _prefill(decoder, store, tokens[:context], prefill_rows)  # what the steps look back on

    read = decoder.kernels.weight_reader(packed_weights(decoder))
    jobs: dict[tuple[str, int], Job] = {("read", 0): read}
    for rows in ROWS:
        jobs["step", rows] = _step(decoder, store, tokens, context, rows)
        jobs["linear", rows] = _linear_layers(decoder, store, rows)
    jobs["prefill", prompt] = lambda: _prefill(decoder, store, tokens[:prompt], prefill_rows, last_logits=True)

    times: dict[tuple[str, int], list[float]] = {name: [] for name in jobs}
    for turn in range(rounds):
        for name in list(jobs) if turn % 2 == 0 else reversed(jobs):
            if turn == 0 or name[0] != "prefill":
                jobs[name]()  # as in a loop of its kind: what ran before leaves its traces in caches and threads
            times[name].append(_milliseconds(jobs[name], decoder.device))
        advance()
    medians = {name: median(values) for name, values in times.items()}
    return KernelReport(
        isa=decoder.kernels.name,
        precision=str(model.precision),
        threads=int(getattr(decoder.kernels, "threads", torch.get_num_threads())),
        read_ms=medians["read", 0],
        step_ms={rows: medians["step", rows] for rows in ROWS},
        linear_ms={rows: medians["linear", rows] for rows in ROWS},
        prefill_tokens_per_s=prompt / medians["prefill", prompt] * 1e3,
    )


def packed_weights(decoder: Decoder) -> list[Any]:
    """Every packed linear layer of the model in the order of execution, experts and lm_head included."""
    packed: list[Any] = []
    for layer in decoder.layers:
        packed += [layer.qkv, layer.output]
        if layer.mixture is None:
            packed += [layer.gate_up, layer.down]
        else:
            packed += [layer.mixture.router, *layer.mixture.gate_up, *layer.mixture.down]
    return [*packed, decoder.lm_head]


def _check(decoder: Decoder, context: int) -> None:
    most = decoder.context_limit - max(ROWS)
    if context > most:
        raise ConfigError(
            f"--context is {context}; at most {most} is possible here: the model has {decoder.context_limit} positions,"
            f" and the steps need {max(ROWS)} of them"
        )


def _step(decoder: Decoder, store: KVStore, tokens: IntArray, context: int, rows: int) -> Job:
    """A root and rows - 1 guesses in a line behind it, as a verification sees them."""
    batch = _chain(tokens, context, rows, shared=context + 1, logit_rows=np.arange(rows))
    return lambda: decoder.forward(batch, store)


def _prefill(decoder: Decoder, store: KVStore, tokens: IntArray, rows: int, last_logits: bool = False) -> None:
    """Compute the keys and values of a prompt, and the logits of its last token if they are wanted."""
    for first in range(0, len(tokens), rows):
        count = min(rows, len(tokens) - first)
        is_last = first + count == len(tokens)
        wanted = np.array([count - 1]) if last_logits and is_last else NO_ROWS
        decoder.forward(_chain(tokens, first, count, shared=first + count, logit_rows=wanted), store)


def _chain(tokens: IntArray, first: int, rows: int, *, shared: int, logit_rows: IntArray) -> TokenBatch:
    """Tokens first ... first + rows - 1 of a sequence whose position p lies in slot p."""
    slots = np.arange(first + rows)
    path = AttentionPath(slots, np.arange(rows), 0, shared)
    return TokenBatch(tokens[first : first + rows], slots[first:], slots[first:], [path], logit_rows)


def _linear_layers(decoder: Decoder, store: KVStore, rows: int) -> Job:
    """The products of one pass, each as in `Decoder.forward`, on activations that are made up.

    A mixture of experts is measured as a whole, routing and activation included.
    """
    kernels, architecture = decoder.kernels, decoder.architecture
    batch = _chain(np.arange(rows), 0, rows, shared=rows, logit_rows=np.arange(rows))
    prepared = kernels.prepare(batch, store, [])
    generator = torch.Generator().manual_seed(0)

    def made_up(features: int) -> Tensor:
        """Random rows, by way of `embed`, which knows how the device pads them."""
        table = torch.randn(max(ROWS), features, generator=generator).to(decoder.device)
        return kernels.embed(table, prepared, 1.0)

    x = made_up(architecture.hidden_size)
    attended = made_up(architecture.heads * architecture.head_dim)
    gated = made_up(architecture.intermediate_size)

    @torch.no_grad()
    def run() -> None:
        for layer in decoder.layers:
            kernels.norm_project(x, layer.attention_norm, layer.qkv)
            kernels.project_add(attended, layer.output, x, layer.output_norm)
            if layer.mixture is None:
                kernels.norm_project(x, layer.mlp_norm, layer.gate_up)
                kernels.project_add(gated, layer.down, x, layer.down_norm)
            else:
                kernels.mixture_add(x, layer.mlp_norm, layer.mixture, architecture.activation, x)
        kernels.logits(x, decoder.final_norm, decoder.lm_head, prepared, architecture.logit_softcap)

    return run


def _milliseconds(job: Job, device: torch.device) -> float:
    _finish(device)
    start = time.perf_counter()
    job()
    _finish(device)
    return (time.perf_counter() - start) * 1e3


def _finish(device: torch.device) -> None:
    """Wait for what a GPU still has to do; a CPU has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
