"""The engine for servers: a thread that steps, and coroutines that add requests, read chunks and cancel."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from forerun.config import EngineConfig, configure
from forerun.engine.build import build_engine
from forerun.engine.engine import Engine
from forerun.engine.outputs import TokenChunk
from forerun.errors import EngineError
from forerun.models.tokenizer import Tokenizer
from forerun.verification.sampling import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Reader:
    """Who waits for the chunks of a request, in which event loop. request_id: filled in by the engine's thread."""

    loop: asyncio.AbstractEventLoop
    queue: "asyncio.Queue[TokenChunk | Exception]" = field(default_factory=asyncio.Queue)
    request_id: int = -1

    def tell(self, news: TokenChunk | Exception) -> bool:
        """Called by the engine's thread; False when the reader's event loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, news)
        except RuntimeError:
            return False
        return True


class AsyncEngine:
    """Drives an `Engine` from a thread of its own. Every call to the engine happens in that thread.

    Use as an async context manager, or call `close`. A consumer that reads slowly stalls nobody: its chunks wait in its
    own queue. A consumer that stops reading (break, cancelled task, closed generator) cancels its request.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._readers: dict[int, _Reader] = {}
        self._end: str | None = None  # why there will be no further step
        self._thread = threading.Thread(target=self._loop, name="forerun-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, model: str | EngineConfig, **settings: Any) -> "AsyncEngine":
        """An engine for a model and settings, as `LLM` takes them. Raises the same errors."""
        return cls(build_engine(configure(model, **settings)).engine)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer: `generate` takes token ids."""
        return self._engine.tokenizer

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, speculate: bool = True, tenant: str = ""
    ) -> AsyncIterator[TokenChunk]:
        """Answer a prompt (token ids) piece by piece; the last chunk of each of its n answers has a finish reason.

        Raises InvalidRequestError when the request cannot be served, EngineError when the engine is closed or broken.
        """
        reader = _Reader(asyncio.get_running_loop())
        unfinished = params.n
        if not self._post(partial(self._add, reader, prompt, params, speculate, tenant)):
            raise EngineError(f"the request cannot be served: {self._end}")
        try:
            while unfinished:
                news = await reader.queue.get()
                if isinstance(news, Exception):
                    raise news
                unfinished -= news.finish_reason is not None
                yield news
        finally:
            self._post(partial(self._drop, reader))

    def close(self) -> None:
        """Stop after the current step; unfinished requests end as cancelled."""
        with self._wake:
            self._end = self._end or "the engine has been closed"
            self._wake.notify()
        self._thread.join()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _post(self, call: Callable[[], None]) -> bool:
        """Leave a call for the engine's thread; False when there will be no further step."""
        with self._wake:
            if self._end is None:
                self._inbox.append(call)
                self._wake.notify()
            return self._end is None

    def _add(
        self, reader: _Reader, prompt: Sequence[int], params: SamplingParams, speculate: bool, tenant: str
    ) -> None:
        try:
            reader.request_id = self._engine.add(prompt, params, speculate=speculate, tenant=tenant)
        except Exception as error:
            reader.tell(error)
        else:
            self._readers[reader.request_id] = reader

    def _drop(self, reader: _Reader) -> None:
        """The reader has gone, or has read everything."""
        if self._readers.pop(reader.request_id, None):
            self._engine.cancel(reader.request_id)
            self._engine.collect(reader.request_id)

    def _loop(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            logger.exception("the engine broke; nothing more can be served")
            with self._wake:
                self._end = f"the engine broke: {type(error).__name__}: {error}"
            while self._inbox:  # requests that still wait to be accepted become readers to be told
                with suppress(Exception):
                    self._inbox.popleft()()
            for reader in self._readers.values():
                reader.tell(EngineError(f"the request cannot be finished: {self._end}"))

    def _turn(self) -> bool:
        """What was posted, then one step; False after the last one."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._engine.has_work or self._end is not None)
            closing = self._end is not None
        while self._inbox:
            self._inbox.popleft()()
        if closing:
            for request_id in self._readers:
                self._engine.cancel(request_id)
        for chunk in self._engine.step():
            reader = self._readers.get(chunk.request_id)
            if reader and not reader.tell(chunk):
                logger.info("request %d has lost its reader and is cancelled", chunk.request_id)
                self._drop(reader)
        if closing:
            for reader in list(self._readers.values()):
                self._drop(reader)
        return not closing
