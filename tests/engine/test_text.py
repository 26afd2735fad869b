"""The text of a growing answer: what is told is never taken back, and stops are found across token borders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.text import AnswerText
from tests.engine.words import BEGIN, byte_tokens, tokenizer

TOKENS = st.lists(st.integers(2, tokenizer().vocab_size - 1), max_size=30)

LETTERS = st.text(st.sampled_from("abé "), min_size=1, max_size=24)


def answer_text(stop=(), include_stop=False):
    return AnswerText(tokenizer(), stop, include_stop=include_stop)


def read(tokens, cuts, stop=(), include_stop=False):
    """All text of the tokens, taken after each of the `cuts` (numbers of tokens); and at which token it stopped."""
    text, taken = answer_text(stop, include_stop), []
    for number, token in enumerate(tokens, 1):
        ended = text.push(token)
        if ended or number in cuts:
            taken.append(text.take())
        if ended:
            break
    else:
        number = None
    text.finish()
    taken.append(text.take())
    return "".join(taken), number


def test_a_stop_string_is_found_across_token_borders():
    for tokens in (byte_tokens("one END two"), tokenizer().encode("one END two")):
        assert read(tokens, (), stop=["END"])[0] == "one "
        assert read(tokens, (), stop=["END"], include_stop=True)[0] == "one END"


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_is_certain():
    text = answer_text(["END"])
    told = []
    for token in byte_tokens("a ENTER EN"):
        text.push(token)
        told.append(text.take())
    assert told == ["a", " ", "", "", "ENT", "", "ER", " ", "", ""]
    text.finish()
    assert text.take() == "EN"


def test_the_beginning_of_a_second_stop_string_inside_the_first_is_seen():
    assert read(byte_tokens("aab"), (), stop=["ab"])[0] == "a"
    assert read(byte_tokens("xxaaaab"), (), stop=["aaab"])[0] == "xxa"


def test_where_two_stops_begin_together_the_longer_one_counts():
    tokens = tokenizer().encode("say one two")
    whole = "".join(tokenizer().decode(tokens))
    text, _ = read([*tokens], (), stop=["one", "one two"], include_stop=True)
    assert text in ("say one", whole), "by tokens: the shorter one may be complete before the longer one"
    assert read(byte_tokens("say one two"), (), stop=["one", "one two"], include_stop=True)[0] == "say one"


def test_the_first_of_several_stops_counts_not_the_first_listed():
    assert read(byte_tokens("abcdef"), (), stop=["ef", "cd"])[0] == "ab"


def test_a_character_of_several_bytes_is_held_back_until_it_is_complete():
    text = answer_text()
    told = []
    for token in byte_tokens("é😀x"):
        text.push(token)
        told.append(text.take())
    assert told == ["", "é", "", "", "", "😀", "x"]


def test_bytes_of_a_character_that_never_comes_are_told_at_the_end_as_unknown():
    text = answer_text(["STOP"])
    for token in byte_tokens("a😀")[:-1]:
        text.push(token)
    assert text.take() == "a"
    text.finish()
    assert text.take() == "\ufffd"


def test_a_stop_string_of_long_characters_is_found_when_its_last_byte_comes():
    tokens = byte_tokens("日本語")
    assert read(tokens, (), stop=["本"]) == ("日", 6)


def test_special_tokens_show_no_text_and_do_not_break_a_stop_string():
    assert read([*byte_tokens("one EN"), BEGIN, *byte_tokens("D two")], (), stop=["END"])[0] == "one "


def test_a_hidden_token_shows_nothing_and_ends_nothing():
    text = answer_text(["x"])
    text.push(byte_tokens("a")[0])
    assert not text.push(byte_tokens("x")[0], hidden=True)
    text.finish()
    assert text.take() == "a"


def test_a_stop_string_that_may_not_stop_yet_is_ordinary_text():
    text = answer_text(["b"])
    ended = [text.push(token, may_stop=number >= 3) for number, token in enumerate(byte_tokens("abcb"))]
    assert ended == [False, False, False, True]
    text.finish()
    assert text.take() == "abc"


def test_without_a_tokenizer_there_is_no_text():
    text = AnswerText(None, (), include_stop=False)
    assert not text.push(5)
    text.finish()
    assert text.take() == ""


def test_nothing_is_told_after_a_stop():
    text = answer_text(["b"])
    assert [text.push(token) for token in byte_tokens("ab")] == [False, True]
    assert not text.push(byte_tokens("z")[0])
    text.finish()
    assert text.take() == "a"


@settings(max_examples=150, deadline=None)
@given(tokens=TOKENS, cuts=st.sets(st.integers(1, 30)), data=st.data(), include_stop=st.booleans())
def test_the_joined_text_does_not_depend_on_how_it_is_cut_into_chunks(tokens, cuts, data, include_stop):
    whole = tokenizer().decode(tokens)
    drawn = st.integers(0, max(len(whole) - 1, 0)).flatmap(
        lambda start: st.integers(1, 5).map(lambda length: whole[start : start + length] or "none")
    )
    stops = data.draw(st.lists(drawn, max_size=2))
    expected = read(tokens, (), stops, include_stop)
    assert read(tokens, cuts, stops, include_stop) == expected
    assert read(tokens, range(31), stops, include_stop) == expected
    text, stopped = expected
    if not stops:
        assert text == whole
    if stopped:
        assert whole.startswith(text.removesuffix("\ufffd"))
        assert include_stop or not any(stop in text for stop in stops)


@pytest.mark.parametrize("include_stop", [False, True])
@settings(max_examples=80, deadline=None)
@given(
    words=st.text(st.sampled_from("abé "), min_size=1, max_size=24),
    stop=st.text(st.sampled_from("abé "), min_size=1, max_size=4),
)
def test_byte_by_byte_the_text_ends_where_the_whole_text_first_holds_the_stop(include_stop, words, stop):
    text, stopped = read(byte_tokens(words), (), [stop], include_stop)
    at = words.find(stop)
    if at < 0:
        assert (text, stopped) == (words, None)
    else:
        assert text == words[: at + len(stop) if include_stop else at]
        assert stopped == len(words[: at + len(stop)].encode())
