"""Who computes what in the next step: admission, chunked prefill, preemption. Drafts are added later, by others."""

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forerun.cache import PagePool
from forerun.engine.request import Request


@dataclass(frozen=True)
class Work:
    """Tokens `first` ... `first + count - 1` of a request are computed in this step.

    When they reach the end of the request's tokens, the step emits at least one token for it.
    """

    request: Request
    first: int
    count: int

    @property
    def emits(self) -> bool:
        """Whether the last known token is among those computed."""
        return self.first + self.count == len(self.request.tokens)

    @property
    def decodes(self) -> bool:
        """Whether it is one token of the answer. If it emits, it decodes plainly or is the root of a draft tree."""
        return self.count == 1 and self.first >= self.request.prompt_length


class Scheduler:
    """Continuous batching in the order of arrival.

    Decoding requests come first, then prefill chunks, up to `token_limit` tokens in a step. New requests wait until
    `min_batch` of them wait or the oldest has waited `max_wait_s`. When the pool runs out, the youngest running request
    gives its slots back and waits at the place of its arrival; what it had computed may be found again by its prefix.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_batch: int,
        min_batch: int,
        max_wait_s: float,
        token_limit: int,
        clock: Callable[[], float],
    ) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._pool = pool
        self._max_batch = max_batch
        self._min_batch = min_batch
        self._max_wait_s = max_wait_s
        self._token_limit = token_limit
        self._clock = clock

    @property
    def requests(self) -> list[Request]:
        """Every unfinished request, running ones first."""
        return self.running + self.waiting

    def add(self, request: Request) -> None:
        """A new request waits for its turn."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """A request ended: its slots go back to the pool."""
        (self.running if request in self.running else self.waiting).remove(request)
        request.slots.release()

    def hold_s(self) -> float:
        """Seconds for which the waiting requests are still held back; 0 when they may enter."""
        if self._min_batch == 1:
            return 0.0
        fresh = [request for request in self.waiting if not request.stats.preemptions]
        if not fresh or len(fresh) < len(self.waiting) or len(fresh) >= self._min_batch:
            return 0.0
        return max(0.0, fresh[0].arrived_at + self._max_wait_s - self._clock())

    def plan(self) -> list[Work]:
        """The work of the next step, in the order of arrival; empty when nothing can run now."""
        self._admit()
        plan: list[Work] = []
        free = self._token_limit
        decoding = [request for request in self.running if request.decoding]
        prefilling = [request for request in self.running if not request.decoding]
        for request in [*decoding, *prefilling]:
            count = min(len(request.tokens) - request.slots.computed, free)
            if count and request in self.running and self._make_room(request, request.slots.computed + count):
                plan.append(Work(request, request.slots.computed, count))
                free -= count
        plan = [work for work in plan if work.request in self.running]  # a later request may have been preempted
        return sorted(plan, key=lambda work: work.request.request_id)

    def preempt(self, request: Request) -> None:
        """Take a running request's slots away; it waits for its turn and resumes with the same tokens."""
        self.running.remove(request)
        request.slots.release()
        request.count(preemptions=1)
        insort(self.waiting, request, key=lambda waiting: waiting.request_id)

    def _admit(self) -> None:
        if self.hold_s() > 0:
            return
        while self.waiting and len(self.running) < self._max_batch:
            request = self.waiting[0]
            cached = request.slots.attach_prefix(request.tokens)
            needed = -(-len(request.tokens) // self._pool.page_size) - len(request.slots.owned_pages)
            if self.running and needed + len(self.running) > self._pool.available:
                request.slots.release()  # it would only push others out; the running ones will end and make room
                return
            if not request.stats.preemptions:
                request.count(cached_tokens=cached)
                request.prefilled = cached
            self.running.append(self.waiting.pop(0))
            self.running.sort(key=lambda running: running.request_id)

    def _make_room(self, request: Request, length: int) -> bool:
        """Reserve slots for `length` tokens, preempting the youngest as long as that is needed."""
        while not request.slots.reserve(length):
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is request:
                return False
        return True


def owned_pages(requests: Iterable[Request]) -> list[list[int]]:
    """The pages that each request holds, for the pool's invariant check."""
    return [request.slots.owned_pages for request in requests]
