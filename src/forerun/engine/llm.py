"""The Python front end: prompts in, answers out. Everything that happens in between is the engine's."""

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from rich.console import Console
from rich.progress import Progress

from forerun.config import EngineConfig, configure
from forerun.engine.build import build_engine
from forerun.engine.outputs import RequestOutput, TokenChunk
from forerun.errors import EngineError, InvalidRequestError
from forerun.models.loader import LoadedModel
from forerun.models.tokenizer import Tokenizer
from forerun.verification.sampling import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model, ready to answer.

    >>> llm = LLM("smollm2-135m-instruct")
    >>> llm.generate(["Once upon a time"], SamplingParams(max_tokens=16))[0].text

    model: alias, directory, .gguf file or hub id; or a complete EngineConfig. settings: any setting of EngineConfig by
    name (`precision="fp32"`), nested (`speculation={"method": "suffix"}`) or dotted; they win over FORERUN_* variables.
    Calls from several threads take turns.
    """

    def __init__(self, model: str | EngineConfig, *, progress: bool | None = None, **settings: Any) -> None:
        self.config = configure(model, **settings)
        built = build_engine(self.config, progress=progress)
        self.model: LoadedModel = built.model
        self.engine = built.engine
        self.missing_drafters = built.missing_drafters
        self._lock = threading.Lock()
        self._streams: dict[int, deque[TokenChunk]] = {}
        self._orphans: deque[int] = deque()  # requests of streams that were left while the engine was busy
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        self._check_open()
        return self.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: bool = True,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts (text or token ids), in order. A prompt that cannot be served has `error` set in its output.

        params: one for all prompts, or one for each. speculation=False decodes plainly, and drafters learn nothing from
        it. progress: show a bar (default: on a terminal, from ten prompts up).
        Raises InvalidRequestError only when prompts and params do not match in number.
        """
        return self._answer(_several(prompts), params, speculation, progress)

    def _answer(
        self,
        several: Sequence[Prompt | InvalidRequestError],
        params: SamplingParams | Sequence[SamplingParams] | None,
        speculation: bool,
        progress: bool | None,
    ) -> list[RequestOutput]:
        each = _one_each(params, len(several))
        waiting: dict[int, int] = {}  # place of each request's prompt
        outputs: dict[int, RequestOutput] = {}
        try:
            with self._lock:
                self._check_open()
                for at, (prompt, own) in enumerate(zip(several, each, strict=True)):
                    added = self._add(prompt, own, speculation)
                    if isinstance(added, int):
                        waiting[added] = at
                    else:
                        outputs[at] = added
            with Progress(
                console=Console(stderr=True), disable=not _wants_bar(len(several), progress), transient=True
            ) as bar:
                task = bar.add_task("answering", total=len(waiting))
                while waiting:
                    for request_id, output in self._advance(waiting):
                        outputs[waiting.pop(request_id)] = output
                        bar.advance(task)
        finally:
            self._drop(waiting)
        return [outputs[at] for at in range(len(several))]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: bool = True,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template; else as `generate`.

        A malformed conversation, or a model without a chat template, is an `error` in that conversation's output.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._rendered(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self._answer(prompts, params, speculation, progress)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids that a conversation becomes, ready for the model's answer."""
        return self.tokenizer.encode(self.model.chat_template.render(messages), add_special_tokens=False)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: bool = True
    ) -> Iterator[TokenChunk]:
        """Answer one prompt piece by piece; leaving the loop early cancels the request.

        Raises InvalidRequestError when the request cannot be served.
        """
        with self._lock:
            self._check_open()
            request_id = self.engine.add(self._encode(prompt), params or SamplingParams(), speculate=speculation)
            chunks = self._streams[request_id] = deque()
        finished: list[tuple[int, RequestOutput]] = []
        try:
            while not finished:
                finished = self._advance([request_id])
                while chunks:
                    yield chunks.popleft()
        finally:
            del self._streams[request_id]
            if not finished:
                self._leave(request_id)

    def clear_history(self) -> None:
        """Forget what earlier requests left behind: drafting history and the prefix cache."""
        with self._lock:
            self._check_open()
            self.engine.clear_history()

    def close(self) -> None:
        """Free the models and the cache; the object cannot be used afterwards. Closing again does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                del self.engine, self.model

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rendered(self, messages: Sequence[Message]) -> Prompt | InvalidRequestError:
        try:
            return self.chat_prompt(messages)
        except InvalidRequestError as error:
            return error

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable):
            raise InvalidRequestError(
                f"the prompt is a {type(prompt).__name__}; allowed: a text, or a list of token ids"
            )
        return list(prompt)

    def _add(
        self, prompt: Prompt | InvalidRequestError, params: SamplingParams, speculation: bool
    ) -> int | RequestOutput:
        tokens: list[int] = []
        try:
            if isinstance(prompt, InvalidRequestError):
                raise prompt
            tokens = self._encode(prompt)
            return self.engine.add(tokens, params, speculate=speculation)
        except InvalidRequestError as error:
            return RequestOutput(-1, tuple(tokens), (), str(error))

    def _advance(self, wanted: Iterable[int]) -> list[tuple[int, RequestOutput]]:
        """One engine step for everybody; those of the wanted requests that are finished."""
        with self._lock:
            self._check_open()
            while self._orphans:
                self._discard(self._orphans.popleft())
            if not self._ready(wanted):
                for chunk in self.engine.step():
                    if chunk.request_id in self._streams:
                        self._streams[chunk.request_id].append(chunk)
            return [(request_id, self.engine.collect(request_id)) for request_id in self._ready(wanted)]

    def _ready(self, wanted: Iterable[int]) -> list[int]:
        return [request_id for request_id in wanted if self.engine.is_done(request_id)]

    def _drop(self, request_ids: Iterable[int]) -> None:
        """Requests that nobody waits for any more: cancel them and throw their answers away."""
        with self._lock:
            for request_id in [] if self._closed else list(request_ids):
                self._discard(request_id)

    def _leave(self, request_id: int) -> None:
        """A stream was left early. It may be the garbage collector that leaves it, in the middle of a step."""
        if not self._lock.acquire(blocking=False):
            self._orphans.append(request_id)
            return
        try:
            if not self._closed:
                self._discard(request_id)
        finally:
            self._lock.release()

    def _discard(self, request_id: int) -> None:
        self.engine.cancel(request_id)
        self.engine.collect(request_id)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM has been closed; make a new one")


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a text and a list of token ids are one prompt."""
    if not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"the prompts are a {type(prompts).__name__}; allowed: a text, a list of token ids, or a list of these"
        )
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if isinstance(params, Mapping) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidRequestError(
            f"params is {params!r}; allowed: SamplingParams(...), or a list of one for each prompt"
        )
    if len(params) != prompts:
        raise InvalidRequestError(
            f"{prompts} prompts came with {len(params)} sets of sampling parameters; give one for all, or one for each"
        )
    return list(params)


def _wants_bar(prompts: int, progress: bool | None) -> bool:
    return (prompts >= 10 and sys.stderr.isatty()) if progress is None else progress
