"""Answers as other programs read them: the JSON of `forerun generate`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.engine.outputs import Completion, RequestOutput, RequestStats


def answer_json(output: "RequestOutput") -> dict[str, Any]:
    """One prompt's answer; of a refused prompt an empty one with `error`.

    With n > 1 the first answer is on top, with its own statistics; all are in `completions`, and `usage` is their sum.
    """
    if output.completions:
        answer = _completion_json(output.completions[0])
    else:
        answer = {"text": output.text, "token_ids": [], "finish_reason": output.finish_reason, "error": failure(output)}
        answer["stats"] = stats_json(output.stats)
    answer["usage"] = {
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": sum(len(completion.token_ids) for completion in output.completions),
    }
    if len(output.completions) > 1:
        answer["completions"] = [_completion_json(completion) for completion in output.completions]
    return answer


def stats_json(stats: "RequestStats") -> dict[str, Any]:
    """Counts and rates of one answer; a rate without a denominator is None."""
    return {
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_length": stats.mean_accepted_length,
        "decode_tokens_per_s": stats.decode_tokens_per_s,
        "ttft_ms": None if stats.ttft_s is None else stats.ttft_s * 1e3,
    }


def failure(output: "RequestOutput") -> str | None:
    """Why a prompt has no complete answer; None when it has."""
    if output.error is not None or not output.completions:
        return output.error or "the request ended without an answer"
    return next((completion.error for completion in output.completions if completion.error is not None), None)


def _completion_json(completion: "Completion") -> dict[str, Any]:
    answer: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if completion.error is not None:
        answer["error"] = completion.error
    if completion.logprobs is not None:
        answer["logprobs"] = [asdict(logprob) for logprob in completion.logprobs]
    answer["stats"] = stats_json(completion.stats)
    return answer
