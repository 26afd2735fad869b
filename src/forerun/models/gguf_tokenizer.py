"""A GGUF's tokenizer metadata as tokenizer.json, tokenizer_config.json and generation_config.json.

Two kinds exist: byte-level BPE ("gpt2"), told apart by the pre-tokenizer's name, and SentencePiece BPE ("llama").
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from forerun.errors import TokenizerError
from forerun.models.tokenizer import END_TOKEN_NAMES

# ggml's token types
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_PADDING = re.compile(r"\[PAD\d+\]")

_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}*{_CASED[1]}+|[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}+{_CASED[1]}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Splitting:
    """How a byte-level tokenizer cuts text before BPE.

    pattern: the words; None = GPT-2's. digits: each digit alone, first. whole_words: a word that is a token needs no
    merges. compose: text is brought to NFC. bos: a beginning token is added if the metadata does not say.
    """

    pattern: str | None = None
    digits: bool = False
    whole_words: bool = False
    compose: bool = False
    bos: bool = False


_GPT2 = _Splitting()
_SMOLLM = _Splitting(digits=True)
_LLAMA3 = _Splitting(_LLAMA3_PATTERN, whole_words=True, bos=True)
_QWEN2 = _Splitting(_QWEN2_PATTERN, compose=True)

# By tokenizer.ggml.pre.
_SPLITTINGS: Mapping[str, _Splitting] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _Splitting(_LLAMA3_PATTERN),
    "dbrx": _Splitting(_LLAMA3_PATTERN),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Splitting(_TEKKEN_PATTERN, whole_words=True, bos=True),
}


class GgufVocabulary:
    """The tokenizer metadata of a GGUF, read and checked. Raises TokenizerError when it is missing or contradictory."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self._metadata = metadata
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise TokenizerError(f"{path} holds no tokenizer (tokenizer.ggml.tokens is missing); use a complete GGUF")
        self.tokens: list[str] = tokens
        types = self.get("token_type") or [_NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise TokenizerError(f"{path}: {len(types)} token types for {len(tokens)} tokens")
        self.types: list[int] = types
        # Rows that only fill the embedding up to a round number are no tokens.
        self.ids = {
            token: index
            for index, token in reversed(list(enumerate(tokens)))
            if not (types[index] == _UNUSED and _PADDING.fullmatch(token))
        }

    def get(self, key: str, default: Any = None) -> Any:
        """tokenizer.ggml.`key`, or the default."""
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def special(self, role: str) -> str | None:
        """Text of the token with a role (bos, eos, eot, unknown, padding, ...), or None."""
        index: int | None = self.get(f"{role}_token_id")
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise TokenizerError(
                f"{self.path}: tokenizer.ggml.{role}_token_id is {index}, but there are {len(self.tokens)} tokens"
            )
        return self.tokens[index]


def save_tokenizer(metadata: Mapping[str, Any], path: Path, directory: Path) -> None:
    """Write the three tokenizer files of the GGUF `path` (whose metadata this is) into `directory`.

    Raises TokenizerError when the metadata is missing, contradictory, or of a kind that is not supported.
    """
    import json

    vocabulary = GgufVocabulary(metadata, path)
    tokenizer = build_tokenizer(vocabulary)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: text for name, role in roles.items() if (text := vocabulary.special(role)) is not None},
    }
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    generation = {"bos_token_id": vocabulary.get("bos_token_id"), "eos_token_id": end_token_ids(vocabulary)}
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=2), "utf-8")


def end_token_ids(vocabulary: GgufVocabulary) -> list[int]:
    """Ids that end an answer: the metadata's end of text, turn and message, and control tokens known to mean that."""
    named = {index for role in ("eos", "eot", "eom") if (index := vocabulary.get(f"{role}_token_id")) is not None}
    known = {vocabulary.ids[name] for name in END_TOKEN_NAMES if name in vocabulary.ids}
    return sorted(named | {index for index in known if vocabulary.types[index] in (_CONTROL, _USER_DEFINED)})


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """The tokenizer itself. Raises TokenizerError for a model or pre-tokenizer that is not supported."""
    kind = vocabulary.get("model")
    try:
        if kind == "gpt2":
            tokenizer, adds_bos = _byte_level(vocabulary)
        elif kind == "llama":
            tokenizer, adds_bos = _sentencepiece(vocabulary), True
        else:
            raise TokenizerError(
                f"{vocabulary.path}: tokenizer model {kind!r} is not supported in GGUF; supported: "
                "gpt2 (byte-level BPE), llama (SentencePiece BPE)"
            )
        _add_special_tokens(tokenizer, vocabulary)
        _add_ends(tokenizer, vocabulary, adds_bos)
    except TokenizerError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise TokenizerError(f"{vocabulary.path}: its tokenizer cannot be rebuilt: {error}") from error
    return tokenizer


def _byte_level(vocabulary: GgufVocabulary) -> tuple[Tokenizer, bool]:
    name = vocabulary.get("pre", "default")
    splitting = _SPLITTINGS.get(name)
    if splitting is None:
        raise TokenizerError(
            f"{vocabulary.path}: pre-tokenizer {name!r} is not known; known: {', '.join(_SPLITTINGS)}. "
            "Use the model's original directory with tokenizer.json instead"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("merges") or []]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=splitting.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    if splitting.pattern:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitting.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.bos


def _sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    """SentencePiece BPE merges the neighbours whose joint piece has the best score; ranks by score say the same."""
    scores = vocabulary.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise TokenizerError(f"{vocabulary.path}: tokenizer.ggml.scores does not match the tokens")
    merges = _merges_by_score(vocabulary, scores)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=vocabulary.special("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    end: list[Any] = []
    if vocabulary.get("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        end = [decoders.Strip(" ", 1, 0)]
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end])
    return tokenizer


def _merges_by_score(vocabulary: GgufVocabulary, scores: list[float]) -> list[tuple[str, str]]:
    usable = {token for token, index in vocabulary.ids.items() if vocabulary.types[index] == _NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token in usable:
        index = vocabulary.ids[token]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                ranked.append((-scores[index], index, cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    phi3 = "phi-3" in str(vocabulary._metadata.get("general.name", "")).lower().replace("phi3", "phi-3")
    keeps_space = {"<unk>", "<s>", "<|endoftext|>"}
    tokens: list[AddedToken] = []
    for token, index in sorted(vocabulary.ids.items(), key=lambda item: item[1]):
        kind = vocabulary.types[index]
        if not token or kind not in (_CONTROL, _USER_DEFINED, _UNKNOWN):
            continue
        special = kind != _USER_DEFINED
        # Phi-3's control tokens swallow the white space after them; GGUF has no field for it.
        swallow = phi3 and token not in keeps_space
        tokens.append(AddedToken(token, special=special, normalized=False, rstrip=swallow))
    tokenizer.add_tokens(tokens)


def _add_ends(tokenizer: Tokenizer, vocabulary: GgufVocabulary, adds_bos: bool) -> None:
    """Begin and end tokens around every encoded text, as the metadata says."""
    used: dict[str, int] = {}
    for role, default in (("bos", adds_bos), ("eos", False)):
        text = vocabulary.special(role)
        if text is not None and vocabulary.get(f"add_{role}_token", default):
            used[role] = vocabulary.get(f"{role}_token_id")
    if not used:
        return
    names = {role: vocabulary.tokens[index] for role, index in used.items()}
    begin = [names["bos"]] if "bos" in names else []
    end = [names["eos"]] if "eos" in names else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *(f"{name}:1" for name in begin), "$B:1", *(f"{name}:1" for name in end)],
        special_tokens=[(names[role], used[role]) for role in used],
    )
