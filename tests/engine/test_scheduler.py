"""Scheduling: order of arrival, chunked prefill, admission holds, and preemption of the youngest."""

from dataclasses import dataclass, field

import pytest

from forerun.cache import PagePool, SequenceSlots
from forerun.engine.outputs import RequestStats
from forerun.engine.scheduler import Scheduler, owned_pages


@dataclass(eq=False)
class FakeRequest:
    """As much of a request as the scheduler looks at."""

    request_id: int
    tokens: list
    slots: SequenceSlots
    arrived_at: float = 0.0
    stats: RequestStats = field(default_factory=RequestStats)
    preempted: int = 0
    prefilled: int = 0

    @property
    def decoding(self):
        return self.slots.computed == len(self.tokens) - 1

    def count(self, **increments):
        self.preempted += increments.get("preemptions", 0)
        self.stats = RequestStats(preemptions=self.preempted)


class Bench:
    """A scheduler with a clock that the test sets."""

    def __init__(self, pages=100, page_size=4, **settings):
        self.now = 0.0
        self.pool = PagePool(pages, page_size)
        defaults = {"max_batch": 8, "min_batch": 1, "max_wait_s": 0.1, "token_limit": 64}
        self.scheduler = Scheduler(self.pool, **{**defaults, **settings}, clock=lambda: self.now)
        self.count = 0

    def add(self, length):
        tokens = [self.count * 1000 + at for at in range(length)]
        request = FakeRequest(self.count, tokens, SequenceSlots(self.pool), self.now)
        self.count += 1
        self.scheduler.add(request)
        return request

    def step(self):
        """Plan a step and carry it out; (request id, first, count) of each piece of work."""
        plan = self.scheduler.plan()
        for work in plan:
            if work.emits:
                work.request.tokens.append(7)
            work.request.slots.commit(work.first + work.count)
            work.request.slots.keep_prefix(work.request.tokens)
        self.pool.check(owned_pages(self.scheduler.requests))
        return [(work.request.request_id, work.first, work.count) for work in plan]


def test_a_long_prompt_is_computed_in_chunks_under_the_token_limit():
    bench = Bench(token_limit=10)
    bench.add(25)
    assert [bench.step() for _ in range(4)] == [[(0, 0, 10)], [(0, 10, 10)], [(0, 20, 5)], [(0, 25, 1)]]


def test_decoding_requests_go_before_prompts_and_prompts_in_the_order_of_arrival():
    bench = Bench(token_limit=10)
    bench.add(3)
    assert bench.step() == [(0, 0, 3)]
    bench.add(12)
    bench.add(5)
    assert bench.step() == [(0, 3, 1), (1, 0, 9)]
    assert bench.step() == [(0, 4, 1), (1, 9, 3), (2, 0, 5)]


def test_no_more_than_max_batch_requests_run():
    bench = Bench(max_batch=2)
    for _ in range(3):
        bench.add(2)
    assert [entry[0] for entry in bench.step()] == [0, 1]
    bench.scheduler.remove(bench.scheduler.running[0])
    assert [entry[0] for entry in bench.step()] == [1, 2]


def test_new_requests_are_held_until_enough_wait():
    bench = Bench(min_batch=2)
    bench.add(2)
    assert bench.step() == []
    assert bench.scheduler.hold_s() == pytest.approx(0.1)
    bench.add(2)
    assert [entry[0] for entry in bench.step()] == [0, 1]


def test_new_requests_are_held_no_longer_than_max_wait():
    bench = Bench(min_batch=4)
    bench.add(2)
    bench.now = 0.05
    assert bench.step() == []
    bench.now = 0.1
    assert bench.step() == [(0, 0, 2)]


def test_by_default_nothing_is_held():
    bench = Bench()
    bench.add(2)
    assert bench.step() == [(0, 0, 2)]


def test_when_pages_run_out_the_youngest_gives_way_and_resumes_at_its_place():
    bench = Bench(pages=4, page_size=4)
    old, young = bench.add(7), bench.add(7)
    bench.step()
    bench.step()
    assert bench.step() == [(0, 8, 1)], "the older one needs a third page and takes it"
    assert young.preempted == 1
    assert bench.scheduler.waiting == [young]
    later = bench.add(1)
    bench.scheduler.remove(old)
    assert next(entry[0] for entry in bench.step()) == young.request_id
    assert later in bench.scheduler.requests


def test_a_preempted_request_finds_its_full_pages_again():
    bench = Bench(pages=4, page_size=4)
    old, young = bench.add(7), bench.add(7)
    bench.step()
    bench.step()
    bench.step()
    bench.scheduler.remove(old)
    ((request_id, first, count),) = bench.step()
    assert request_id == young.request_id
    assert first + count == 9
    assert first > 0, "at least one of its pages was still kept"


def test_everybody_finishes_under_constant_pressure():
    bench = Bench(pages=6, page_size=4, token_limit=6, max_batch=4)
    requests = [bench.add(5 + at) for at in range(5)]
    goal = {request.request_id: len(request.tokens) + 8 for request in requests}
    for _ in range(400):
        bench.step()
        for request in list(bench.scheduler.running):
            if len(request.tokens) >= goal[request.request_id]:
                bench.scheduler.remove(request)
        if not bench.scheduler.requests:
            break
    assert not bench.scheduler.requests
    assert bench.pool.in_use == 0


def test_a_request_that_waits_can_be_removed():
    bench = Bench(max_batch=1)
    bench.add(2)
    waiting = bench.add(2)
    bench.step()
    bench.scheduler.remove(waiting)
    assert waiting not in bench.scheduler.requests
