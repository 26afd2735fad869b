"""An LLM without a model: tokens are characters, and the answer to a prompt is a fixed text."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from forerun.config import EngineConfig
from forerun.engine.outputs import Completion, RequestOutput, RequestStats, TokenChunk
from forerun.errors import InvalidRequestError
from forerun.verification.logprobs import TokenLogprob
from forerun.verification.sampling import SamplingParams

CONTEXT = 1000


class FakeTokenizer:
    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def stream(self) -> SimpleNamespace:
        return SimpleNamespace(push=chr, flush=lambda: "")


class FakeLLM:
    """differs: prompts whose speculative answer is wrong, which an engine must never do and a report must show."""

    def __init__(self, config: EngineConfig | None = None, *, differs: str = "\0") -> None:
        self.config = config or EngineConfig()
        self.model = SimpleNamespace(
            name="fake", precision="fp32", device="cpu", chat_template=SimpleNamespace(available=True)
        )
        self.tokenizer = FakeTokenizer()
        self.missing_drafters: dict[str, str] = {}
        self.calls: list[tuple[str, Any]] = []
        self.params: list[SamplingParams] = []
        self.differs = differs

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [ord(char) for message in messages for char in f"<{message['role']}>{message['content']}"]

    def chat(self, messages: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
        return self.generate([self.chat_prompt(conversation) for conversation in messages], params, **options)

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams,
        *,
        speculation: bool = True,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        self.params.append(params)
        self.calls.append(("speculative" if speculation else "plain", list(prompts)))
        return [self._answer(number, self._ids(p), params, speculation) for number, p in enumerate(prompts)]

    def stream(self, prompt: list[int], params: SamplingParams, *, speculation: bool = True) -> Iterator[TokenChunk]:
        output = self._answer(0, self._ids(prompt), params, speculation)
        if output.error:
            raise InvalidRequestError(output.error)
        self.calls.append(("stream", self.tokenizer.decode(prompt)))
        text = output.text
        for at in range(0, len(text), 2):
            piece, last = text[at : at + 2], at + 2 >= len(text)
            sources = ("target", "suffix")[: len(piece)]
            yield TokenChunk(0, 0, piece, tuple(map(ord, piece)), sources, None, output.finish_reason if last else None)

    def clear_history(self) -> None:
        self.calls.append(("clear", None))

    def close(self) -> None:
        self.calls.append(("close", None))

    def _ids(self, prompt: str | list[int]) -> list[int]:
        return [ord(char) for char in prompt] if isinstance(prompt, str) else list(prompt)

    def _answer(self, number: int, ids: list[int], params: SamplingParams, speculation: bool) -> RequestOutput:
        if len(ids) > CONTEXT:
            error = f"the prompt has {len(ids)} tokens, more than the context of {CONTEXT}"
            return RequestOutput(-1, tuple(ids), (), error)
        prompt = self.tokenizer.decode(ids)
        reply = f"echo {prompt}"
        if speculation and self.differs in prompt:
            reply = reply.upper()
        text = reply[: params.max_tokens]
        completions = tuple(self._completion(index, text, params, speculation) for index in range(params.n))
        return RequestOutput(number, tuple(ids), completions)

    def _completion(self, index: int, text: str, params: SamplingParams, speculation: bool) -> Completion:
        tokens = tuple(map(ord, text))
        decoded = max(len(tokens) - 1, 0)
        accepted = decoded // 2 if speculation else 0
        stats = RequestStats(
            steps=decoded - accepted,
            drafted=accepted * 2,
            accepted=accepted,
            decode_tokens=decoded,
            ttft_s=0.010,
            decode_s=0.001 * (decoded - accepted),
        )
        logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(TokenLogprob(token, -0.5, ((token, -0.5),) * params.logprobs) for token in tokens)
        reason = "length" if len(text) == params.max_tokens else "stop"
        return Completion(index, text, tokens, reason, logprobs, ("target",) * len(tokens), stats)
