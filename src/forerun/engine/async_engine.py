"""The engine for servers: a thread that steps, and coroutines that add requests, read chunks and cancel."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from forerun.engine.engine import Engine
from forerun.engine.outputs import TokenChunk
from forerun.errors import EngineError
from forerun.verification.sampling import SamplingParams

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Drives an `Engine` from a thread of its own. Every call to the engine happens in that thread.

    Use as an async context manager, or call `close`. A consumer that reads slowly stalls nobody: its chunks wait in its
    own queue. A consumer that stops reading (break, cancelled task, closed generator) cancels its request.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._readers: dict[int, Callable[[TokenChunk], None]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="forerun-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, speculate: bool = True, tenant: str = ""
    ) -> AsyncIterator[TokenChunk]:
        """Answer a prompt (token ids) piece by piece; the last chunk of each of its n answers has a finish reason.

        Raises InvalidRequestError when the request cannot be served, EngineError when the engine is closed.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[TokenChunk] = asyncio.Queue()
        accepted: asyncio.Future[int] = loop.create_future()

        def deliver(chunk: TokenChunk) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, chunk)

        def add() -> None:
            try:
                request_id = self._engine.add(prompt, params, speculate=speculate, tenant=tenant)
            except Exception as error:
                loop.call_soon_threadsafe(_settle, accepted, error)
            else:
                self._readers[request_id] = deliver
                loop.call_soon_threadsafe(_settle, accepted, request_id)

        self._post(add)
        try:
            request_id = await accepted
        except asyncio.CancelledError:
            # The engine may accept the request after its reader has gone.
            accepted.add_done_callback(self._drop_late)
            raise
        unfinished = params.n
        try:
            while unfinished:
                chunk = await queue.get()
                unfinished -= chunk.finish_reason is not None
                yield chunk
        finally:
            self._post(lambda: self._drop(request_id))

    def close(self) -> None:
        """Stop after the current step; unfinished requests end as cancelled."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _post(self, call: Callable[[], None]) -> None:
        with self._wake:
            if self._closed:
                raise EngineError("the engine has been closed")
            self._inbox.append(call)
            self._wake.notify()

    def _drop_late(self, accepted: "asyncio.Future[int]") -> None:
        if not accepted.cancelled() and accepted.exception() is None:
            self._post(lambda: self._drop(accepted.result()))

    def _drop(self, request_id: int) -> None:
        """The reader has gone, or has read everything."""
        self._engine.cancel(request_id)
        self._readers.pop(request_id, None)
        self._engine.collect(request_id)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._engine.has_work or self._closed):
                    self._wake.wait()
                inbox, self._inbox = self._inbox, []
                closing = self._closed
            for call in inbox:
                call()
            if closing:
                for request_id in list(self._readers):
                    self._engine.cancel(request_id)
            for chunk in self._engine.step():
                if deliver := self._readers.get(chunk.request_id):
                    self._deliver(deliver, chunk)
            if closing:
                return

    def _deliver(self, deliver: Callable[[TokenChunk], None], chunk: TokenChunk) -> None:
        try:
            deliver(chunk)
        except RuntimeError:  # the reader's event loop is closed
            logger.info("request %d lost its reader; it is cancelled", chunk.request_id)
            self._drop(chunk.request_id)


def _settle(future: "asyncio.Future[int]", outcome: int | Exception) -> None:
    if future.cancelled():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
