"""The Python front: prompts in, answers out, in order, whatever else happens in between."""

import gc
import threading
import weakref

import numpy as np
import pytest

from forerun import LLM, SamplingParams
from forerun.errors import EngineError, InvalidRequestError, ModelNotFoundError
from tests.engine.words import save_talking_model

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
TEXTS = ["the quick brown fox", "one two three", "a guess that is right"]
SETTINGS = {"precision": "fp32", "device": "cpu", "cache": {"memory": "4MiB"}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_talking_model(tmp_path_factory.mktemp("model") / "talking")


@pytest.fixture(scope="module")
def llm(directory):
    with LLM(directory, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm):
    """Plain answers to TEXTS, one after the other."""
    return [llm.generate(text, PARAMS, speculation=False)[0] for text in TEXTS]


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    """After every test the shared engine is as empty as before."""
    yield
    assert not llm.engine.has_work
    assert not llm.engine._answers
    assert not llm._streams
    assert llm.engine.pool.in_use == 0


def told(output):
    return [(c.token_ids, c.text, c.finish_reason) for c in output.completions]


def test_answers_come_in_the_order_of_the_prompts_and_are_those_of_plain_decoding(llm, expected):
    outputs = llm.generate(TEXTS, PARAMS)
    assert list(map(told, outputs)) == list(map(told, expected))
    assert all(output.text and len(output.token_ids) == 12 for output in outputs)


def test_text_and_its_token_ids_are_the_same_prompt(llm, expected):
    ids = llm.tokenizer.encode(TEXTS[0])
    for prompt in (ids, [ids], np.asarray(ids), tuple(ids)):
        (output,) = llm.generate(prompt, PARAMS)
        assert told(output) == told(expected[0])
        assert output.prompt_token_ids == tuple(ids)


def test_no_prompts_give_no_answers(llm):
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_parameters(llm, expected):
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    first, second, third = llm.generate(TEXTS, [PARAMS, short, PARAMS])
    assert told(first) == told(expected[0])
    assert second.token_ids == expected[1].token_ids[:2]
    assert told(third) == told(expected[2])
    with pytest.raises(InvalidRequestError, match=r"3 prompts .* 2 sets"):
        llm.generate(TEXTS, [PARAMS, short])


def test_without_parameters_the_defaults_hold(llm):
    (output,) = llm.generate("x", SamplingParams(max_tokens=1))
    assert len(output.token_ids) == 1
    assert llm.generate("x")[0].finish_reason in ("stop", "length")


def test_several_answers_to_each_prompt(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(TEXTS[:2], params)
    assert [len(output.completions) for output in outputs] == [3, 3]
    assert list(map(told, outputs)) == [told(llm.generate(t, params, speculation=False)[0]) for t in TEXTS[:2]]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("", "empty"),
        ([1, 100_000], "100000"),
        ([1, "two"], "two"),
        ([1, None], "None"),
        (None, "NoneType"),
        (7.5, "float"),
        ("x" * 5000, "context"),
        ("broken \ud800 text", "surrogate"),
    ],
    ids=["empty", "id", "word", "hole", "none", "number", "long", "surrogate"],
)
def test_a_prompt_that_cannot_be_served_disturbs_no_other(llm, expected, bad, words):
    outputs = llm.generate([TEXTS[0], bad, TEXTS[1]], PARAMS)
    assert told(outputs[0]) == told(expected[0])
    assert told(outputs[2]) == told(expected[1])
    assert words in outputs[1].error
    assert outputs[1].completions == ()
    assert (outputs[1].text, outputs[1].token_ids, outputs[1].finish_reason) == ("", (), "error")


def test_a_chat_is_its_template_s_text(llm):
    messages = [{"role": "user", "content": "one two"}]
    ids = llm.tokenizer.encode("user: one two\nassistant:", add_special_tokens=False)
    assert llm.chat_prompt(messages) == ids
    (output,) = llm.chat(messages, PARAMS)
    assert output.prompt_token_ids == tuple(ids)
    assert told(output) == told(llm.generate([ids], PARAMS)[0])
    several = llm.chat([messages, [*messages, {"role": "assistant", "content": "three"}]], PARAMS)
    assert told(several[0]) == told(output)
    assert len(several) == 2


@pytest.mark.parametrize("bad", [[{"content": "no role"}], [{"role": "user", "content": 7}], []])
def test_malformed_messages_are_an_error_of_that_conversation_alone(llm, bad):
    good = [{"role": "user", "content": "one two"}]
    outputs = llm.chat([good, bad, good], PARAMS)
    assert outputs[1].error
    assert outputs[1].completions == ()
    assert told(outputs[0]) == told(outputs[2]) == told(llm.chat(good, PARAMS)[0])


def test_a_model_without_a_chat_template_says_so(tmp_path):
    path = save_talking_model(tmp_path / "plain", chat_template=None)
    with LLM(path, **SETTINGS) as made:
        (output,) = made.chat([{"role": "user", "content": "x"}], PARAMS)
        assert "chat template" in output.error


def test_a_stream_tells_what_generate_returns(llm, expected):
    for text, output in zip(TEXTS, expected, strict=True):
        chunks = list(llm.stream(text, PARAMS))
        assert sum((chunk.token_ids for chunk in chunks), ()) == output.token_ids
        assert "".join(chunk.text for chunk in chunks) == output.text
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert {len(chunk.sources) - len(chunk.token_ids) for chunk in chunks} == {0}


def test_a_stream_of_several_answers_tells_them_apart(llm):
    params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate(TEXTS[0], params)
    chunks = list(llm.stream(TEXTS[0], params))
    for completion in output.completions:
        mine = [chunk for chunk in chunks if chunk.index == completion.index]
        assert "".join(chunk.text for chunk in mine) == completion.text
    assert sum(chunk.finish_reason is not None for chunk in chunks) == 2


def test_a_stream_that_cannot_be_served_is_refused(llm):
    for bad in ("", [1, "two"], None):
        with pytest.raises(InvalidRequestError):
            next(llm.stream(bad, PARAMS))


def test_leaving_a_stream_early_cancels_its_request(llm, expected):
    stream = llm.stream(TEXTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work
    assert told(llm.generate(TEXTS[0], PARAMS)[0]) == told(expected[0])


def test_streams_and_generate_interleave_in_one_thread(llm, expected):
    first, second = llm.stream(TEXTS[0], PARAMS), llm.stream(TEXTS[1], PARAMS)
    chunks = {0: [next(first)], 1: [next(second)]}
    (third,) = llm.generate(TEXTS[2], PARAMS)
    assert told(third) == told(expected[2])
    chunks[1] += second
    chunks[0] += first
    for at in (0, 1):
        assert "".join(chunk.text for chunk in chunks[at]) == expected[at].text
        assert sum((chunk.token_ids for chunk in chunks[at]), ()) == expected[at].token_ids


def test_threads_take_turns(llm, expected):
    outcomes = {}

    def ask(number):
        if number % 2:
            outcomes[number] = llm.generate(TEXTS, PARAMS)[number % 3].text
        else:
            outcomes[number] = "".join(chunk.text for chunk in llm.stream(TEXTS[number % 3], PARAMS))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == {number: expected[number % 3].text for number in range(6)}


def test_a_repeated_prompt_is_found_again_until_history_is_cleared(llm):
    long = " ".join(TEXTS * 4)
    llm.clear_history()
    (cold,), (warm,) = llm.generate(long, PARAMS), llm.generate(long, PARAMS)
    assert told(cold) == told(warm)
    assert cold.stats.cached_tokens == 0
    assert warm.stats.cached_tokens > 0
    assert warm.stats.accepted > 0, "the suffix drafter has seen the answer"
    llm.clear_history()
    (again,) = llm.generate(long, PARAMS)
    assert told(again) == told(cold)
    assert again.stats.cached_tokens == 0
    assert again.stats.accepted <= cold.stats.accepted


def test_plain_decoding_on_request_neither_drafts_nor_teaches(llm):
    llm.clear_history()
    for _ in range(2):
        (output,) = llm.generate(TEXTS[0], PARAMS, speculation=False)
        assert output.stats.drafted == 0
        assert output.stats.acceptance_rate is None


def test_an_interrupted_generate_leaves_nothing_running(llm, monkeypatch):
    steps = []
    step = llm.engine.step

    def interrupted():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, PARAMS)


def test_an_interrupt_in_the_middle_of_a_step_leaves_nothing_running(llm, expected, monkeypatch):
    """Between the choice of a request's last token and its report is the worst moment."""
    commit = llm.engine._commit

    def interrupted(parts, verdicts):
        if any(part.work.request.finished for part in parts):
            raise KeyboardInterrupt
        commit(parts, verdicts)

    monkeypatch.setattr(llm.engine, "_commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, PARAMS)
    monkeypatch.undo()
    assert not llm.engine.has_work
    llm.engine.check()
    assert llm.engine.pool.in_use == 0
    assert [told(output) for output in llm.generate(TEXTS, PARAMS)] == list(map(told, expected))


def test_a_stream_that_the_garbage_collector_leaves_in_the_middle_of_a_step_stalls_nobody(llm, expected, monkeypatch):
    streams = [llm.stream(TEXTS[0], PARAMS)]
    next(streams[0])
    forward = llm.engine.decoder.forward

    def leaving(batch, store):
        streams.clear()  # what a collection does that happens to run here
        return forward(batch, store)

    monkeypatch.setattr(llm.engine.decoder, "forward", leaving)
    assert told(llm.generate(TEXTS[1], PARAMS)[0]) == told(expected[1])
    assert not llm.engine.has_work
    assert llm.engine.pool.in_use == 0


def test_the_stop_string_and_the_end_token_of_the_model_end_answers(llm, expected):
    text = expected[0].text
    stop = text[len(text) // 2 :][:3]
    for include in (False, True):
        params = SamplingParams(max_tokens=12, ignore_eos=True, stop=stop, include_stop=include)
        (output,) = llm.generate(TEXTS[0], params)
        at = text.find(stop)
        assert output.text == text[: at + len(stop) if include else at]
        assert output.finish_reason == "stop"
    (ended,) = llm.generate(TEXTS[0], SamplingParams(max_tokens=12, logit_bias={1: 100.0}))
    assert (ended.text, ended.token_ids, ended.finish_reason) == ("", (1,), "stop")


def test_a_closed_llm_says_so_and_may_be_closed_again(directory):
    made = LLM(directory, **SETTINGS)
    stream = made.stream(TEXTS[0], PARAMS)
    next(stream)
    made.close()
    made.close()
    for call in (
        lambda: made.generate("x"),
        lambda: next(stream),
        lambda: next(made.stream("x")),
        lambda: made.chat([{"role": "user", "content": "x"}]),
        made.clear_history,
    ):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_closed_llm_holds_neither_models_nor_cache(directory):
    made = LLM(directory, **SETTINGS)
    made.generate("x", PARAMS)
    decoder = weakref.ref(made.engine.decoder)
    made.close()
    gc.collect()
    assert decoder() is None


def test_a_missing_draft_model_is_refused_or_told(directory, tmp_path):
    nowhere = str(tmp_path / "nowhere")
    speculation = {"method": ["suffix", "draft"], "draft_model": nowhere}
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(directory, **SETTINGS, speculation=speculation)
    with LLM(directory, **SETTINGS, speculation={**speculation, "on_draft_error": "off"}) as made:
        assert "nowhere" in made.missing_drafters["draft"]
        assert made.generate("x", PARAMS)[0].finish_reason == "length"


def test_the_target_as_draft_model_is_always_right(directory, expected):
    speculation = {"method": "draft", "draft_model": directory, "width": 1, "depth": 3}
    with LLM(directory, **SETTINGS, speculation=speculation) as made:
        outputs = made.generate(TEXTS, PARAMS)
    assert list(map(told, outputs)) == list(map(told, expected))
    assert all(output.stats.acceptance_rate == 1.0 for output in outputs)


def test_turned_off_there_are_no_drafts(directory, expected):
    with LLM(directory, **SETTINGS, speculation={"method": "off"}) as made:
        outputs = made.generate(TEXTS * 2, PARAMS)
    assert list(map(told, outputs)) == list(map(told, expected)) * 2
    assert all(output.stats.drafted == 0 for output in outputs)


def test_a_seed_in_the_settings_is_that_of_requests_without_one(directory):
    params = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    answers = []
    for seed in (3, 3, 4):
        with LLM(directory, **SETTINGS, seed=seed) as made:
            answers.append([output.token_ids for output in made.generate([TEXTS[0], TEXTS[0]], params)])
    assert answers[0] == answers[1] != answers[2]
    assert answers[0][0] != answers[0][1], "two requests without a seed of their own differ"
