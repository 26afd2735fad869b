"""An answer ends where plain decoding ends it: end tokens, stop tokens, stop strings and limits inside a draft."""

import pytest

from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Oracle
from tests.engine.guessing import Guess, coming, truth_of
from tests.engine.harness import Ask, engine, finish, plain, run, same
from tests.engine.words import tokenizer

PROMPT = [11, 22, 33]
LONG = SamplingParams(max_tokens=24)
K = 4


@pytest.fixture(scope="module")
def answer():
    """What the model says when nothing ends it, and an oracle's knowledge of it."""
    (output,), truth = truth_of([Ask(PROMPT, LONG)], tokenizer=tokenizer())
    return output, truth


def first_seen(tokens):
    """Indices at which a token occurs for the first time: there it can be declared to be the end."""
    return [at for at, token in enumerate(tokens) if token not in tokens[:at]]


def with_oracle(truth, params, **settings):
    """The request with an oracle that knows the answer beyond its end, and all chunks that it gave."""
    served = engine(drafters=[Oracle(truth)], depth=K, nodes=K, tokenizer=tokenizer(), **settings)
    request_id = served.add(PROMPT, params)
    chunks = []
    while served.has_work:
        chunks += served.step()
        served.check()
    return served.collect(request_id), chunks


def agrees(params, truth, **settings):
    """With and without drafts the same; nothing is told after the end; the output."""
    output, chunks = with_oracle(truth, params, **settings)
    assert same(output, plain(Ask(PROMPT, params), tokenizer=tokenizer(), **settings))
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == output.finish_reason
    assert sum((chunk.token_ids for chunk in chunks), ()) == output.token_ids
    assert "".join(chunk.text for chunk in chunks) == output.text
    return output


def test_an_end_token_ends_the_answer_at_every_index_of_an_accepted_block(answer):
    output, truth = answer
    for at in first_seen(output.token_ids)[:12]:
        ended = agrees(LONG, truth, end_tokens=frozenset({output.token_ids[at]}))
        assert ended.token_ids == output.token_ids[: at + 1]
        assert ended.finish_reason == "stop"


def test_an_end_token_shows_no_text_and_a_stop_token_only_if_it_is_asked_for(answer):
    output, truth = answer
    at = next(
        at for at in first_seen(output.token_ids) if at > 2 and tokenizer().decode([output.token_ids[at]]).strip()
    )
    stop = output.token_ids[at]
    before, through = (tokenizer().decode(output.token_ids[:length]) for length in (at, at + 1))
    assert agrees(LONG, truth, end_tokens=frozenset({stop})).text == before
    hidden = agrees(SamplingParams(max_tokens=24, stop_token_ids=[stop]), truth)
    assert hidden.text == before
    assert hidden.token_ids[-1] == stop
    shown = agrees(SamplingParams(max_tokens=24, stop_token_ids=[stop], include_stop=True), truth)
    assert shown.text == through


def test_an_ignored_end_token_ends_nothing_and_a_stop_token_still_does(answer):
    output, truth = answer
    end = frozenset({output.token_ids[2]})
    assert agrees(SamplingParams(max_tokens=24, ignore_eos=True), truth, end_tokens=end).token_ids == output.token_ids
    both = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=[output.token_ids[2]])
    assert agrees(both, truth, end_tokens=end).finish_reason == "stop"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_answer_wherever_it_lies_in_a_block(answer, include):
    """Stop strings of one to six characters from all over the answer: within a token, across borders, across blocks."""
    output, truth = answer
    text = output.text
    for start in range(0, len(text) - 6, 5):
        stop = text[start : start + 1 + start % 6]
        ended = agrees(SamplingParams(max_tokens=24, stop=[stop], include_stop=include), truth)
        at = text.find(stop)
        assert ended.text == text[: at + len(stop) if include else at]
        assert ended.finish_reason == "stop"


def test_the_earliest_of_several_stops_ends_the_answer(answer):
    output, truth = answer
    text = output.text
    stops = [text[20:23], text[6:9], text[12:14]]
    ended = agrees(SamplingParams(max_tokens=24, stop=stops), truth)
    assert ended.text == text[: min(text.find(stop) for stop in stops)]


@pytest.mark.parametrize("limit", range(1, 8))
def test_a_stop_at_the_last_allowed_token_is_a_stop_and_one_beyond_it_is_the_limit(answer, limit):
    output, truth = answer
    at = [at for at in first_seen(output.token_ids) if at >= 2][1]
    params = SamplingParams(max_tokens=limit, stop_token_ids=[output.token_ids[at]])
    ended = agrees(params, truth)
    assert ended.finish_reason == ("stop" if at < limit else "length")
    assert len(ended.token_ids) == min(limit, at + 1)


def test_a_stop_string_complete_at_the_last_allowed_token_is_a_stop(answer):
    output, truth = answer
    for limit in range(1, 10):
        text, before = (tokenizer().decode(output.token_ids[:count]) for count in (limit, limit - 1))
        if len(text) <= len(before) or text[-1] in before or text[-1] == "\ufffd":
            continue
        ended = agrees(SamplingParams(max_tokens=limit, stop=[text[-1]]), truth)
        assert ended.finish_reason == "stop"
        assert len(ended.token_ids) == limit


def test_text_held_back_for_a_stop_string_that_never_comes_is_told_at_the_end(answer):
    output, truth = answer
    ended = agrees(SamplingParams(max_tokens=24, stop=[output.text[-3:] + "\u2603"]), truth)
    assert ended.text == output.text
    assert ended.finish_reason == "length"


@pytest.mark.parametrize("least", [1, 3, 8])
def test_an_end_token_is_allowed_from_min_tokens_on_exactly(least):
    """The bias makes the end token win whenever it is allowed, so the answer has min_tokens tokens and then the end."""
    params = SamplingParams(max_tokens=20, min_tokens=least, logit_bias={5: 100.0})
    end = frozenset({5})
    (expected,), truth = truth_of([Ask(PROMPT, params)], end_tokens=end)
    assert len(expected.token_ids) == least + 1
    assert expected.token_ids[-1] == 5
    (output,) = run(engine(drafters=[Oracle(truth)], depth=16, end_tokens=end), [Ask(PROMPT, params)])
    assert same(output, expected)


def test_a_stop_string_before_min_tokens_ends_nothing(answer):
    output, truth = answer
    params = SamplingParams(max_tokens=24, min_tokens=20, stop=[output.text[:1]])
    ended = agrees(params, truth)
    assert len(ended.token_ids) >= 20


def test_one_token_is_answered_without_drafting():
    drafter = Guess(lambda context, limit: [1, 2, 3])
    (output,) = run(engine(drafters=[drafter]), [Ask(PROMPT, SamplingParams(max_tokens=1))])
    assert drafter.asked == []
    assert output.stats.drafted == 0
    assert len(output.token_ids) == 1
    assert output.finish_reason == "length"


@pytest.mark.parametrize("length", [2, 3, 9])
def test_no_draft_reaches_past_the_last_token_but_one(length, answer):
    """One of the remaining tokens is the bonus token; a drafter that does not care is cut."""
    _, truth = answer
    drafter = Guess(lambda context, limit: coming(truth, context, 16))
    ask = Ask(PROMPT, SamplingParams(max_tokens=length))
    (output,) = run(engine(drafters=[drafter], depth=16), [ask])
    assert same(output, plain(ask))
    emitted = 0
    for verdict in drafter.verdicts:
        assert verdict.drafted <= max(length - emitted - 1, 0)
        emitted += len(verdict.tokens)
    assert emitted == length


def test_the_tokens_counted_are_the_tokens_committed(answer):
    output, truth = answer
    end = frozenset({output.token_ids[first_seen(output.token_ids)[3]]})
    ended, chunks = with_oracle(truth, LONG, end_tokens=end)
    (completion,) = ended.completions
    assert len(completion.token_ids) == len(completion.sources) == sum(len(chunk.token_ids) for chunk in chunks)
    assert completion.stats.accepted + completion.stats.steps == len(completion.token_ids) - (
        1 if completion.sources[-1] == "target" else 0
    )


def test_every_answer_ends_exactly_once(answer):
    output, truth = answer
    served = engine(drafters=[Oracle(truth)], tokenizer=tokenizer(), end_tokens=frozenset({output.token_ids[6]}))
    ids = [served.add(PROMPT, SamplingParams(max_tokens=limit, n=2)) for limit in (1, 3, 7, 24)]
    ends = []
    while served.has_work:
        ends += [(chunk.request_id, chunk.index) for chunk in served.step() if chunk.finish_reason]
    assert sorted(ends) == sorted((request_id, index) for request_id in ids for index in range(2))
    finish(served)
