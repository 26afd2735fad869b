"""What a step costs outside of the model: planning, drafting, laying out the batch, the choice, committing, the text.

    python bench/step_overhead.py [--steps 1000] [--repeats 5] [--growth 10000] [--real] [--json OUT]

A stand-in takes the model's place: its logits name the next token of a long JSON text, so that forward takes almost no
time, while the tokenizer, the vocabulary and everything around the model are the default model's. --real runs the
default model itself: slower, but with caches that the weights have swept, as in earnest. Prints the median of every
part in microseconds, at batch 1 and 8, plain and with the suffix drafter; `overhead` is the step without forward, and
`argmax` what numpy takes to read the logits of the nodes walked through. Then the median overhead in windows over many
steps, of one long answer and of many short ones: it must not grow.

With the stand-in every run is the same step by step; each is done --repeats times, and of each step and part the least
time counts, because other programs on the machine only ever add to it.
"""

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import forerun.engine.engine as engine_module
import forerun.verification.walk as walk_module
from forerun.config import DEFAULT_MODEL, BatchingConfig, EngineConfig
from forerun.control.fixed import FixedController
from forerun.drafting.base import DraftLimit
from forerun.drafting.suffix import SuffixDrafter
from forerun.engine.engine import Engine
from forerun.kernels.batch import TokenBatch
from forerun.kernels.cpu.prepared import prepare
from forerun.kernels.kv_store import KVStore
from forerun.models.loader import LoadedModel, load_model
from forerun.models.tokenizer import Tokenizer
from forerun.verification.sampling import SamplingParams

PARTS = ("plan", "propose", "place", "assemble", "prepare", "argmax", "verify", "commit", "report", "rest")
SHORT = 128  # tokens of a short answer
PROMPT = 64  # tokens of the prompt


class StandIn:
    """In the decoder's place: the token after position p is script[offset + p + 1], whatever stands before."""

    def __init__(self, script: Sequence[int], vocab_size: int) -> None:
        self.vocab_size, self.context_limit = vocab_size, len(script) - 1
        self.offset = 0
        self.kernels = SimpleNamespace(prepare=prepare)
        self._script = torch.tensor(script)
        self._rotary = [(torch.zeros(len(script), 4), torch.zeros(len(script), 4))]
        self._logits = torch.zeros(512, vocab_size)
        self._hot: Tensor | None = None

    def new_store(self, slots: int) -> KVStore:
        """A store as small as can be."""
        return KVStore.allocate(1, slots, 1, 8, torch.float32, torch.device("cpu"))

    def forward(self, batch: TokenBatch, store: KVStore) -> Tensor:
        """One step's logits, after the batch was laid out as for the native kernels."""
        self.kernels.prepare(batch, store, self._rotary)
        wanted = torch.as_tensor(batch.positions)[torch.as_tensor(batch.logit_rows)]
        if self._hot is not None:
            self._logits[torch.arange(len(self._hot)), self._hot] = 0.0
        self._hot = self._script[wanted + self.offset + 1]
        self._logits[torch.arange(len(self._hot)), self._hot] = 1.0
        return self._logits[: len(wanted)]


@dataclass(frozen=True)
class Case:
    """What is measured: with which drafter ("plain" is none), how many answers at a time, of how many tokens."""

    drafter: str
    batch: int
    answer: int
    steps: int


class Stopwatch:
    """Adds up how long named calls take within a step, and keeps one row of figures for every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, attribute: str, name: str) -> Callable[[], None]:
        """Time every call of an attribute from now on; calling what is returned puts it back."""
        call, now, clock = getattr(owner, attribute), self._now, time.perf_counter

        def timed(*arguments: Any, **named: Any) -> Any:
            start = clock()
            try:
                return call(*arguments, **named)
            finally:
                now[name] += clock() - start

        setattr(owner, attribute, timed)
        return lambda: setattr(owner, attribute, call)

    def end_step(self) -> None:
        """Split what was measured into parts that do not overlap."""
        now = self._now
        row = {name: now[name] for name in ("plan", "propose", "assemble", "prepare", "argmax", "commit", "report")}
        row["verify"] = now["verify"] - now["argmax"]
        row["place"] = now["draft"] - now["propose"]
        row["forward"] = now["forward"] - now["prepare"]
        row["overhead"] = now["step"] - row["forward"]
        row["rest"] = row["overhead"] - sum(row[name] for name in PARTS if name != "rest")
        self.steps.append(row)
        now.clear()


def script_of(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """A JSON text as models write it: keys and layout repeat, values only sometimes."""
    chance, ids, number = random.Random(0), [], 0
    words = ["lamp", "desk", "chair", "shelf", "green", "large", "oak", "paid", "open", "north", "berg", "ruiz"]
    while len(ids) < tokens:
        rows = []
        for _ in range(50):
            number += 1
            row = {"order": number, "item": " ".join(chance.sample(words, 2)), "quantity": chance.randint(1, 99)}
            rows.append(row | {"paid": chance.random() < 0.5, "customer": chance.choice(words)})
        ids += tokenizer.encode(json.dumps(rows, indent=2), add_special_tokens=False)
    return ids[:tokens]


def build(decoder: Any, tokenizer: Tokenizer, *, batch: int, context: int, suffix: bool) -> Engine:
    """An engine with the default settings."""
    speculation = EngineConfig().speculation
    return Engine(
        decoder,
        slots=batch * (context + 64),
        controller=FixedController(
            DraftLimit(speculation.width, speculation.depth, speculation.nodes), speculation.step_nodes
        ),
        drafters=[SuffixDrafter()] if suffix else [],
        tokenizer=tokenizer,
        context_length=context,
        batching=BatchingConfig(),
        seed=0,
    )


def measure(engine: Engine, script: list[int], *, batch: int, answer: int, steps: int) -> tuple[list[dict], int]:
    """Serve `batch` answers of `answer` tokens at a time until `steps` decoding steps are measured.

    Every round answers from another place of the script.
    """
    watch = Stopwatch()
    undo = [
        watch.watch(engine, "step", "step"),
        watch.watch(engine.scheduler, "plan", "plan"),
        watch.watch(engine, "_draft", "draft"),
        watch.watch(engine.speculation, "propose", "propose"),
        watch.watch(engine_module, "assemble", "assemble"),
        watch.watch(engine.decoder, "forward", "forward"),
        watch.watch(engine.decoder.kernels, "prepare", "prepare"),
        watch.watch(engine, "_verify", "verify"),
        watch.watch(walk_module, "checked_best", "argmax"),
        watch.watch(engine, "_commit", "commit"),
        watch.watch(engine, "_report", "report"),
    ]
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    tokens = offset = 0
    while len(watch.steps) < steps:
        if isinstance(engine.decoder, StandIn):
            engine.decoder.offset = offset
        prompt = script[offset : offset + PROMPT]
        offset = (offset + PROMPT + answer) % max(len(script) - 2 * (PROMPT + answer), 1)
        ids = [engine.add(prompt, params) for _ in range(batch)]
        engine.step()  # the prompt's own
        watch.end_step()
        watch.steps.pop()
        while engine.has_work and len(watch.steps) < steps:
            tokens += sum(len(chunk.token_ids) for chunk in engine.step())
            watch.end_step()
        for request_id in ids:
            engine.cancel(request_id)
            engine.collect(request_id)
    for put_back in undo:
        put_back()
    return watch.steps, tokens


def least(runs: Sequence[Sequence[dict[str, float]]]) -> list[dict[str, float]]:
    """Of every step and part the least time of several runs that did the same."""
    return [{name: min(step[name] for step in steps) for name in steps[0]} for steps in zip(*runs, strict=True)]


def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Median of each part, microseconds."""
    return {name: statistics.median(step[name] for step in steps) * 1e6 for name in (*PARTS, "overhead", "forward")}


def windows(steps: Sequence[dict[str, float]], count: int = 10) -> list[float]:
    """Median overhead of each of `count` equal parts of a run, microseconds."""
    size = len(steps) // count
    return [
        statistics.median(step["overhead"] for step in steps[at * size : (at + 1) * size]) * 1e6 for at in range(count)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="decoding steps for the medians of each case")
    parser.add_argument("--repeats", type=int, default=5, help="how often everything is done")
    parser.add_argument("--growth", type=int, default=10_000, help="decoding steps over which to look for growth")
    parser.add_argument("--real", action="store_true", help="the default model in place of the stand-in; no growth")
    parser.add_argument("--threads", type=int, default=2, help="of the real model")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads if options.real else 1)
    model: LoadedModel = load_model(DEFAULT_MODEL)
    tokenizer, vocabulary = model.tokenizer, model.decoder.vocab_size
    result: dict[str, Any] = {"model": "real" if options.real else "stand-in", "us": {}, "windows_us": {}}
    print(f"{'us, medians':24}" + "".join(f"{name:>10}" for name in (*PARTS, "overhead", "forward")) + "  tokens/step")
    script = script_of(tokenizer, 8 * options.growth + 1000 * SHORT)
    repeats = 1 if options.real else options.repeats

    def run(case: Case) -> tuple[list[dict[str, float]], int]:
        decoder = model.decoder if options.real else StandIn(script, vocabulary)
        engine = build(
            decoder, tokenizer, batch=case.batch, context=case.answer + PROMPT + 64, suffix=case.drafter == "suffix"
        )
        return measure(engine, script, batch=case.batch, answer=case.answer, steps=case.steps)

    cases = [Case(drafter, batch, SHORT, options.steps) for batch in (1, 8) for drafter in ("plain", "suffix")]
    runs = [[run(case) for case in cases] for _ in range(repeats)]
    for case, *results in zip(cases, *runs, strict=True):
        row = medians(least([steps for steps, _ in results])[case.steps // 10 :])
        pace = results[0][1] / case.steps / case.batch
        result["us"][f"{case.drafter}, batch {case.batch}"] = row
        print(f"{f'{case.drafter}, batch {case.batch}':24}" + "".join(f"{value:10.1f}" for value in row.values())
              + f"{pace:13.2f}")  # fmt: skip
    if options.growth and not options.real:
        print(f"\noverhead in ten windows over {options.growth} steps at batch 1, us, medians")
        for drafter in ("plain", "suffix"):
            for kind, answer in (("one answer", 8 * options.growth), ("short answers", SHORT)):
                case = Case(drafter, 1, answer, options.growth)
                row = windows(least([run(case)[0] for _ in range(repeats)]))
                result["windows_us"][f"{drafter}, {kind}"] = row
                print(f"{f'{drafter}, {kind}':24}" + "".join(f"{value:9.1f}" for value in row))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
