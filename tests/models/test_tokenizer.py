"""Text to ids and back, and a stream that never shows what a later token could change."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from forerun.errors import InvalidRequestError, TokenizerError
from forerun.models.text_stream import TokenBytes
from forerun.models.tokenizer import Tokenizer
from tests.models.tiny_gguf import byte_level_tokenizer

INNER = byte_level_tokenizer()
BYTE_LEVEL = Tokenizer(INNER)
IDS = st.lists(st.integers(0, INNER.get_vocab_size() - 1), max_size=30)


def sentencepiece(*, strip):
    """Words with ▁, bytes, and a special token; optionally the decoder that takes away one leading space."""
    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é", "▁▁"]
    inner = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    inner.add_tokens([AddedToken("<s>", special=True)])
    return inner


def streamed(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    return [stream.push(index) for index in ids], stream.flush()


def write(directory, inner=INNER, **files):
    inner.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.from_directory(directory)


@given(st.text(max_size=40))
@settings(max_examples=80, deadline=None)
def test_text_survives_the_round_trip(text):
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@given(IDS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_byte_level_text_is_that_of_the_tokenizers_library_even_for_broken_utf8(ids, skip):
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=skip) == INNER.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("strip", [False, True])
@given(st.lists(st.sampled_from([0, *range(1 + 0x20, 1 + 0x7F), *range(257, 262)]), max_size=20))
@settings(max_examples=80, deadline=None)
def test_sentencepiece_text_is_that_of_the_tokenizers_library(strip, ids):
    inner = sentencepiece(strip=strip)
    assert Tokenizer(inner).decode(ids) == inner.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("strip", [False, True])
@given(st.text("aé ▁日😀", min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_sentencepiece_bytes_join_to_characters(strip, text):
    ids = [1 + byte for byte in text.encode()]
    inner = sentencepiece(strip=strip)
    assert Tokenizer(inner).decode(ids) == inner.decode(ids) == (text.removeprefix(" ") if strip else text)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, *(Tokenizer(sentencepiece(strip=strip)) for strip in (False, True))])
@given(st.lists(st.integers(0, 261), max_size=30), st.booleans())
@settings(max_examples=100, deadline=None)
def test_joined_pushes_are_the_whole_text(tokenizer, ids, skip):
    pieces, rest = streamed(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.text("aé日😀", min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_a_character_appears_whole_when_its_last_byte_does(text):
    by_bytes = {BYTE_LEVEL.token_bytes(index): index for index in range(3, 259)}
    ids = [by_bytes[bytes([byte])] for byte in text.encode()]
    pieces, rest = streamed(BYTE_LEVEL, ids)
    assert [piece for piece in pieces if piece] == list(text)
    assert rest == ""


def test_an_unfinished_character_waits_and_then_becomes_a_replacement():
    by_bytes = {BYTE_LEVEL.token_bytes(index): index for index in range(3, 259)}
    pieces, rest = streamed(BYTE_LEVEL, [by_bytes[b"a"], by_bytes[b"\xe6"], by_bytes[b"\x97"]])
    assert pieces == ["a", "", ""]
    assert rest == "\ufffd"


def test_spaces_between_words_survive_and_only_the_first_is_taken():
    pieces, _ = streamed(Tokenizer(sentencepiece(strip=True)), [257, 0, 259, 259])
    assert "".join(pieces) == " a a"
    pieces, _ = streamed(Tokenizer(sentencepiece(strip=True)), [259, 259])
    assert pieces == ["a", " a"]


def test_special_tokens_are_hidden_unless_asked_for(tmp_path):
    tokenizer = write(tmp_path)
    ids = tokenizer.encode("the</s>dog")
    assert 1 in ids
    assert tokenizer.decode(ids) == "thedog"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the</s>dog"


@pytest.mark.parametrize("index", [-1, 10**6, 2**40])
def test_ids_outside_the_vocabulary_mean_nothing(index):
    assert BYTE_LEVEL.decode([index]) == ""
    assert BYTE_LEVEL.token(index) is None


def test_a_tokenizer_without_decoder_separates_by_spaces():
    inner = tokenizers.Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    assert Tokenizer(inner).decode([0, 1, 1]) == inner.decode([0, 1, 1]) == "one two two"


def test_a_decoder_that_cannot_stream_is_refused():
    with pytest.raises(TokenizerError, match=r"'CTC'.*ByteLevel"):
        TokenBytes({"type": "CTC"}, lambda _: None, ())


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff"])
def test_a_lone_surrogate_is_a_bad_request(text):
    with pytest.raises(InvalidRequestError, match="surrogate"):
        BYTE_LEVEL.encode(text)


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"]])
def test_only_text_can_be_encoded(text):
    with pytest.raises(InvalidRequestError, match="must be a string"):
        BYTE_LEVEL.encode(text)


def test_a_missing_tokenizer_names_directory_and_file(tmp_path):
    with pytest.raises(TokenizerError, match=rf"{tmp_path.name} has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)
    INNER.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(TokenizerError, match=r"generation_config\.json must hold a JSON object"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {2}),
        ({"generation_config": {"eos_token_id": 1}}, {1, 2}),
        ({"generation_config": {"eos_token_id": [5, 6]}}, {2, 5, 6}),
        ({"config": {"eos_token_id": 7}}, {2, 7}),
        ({"config": {"text_config": {"eos_token_id": 8}}}, {2, 8}),
        ({"tokenizer_config": {"eos_token": "</s>"}}, {1, 2}),
        ({"tokenizer_config": {"eos_token": {"content": "</s>", "lstrip": False}}}, {1, 2}),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": None}}, {2}),
    ],
)
def test_end_tokens_come_from_every_file_that_names_them(tmp_path, files, expected):
    assert write(tmp_path, **files).end_token_ids == expected  # 2 is <|im_end|>


def test_the_beginning_token_comes_from_its_text_or_id(tmp_path):
    assert write(tmp_path).bos_token_id is None
    assert write(tmp_path, config={"bos_token_id": 4}).bos_token_id == 4
    named = write(tmp_path, tokenizer_config={"bos_token": "<s>", "add_bos_token": True})
    assert named.bos_token_id == 0
    assert named.special_tokens == {"bos_token": "<s>"}


def test_equal_vocabularies_have_no_differences_whatever_their_padding_and_ends(tmp_path):
    padded = tokenizers.Tokenizer.from_str(INNER.to_str())
    padded.add_tokens([f"[PAD{index}]" for index in range(INNER.get_vocab_size(), 512)])
    assert padded.get_vocab_size() == 512
    other = Tokenizer(padded, end_token_ids={7})
    assert BYTE_LEVEL.same_vocabulary(other) == []
    assert other.same_vocabulary(BYTE_LEVEL) == []


def test_differences_say_which_field_and_give_examples():
    longer = tokenizers.Tokenizer.from_str(INNER.to_str())
    longer.add_tokens(["<tool>"])
    assert BYTE_LEVEL.same_vocabulary(Tokenizer(longer)) == [
        f"size: 1 tokens are missing here ({INNER.get_vocab_size()} '<tool>')"
    ]
    different = Tokenizer(sentencepiece(strip=False)).same_vocabulary(BYTE_LEVEL)
    assert different[0].startswith("tokens: ")
    assert "1 is '<0x00>' here and '</s>' there" in different[0]
    assert different[1].startswith("size: ")


def test_the_vocabulary_is_a_copy(tmp_path):
    tokenizer = write(tmp_path)
    tokenizer.vocabulary().clear()
    assert tokenizer.vocabulary()["</s>"] == 1
    assert len(tokenizer.vocabulary()) == tokenizer.vocab_size == tokenizer.highest_id + 1
