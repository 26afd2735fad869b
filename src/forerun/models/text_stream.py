"""From token ids to text, one token at a time, with nothing shown that a later token could change.

The rules are those of the tokenizer's own decoder, read from tokenizer.json and applied to one token at a time; that is
possible because every supported decoder concatenates what single tokens mean.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from forerun.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Step = Callable[[str], "str | bytes"]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a visible character per byte. Printable Latin-1 stands for itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


class TokenBytes:
    """The bytes that each token stands for, memoised.

    decoder: the `decoder` entry of tokenizer.json. token_of: text of a token by its id, None for unknown ids.
    hidden: ids that stand for nothing (special tokens). separator: put between tokens (a tokenizer without decoder
    separates by a space). strip: how many leading `strip_text` the whole text loses.
    Raises TokenizerError for decoders whose tokens cannot be read one by one.
    """

    def __init__(
        self, decoder: Mapping[str, Any] | None, token_of: Callable[[int], str | None], hidden: Iterable[int]
    ) -> None:
        self._token_of = token_of
        self._known: dict[int, bytes] = {}
        self.hidden = frozenset(hidden)
        self.separator = b" " if decoder is None else b""
        self.strip_text, self.strip = " ", 0
        self._steps: list[Step] = []
        if decoder is not None:
            self._read(decoder)

    def of(self, token_id: int) -> bytes:
        """UTF-8 (or a part of it) that a token stands for; empty for ids that are not in the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._decode(token_id)
        return known

    def _decode(self, token_id: int) -> bytes:
        value: str | bytes = self._token_of(token_id) or ""
        for step in self._steps:
            if isinstance(value, bytes):
                break
            value = step(value)
        return value.encode("utf-8", "replace") if isinstance(value, str) else value

    def _read(self, decoder: Mapping[str, Any]) -> None:
        kind = decoder.get("type")
        if kind == "Sequence":
            for inner in decoder["decoders"]:
                self._read(inner)
        elif kind == "ByteLevel":
            self._steps.append(_from_alphabet)
        elif kind == "ByteFallback":
            self._steps.append(_from_byte_token)
        elif kind == "Replace" and "String" in decoder["pattern"]:
            old, new = decoder["pattern"]["String"], decoder["content"]
            self._steps.append(lambda token: token.replace(old, new))
        elif kind == "Metaspace":
            mark = decoder["replacement"]
            self._steps.append(lambda token: token.replace(mark, " "))
            scheme = decoder.get("prepend_scheme", "always" if decoder.get("add_prefix_space", True) else "never")
            self.strip = 0 if scheme == "never" else 1
        elif kind == "Strip" and not decoder["stop"]:
            self.strip_text, self.strip = decoder["content"], decoder["start"]
        elif kind != "Fuse":
            raise TokenizerError(
                f"a tokenizer whose decoder is {kind!r} is not supported; supported: ByteLevel, Metaspace, and "
                "sequences of Replace, ByteFallback, Fuse and Strip (at the start)"
            )


_ALPHABET = _byte_alphabet()


def _from_alphabet(token: str) -> bytes:
    try:
        return bytes(map(_ALPHABET.__getitem__, token))
    except KeyError:  # an added token, written as it is
        return token.encode("utf-8", "replace")


def _from_byte_token(token: str) -> "str | bytes":
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token


class TextStream:
    """The text of a growing token sequence: everything `push` returned, then `flush()`, is the text of all tokens.

    A character whose bytes are spread over several tokens appears when it is complete. Bytes that are not UTF-8 become
    U+FFFD. Constant time per token.
    """

    def __init__(self, tokens: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._tokens = tokens
        self._hidden = tokens.hidden if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._to_strip = tokens.strip
        self._first = True

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became final, often empty."""
        if token_id in self._hidden:
            return ""
        data = self._tokens.of(token_id)
        if self._tokens.separator and not self._first:
            data = self._tokens.separator + data
        self._first = False
        return self._stripped(self._utf8.decode(data))

    def flush(self) -> str:
        """The sequence is over: U+FFFD for bytes that still wait for the rest of a character, else nothing."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._tokens.strip_text):
                self._to_strip = 0
                break
            text = text[len(self._tokens.strip_text) :]
            self._to_strip -= 1
        return text
