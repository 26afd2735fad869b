"""A step costs the same however long the answer already is: work is counted, not timed."""

import random
import sys

import numpy as np
import pytest
import torch

from forerun.cache import PagePool, SequenceSlots
from forerun.drafting.suffix import SuffixDrafter
from forerun.kernels.kv_store import KVStore
from forerun.verification.sampling import SamplingParams
from tests.engine.harness import VOCABULARY, engine
from tests.engine.words import tokenizer

STEPS = 600
WINDOW = 150


class Script:
    """In a decoder's place: the next token is a function of the position, and keeps the batches that it was given."""

    vocab_size = VOCABULARY
    context_limit = 100_000

    def __init__(self, tokens):
        self._tokens = tokens
        self.batches = []

    def new_store(self, slots):
        return KVStore.allocate(1, slots, 1, 1, torch.float32, torch.device("cpu"))

    def forward(self, batch, store):
        self.batches = [batch]
        logits = torch.zeros(len(batch.logit_rows), VOCABULARY)
        logits[torch.arange(len(logits)), self._tokens[batch.positions[batch.logit_rows] + 1]] = 1.0
        return logits


class Watched(list):
    """A list that counts the items that are taken out of it, slices and loops included."""

    taken = 0

    def __getitem__(self, at):
        got = super().__getitem__(at)
        self.taken += len(got) if isinstance(at, slice) else 1
        return got

    def __iter__(self):
        self.taken += len(self)
        return super().__iter__()


def text(length):
    """Three sentences over and over, in a random order, so that some guesses are right and some are not."""
    chance = random.Random(0)
    sentences = [[chance.randrange(2, VOCABULARY) for _ in range(9)] for _ in range(3)]
    tokens = [token for _ in range(length) for token in chance.choice(sentences)]
    return torch.tensor(tokens[:length])


@pytest.mark.parametrize("drafters", [(), (SuffixDrafter,)], ids=["plain", "suffix"])
def test_the_work_of_a_step_does_not_grow_with_the_answer(drafters):
    script = text(20 * STEPS)
    served = engine(
        Script(script),
        [drafter() for drafter in drafters],
        slots=21 * STEPS,
        context_length=20 * STEPS,
        tokenizer=tokenizer(),
        end_tokens=frozenset(),
    )
    served.add(script[:8].tolist(), SamplingParams(max_tokens=19 * STEPS, ignore_eos=True, stop="never said"))
    (request,) = served.scheduler.requests
    request.tokens, request.sources = Watched(request.tokens), Watched(request.sources)
    calls = [calls_of(served.step) for _ in range(STEPS)]
    early, late = calls[WINDOW : 2 * WINDOW], calls[-WINDOW:]
    assert sum(late) < 1.1 * sum(early), "later steps call more functions than earlier ones"
    emitted = len(request.tokens) - request.prompt_length
    assert emitted >= STEPS - 1
    assert request.tokens.taken < 20 * emitted, "tokens are gone through again and again"
    assert request.sources.taken < 3 * emitted


def calls_of(function):
    """How many functions, of Python and of C, a call calls."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_slots_are_copied_a_few_times_only_while_a_sequence_grows():
    slots = SequenceSlots(PagePool(1000, 4))
    buffers = [slots.slots]
    for length in range(1, 4001):
        assert slots.reserve(length)
        slots.commit(length - 1)
        if slots.slots.base is not buffers[-1]:
            buffers.append(slots.slots.base)
    assert len(buffers) < 15


def test_the_likely_line_of_a_tree_is_laid_out_without_copying_the_context():
    script = text(600)
    model = Script(script)
    served = engine(model, [SuffixDrafter()], slots=1024, context_length=600)
    served.add(script[:8].tolist(), SamplingParams(max_tokens=400, ignore_eos=True))
    (request,) = served.scheduler.requests
    shared = 0
    while served.has_work:
        served.step()
        (batch,) = model.batches
        drafted = len(batch.logit_rows) > 1
        shared += drafted and np.shares_memory(batch.paths[0].slots, request.slots.slots)
    assert shared > 10
