"""`forerun chat`: a conversation in the terminal, streamed as it is written."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from forerun.cli.loading import load_llm
from forerun.cli.options import CommandLine, with_options
from forerun.errors import InvalidRequestError

if TYPE_CHECKING:
    from forerun.engine.llm import LLM
    from forerun.engine.outputs import TokenChunk
    from forerun.verification.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 1024
TARGET = "target"
COLOURS = {TARGET: "", "suffix": "green", "draft": "cyan"}
OTHER_COLOUR = "magenta"
HELP = "/reset starts a new conversation, /quit (or the end of input) leaves."


@with_options(without=("n", "logprobs"))
def chat(
    given: CommandLine,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour each token by who guessed it; plain: the target alone.")
    ] = False,
) -> None:
    """Talk with a model."""
    config = given.resolve().config
    params = given.params(config.seed, max_tokens=DEFAULT_MAX_TOKENS)
    llm = load_llm(config)
    speculation = config.speculation.method != "off"
    conversation = Conversation(llm, params, system, speculation=speculation, show_drafts=show_drafts)
    conversation.run()
    if conversation.failures and not sys.stdin.isatty():
        raise typer.Exit(1)  # a script wants to know; a person has read it


@dataclass
class Conversation:
    """The messages so far, and how they are answered and shown."""

    llm: "LLM"
    params: "SamplingParams"
    system: str | None
    speculation: bool = True
    show_drafts: bool = False
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    messages: list[dict[str, str]] = field(default_factory=list)
    failures: int = 0

    def run(self) -> None:
        """Read lines and answer them until the input ends or /quit."""
        self.reset()
        if sys.stdin.isatty():
            self.console.print(HELP, style="dim")
        if self.show_drafts:
            self.console.print(legend())
        for line in _lines():
            if line in ("/quit", "/exit"):
                break
            if line == "/reset":
                self.reset()
                self.console.print("a new conversation", style="dim")
            elif line.startswith("/"):
                self.console.print(f"unknown command {line.split()[0]}; {HELP}", style="red", markup=False)
            elif line:
                self.answer(line)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system is not None else []

    def answer(self, question: str) -> None:
        """Stream the answer to one message; an error or an interruption ends this answer, not the conversation."""
        self.messages.append({"role": "user", "content": question})
        reply = Reply()
        try:
            prompt = self.llm.chat_prompt(self.messages)
            chunks = self.llm.stream(prompt, self.params, speculation=self.speculation)
            split = token_splitter(self.llm) if self.show_drafts else None
            for chunk in reply.follow(chunks):
                self._show(chunk, split)
        except InvalidRequestError as error:
            self.failures += 1
            self.console.print(f"error: {error}", style="red", markup=False)
        except KeyboardInterrupt:
            self.console.print("\n(interrupted)", style="dim")
        if not reply.text:
            self.messages.pop()  # nothing was answered; the next message must not follow two questions
        else:
            self.messages.append({"role": "assistant", "content": reply.text})
            self.console.print(f"\n{reply.summary()}", style="dim", markup=False)

    def _show(self, chunk: "TokenChunk", split: "Callable[[TokenChunk], list[tuple[str, str]]] | None") -> None:
        if chunk.error is not None:
            self.failures += 1
            self.console.print(f"\nerror: {chunk.error}", style="red", markup=False)
        pieces = split(chunk) if split else [(chunk.text, TARGET)]
        for text, source in pieces:
            self.console.print(Text(text, style=COLOURS.get(source, OTHER_COLOUR)), end="")


@dataclass
class Reply:
    """One answer while it arrives: its text, and the figures for the line below it."""

    text: str = ""
    sources: Counter[str] = field(default_factory=Counter)
    started_at: float | None = None
    ended_at: float = 0.0
    first_tokens: int = 0

    def follow(self, chunks: "Iterator[TokenChunk]") -> "Iterator[TokenChunk]":
        """Pass chunks on and keep count."""
        for chunk in chunks:
            self.ended_at = time.perf_counter()
            if self.started_at is None and chunk.token_ids:
                self.started_at, self.first_tokens = self.ended_at, len(chunk.token_ids)
            self.text += chunk.text
            self.sources.update(chunk.sources)
            yield chunk

    def summary(self) -> str:
        """Tokens, tokens per second after the first, and the share of tokens that drafters had guessed."""
        tokens = self.sources.total()
        seconds = self.ended_at - (self.started_at or self.ended_at)
        speed = f"{(tokens - self.first_tokens) / seconds:.1f} tokens/s" if seconds > 0 else "- tokens/s"
        guessed = tokens - self.sources[TARGET]
        return f"[{tokens} tokens, {speed}, {guessed / max(tokens, 1):.0%} accepted from drafts]"


def token_splitter(llm: "LLM") -> "Callable[[TokenChunk], list[tuple[str, str]]]":
    """A function that cuts a chunk's text into (text, source) per token.

    Text that is held back or cut (a character in two tokens, a stop string) cannot be told apart by token; such a chunk
    takes the colour of most of its tokens.
    """
    pieces = llm.tokenizer.stream()

    def split(chunk: "TokenChunk") -> list[tuple[str, str]]:
        cut = [(pieces.push(token), source) for token, source in zip(chunk.token_ids, chunk.sources, strict=True)]
        if "".join(text for text, _ in cut) == chunk.text:
            return cut
        most = Counter(chunk.sources).most_common(1)
        return [(chunk.text, most[0][0] if most else TARGET)]

    return split


def legend() -> Text:
    """What the colours mean."""
    parts = [(f"{source} ", colour or "default") for source, colour in COLOURS.items()]
    return Text.assemble("tokens: ", *parts, ("others", OTHER_COLOUR))


def _lines() -> Iterator[str]:
    """Lines of stdin, stripped; with a prompt where somebody is typing."""
    asking = sys.stdin.isatty()
    while True:
        if asking:
            sys.stdout.write("> ")
            sys.stdout.flush()
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            return
        if not line:
            return
        yield line.strip()
