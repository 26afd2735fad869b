"""The step loop: plan, draft, compute, verify, commit. One thread at a time drives an engine."""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import numpy as np
from torch import Tensor

from forerun.cache import PagePool, SequenceSlots
from forerun.config import BatchingConfig, CacheConfig
from forerun.control.base import Controller, StepRecord
from forerun.drafting.base import Drafter
from forerun.drafting.tree import EMPTY_TREE, DraftTree
from forerun.engine.assembly import StepWork, assemble
from forerun.engine.outputs import Completion, FinishReason, RequestOutput, TokenChunk
from forerun.engine.request import Request
from forerun.engine.scheduler import Scheduler, Work, owned_pages
from forerun.engine.speculation import Speculation
from forerun.engine.text import AnswerText
from forerun.errors import InvalidRequestError
from forerun.kernels.batch import IntArray
from forerun.models.decoder import Decoder
from forerun.models.tokenizer import Tokenizer
from forerun.verification.choice import SamplingState
from forerun.verification.logprobs import token_logprob
from forerun.verification.noise import derive_seed, random_seed
from forerun.verification.sampling import SamplingParams
from forerun.verification.walk import TARGET, LogitRows, Verdict, verify

logger = logging.getLogger(__name__)


@dataclass
class _Answers:
    """The answers to one prompt: how many there will be, and those that are finished."""

    prompt: tuple[int, ...]
    count: int
    finished: list[Completion] = field(default_factory=list)


class Engine:
    """Serves requests on one target model.

    end_tokens: tokens that end an answer; by default the tokenizer's. seed: from which the seeds of requests without
    one are derived, in the order of their arrival; None = they are random.
    context_limit: greatest number of tokens of prompt and answer together; never more than the KV pool holds.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        controller: Controller,
        drafters: Sequence[Drafter] = (),
        tokenizer: Tokenizer | None = None,
        end_tokens: frozenset[int] = frozenset(),
        context_length: int | None = None,
        batching: BatchingConfig | None = None,
        cache: CacheConfig | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        batching, cache = batching or BatchingConfig(), cache or CacheConfig()
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.pool = PagePool(slots // cache.page_size, cache.page_size)
        self.context_limit = min(
            decoder.context_limit, context_length or decoder.context_limit, self.pool.pages * cache.page_size
        )
        self.speculation = Speculation(drafters, controller, decoder.vocab_size)
        self._store = decoder.new_store(self.pool.pages * cache.page_size)
        self._end_tokens = end_tokens or (tokenizer.end_token_ids if tokenizer else frozenset())
        self._keep_prefix = cache.prefix
        self._token_limit = batching.token_limit
        self._seed = seed
        self._clock = clock
        self._ids = itertools.count()
        self._chunks: list[TokenChunk] = []
        self._answers: dict[int, _Answers] = {}
        self.scheduler = Scheduler(
            self.pool,
            max_batch=batching.max_batch,
            min_batch=batching.min_batch,
            max_wait_s=batching.max_wait_ms / 1e3,
            token_limit=batching.token_limit,
            clock=clock,
        )

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, prompt: Sequence[int], params: SamplingParams, *, speculate: bool = True, tenant: str = "") -> int:
        """Accept a prompt (token ids); its n answers are made side by side. Returns the id that chunks will carry.

        Raises InvalidRequestError when the request cannot be served; nothing else is concerned then.
        """
        prompt = _token_ids(prompt)
        self._check(prompt, params)
        parent = next(self._ids)
        seed = params.seed
        if seed is None:
            seed = random_seed() if self._seed is None else derive_seed(self._seed, parent + 1)
        for index in range(params.n):
            self.scheduler.add(
                self._request(parent, index, prompt, params, derive_seed(seed, index), speculate, tenant)
            )
        self._answers[parent] = _Answers(tuple(prompt), params.n)
        return parent

    def cancel(self, parent_id: int) -> None:
        """End the unfinished answers to a prompt now. Unknown and finished ids are ignored."""
        for request in [request for request in self.scheduler.requests if request.parent_id == parent_id]:
            self._end(request, "cancelled")

    def step(self) -> list[TokenChunk]:
        """One step of the target over everything scheduled; the chunks of text and tokens that it gave."""
        if (hold := self.scheduler.hold_s()) and not self.scheduler.running:
            time.sleep(min(hold, 0.001))
        plan = self.scheduler.plan()
        if plan:
            try:
                self._run(plan)
            except BaseException as error:
                self._abandon(plan, f"the step failed: {type(error).__name__}: {error}")
                if not isinstance(error, Exception):  # an interrupt is for the caller, who finds the engine in order
                    raise
                logger.exception("a step failed; the %d requests in it end with an error", len(plan))
        chunks, self._chunks = self._chunks, []
        return chunks

    def is_done(self, parent_id: int) -> bool:
        """Whether every answer to a prompt is finished."""
        answers = self._answers[parent_id]
        return len(answers.finished) == answers.count

    def collect(self, parent_id: int) -> RequestOutput:
        """The finished answers to a prompt; the engine forgets them. Only once `is_done`."""
        answers = self._answers.pop(parent_id)
        finished = sorted(answers.finished, key=lambda completion: completion.index)
        return RequestOutput(parent_id, answers.prompt, tuple(finished))

    def clear_history(self) -> None:
        """Forget what earlier requests left behind: drafting history and kept prefixes."""
        self.pool.clear_kept()
        self.speculation.clear_history()

    def check(self) -> None:
        """Raise AssertionError unless every KV page is accounted for exactly once."""
        self.pool.check(owned_pages(self.scheduler.requests))

    def _run(self, plan: Sequence[Work]) -> None:
        start = self._clock()
        parts = self._draft(plan)
        drafted_at = self._clock()
        batch = assemble(parts)
        logits = self.decoder.forward(batch, self._store)
        computed_at = self._clock()
        verdicts = self._verify(parts, logits)
        self._commit(parts, verdicts)
        self._report(parts, verdicts)
        decoded = [verdict for part, verdict in zip(parts, verdicts, strict=True) if verdict and part.work.decodes]
        self.speculation.controller.observe(
            StepRecord(
                requests=len(decoded),
                rows=batch.rows,
                drafted=sum(verdict.drafted for verdict in decoded),
                accepted=sum(verdict.accepted for verdict in decoded),
                emitted=sum(len(verdict.tokens) for verdict in decoded),
                draft_s=drafted_at - start,
                forward_s=computed_at - drafted_at,
                total_s=self._clock() - start,
            )
        )

    def _abandon(self, plan: Sequence[Work], error: str) -> None:
        """A step broke off in the middle: its requests end, the others and the pool are not concerned."""
        for request in (work.request for work in plan if work.request in self.scheduler.running):
            request.break_off(error)
            self._retire(request)

    def _draft(self, plan: Sequence[Work]) -> list[StepWork]:
        """Hang a draft tree on every request that decodes, as far as tokens and slots of this step allow."""
        # The first token is the prompt's own. Drafts begin after it, whatever the chunks.
        decoding = [work for work in plan if work.decodes and work.emits]
        free = self._token_limit - sum(work.count for work in plan)
        trees = dict(
            zip(
                (work.request.request_id for work in decoding),
                self.speculation.propose([work.request for work in decoding], free),
                strict=True,
            )
        )
        return [self._place(work, trees.get(work.request.request_id, EMPTY_TREE)) for work in plan]

    def _place(self, work: Work, tree: DraftTree) -> StepWork:
        slots = work.request.slots.place_tree(tree.depths())
        return StepWork(work, tree if len(slots) == len(tree) else tree.head(len(slots)), slots)

    def _verify(self, parts: Sequence[StepWork], logits: Tensor) -> list[Verdict | None]:
        """What each request emits: None while its prompt is unfinished, or when its logits are unusable."""
        verdicts: list[Verdict | None] = []
        step_rows, start = LogitRows(logits), 0
        for part in parts:
            request, end = part.work.request, start + part.logit_rows
            verdict = None
            if part.work.emits:
                rows = step_rows.part(start, end)
                try:
                    verdict = verify(part.tree, rows, request.state, stop=request.take)
                except Exception as error:
                    logger.warning("request %d ends with an error: %s", request.request_id, error)
                    _record_broken_walk(request, part.tree, rows)
                    self._end(request, "error", str(error))
            verdicts.append(verdict)
            start = end
        return verdicts

    def _commit(self, parts: Sequence[StepWork], verdicts: Sequence[Verdict | None]) -> None:
        """Keep the keys and values of accepted paths at their positions; give every other slot of the step back."""
        moves: list[tuple[IntArray, IntArray]] = []
        committed: list[Request] = []
        for part, verdict in zip(parts, verdicts, strict=True):
            request = part.work.request
            if request not in self.scheduler.running:
                continue
            committed.append(request)
            computed = part.work.first + part.work.count
            path = verdict.path if verdict else ()
            if not path:
                request.slots.commit(computed)
                continue
            source, target = request.slots.commit(computed + len(path), part.tree_slots[list(path)])
            if len(source):
                moves.append((source, target))
        if moves:
            self._store.move(*(np.concatenate(slots) for slots in zip(*moves, strict=True)))
        for request in committed:
            request.slots.keep_prefix(request.tokens)

    def _report(self, parts: Sequence[StepWork], verdicts: Sequence[Verdict | None]) -> None:
        """Statistics, drafters' lessons, chunks, and the end of answers that are complete."""
        now = self._clock()
        for part, verdict in zip(parts, verdicts, strict=True):
            request = part.work.request
            if verdict is None:
                if not request.finished:
                    request.count_prefill(part.work.first, part.work.count)
                continue
            request.record(verdict.sources, verdict.logprobs)
            if request.first_token_at is None:
                request.count_prefill(part.work.first, part.work.count)
            request.count_step(verdict.drafted, verdict.accepted, len(verdict.tokens), now)
            self.speculation.observe(request, verdict)
            if request.finished:
                self._retire(request)
            else:
                self._chunks.append(request.chunk())

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End an answer from outside of its own tokens."""
        request.finish(reason, error)
        self._retire(request)

    def _retire(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.speculation.forget(request)
        self._chunks.append(request.chunk())
        self._answers[request.parent_id].finished.append(request.completion())

    def _request(
        self,
        parent: int,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        speculate: bool,
        tenant: str,
    ) -> Request:
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_tokens)
        return Request(
            request_id=next(self._ids),
            parent_id=parent,
            index=index,
            prompt_length=len(prompt),
            tokens=list(prompt),
            params=params,
            seed=seed,
            limit=min(len(prompt) + params.max_tokens, self.context_limit),
            end_tokens=ends,
            state=SamplingState(params, seed, prompt, self.decoder.vocab_size, ends),
            text=AnswerText(self.tokenizer, params.stop, include_stop=params.include_stop),
            slots=SequenceSlots(self.pool, keep_prefix=self._keep_prefix),
            tenant=tenant,
            speculate=speculate,
            arrived_at=self._clock(),
        )

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not len(prompt):
            raise InvalidRequestError("the prompt is empty; give at least one token")
        if len(prompt) >= self.context_limit:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.context_limit}, answer included; "
                "shorten the prompt, or raise context_length or cache.memory if the model allows more"
            )
        wrong = next((token for token in prompt if not 0 <= token < self.decoder.vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"token id {wrong} is not in the vocabulary; allowed: 0 .. {self.decoder.vocab_size - 1}"
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")
        params.check_vocabulary(self.decoder.vocab_size)


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """The prompt as plain ints. Raises InvalidRequestError when it holds anything but whole numbers."""
    if strangers := [token for token in prompt if not isinstance(token, Integral)]:
        raise InvalidRequestError(
            f"the prompt holds {strangers[0]!r}, a {type(strangers[0]).__name__}; allowed: token ids, which are whole "
            "numbers; turn text into ids with the tokenizer"
        )
    return [int(token) for token in prompt]


def _record_broken_walk(request: Request, tree: DraftTree, rows: LogitRows) -> None:
    """Record what a walk emitted before it broke off: accepted drafts, which plain decoding would have emitted too."""
    children = {place: node for node, place in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node, count = -1, request.params.logprobs
    for token in request.answer[len(request.sources) :]:
        logprobs = None if count is None else [token_logprob(rows.row(node + 1), token, count)]
        node = children.get((node, token), -1)
        request.record([tree.source[node] if node >= 0 else TARGET], logprobs)
