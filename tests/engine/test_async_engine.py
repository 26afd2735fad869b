"""The engine for servers: many readers at once, slow ones, lost ones, and the end of it all."""

import asyncio
import random
import threading

import pytest

from forerun import LLM
from forerun.engine.async_engine import AsyncEngine
from forerun.errors import EngineError, InvalidRequestError
from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Ragged
from tests.engine.guessing import truth_of
from tests.engine.harness import Ask, decoder, engine
from tests.engine.words import save_talking_model

ASKS = [Ask([at, 4], SamplingParams(max_tokens=10 + at, ignore_eos=True, logprobs=0)) for at in range(6)]
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def answers():
    return truth_of(ASKS)


class Gate:
    """A decoder whose passes wait until the gate is opened."""

    def __init__(self, inner):
        self._inner, self.open, self.waiting = inner, threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def forward(self, batch, store):
        self.waiting.set()
        assert self.open.wait(20), "the test forgot to open the gate"
        return self._inner.forward(batch, store)


async def read(served, ask):
    """Everything that the engine tells of a request."""
    return [chunk async for chunk in served.generate(ask.prompt, ask.params)]


async def settled(served, inner):
    """Wait until the engine has nothing left to do and nobody left to tell."""
    for _ in range(2000):
        if not (inner.has_work or served._inbox or served._readers or inner._answers):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"left over: {len(inner.scheduler.requests)} requests, {len(served._readers)} readers")


def tokens_of(chunks):
    return sum((chunk.token_ids for chunk in chunks), ())


def test_requests_at_the_same_time_are_each_answered_as_alone(answers):
    alone, truth = answers
    inner = engine(drafters=[Ragged(truth)])

    async def talk():
        async with AsyncEngine(inner) as served:
            told = await asyncio.gather(*(read(served, ask) for ask in ASKS))
            await settled(served, inner)
            return told

    for chunks, expected in zip(asyncio.run(talk()), alone, strict=True):
        assert tokens_of(chunks) == expected.token_ids
        assert sum((chunk.logprobs for chunk in chunks), ()) == expected.logprobs
        assert [chunk.finish_reason for chunk in chunks][-1] == "length"
        assert not any(chunk.finish_reason for chunk in chunks[:-1])
    assert inner.pool.in_use == 0


def test_several_answers_to_one_prompt_come_side_by_side():
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
    (expected,), _ = truth_of([Ask([1, 2], params)])

    async def talk():
        async with AsyncEngine(engine()) as served:
            return await read(served, Ask([1, 2], params))

    chunks = asyncio.run(talk())
    assert sorted(chunk.index for chunk in chunks if chunk.finish_reason) == [0, 1, 2]
    for completion in expected.completions:
        mine = [chunk for chunk in chunks if chunk.index == completion.index]
        assert tokens_of(mine) == completion.token_ids


def test_a_request_that_cannot_be_served_is_refused_to_its_own_reader(answers):
    alone, _ = answers

    async def talk():
        async with AsyncEngine(engine()) as served:
            good = asyncio.create_task(read(served, ASKS[0]))
            with pytest.raises(InvalidRequestError, match="empty"):
                await read(served, Ask([], LONG))
            return await good

    assert tokens_of(asyncio.run(talk())) == alone[0].token_ids


def test_a_slow_reader_stalls_nobody(answers):
    alone, _ = answers

    async def talk():
        async with AsyncEngine(engine()) as served:
            slow = served.generate(ASKS[0].prompt, ASKS[0].params)
            first = await anext(slow)
            others = await asyncio.gather(*(read(served, ask) for ask in ASKS[1:]))
            rest = [chunk async for chunk in slow]
            return [[first, *rest], *others]

    for chunks, expected in zip(asyncio.run(talk()), alone, strict=True):
        assert tokens_of(chunks) == expected.token_ids


def test_200_readers_that_leave_at_random_times_leave_nothing_behind(answers):
    _, truth = answers
    inner = engine(drafters=[Ragged(lambda context: truth.get(tuple(context.tokens[:2]), ()))], max_batch=16)
    draw = random.Random(5)

    async def leave(served, number):
        patience = draw.randint(0, 6)
        stream = served.generate([number % 6, 4], SamplingParams(max_tokens=12, ignore_eos=True))
        if draw.random() < 0.3:
            task = asyncio.create_task(read(served, ASKS[number % 6]))
            await asyncio.sleep(draw.random() * 0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async for _ in stream:
            patience -= 1
            if patience < 0:
                break
        await stream.aclose()

    async def talk():
        async with AsyncEngine(inner) as served:
            await asyncio.gather(*(leave(served, number) for number in range(200)))
            await settled(served, inner)
            return await read(served, ASKS[0])

    assert tokens_of(asyncio.run(talk())) == truth[tuple(ASKS[0].prompt)]
    inner.check()
    assert inner.pool.in_use == 0


def test_a_reader_that_leaves_before_its_request_is_accepted_leaves_nothing_behind():
    gate = Gate(decoder())
    inner = engine(gate)

    async def talk():
        async with AsyncEngine(inner) as served:
            first = asyncio.create_task(read(served, ASKS[0]))
            await asyncio.to_thread(gate.waiting.wait, 20)
            late = asyncio.create_task(read(served, Ask([9, 9], LONG)))
            await asyncio.sleep(0.01)
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
            gate.open.set()
            await first
            await settled(served, inner)

    asyncio.run(talk())


def test_an_event_loop_that_is_gone_takes_nobody_else_with_it(answers):
    """A reader's loop is closed while its request waits to be accepted; the engine serves the next one."""
    alone, _ = answers
    gate = Gate(decoder())
    inner = engine(gate)
    served = AsyncEngine(inner)

    async def give_up():
        reading = asyncio.create_task(read(served, ASKS[1]))
        await asyncio.to_thread(gate.waiting.wait, 20)
        refused = asyncio.create_task(read(served, Ask([], LONG)))
        accepted = asyncio.create_task(read(served, Ask([8, 8], LONG)))
        await asyncio.sleep(0.01)
        for task in (reading, refused, accepted):
            task.cancel()

    asyncio.run(give_up())
    gate.open.set()

    async def next_one():
        chunks = await asyncio.wait_for(read(served, ASKS[0]), 20)
        await settled(served, inner)
        return chunks

    try:
        assert tokens_of(asyncio.run(next_one())) == alone[0].token_ids
    finally:
        served.close()


def test_closing_ends_what_is_unfinished_as_cancelled_and_refuses_what_comes_later():
    inner = engine()

    async def talk():
        served = AsyncEngine(inner)
        reading = asyncio.create_task(read(served, Ask([1, 2], LONG)))
        while not inner.has_work:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(served.close)
        chunks = await asyncio.wait_for(reading, 20)
        with pytest.raises(EngineError, match="closed"):
            await read(served, ASKS[0])
        await asyncio.to_thread(served.close)
        return chunks

    chunks = asyncio.run(talk())
    assert chunks[-1].finish_reason == "cancelled"
    assert inner.pool.in_use == 0


def test_an_engine_that_breaks_tells_every_reader_and_leaves_none_waiting():
    inner = engine()

    def broken():
        raise RuntimeError("the scheduler is broken")

    async def talk():
        served = AsyncEngine(inner)
        inner.scheduler.plan = broken
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(read(served, ask) for ask in ASKS[:2]), return_exceptions=True), 20
        )
        with pytest.raises(EngineError):
            await read(served, ASKS[0])
        await asyncio.to_thread(served.close)
        return outcomes

    for outcome in asyncio.run(talk()):
        assert isinstance(outcome, EngineError), outcome
        assert "the scheduler is broken" in str(outcome)


def test_held_requests_are_served_when_the_time_is_up(answers):
    alone, _ = answers

    async def talk():
        async with AsyncEngine(engine(min_batch=4, max_wait_ms=20)) as served:
            return await asyncio.wait_for(read(served, ASKS[0]), 20)

    assert tokens_of(asyncio.run(talk())) == alone[0].token_ids


def test_an_async_engine_is_loaded_as_an_llm_is(tmp_path):
    model = save_talking_model(tmp_path)

    async def answer():
        async with AsyncEngine.load(model, precision="fp32", speculation={"method": "suffix"}) as served:
            prompt = served.tokenizer.encode("one two three")
            chunks = [chunk async for chunk in served.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))]
            return prompt, [token for chunk in chunks for token in chunk.token_ids]

    prompt, tokens = asyncio.run(answer())
    with LLM(model, precision="fp32") as llm:
        (expected,) = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True), speculation=False)
    assert tuple(tokens) == expected.token_ids
