"""Promise 1 on a real model: answers to real prompts, greedy and seeded, are identical with speculation and without."""

import json
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.bench.measure import chat_prompt
from forerun.bench.workload import packaged_workloads
from forerun.errors import ModelNotFoundError

WORKLOADS = Path(__file__).parents[3] / "shared" / "workloads"
PER_FILE = 16
TOKENS = 40

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm():
    try:
        with LLM("smollm2-135m-instruct", threads=2, batching={"max_batch": 8}) as model:
            yield model
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def prompts():
    """Prompts of the shared workloads, evenly spread; our own where those are not at hand."""
    files = sorted(WORKLOADS.glob("*.jsonl"))
    if not files:
        return [request.prompt for task in packaged_workloads() for request in task.requests]
    rows = [file.read_text(encoding="utf-8").splitlines() for file in files]
    return [json.loads(lines[at * len(lines) // PER_FILE])["prompt"] for lines in rows for at in range(PER_FILE)]


@pytest.mark.timeout(1200)
def test_real_answers_are_identical_with_and_without_speculation(llm):
    """Plain against speculative, eight at a time, and some of them alone; every second request is sampled."""
    kinds = [{}, {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}]
    asked = [
        (chat_prompt(llm, prompt), SamplingParams(max_tokens=TOKENS, seed=at, **kinds[at % 2]))
        for at, prompt in enumerate(prompts())
    ]
    asked = [(tokens, params) for tokens, params in asked if len(tokens) < 1500]
    assert len(asked) >= 60 or not WORKLOADS.exists()
    tokens, params = [entry[0] for entry in asked], [entry[1] for entry in asked]
    plain = llm.generate(tokens, params, speculation=False)
    fast = llm.generate(tokens, params)  # finds its prompts in the prefix cache
    assert [output.token_ids for output in fast] == [output.token_ids for output in plain]
    assert [output.finish_reason for output in fast] == [output.finish_reason for output in plain]
    assert sum(output.stats.accepted for output in fast) > len(asked), "nothing was speculated, so nothing was shown"
    alone = slice(0, len(asked), 7)
    for one, own, expected in zip(tokens[alone], params[alone], plain[alone], strict=True):
        (output,) = llm.generate([one], own)
        assert output.token_ids == expected.token_ids


def test_log_probabilities_of_accepted_drafts_are_those_of_plain_decoding(llm):
    prompt = llm.chat_prompt([{"role": "user", "content": "Count from one to twenty, as a JSON list of numbers."}])
    params = SamplingParams(max_tokens=40, logprobs=5)
    (plain,) = llm.generate([prompt], params, speculation=False)
    (fast,) = llm.generate([prompt], params)
    assert fast.stats.accepted > 0
    assert fast.logprobs == plain.logprobs
