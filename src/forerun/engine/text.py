"""From tokens to text, one token at a time: what is certain now, and where a stop string ends it."""

from collections.abc import Sequence

from forerun.models.tokenizer import Tokenizer


class AnswerText:
    """The text of one answer as it grows.

    Text that may be the beginning of a stop string is held back until it is certain. A stop string is found wherever it
    lies, across token borders too; the text ends before it (after it with `include_stop`).
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str], *, include_stop: bool) -> None:
        self._stream = tokenizer.stream() if tokenizer else None
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        self._ready: list[str] = []

    def push(self, token: int, *, hidden: bool = False, may_stop: bool = True) -> bool:
        """Add a token; True when a stop string is complete. A hidden token ends the answer and shows no text."""
        if self._stream is None or hidden:
            return False
        text = self._stream.push(token)
        if not self._stop:
            self._ready.append(text)
            return False
        self._held += text
        if may_stop and self._cut_at_stop():
            return True
        certain = len(self._held) - self._doubtful()
        self._ready.append(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def finish(self) -> None:
        """The answer is over: everything held back is certain now."""
        if self._stream is None:
            return
        self._held += self._stream.flush()
        if not self._cut_at_stop():
            self._ready.append(self._held)
            self._held = ""

    def drop(self) -> None:
        """Forget what was pushed since the last `take`; nothing more will come."""
        self._held = ""
        self._ready.clear()
        self._stream = None

    def take(self) -> str:
        """The text that became certain since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _cut_at_stop(self) -> bool:
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if not found:
            return False
        at, stop = min(found, key=lambda hit: (hit[0], -len(hit[1])))
        self._ready.append(self._held[: at + len(stop)] if self._include_stop else self._held[:at])
        self._held = ""
        self._stream = None
        return True

    def _doubtful(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
