"""Things that fail: a drafter, a request's logits, a whole step. Nothing else is lost with them."""

import logging

import pytest
import torch

from forerun.drafting.tree import DraftTree
from forerun.errors import InvalidRequestError
from forerun.kernels.kv_store import KVStore
from forerun.models.architecture import Architecture
from forerun.verification.sampling import SamplingParams
from tests.drafting.scripted import Oracle, Raising
from tests.engine.guessing import Guess, coming, truth_of, wrong
from tests.engine.harness import VOCABULARY, Ask, decoder, engine, finish, plain, run, same
from tests.models.tiny import run_on, tiny_config, tiny_tensors

ASKS = [Ask([at, 2, 3], SamplingParams(max_tokens=16, ignore_eos=True, logprobs=1)) for at in range(3)]


@pytest.fixture(scope="module")
def answers():
    return truth_of(ASKS)


class Faulty:
    """A decoder whose forward passes a test can spoil. spoil(batch, logits) returns the logits, or raises."""

    def __init__(self, inner, spoil):
        self._inner, self._spoil = inner, spoil

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def forward(self, batch, store):
        return self._spoil(batch, self._inner.forward(batch, store))


class Nonsense(Guess):
    """Returns from `propose` whatever it was made with."""

    def __init__(self, answer):
        super().__init__(None, "nonsense")
        self._answer = answer

    def propose(self, contexts, limit):
        return self._answer(contexts)


def broken_tree():
    """A tree that was sound when it was made."""
    tree = DraftTree([1, 2, 3], [-1, 0, 1], [0.9, 0.8, 0.7], ["nonsense"] * 3)
    tree.parents[:] = [2, 2, 9]
    return tree


@pytest.mark.parametrize(
    "drafter",
    [
        Raising("propose"),
        Raising("observe"),
        Nonsense(lambda contexts: None),
        Nonsense(lambda contexts: 7),
        Nonsense(lambda contexts: []),
        Nonsense(lambda contexts: [None] * len(contexts)),
        Nonsense(lambda contexts: [[1, 2, 3]] * len(contexts)),
        Nonsense(lambda contexts: ["tree"] * (len(contexts) + 1)),
        Nonsense(lambda contexts: [broken_tree()] * len(contexts)),
        Nonsense(lambda contexts: (tree for tree in ())),
    ],
    ids=["raises", "raises later", "none", "number", "too few", "no trees", "lists", "too many", "broken", "generator"],
)
def test_a_drafter_that_fails_is_switched_off_with_a_reason_and_the_answers_go_on(drafter, answers, caplog):
    alone, truth = answers
    served = engine(drafters=[drafter, Oracle(truth)])
    with caplog.at_level(logging.WARNING):
        outputs = run(served, ASKS)
    assert all(map(same, outputs, alone))
    assert list(served.speculation.disabled) == [drafter.name]
    assert served.speculation.disabled[drafter.name]
    assert [warning.getMessage() for warning in caplog.records if drafter.name in warning.getMessage()]
    assert all(output.stats.accepted > 0 for output in outputs), "the other drafter goes on"


def test_a_drafter_that_fails_to_forget_loses_nobody_s_answer(answers):
    alone, _ = answers
    served = engine(drafters=[Raising("forget")])
    assert all(map(same, run(served, ASKS), alone))
    assert all(map(same, run(served, ASKS), alone))


@pytest.mark.parametrize("tokens", [[-1], [VOCABULARY], [10**30], [None], ["x"], [1.5], [2, -7, 3], [float("nan")]])
def test_ids_that_are_no_tokens_are_left_out(tokens, answers):
    alone, _ = answers
    served = engine(drafters=[Guess(lambda context, limit: tokens)])
    assert all(map(same, run(served, ASKS), alone))
    assert not served.speculation.disabled


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("victim", range(3))
def test_unusable_logits_end_their_own_request_alone(victim, value, answers):
    """From the fourth step on one request's logits are unusable; it keeps what it had said."""
    alone, truth = answers
    passes = []

    def spoil(batch, logits):
        passes.append(1)
        if len(passes) > 3:
            rows = batch.logit_rows.tolist()
            group = next(
                (path.group for path in batch.paths if path.slots[0] == served_slots[victim]), None
            )  # the batch knows no requests, but their first slots
            own = {int(row) for path in batch.paths if path.group == group for row in path.rows}
            logits = logits.clone()
            logits[[at for at, row in enumerate(rows) if row in own]] = value
        return logits

    served = engine(Faulty(decoder(), spoil), [Oracle(truth)], depth=2)
    served_slots = {}

    def note_slots(_):
        for request in served.scheduler.running:
            if len(request.slots.slots):
                served_slots[request.request_id // 2] = int(request.slots.slots[0])

    outputs = run(served, ASKS, each_step=note_slots)
    for at, (output, expected) in enumerate(zip(outputs, alone, strict=True)):
        if at != victim:
            assert same(output, expected)
            continue
        (completion,) = output.completions
        assert completion.finish_reason == "error"
        assert completion.error
        said = len(completion.token_ids)
        assert 0 < said < 16
        assert completion.token_ids == expected.token_ids[:said]
        assert len(completion.sources) == said
        assert completion.logprobs == expected.logprobs[:said]


def test_unusable_logits_after_an_accepted_draft_leave_tokens_sources_and_logprobs_of_one_length(answers):
    """The root's row is good and the first draft stands; the next row is not a number."""
    alone, truth = answers

    def spoil(batch, logits):
        if len(logits) > 1:
            logits = logits.clone()
            logits[1] = torch.nan
        return logits

    served = engine(Faulty(decoder(), spoil), [Oracle(truth)], depth=3)
    request_id = served.add(ASKS[0].prompt, ASKS[0].params)
    chunks = []
    while served.has_work:
        chunks += served.step()
        served.check()
    (completion,) = served.collect(request_id).completions
    assert completion.finish_reason == "error"
    assert completion.token_ids == alone[0].token_ids[:2]
    assert len(completion.sources) == len(completion.logprobs) == 2
    assert sum((chunk.token_ids for chunk in chunks), ()) == completion.token_ids
    assert all(len(chunk.token_ids) == len(chunk.sources) == len(chunk.logprobs) for chunk in chunks)


def test_unusable_logits_that_nobody_looks_at_do_no_harm(answers):
    """Rows of drafts that are not accepted may hold anything."""
    alone, truth = answers

    def spoil(batch, logits):
        logits = logits.clone()
        roots = [at for at, row in enumerate(batch.logit_rows) if at == 0 or batch.logit_rows[at - 1] != row - 1]
        others = [at for at in range(len(logits)) if at not in roots]
        logits[others] = torch.nan
        return logits

    right_never = Guess(lambda context, limit: [wrong(token) for token in coming(truth, context, 4)])
    served = engine(Faulty(decoder(), spoil), [right_never])
    (output,) = run(served, ASKS[:1])
    assert same(output, alone[0])


def test_a_draft_of_a_token_that_the_model_cannot_embed_changes_nothing():
    """An embedding that holds NaN, as an unused row of a vocabulary may; plain decoding never meets it."""
    config = tiny_config("llama")
    tensors = tiny_tensors(config)
    poisoned = 511
    tensors["model.embed_tokens.weight"][poisoned] = torch.nan
    model = run_on(Architecture.from_config(config), tensors, torch.float32)
    alone, truth = truth_of(ASKS, model)
    assert all(poisoned not in output.token_ids for output in alone)
    drafter = Guess(lambda context, limit: [*coming(truth, context, 1), poisoned, 3])
    outputs = run(engine(model, [drafter]), ASKS)
    assert all(map(same, outputs, alone))


@pytest.mark.parametrize("failing", [0, 1, 2, 5])
def test_a_pass_that_fails_ends_the_requests_of_its_step_and_the_engine_goes_on(failing, answers, caplog):
    alone, truth = answers
    passes = []

    def spoil(batch, logits):
        passes.append(1)
        if len(passes) == failing + 1:
            raise RuntimeError("out of something")
        return logits

    served = engine(Faulty(decoder(), spoil), [Oracle(truth)], depth=2, max_batch=2)
    with caplog.at_level(logging.CRITICAL):
        outputs = run(served, ASKS)
    assert [output.finish_reason for output in outputs[:2]] == ["error", "error"]
    assert all("out of something" in output.completions[0].error for output in outputs[:2])
    for output, expected in zip(outputs[:2], alone, strict=False):
        assert output.token_ids == expected.token_ids[: len(output.token_ids)]
    assert same(outputs[2], alone[2]), "it waited, and was not in the step that failed"
    assert all(map(same, run(served, ASKS), alone)), "the same engine serves the same requests afterwards"


def test_a_pass_that_fails_half_way_leaves_no_wrong_keys_behind(answers):
    """The failed pass has written keys and values already; prefixes found later must not hold them."""
    alone, truth = answers
    broken = []

    class HalfWay(Faulty):
        def forward(self, batch, store):
            logits = self._inner.forward(batch, store)
            if not broken:
                broken.append(1)
                store.keys[:, batch.slots] = 7.0
                raise RuntimeError("power cut")
            return logits

    served = engine(HalfWay(decoder(), None), [Oracle(truth)], page_size=1)
    assert [output.finish_reason for output in run(served, ASKS)] == ["error"] * 3
    assert all(map(same, run(served, ASKS), alone))


def test_a_step_that_fails_while_it_moves_keys_leaves_no_prefix_that_holds_wrong_ones(monkeypatch):
    ask = Ask(list(range(40)), SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0))
    (expected,), truth = truth_of([ask])
    served = engine(drafters=[Guess(lambda context, limit: second_branch(truth, context))], page_size=4)
    move, moves = KVStore.move, []

    def failing(store, source, destination):
        moves.append(1)
        if len(moves) == 3:
            raise RuntimeError("out of memory")
        move(store, source, destination)

    monkeypatch.setattr(KVStore, "move", failing)
    (broken,) = run(served, [ask])
    answer = broken.completions[0]
    assert broken.finish_reason == "error"
    assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
    assert len(answer.token_ids) == len(answer.sources) == len(answer.logprobs)
    again = Ask([*ask.prompt, *expected.token_ids[:20]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert same(run(served, [again])[0], plain(again))


def second_branch(truth, context):
    """The right tokens on the second branch of a tree, so that accepted ones must be moved."""
    right = coming(truth, context, 4)
    if len(right) < 4:
        return []
    tokens = [wrong(right[0]), right[0], wrong(right[1]), right[1], right[2]]
    return DraftTree(tokens, [-1, -1, 0, 1, 3], [0.9, 0.8, 0.7, 0.7, 0.6], ["guess"] * 5)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], SamplingParams(), "empty"),
        (list(range(256)), SamplingParams(), "256"),
        ([1, VOCABULARY], SamplingParams(), "512"),
        ([-1], SamplingParams(), "-1"),
        ([1, "two"], SamplingParams(), "two"),
        ([1, None], SamplingParams(), "None"),
        ([1, 2.5], SamplingParams(), "2.5"),
        ([1], SamplingParams(stop=["x"]), "tokenizer"),
        ([1], SamplingParams(stop_token_ids=[VOCABULARY]), "512"),
        ([1], SamplingParams(logit_bias={VOCABULARY: 1.0}), "512"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once_and_disturbs_nobody(prompt, params, words, answers):
    alone, truth = answers
    served = engine(drafters=[Oracle(truth)])
    ids = [served.add(ask.prompt, ask.params) for ask in ASKS]
    served.step()
    with pytest.raises(InvalidRequestError, match=words):
        served.add(prompt, params)
    finish(served)
    assert all(same(served.collect(request_id), expected) for request_id, expected in zip(ids, alone, strict=True))
    assert not served._answers
