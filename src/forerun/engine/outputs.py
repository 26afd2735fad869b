"""What the engine gives back: plain data, finished or in pieces."""

from dataclasses import dataclass
from typing import Literal

from forerun.verification.logprobs import TokenLogprob

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class RequestStats:
    """What one answer cost.

    steps: target steps that decoded (prefill not counted). drafted: draft nodes verified. accepted: emitted tokens that
    came from a draft. Tokens emitted are accepted + steps, plus the first, which prefill gives; one less when the
    answer ends on an accepted token, after which there is no bonus.
    prefill_tokens: prompt tokens computed; cached_tokens: prompt tokens taken from the prefix cache.
    ttft_s: seconds from arrival to the first token, None before it. decode_s: seconds from the first to the last token.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    ttft_s: float | None = None
    decode_s: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens emitted per decoding step; None when nothing was drafted."""
        return self.decode_tokens / self.steps if self.drafted else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first per second of decoding; None for answers of one token."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else None


@dataclass(frozen=True)
class TokenChunk:
    """What one step added to one answer: maybe several tokens, and the text that became certain with them.

    sources: for each token "target", or the name of the drafter that guessed it. logprobs: one entry per token,
    if asked for. finish_reason, stats: of the whole answer, with its last chunk.
    """

    request_id: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: RequestStats | None = None


@dataclass(frozen=True)
class Completion:
    """One finished answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    sources: tuple[str, ...]
    stats: RequestStats
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """All answers to one prompt (`SamplingParams.n` of them, or none when the request was refused)."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    error: str | None = None

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.completions[0].text if self.completions else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first answer, an end token included."""
        return self.completions[0].token_ids if self.completions else ()

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.completions[0].finish_reason if self.completions else "error"

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Log-probabilities of the first answer's tokens, when they were asked for."""
        return self.completions[0].logprobs if self.completions else None

    @property
    def stats(self) -> RequestStats:
        """What the first answer cost."""
        return self.completions[0].stats if self.completions else RequestStats()

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)
