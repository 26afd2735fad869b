"""One answer in the making, from arrival to its end. It decides when the answer ends.

Nothing here schedules, drafts or computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forerun.cache import SequenceSlots
from forerun.drafting.base import DraftContext
from forerun.engine.outputs import Completion, FinishReason, RequestStats, TokenChunk
from forerun.engine.text import AnswerText
from forerun.verification.choice import SamplingState
from forerun.verification.logprobs import TokenLogprob
from forerun.verification.sampling import SamplingParams


@dataclass(eq=False)
class Request:
    """One answer: tokens so far, sampling state, KV slots, text and statistics.

    request_id: unique in the engine; parent_id and index: the prompt's id, and which of its n answers this is.
    tokens: prompt and answer; shared with drafters, which only read it. limit: greatest length of `tokens`.
    state, text and slots are filled in by the engine when it accepts the request.
    """

    request_id: int
    parent_id: int
    index: int
    prompt_length: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    limit: int
    end_tokens: frozenset[int]
    state: SamplingState
    text: AnswerText
    slots: SequenceSlots
    tenant: str = ""
    speculate: bool = True
    arrived_at: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    full_text: list[str] = field(default_factory=list)
    first_token_at: float | None = None
    prefilled: int = 0  # prompt tokens counted as computed, or found in the prefix cache
    reported: int = 0  # tokens of the answer that chunks have already told of

    @property
    def answer(self) -> list[int]:
        """The tokens emitted so far."""
        return self.tokens[self.prompt_length :]

    @property
    def finished(self) -> bool:
        """Whether the answer has ended, for whatever reason."""
        return self.finish_reason is not None

    @property
    def decoding(self) -> bool:
        """Whether only the last token is left to compute, so that the next step decodes."""
        return self.slots.computed == len(self.tokens) - 1

    @property
    def room(self) -> int:
        """How many levels a draft tree may have: one token of what remains is the bonus token."""
        return self.limit - len(self.tokens) - 1

    def draft_context(self) -> DraftContext:
        """This request as drafters see it now."""
        return DraftContext(
            self.request_id, self.tokens, self.prompt_length, self.params, self.seed, max(self.room, 0), self.tenant
        )

    def take(self, token: int) -> bool:
        """Add an emitted token; True when it ends the answer."""
        self.tokens.append(token)
        emitted = len(self.tokens) - self.prompt_length
        if token in self.end_tokens:
            self.text.push(token, hidden=not (self.params.include_stop and token in self.params.stop_token_ids))
            self.finish("stop")
        elif self.text.push(token, may_stop=emitted >= self.params.min_tokens):
            self.finish("stop")
        elif len(self.tokens) >= self.limit:
            self.finish("length")
        return self.finished

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End the answer. A request ends once: a second end is a fault of the engine."""
        if self.finished:
            raise AssertionError(f"request {self.request_id} ended twice: {self.finish_reason}, then {reason}")
        self.finish_reason, self.error = reason, error
        self.text.finish()

    def break_off(self, error: str) -> None:
        """The step that was making tokens failed: the answer ends before them, with an error."""
        del self.tokens[self.prompt_length + len(self.sources) :]
        self.text.drop()
        self.finish_reason, self.error = "error", error

    def record(self, sources: Sequence[str], logprobs: Sequence[TokenLogprob] | None) -> None:
        """Keep what is known of the tokens just taken."""
        self.sources += sources
        self.logprobs += logprobs or ()

    def count(self, **increments: int) -> None:
        """Add to the statistics' counters."""
        self.stats = replace(self.stats, **{name: getattr(self.stats, name) + n for name, n in increments.items()})

    def count_prefill(self, first: int, count: int) -> None:
        """Count the prompt tokens among those just computed, each of them once, however often it is preempted."""
        start, end = max(first, self.prefilled), min(first + count, self.prompt_length)
        if end > start:
            self.count(prefill_tokens=end - start)
            self.prefilled = end

    def count_step(self, drafted: int, accepted: int, emitted: int, now: float) -> None:
        """Count the step that emitted tokens at `now`; the first tokens are those of the prompt's own step."""
        stats = self.stats
        if self.first_token_at is None:
            self.first_token_at = now
            self.stats = replace(stats, ttft_s=now - self.arrived_at)
            return
        self.stats = replace(
            stats,
            steps=stats.steps + 1,
            drafted=stats.drafted + drafted,
            accepted=stats.accepted + accepted,
            decode_tokens=stats.decode_tokens + emitted,
            decode_s=now - self.first_token_at,
        )

    def chunk(self) -> TokenChunk:
        """What has been added since the last chunk."""
        start = self.reported
        tokens = self.tokens[self.prompt_length + start :]  # not all of the answer, which grows
        self.reported += len(tokens)
        text = self.text.take()
        self.full_text.append(text)
        return TokenChunk(
            self.parent_id,
            self.index,
            text,
            tuple(tokens),
            tuple(self.sources[start:]),
            None if self.params.logprobs is None else tuple(self.logprobs[start:]),
            self.finish_reason,
            self.error,
            self.stats if self.finished else None,
        )

    def completion(self) -> Completion:
        """The finished answer."""
        if self.finish_reason is None:
            raise AssertionError(f"request {self.request_id} is not finished")
        self.full_text.append(self.text.take())
        return Completion(
            self.index,
            "".join(self.full_text),
            tuple(self.answer),
            self.finish_reason,
            None if self.params.logprobs is None else tuple(self.logprobs),
            tuple(self.sources),
            self.stats,
            self.error,
        )
