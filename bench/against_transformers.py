"""Plain decoding, forerun against transformers' generate(), on the same weights, prompts and threads, in turns.

    python bench/against_transformers.py [--model NAME] [--precision bf16] [--threads 2] [--tokens 64] [--rounds 5]

Both run greedily from the same converted checkpoint in one process; which goes first alternates. Prints the median over
all answers of tokens per second after the first token, and the median of the ratios pair by pair. transformers is a
development dependency only.
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from forerun import LLM, SamplingParams
from forerun.bench.measure import chat_prompt
from forerun.bench.workload import packaged_workloads


class FirstToken(BaseStreamer):
    """Notes when the first generated token arrives; generate() puts the prompt first."""

    def __init__(self) -> None:
        self.puts = 0
        self.at = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with each token."""
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Nothing to do."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    llm = LLM(options.model, precision=options.precision, threads=options.threads, cache={"prefix": False})
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    peer = AutoModelForCausalLM.from_pretrained(llm.model.path, dtype=dtype)
    prompts = [request.prompt for task in packaged_workloads(limit=2) for request in task.requests]
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)

    def ours(tokens: list[int]) -> float:
        (output,) = llm.generate([tokens], params, speculation=False, progress=False)
        return output.stats.decode_tokens_per_s or 0.0

    def theirs(tokens: list[int]) -> float:
        first = FirstToken()
        ids = torch.tensor([tokens])
        peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=options.tokens,
            max_new_tokens=options.tokens,
            do_sample=False,
            streamer=first,
        )
        return (options.tokens - 1) / (time.perf_counter() - first.at)

    speeds: dict[str, list[float]] = {"forerun": [], "transformers": []}
    for number in range(options.rounds + 1):
        prompt = chat_prompt(llm, prompts[number % len(prompts)])
        tokens = prompt if isinstance(prompt, list) else llm.tokenizer.encode(prompt)
        runs = [("forerun", ours), ("transformers", theirs)]
        for name, run in runs if number % 2 else reversed(runs):
            speed = run(tokens)
            if number:  # the first round warms up
                speeds[name].append(speed)
    ratios = [mine / other for mine, other in zip(speeds["forerun"], speeds["transformers"], strict=True)]
    print(f"{options.model}, {options.precision}, {options.threads} threads, plain greedy decoding, kernels "
          f"{llm.model.decoder.kernels.name}")  # fmt: skip
    for name, values in speeds.items():
        print(f"{name:>13}: {statistics.median(values):6.1f} tokens/s ({min(values):.1f} .. {max(values):.1f})")
    print(f"{'ratio':>13}: {statistics.median(ratios):6.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")


if __name__ == "__main__":
    main()
