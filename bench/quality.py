"""What a precision costs in quality: perplexity on a fixed text, and how far greedy answers agree with fp32.

    python bench/quality.py [--precisions fp32,bf16,bf16+int8] [--text FILE] [--tokens 8192] [--window 1024]
                            [--workload FILE ...] [--limit N] [--max-tokens 64] [--json FILE]

Perplexity: teacher-forced passes through the engine's decoder, over windows that do not overlap; the first token of a
window is not predicted. Agreement: the share of positions of fp32's own greedy answers at which the precision, shown
the same tokens before, has the same likeliest token; and how many tokens its own answers have in common with fp32's
before the first difference. Prints a table in Markdown. bf16+int8 are weights in bf16 and a key/value cache in int8.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.bench.measure import chat_prompt
from forerun.bench.workload import read_workload, read_workloads
from forerun.errors import ConfigError, ForerunError
from forerun.kernels.batch import AttentionPath, TokenBatch
from forerun.kernels.kv_store import KVStore
from forerun.models.decoder import Decoder

BASELINE = "fp32"
CHUNK = 256  # rows of a step
DOCUMENT = 1000  # characters; shorter prompts are instructions, not text
TEXT = Path(__file__).resolve().parents[2] / "shared" / "workloads" / "prose.jsonl"


@dataclass(frozen=True)
class Answer:
    """A prompt and its greedy answer, as token ids."""

    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Quality:
    """One precision's figures.

    agreement: share of the positions of fp32's answers. common_prefix: tokens, mean over the prompts, of answers that
    have `answer_tokens` in the mean with fp32. same_answers: answers that are fp32's to the last token.
    """

    precision: str
    kernels: str
    perplexity: float
    agreement: float
    common_prefix: float
    answer_tokens: float
    same_answers: int


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--precisions",
        default="fp32,bf16",
        help="comma-separated; fp32 is added where it is missing; bf16+int8: int8 keys and values",
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--text", type=Path, default=TEXT, help="JSON lines with long prompts, or a plain text file")
    parser.add_argument("--tokens", type=_at_least_two, default=8192, help="most tokens of the text")
    parser.add_argument("--window", type=_at_least_two, default=1024, help="tokens of context for the perplexity")
    parser.add_argument("--workload", type=Path, nargs="+", default=[], help="prompts; default: the packaged ones")
    parser.add_argument("--limit", type=int, default=None, help="only so many prompts of each workload")
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file too")
    options = parser.parse_args()
    try:
        run(options)
    except ForerunError as error:
        sys.exit(f"error: {error}")


def run(options: argparse.Namespace) -> None:
    """All precisions one after the other, fp32 first: the others are compared with its answers."""
    check_writable(options.json)
    text = read_text(options.text)
    prompts = [request.prompt for task in read_workloads(options.workload, options.limit) for request in task.requests]
    params = SamplingParams(max_tokens=options.max_tokens)
    wanted = [word.strip() for word in options.precisions.split(",") if word.strip()]
    baseline: list[Answer] = []
    rows: list[Quality] = []
    tokens = 0
    for precision in dict.fromkeys([BASELINE, *wanted]):
        weights, _, cache = precision.partition("+")
        settings = {"prefix": False, "precision": cache or "auto"}
        with LLM(options.model, precision=weights, threads=options.threads, cache=settings) as llm:
            decoder = llm.model.decoder
            if options.window > decoder.context_limit:
                raise ConfigError(f"--window is {options.window}; the model allows at most {decoder.context_limit}")
            ids = llm.tokenizer.encode(text)[: options.tokens]
            tokens = len(ids)
            answers = greedy_answers(llm, prompts, params)
            baseline = baseline or answers
            common = [common_prefix(a.tokens, b.tokens) for a, b in zip(answers, baseline, strict=True)]
            rows.append(
                Quality(
                    precision=precision,
                    kernels=decoder.kernels.name,
                    perplexity=perplexity(decoder, ids, options.window),
                    agreement=teacher_forced_agreement(decoder, baseline),
                    common_prefix=statistics.mean(common),
                    answer_tokens=statistics.mean(len(answer.tokens) for answer in baseline),
                    same_answers=sum(a.tokens == b.tokens for a, b in zip(answers, baseline, strict=True)),
                )
            )
    print(f"{options.model}; {tokens} tokens of {options.text.name} in windows of {options.window}; {len(prompts)} "
          f"prompts, up to {options.max_tokens} tokens each\n")  # fmt: skip
    print(markdown(rows, len(prompts)))
    if options.json is not None:
        head = {"model": options.model, "text": options.text.name, "tokens": tokens, "window": options.window}
        head |= {"prompts": len(prompts), "max_tokens": options.max_tokens}
        options.json.write_text(json.dumps({**head, "precisions": [asdict(row) for row in rows]}, indent=2) + "\n")


def check_writable(file: Path | None) -> None:
    """Find out before the measurement, not after it. Raises ConfigError."""
    try:
        if file is not None:
            file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"cannot write the figures to {file}: {error}; choose another place with --json") from error


def read_text(file: Path) -> str:
    """The text of a file; of JSON lines the prompts that are documents, one after the other. Raises ConfigError."""
    if file.suffix == ".jsonl":
        prompts = [request.prompt for request in read_workload(file).requests]
        text = "\n\n".join(prompt for prompt in prompts if len(prompt) >= DOCUMENT)
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the text {file}: {error}") from error
    if not text.strip():
        raise ConfigError(f"{file} holds no text (of JSON lines, prompts of {DOCUMENT} characters or more are taken)")
    return text


def greedy_answers(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[Answer]:
    """Plain decoding through the engine. Raises ConfigError if a prompt has no answer."""
    given = [chat_prompt(llm, prompt) for prompt in prompts]
    ids = [llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]
    answers: list[Answer] = []
    for prompt, output in zip(ids, llm.generate(ids, params, speculation=False), strict=True):
        if output.error is not None or not output.token_ids:
            raise ConfigError(f"a prompt of {len(prompt)} tokens has no answer ({output.error}); take it out")
        answers.append(Answer(prompt, list(output.token_ids)))
    return answers


def perplexity(decoder: Decoder, tokens: Sequence[int], window: int) -> float:
    """Exp of the mean negative log-probability of the tokens, each given those before it in its window."""
    store = decoder.new_store(window)
    total, count = 0.0, 0
    for start in range(0, len(tokens), window):
        own = np.asarray(tokens[start : start + window], np.int64)
        for first, logits in teacher_forced(decoder, store, own, 0):
            following = torch.from_numpy(own[first + 1 : first + 1 + len(logits)])
            log_probabilities = torch.log_softmax(logits[: len(following)].cpu().double(), dim=-1)
            total -= float(log_probabilities.gather(1, following[:, None]).sum())
            count += len(following)
    if not count:
        raise ConfigError(f"a text of {len(tokens)} tokens predicts nothing; take a longer one")
    return math.exp(total / count)


def teacher_forced_agreement(decoder: Decoder, answers: Sequence[Answer]) -> float:
    """Share of the answers' tokens that are the likeliest (of equals the lowest id) after what stands before them."""
    same, count = 0, 0
    for answer in answers:
        tokens = np.asarray([*answer.prompt, *answer.tokens[:-1]], np.int64)
        store = decoder.new_store(len(tokens))
        parts = teacher_forced(decoder, store, tokens, len(answer.prompt) - 1)
        likeliest = np.concatenate([logits.cpu().numpy().argmax(-1) for _, logits in parts])
        same += int((likeliest == np.asarray(answer.tokens)).sum())
        count += len(answer.tokens)
    return same / count


def teacher_forced(
    decoder: Decoder, store: KVStore, tokens: np.ndarray[tuple[int], np.dtype[np.int64]], wanted: int
) -> Iterator[tuple[int, Tensor]]:
    """Logits after each token from position `wanted` on, in chunks: (first position, float32 [rows, vocabulary])."""
    for first in range(0, len(tokens), CHUNK):
        slots = np.arange(min(first + CHUNK, len(tokens)))
        rows = np.arange(len(slots) - first)
        path = AttentionPath(slots, rows, 0, len(slots))
        logit_rows = rows[max(0, wanted - first) :]
        batch = TokenBatch(tokens[slots[first:]], slots[first:], slots[first:], [path], logit_rows)
        logits = decoder.forward(batch, store)
        if len(logit_rows):
            yield max(first, wanted), logits


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers have in common before the first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def markdown(rows: Sequence[Quality], prompts: int) -> str:
    """The figures as a table; the first row is fp32's."""
    lines = [
        "| precision | kernels | perplexity | to fp32 | same token, fp32's text | common prefix | same answers |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        change = row.perplexity / rows[0].perplexity - 1
        lines.append(
            f"| {row.precision} | {row.kernels} | {row.perplexity:.4f} | {change:+.2%} | {row.agreement:.2%} | "
            f"{row.common_prefix:.1f} of {row.answer_tokens:.1f} tokens | {row.same_answers} of {prompts} |"
        )
    return "\n".join(lines)


def _at_least_two(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{number} is too small: the second token is the first that is predicted")
    return number


if __name__ == "__main__":
    main()
