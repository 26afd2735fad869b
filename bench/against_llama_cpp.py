"""forerun against llama.cpp: the same model, prompts, tokens and threads, greedy, in turns within one run.

    python bench/against_llama_cpp.py --peer-python peer/bin/python [--precision int8] [--modes plain,prefill]
        [--workload json.jsonl ...] [--limit 6] [--max-tokens 128] [--rounds 3] [--threads 2] [--json OUT]

llama.cpp is the server of the package `xllamacpp`, in a virtual environment of its own (python -m venv peer &&
peer/bin/pip install xllamacpp); forerun does not need it. It answers with forerun's model in Q8_0, `-fa off`, and gets
the token ids that forerun's chat template gives. Neither side keeps anything of a prompt for the next one, except what
a drafter learns. Times are by each side's own clock, without HTTP. Modes:

plain        one request at a time: tokens after the first per second after the first
prefill      a prompt of --prefill-tokens tokens: its tokens per second until the first token of the answer
speculation  as plain: forerun's suffix drafter against every kind of draft-less speculation that llama.cpp has, in the
             settings of SPECULATIONS; answers end where the model ends them, drafters start each workload and round
             without memory, and each answer is compared with the plain one of the same side
concurrency  --concurrency requests at once: tokens per second over the whole time, prompts included, and while all of
             them decode; forerun with the suffix drafter as well

Prints tables in Markdown: medians, and the medians of the ratios pair by pair.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from comparison import Arrivals, Figures, Speed, Table, Together, compare, markdown
from llama_cpp_peer import PeerServer, check_installed, ngram_cache, ngram_map, ngram_mod, q8_0_file, serve

from forerun import LLM, SamplingParams
from forerun.bench.measure import Answer, chat_prompt
from forerun.bench.workload import read_workloads
from forerun.config import DEFAULT_MODEL
from forerun.engine.outputs import RequestOutput
from forerun.errors import EngineError, ForerunError

MODES = ("plain", "prefill", "speculation", "concurrency")
OURS, OURS_FAST, THEIRS = "forerun", "forerun, suffix", "llama.cpp"
BUSY = 0.5  # load above which the figures are not to be trusted
PAUSE_S = 0.05  # between turns, until the threads of the side that has just worked have stopped spinning
SPECULATIONS = (
    ngram_map("ngram-simple", 12, 48),
    ngram_map("ngram-simple", 3, 8),
    ngram_map("ngram-simple", 2, 4),
    ngram_map("ngram-map-k", 12, 48),
    ngram_map("ngram-map-k", 2, 4),
    ngram_map("ngram-map-k4v", 12, 48),
    ngram_map("ngram-map-k4v", 3, 8),
    ngram_mod(24, 48, 64),
    ngram_mod(3, 0, 8),
    ngram_cache(3),
    ngram_cache(8),
)
"""llama.cpp's draft-less speculations, each as it comes and with shorter patterns, which suit short answers better."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Bench:
    """What all modes share. prompts: token ids by workload."""

    llm: LLM
    prompts: Mapping[str, Sequence[list[int]]]
    model: Path
    options: argparse.Namespace

    def serve(self, **settings: Any) -> AbstractContextManager[PeerServer]:
        """llama.cpp's server with room for the longest request."""
        longest = max(len(tokens) for each in self.prompts.values() for tokens in each)
        tokens = max(longest, self.options.prefill_tokens) + self.options.max_tokens + 64  # guesses of the last step
        return serve(
            self.options.peer_python,
            self.model,
            threads=self.options.threads,
            context=-(-tokens // 256) * 256,
            **settings,
        )

    def rounds(self, mode: str) -> Iterator[tuple[int, str, Sequence[list[int]]]]:
        """(round, workload, its first --limit prompts), each workload in each round."""
        for number in range(self.options.rounds):
            for task, prompts in self.prompts.items():
                print(f"{mode}, round {number + 1} of {self.options.rounds}, {task}", file=sys.stderr)
                yield number, task, prompts[: self.options.limit]

    def params(self, max_tokens: int | None = None, *, ignore_eos: bool = True) -> SamplingParams:
        """Greedy, and --max-tokens unless told otherwise."""
        return SamplingParams(max_tokens=max_tokens or self.options.max_tokens, ignore_eos=ignore_eos)

    def ours(self, tokens: list[int], params: SamplingParams, *, speculation: bool = False) -> Answer:
        """forerun's answer."""
        (output,) = self.llm.generate([tokens], params, speculation=speculation, progress=False)
        _check(output)
        stats = output.stats
        return Answer(output.token_ids, stats.ttft_s, stats.decode_s, stats.decode_tokens)

    def ours_together(self, prompts: Sequence[list[int]], params: SamplingParams, *, speculation: bool) -> Together:
        """forerun's answers to several prompts at once."""
        if speculation:
            self.llm.clear_history()
        engine = self.llm.engine
        start = time.perf_counter()
        arrivals: dict[int, Arrivals] = {engine.add(each, params, speculate=speculation): [] for each in prompts}
        while not all(map(engine.is_done, arrivals)):
            chunks = engine.step()
            now = time.perf_counter()
            for chunk in chunks:
                own = arrivals[chunk.request_id]
                own.append((now, len(chunk.token_ids) + (own[-1][1] if own else 0)))
        wall_s = time.perf_counter() - start
        outputs = [engine.collect(request_id) for request_id in arrivals]
        for output in outputs:
            _check(output)
        return Together(wall_s, list(arrivals.values()), [output.token_ids for output in outputs])


def _check(output: RequestOutput) -> None:
    if output.finish_reason == "error":
        why = output.error or (output.completions[0].error if output.completions else None)
        raise EngineError(f"forerun gave no answer to a prompt of {output.prompt_tokens} tokens: {why}")


def theirs(server: PeerServer, tokens: list[int], params: SamplingParams) -> Answer:
    """llama.cpp's answer."""
    return server.complete(tokens, params.max_tokens, ignore_eos=params.ignore_eos)


def theirs_together(server: PeerServer, prompts: Sequence[list[int]], params: SamplingParams) -> Together:
    """llama.cpp's answers to several prompts at once."""
    stream = partial(server.stream, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
    with ThreadPoolExecutor(len(prompts)) as pool:
        start = time.perf_counter()
        arrivals = list(pool.map(stream, prompts))
        return Together(time.perf_counter() - start, arrivals)


def in_turns(number: int, runs: Mapping[str, Callable[[], Result]]) -> dict[str, Result]:
    """Every run's result; with each number another one goes first."""
    names = list(runs)
    shift = number % len(names)
    results = {}
    for name in names[shift:] + names[:shift]:
        time.sleep(PAUSE_S)
        results[name] = runs[name]()
    return {name: results[name] for name in names}


def plain(bench: Bench) -> Table:
    """Plain decoding, one request at a time."""
    turns: dict[str, list[dict[str, Speed]]] = {task: [] for task in bench.prompts}
    params = bench.params()
    with bench.serve() as server:
        for number, task, prompts in bench.rounds("plain"):
            for place, tokens in enumerate(prompts, number):
                runs = {OURS: partial(bench.ours, tokens, params), THEIRS: partial(theirs, server, tokens, params)}
                turns[task].append(_decoding(in_turns(place, runs)))
    return {task: compare(each, OURS) for task, each in turns.items()}


def _decoding(answers: Mapping[str, Answer]) -> dict[str, Speed]:
    return {name: Speed(answer.decode_tokens, answer.decode_s) for name, answer in answers.items()}


def prefill(bench: Bench) -> Table:
    """Prompts of one length, cut from the workloads' prompts put one after the other."""
    length, params = bench.options.prefill_tokens, bench.params(1)
    turns: dict[str, list[dict[str, Speed]]] = {task: [] for task in bench.prompts}
    with bench.serve() as server:
        for number, task, _ in bench.rounds("prefill"):
            text = [token for prompt in bench.prompts[task] for token in prompt]
            for place in range(bench.options.limit):
                start = place * length % max(1, len(text) - length)
                tokens = (text[start:] + text * (length // len(text)))[:length]
                runs = {OURS: partial(bench.ours, tokens, params), THEIRS: partial(theirs, server, tokens, params)}
                answers = in_turns(number + place, runs)
                turns[task].append({name: Speed(length, each.ttft_s or 0.0) for name, each in answers.items()})
    return {task: compare(each, OURS) for task, each in turns.items()}


def speculation(bench: Bench) -> Table:
    """Both sides plain and with all their speculations."""
    turns: dict[str, list[dict[str, Answer]]] = {task: [] for task in bench.prompts}
    params = bench.params(ignore_eos=bench.options.ignore_eos)
    ways = [way for way in SPECULATIONS if way.type in bench.options.speculations]
    for number, task, prompts in bench.rounds("speculation"):
        bench.llm.clear_history()
        with ExitStack() as stack:
            servers = {THEIRS: stack.enter_context(bench.serve())}
            for way in ways:
                servers[way.name] = stack.enter_context(bench.serve(speculation=way))
            for place, tokens in enumerate(prompts, number):
                runs = {
                    OURS: partial(bench.ours, tokens, params),
                    OURS_FAST: partial(bench.ours, tokens, params, speculation=True),
                    **{name: partial(theirs, server, tokens, params) for name, server in servers.items()},
                }
                turns[task].append(in_turns(place, runs))
    return {task: compare(list(map(_decoding, each)), OURS_FAST, _identical(each)) for task, each in turns.items()}


def _identical(turns: Sequence[Mapping[str, Answer]]) -> dict[str, tuple[int, int]]:
    """How many answers are token for token the same side's plain one, of how many."""
    return {
        name: (sum(turn[name].token_ids == turn[_plain_of(name)].token_ids for turn in turns), len(turns))
        for name in turns[0]
        if name != _plain_of(name)
    }


def _plain_of(name: str) -> str:
    return OURS if name in (OURS, OURS_FAST) else THEIRS


def concurrency(bench: Bench) -> tuple[Table, Table]:
    """Many requests at once: over the whole time, and, plain ones only, while all decode.

    A workload's prompts are repeated where it has too few.
    """
    count, params = bench.options.concurrency, bench.params()
    turns: dict[str, list[dict[str, Together]]] = {task: [] for task in bench.prompts}
    with bench.serve(parallel=count) as server:
        for number, task, _ in bench.rounds("concurrency"):
            prompts = [bench.prompts[task][place % len(bench.prompts[task])] for place in range(count)]
            runs = {
                OURS: partial(bench.ours_together, prompts, params, speculation=False),
                OURS_FAST: partial(bench.ours_together, prompts, params, speculation=True),
                THEIRS: partial(theirs_together, server, prompts, params),
            }
            turns[task].append(in_turns(number, runs))
    whole, full = {}, {}
    for task, each in turns.items():
        pairs = [pair for turn in each for pair in zip(turn[OURS].answers, turn[OURS_FAST].answers, strict=True)]
        identical = {OURS_FAST: (sum(a == b for a, b in pairs), len(pairs))}
        whole[task] = compare([{name: run.whole for name, run in turn.items()} for turn in each], OURS, identical)
        full[task] = compare([{name: turn[name].full for name in (OURS, THEIRS)} for turn in each], OURS)
    return whole, full


def best_rival(figures: Mapping[str, Figures]) -> str:
    """Which of llama.cpp's speculations has the highest median."""
    rivals = [name for name in figures if name not in (OURS, OURS_FAST, THEIRS)]
    return max(rivals, key=lambda name: figures[name].median_per_s)


def names_in(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of lists such as a,b of the names allowed."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if strangers := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"no {', '.join(map(repr, strangers))}; allowed: {', '.join(allowed)}")
        return names

    return parse


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = sorted({way.type for way in SPECULATIONS})
    parser.add_argument("--peer-python", type=Path, default=Path(sys.executable), help="a Python that has xllamacpp")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="alias or .gguf file")
    parser.add_argument("--precision", default="bf16", help="forerun's; passed through")
    parser.add_argument("--modes", type=names_in(MODES), default=list(MODES), help=",".join(MODES))
    parser.add_argument("--workload", type=Path, action="append", default=[], help="repeatable; default: the packaged")
    parser.add_argument("--limit", type=positive, default=6, help="prompts of each workload, one at a time")
    parser.add_argument("--max-tokens", type=positive, default=128)
    parser.add_argument("--prefill-tokens", type=positive, default=512)
    parser.add_argument("--concurrency", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--speculations", type=names_in(ways), default=ways, help=",".join(ways))
    parser.add_argument("--ignore-eos", action="store_true", help="in the mode speculation too")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> Bench:
    """Both models and the prompts. Raises ForerunError when something is missing."""
    check_installed(options.peer_python)
    model = q8_0_file(options.model)
    llm = LLM(
        options.model,
        precision=options.precision,
        threads=options.threads,
        cache={"prefix": False},
        speculation={"method": "suffix"},
        batching={"max_batch": max(32, options.concurrency)},
    )
    most = max(options.limit, options.concurrency if "concurrency" in options.modes else 1)
    prompts = {}
    for workload in read_workloads(options.workload, most):
        rendered = [chat_prompt(llm, request.prompt) for request in workload.requests]
        prompts[workload.name] = [llm.tokenizer.encode(each) if isinstance(each, str) else each for each in rendered]
    return Bench(llm, prompts, model, options)


def show(text: str) -> None:
    """Print at once: a whole run takes long."""
    print(text, flush=True)


def measure(bench: Bench) -> dict[str, Any]:
    """Run the modes and print their tables; all figures for JSON."""
    results: dict[str, Table] = {}
    rivals: dict[str, str] = {}
    for mode in bench.options.modes:
        if mode == "plain":
            results[mode] = plain(bench)
            show(markdown("Plain decoding, batch 1", results[mode]))
        elif mode == "prefill":
            results[mode] = prefill(bench)
            show(markdown(f"Prefill, {bench.options.prefill_tokens} tokens", results[mode]))
        elif mode == "speculation":
            results[mode] = speculation(bench)
            rivals = {task: best_rival(figures) for task, figures in results[mode].items() if figures}
            show(markdown("Speculation, batch 1 (bold: llama.cpp's best)", results[mode], bold=rivals))
        else:
            whole, full = concurrency(bench)
            alone = {task: {**row, OURS_FAST: row[OURS]} for task, row in results.get("plain", {}).items() if row}
            results |= {mode: whole, "concurrency, all decoding": full}
            title = f"{bench.options.concurrency} requests at once"
            show(markdown(f"{title}, the whole time, prompts included", whole, alone=alone))
            show(markdown(f"{title}, while all decode", full, alone=alone))
    figures = {
        mode: {task: {name: asdict(each) for name, each in row.items()} for task, row in table.items()}
        for mode, table in results.items()
    }
    return {"best_rival": rivals, "figures": figures}


def warm_up(bench: Bench, server: PeerServer) -> None:
    """Let both sides pay for what they do for the first time."""
    tokens, params = next(iter(bench.prompts.values()))[0], bench.params(16)
    in_turns(0, {OURS: partial(bench.ours, tokens, params), THEIRS: partial(theirs, server, tokens, params)})


def main() -> int:
    """Measure and print. Exit status 1, with one line, when something is missing."""
    options = read_options()
    try:
        bench = prepare(options)
        load = os.getloadavg()[0]
        with bench.serve() as server:
            warm_up(bench, server)
            about = server.about
        kernels = bench.llm.model.decoder.kernels.name
        show(
            f"{options.model}, {options.threads} threads, {options.max_tokens} tokens, {options.limit} prompts of each "
            f"workload, {options.rounds} rounds; load of the machine before the start: {load:.1f}. forerun: "
            f"{options.precision}, kernels {kernels}. llama.cpp: Q8_0, xllamacpp {about['version']}, "
            f"{about['system']}\n"
        )
        if load > BUSY:
            show(
                "**The machine was busy.** llama.cpp's threads spin while they wait for one another, so other work "
                "slows it down out of all proportion: these figures compare nothing.\n"
            )
        report = {"options": vars(options), "kernels": kernels, "load": load, "peer": about, **measure(bench)}
    except ForerunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
