"""A model's tokenizer: text to ids and back, and what it says about special tokens.

Read from transformers' files; a GGUF's tokenizer has been turned into such files when it was converted.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from forerun.errors import InvalidRequestError, ModelError, TokenizerError
from forerun.models.text_stream import TextStream, TokenBytes

TOKENIZER_FILE = "tokenizer.json"
# Tokens that end an answer in every model that has them, whatever its configuration forgets.
END_TOKEN_NAMES = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "<|end_of_text|>"}
)
# Names of rows that only fill a vocabulary up to a round size.
_PADDING = re.compile(r"\[PAD\d+\]|<\|?(?:pad|padding|dummy|extra)_?\d+\|?>")
_EXAMPLES = 3


class Tokenizer:
    """Text to token ids and back.

    end_token_ids: tokens that end an answer. bos_token_id: the beginning token, or None. special_tokens: texts of the
    special tokens by role (bos_token, eos_token, ...), as chat templates want them.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        end_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._inner = inner
        self._inner.no_truncation()
        self._inner.no_padding()
        added = inner.get_added_tokens_decoder()
        hidden = [index for index, token in added.items() if token.special]
        self._bytes = TokenBytes(_decoder_settings(inner), self.token, hidden)
        self.end_token_ids = frozenset(end_token_ids)
        self.bos_token_id = bos_token_id
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_directory(cls, directory: Path | str) -> "Tokenizer":
        """Read tokenizer.json, and special tokens from the configuration files beside it.

        Raises TokenizerError, naming directory and file, when tokenizer.json is missing or broken.
        """
        directory = Path(directory)
        inner = _read_tokenizer(directory)
        settings = read_json(directory, "tokenizer_config.json")
        model, generation = read_json(directory, "config.json"), read_json(directory, "generation_config.json")
        special = _special_tokens(settings, read_json(directory, "special_tokens_map.json"))
        begin = inner.token_to_id(special["bos_token"]) if "bos_token" in special else None
        if begin is None:
            begin = next((ids[0] for source in (generation, model) if (ids := _ids(source, "bos_token_id"))), None)
        return cls(
            inner, end_token_ids=_end_ids(inner, special, generation, model), bos_token_id=begin, special_tokens=special
        )

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; a model may have more rows, as padding."""
        size: int = self._inner.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def highest_id(self) -> int:
        """The highest token id (ids may have gaps)."""
        return max([self._inner.get_vocab_size(with_added_tokens=False) - 1, *self._inner.get_added_tokens_decoder()])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; special tokens written in it are recognised.

        add_special_tokens: also add what the model wants around every text, such as a beginning token.
        Raises InvalidRequestError for text that is not valid Unicode (a lone surrogate).
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"a text to encode must be a string, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has a lone surrogate {text[error.start]!r} at character {error.start}; send valid Unicode"
            ) from error
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Bytes that are not UTF-8 become U+FFFD; ids that are not in the vocabulary mean nothing."""
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A new text that grows token by token."""
        return TextStream(self._bytes, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it, or None when there is no such id."""
        if not 0 <= token_id < 2**32:
            return None
        text: str | None = self._inner.id_to_token(token_id)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, also if it is special; a single token need not be valid UTF-8."""
        return self._bytes.of(token_id)

    def vocabulary(self) -> dict[str, int]:
        """Every token's id, added tokens included."""
        return dict(self._vocabulary)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return found

    def same_vocabulary(self, other: "Tokenizer") -> list[str]:
        """How the two vocabularies differ, one sentence per kind of difference; empty when ids mean the same in both.

        Rows that only fill up one of them are no difference, nor are special roles (what ends an answer).
        """
        mine, theirs = _by_id(self._vocabulary), _by_id(other._vocabulary)
        if mine == theirs:
            return []
        changed = sorted(index for index in mine.keys() & theirs.keys() if mine[index] != theirs[index])
        differences = []
        if changed:
            pairs = [f"{index} is {mine[index]!r} here and {theirs[index]!r} there" for index in changed[:_EXAMPLES]]
            differences.append(f"tokens: {len(changed)} ids mean different tokens ({', '.join(pairs)})")
        for place, these, those in (("there", mine, theirs), ("here", theirs, mine)):
            if absent := sorted(these.keys() - those.keys()):
                names = ", ".join(f"{index} {these[index]!r}" for index in absent[:_EXAMPLES])
                differences.append(f"size: {len(absent)} tokens are missing {place} ({names})")
        return differences


def read_json(directory: Path, name: str, failure: type[ModelError] = TokenizerError) -> dict[str, Any]:
    """A JSON object in a directory; empty when there is no such file. Raises `failure` when it is not a JSON object."""
    path = directory / name
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise failure(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise failure(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise TokenizerError(
            f"{directory} has no {TOKENIZER_FILE}; put the model's {TOKENIZER_FILE} there (other formats, such as "
            "tokenizer.model, are not read)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise TokenizerError(f"{path} cannot be read: {error}; download it again") from error


def _decoder_settings(inner: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The `decoder` entry of tokenizer.json. Pickling serialises the decoder alone, not the whole vocabulary."""
    if inner.decoder is None:
        return None
    settings: dict[str, Any] = json.loads(inner.decoder.__getstate__())
    return settings


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens by role; the first source that names a role wins."""
    found: dict[str, str] = {}
    for source in sources:
        for role, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if role.endswith("_token") and isinstance(text, str) and not role.startswith("add_"):
                found.setdefault(role, text)
    return found


def _ids(source: Mapping[str, Any], field: str) -> list[int]:
    value = source.get(field)
    values = value if isinstance(value, list) else [value]
    return [index for index in values if isinstance(index, int) and not isinstance(index, bool)]


def _end_ids(
    inner: tokenizers.Tokenizer, special: Mapping[str, str], generation: Mapping[str, Any], model: Mapping[str, Any]
) -> set[int]:
    """Every id that some file calls an end token, and the added tokens whose name says so."""
    ends = {*_ids(generation, "eos_token_id"), *_ids(model, "eos_token_id")}
    ends |= set(_ids(model.get("text_config") or {}, "eos_token_id"))
    for role in ("eos_token", "eot_token"):
        if (index := inner.token_to_id(special[role]) if role in special else None) is not None:
            ends.add(index)
    added = inner.get_added_tokens_decoder()
    return ends | {index for index, token in added.items() if token.content in END_TOKEN_NAMES}


def _by_id(vocabulary: Mapping[str, int]) -> dict[int, str]:
    return {index: token for token, index in vocabulary.items() if token and not _PADDING.fullmatch(token)}
