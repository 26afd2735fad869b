"""How large the cache is made, and that nothing grows however long the engine runs."""

import gc
import weakref

import pytest
import torch

from forerun.drafting.draft_model import DraftModelDrafter
from forerun.drafting.suffix import SuffixDrafter
from forerun.engine import memory
from forerun.engine.memory import cache_slots
from forerun.errors import CacheMemoryError
from forerun.verification.sampling import SamplingParams
from tests.engine.guessing import truth_of
from tests.engine.harness import VOCABULARY, Ask, decoder, engine, run, same

CPU = torch.device("cpu")
SIZES = {"bytes_per_slot": 1000, "page_size": 16, "context": 100, "device": CPU}


@pytest.fixture(autouse=True)
def one_megabyte_is_free(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 1_000_000)


def test_memory_that_is_set_becomes_whole_pages():
    assert cache_slots(500_000, wanted=10_000, **SIZES) == 496
    assert cache_slots(16_000, wanted=10_000, **SIZES) == 16


def test_the_machine_gives_a_share_of_what_is_free_and_no_more_than_is_wanted():
    assert cache_slots(None, wanted=10_000, **SIZES) == 240
    assert cache_slots(None, wanted=64, **SIZES) == 64


def test_too_much_is_refused_with_what_is_free_and_what_lowers_it():
    with pytest.raises(CacheMemoryError, match=r"(?s)cache\.memory.*1\.907 MiB.*976\.6 KiB.*lower"):
        cache_slots(2_000_000, wanted=10_000, **SIZES)


def test_too_little_for_a_page_is_refused_with_what_is_needed_and_what_raises_it():
    with pytest.raises(CacheMemoryError, match=r"(?s)15\.62 KiB.*raise cache\.memory"):
        cache_slots(15_000, wanted=10_000, **SIZES)


def test_free_memory_is_a_number_of_bytes(monkeypatch):
    monkeypatch.undo()
    assert memory.free_memory(CPU) > 2**20


def size_of(served, suffix, draft):
    """How much is kept: by the engine, by its cache's index, and by the drafters."""
    return {
        "requests": len(served.scheduler.requests) + len(served._answers) + len(served._chunks),
        "pages": served.pool.in_use,
        "keys": max(len(served.pool._key_of) - served.pool.pages, 0),
        "drafting": len(suffix._requests) + len(draft._sequences),
        "draft pages": draft._pool.in_use,
    }


def test_thousands_of_tokens_later_nothing_has_grown():
    """Requests end and are cancelled by turns. History is bounded, and everything else is back to nothing."""
    suffix = SuffixDrafter(min_score=0.0, history_tokens=500)
    draft = DraftModelDrafter(decoder(seed=9), slots=512, target_vocab_size=VOCABULARY)
    served = engine(drafters=[suffix, draft], slots=256, page_size=4)
    empty = size_of(served, suffix, draft)
    assert set(empty.values()) == {0}
    history = []
    for number in range(40):
        ids = [
            served.add([number, at, *range(at)], SamplingParams(max_tokens=4 + at % 4, ignore_eos=True))
            for at in range(5)
        ]
        for _ in range(number % 4):
            served.step()
        served.cancel(ids[number % 5])
        while served.has_work:
            served.step()
        for request_id in ids:
            served.collect(request_id)
        served.step()
        assert size_of(served, suffix, draft) == empty
        history.append(suffix.memory_bytes())
    assert max(history[20:]) == min(history[20:]), "history goes on growing"
    served.check()
    draft.check()


def test_a_collected_request_is_gone():
    served = engine(drafters=[SuffixDrafter(min_score=0.0)])
    request_id = served.add([1, 2, 3], SamplingParams(max_tokens=3))
    (request,) = map(weakref.ref, served.scheduler.requests)
    while served.has_work:
        served.step()
    served.collect(request_id)
    gc.collect()
    assert request() is None


def test_twenty_requests_one_after_the_other_are_drafted_for_as_each_would_be_alone():
    """What the draft model keeps of one request is not mixed into the next, shorter ones included."""
    draft = DraftModelDrafter(decoder(seed=3), slots=128, target_vocab_size=VOCABULARY)
    model = decoder(seed=3)
    served = engine(model, [draft], max_batch=1, width=1, depth=3, nodes=3)
    asks = [
        Ask([number] * (1 + 13 * number % 29), SamplingParams(max_tokens=9, ignore_eos=True)) for number in range(20)
    ]
    alone, _ = truth_of(asks, model)
    for ask, expected in zip(asks, alone, strict=True):
        (output,) = run(served, [ask])
        assert same(output, expected)
        assert output.stats.acceptance_rate == 1.0


def test_a_tenant_s_traffic_teaches_no_other_unless_history_is_shared():
    ask = SamplingParams(max_tokens=16, ignore_eos=True)
    for share, learns in ((False, False), (True, True)):
        served = engine(drafters=[SuffixDrafter(share_history=share, min_score=0.0)], prefix=False)
        run(served, [Ask([7, 8, 9], ask, tenant="one")])
        (again,) = run(served, [Ask([7, 8, 9], ask, tenant="one")])
        (other,) = run(served, [Ask([7, 8, 9], ask, tenant="two")])
        assert again.stats.accepted > 8
        assert (other.stats.accepted > 8) == learns
        served.clear_history()
        (forgotten,) = run(served, [Ask([7, 8, 9], ask, tenant="one")])
        assert forgotten.stats.accepted < again.stats.accepted
