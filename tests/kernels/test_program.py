"""A recorded program: one call per step, and the bits of the same operations called one by one."""

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import EngineError
from forerun.kernels.batch import AttentionPath, TokenBatch
from forerun.kernels.cpu import CpuKernels, binding
from forerun.kernels.cpu.program import EMBED, LINEAR, LOGITS, Recorder, assign_buffers
from tests.models.tiny import CONTEXT, FAMILIES, VOCABULARY, tiny_decoder

SETS = binding.supported()
pytestmark = pytest.mark.skipif(not SETS, reason="no native kernels on this machine")
families = pytest.mark.parametrize("family", FAMILIES)
held = pytest.mark.parametrize(
    ("dtype", "bits", "cache"),
    [
        (torch.float32, None, None),
        (torch.bfloat16, None, None),
        (torch.bfloat16, 8, None),
        (torch.float32, 4, None),
        (torch.bfloat16, 8, torch.int8),
    ],
)


def kernels(threads=2, isa=None, **settings):
    return CpuKernels(isa or SETS[-1], threads, **settings)


def prompt(length, first=0, slot=0, seed=0, wanted=None):
    """Tokens for positions first ... of one sequence, in slots of the same numbers."""
    rows, generator = length - first, np.random.default_rng(seed)
    return TokenBatch(
        generator.integers(0, VOCABULARY, rows),
        np.arange(first, length),
        np.arange(slot + first, slot + length),
        [AttentionPath(np.arange(slot, slot + length), np.arange(rows), 0, first)],
        np.arange(rows) if wanted is None else np.array(wanted, np.int64),
    )


def two_sequences(first, second):
    """Prompts of these lengths side by side; the logits wanted are those of every third row, backwards."""
    parts = [prompt(first), prompt(second, slot=first, seed=1)]
    rows = first + second
    return TokenBatch(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("token_ids", "positions", "slots")),
        [
            AttentionPath(np.arange(first), np.arange(first), 0, 0),
            AttentionPath(np.arange(first, rows), np.arange(first, rows), 1, 0),
        ],
        np.arange(rows)[::-3].copy(),
    )


def same_bits(model, other, batches, slots=128):
    """Both models give the same logits, and leave the same keys and values."""
    stores = model.new_store(slots), other.new_store(slots)
    for batch in batches:
        assert torch.equal(model.forward(batch, stores[0]), other.forward(batch, stores[1]))
    for part in ("keys", "values", "key_scales", "value_scales"):
        one, another = (getattr(store, part) for store in stores)
        assert one is another is None or torch.equal(one, another), part


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@held
@families
def test_a_program_has_the_bits_of_the_operations_one_by_one(family, dtype, bits, cache, threads, isa):
    kind = {"dtype": dtype, "bits": bits, "cache": cache}
    recorded = tiny_decoder(family, **kind, kernels=kernels(threads, isa))
    one_by_one = tiny_decoder(family, **kind, kernels=kernels(threads, isa, program=False))
    batches = [prompt(1), prompt(2, 1), prompt(9, 2), prompt(70, 9), prompt(71, 70), prompt(72, 71, wanted=[])]
    same_bits(recorded, one_by_one, [*batches, two_sequences(33, 40), two_sequences(1, 2)])
    assert recorded._run.program is not None


@pytest.mark.parametrize(("bits", "cache"), [(None, None), (8, None), (None, torch.int8)])
@families
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(family, bits, cache):
    models = [tiny_decoder(family, bits=bits, cache=cache, kernels=kernels(threads)) for threads in (1, 2)]
    for model, rows in itertools.product(models, (2, 3, 17, 64)):
        whole = model.forward(prompt(rows), model.new_store(64))
        for other in models:
            store = other.new_store(64)
            tokens = prompt(rows).token_ids
            for position in range(rows):
                one = prompt(position + 1, position)
                one.token_ids[:] = tokens[position]
                assert torch.equal(other.forward(one, store)[0], whole[position])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_quantised_experts_agree_with_the_reference(family, bits):
    native, reference = tiny_decoder(family, bits=bits, kernels=kernels()), tiny_decoder(family, bits=bits)
    got, want = (model.forward(prompt(40), model.new_store(64)).cpu() for model in (native, reference))
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


@families
def test_over_a_cache_of_codes_a_model_agrees_with_the_reference(family):
    native, reference = (tiny_decoder(family, cache=torch.int8, kernels=own) for own in (kernels(), None))
    got, want = (model.forward(prompt(40), model.new_store(64)).cpu() for model in (native, reference))
    plain = tiny_decoder(family)
    exact = plain.forward(prompt(40), plain.new_store(64)).cpu()

    def apart(one, another):
        """Of the middle row, relative: in others a code rounded the other way may choose another expert."""
        return ((one - another).norm(dim=-1) / another.norm(dim=-1)).median()

    assert apart(got, want) < 2e-3
    assert apart(got, want) < apart(want, exact) < 0.1


def test_repeated_steps_of_changing_sizes_do_not_disturb_each_other():
    model = tiny_decoder("qwen3_moe", kernels=kernels(2))
    wanted = {}
    for rows in (1, 40, 3, 100, 1, 17, 100, 2, 40) * 6:
        logits = model.forward(prompt(rows), model.new_store(128))
        assert torch.equal(wanted.setdefault(rows, logits), logits)


def test_models_of_different_shapes_take_turns_in_the_same_memory():
    shared = kernels(2)
    models = {family: tiny_decoder(family, kernels=shared) for family in FAMILIES}
    alone = {family: model.forward(prompt(20), model.new_store(32)) for family, model in models.items()}
    for family in (*FAMILIES, *reversed(FAMILIES)):
        assert torch.equal(models[family].forward(prompt(20), models[family].new_store(32)), alone[family])


def test_steps_from_several_threads_come_one_after_the_other():
    model = tiny_decoder(kernels=kernels(2))
    want = {rows: model.forward(prompt(rows), model.new_store(64)) for rows in (1, 5, 30)}
    wrong = []

    def work(rows):
        logits = (model.forward(prompt(rows), model.new_store(64)) for _ in range(100))
        wrong.extend(rows for each in logits if not torch.equal(each, want[rows]))

    workers = [threading.Thread(target=work, args=(rows,)) for rows in want]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not wrong
    assert not any(worker.is_alive() for worker in workers)


def test_more_threads_than_processors_hold_nothing_up():
    few, many = tiny_decoder(kernels=kernels(1)), tiny_decoder(kernels=kernels(16))
    for _ in range(20):
        same_bits(few, many, [prompt(1), prompt(30, 1), prompt(31, 30)], slots=32)


@pytest.mark.parametrize("head_dim", [20, 264])
def test_a_model_that_a_program_does_not_cover_runs_all_the_same(head_dim):
    model = tiny_decoder(head_dim=head_dim, kernels=kernels())
    reference = tiny_decoder(head_dim=head_dim)
    got, want = (m.forward(prompt(20), m.new_store(32)).cpu() for m in (model, reference))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert model._run.program is None


def test_operations_that_compute_with_values_themselves_are_not_recorded():
    native, table = kernels(), torch.randn(VOCABULARY, 8)
    packed = native.pack(torch.randn(VOCABULARY, 8))
    norm = tiny_decoder("llama", hidden_size=8, head_dim=8).final_norm

    def twice(kernels, prepared, store):
        x = kernels.embed(table, prepared, 1.0)
        return kernels.logits(x + x, norm, packed, prepared, None)

    def through_torch(kernels, prepared, store):
        return kernels.logits(torch.relu(kernels.embed(table, prepared, 1.0)), norm, packed, prepared, None)

    store = tiny_decoder().new_store(8)
    prepared = native.prepare(prompt(3), store, [])
    for operations in (twice, through_torch):
        run = native.record(operations)
        assert torch.equal(run(prepared, store), operations(native, prepared, store))
        assert run.program is None


def test_what_does_not_fit_the_model_is_refused():
    model = tiny_decoder(kernels=kernels())
    model.forward(prompt(3), model.new_store(8))
    unknown = prompt(3)
    unknown.token_ids[1] = VOCABULARY
    with pytest.raises(EngineError, match="token ids"):
        model.forward(unknown, model.new_store(8))
    with pytest.raises(EngineError, match="layer"):
        model.forward(prompt(3), tiny_decoder(num_hidden_layers=1).new_store(8))
    with pytest.raises(EngineError, match="heads"):
        model.forward(prompt(3), tiny_decoder("qwen3").new_store(8))
    with pytest.raises(EngineError, match="positions"):
        model.forward(prompt(CONTEXT + 1, CONTEXT), model.new_store(CONTEXT + 1))
    prepared = model.kernels.prepare(prompt(3), model.new_store(8), model._rotary)
    with pytest.raises(EngineError, match="prepared for"):
        model._run(prepared, model.new_store(8))


@st.composite
def recordings(draw):
    """Random operations with up to two inputs, each one a value that was made before; the last value is the result."""
    recorder = Recorder("test")
    values = [recorder._add(EMBED, None, 8)]
    for _ in range(draw(st.integers(1, 30))):
        x, residual = draw(st.sampled_from(values[-6:])), draw(st.none() | st.sampled_from(values[-6:]))
        values.append(recorder._add(LINEAR, None, draw(st.integers(1, 5)) * 8, x, residual))
    return recorder.instructions


@settings(deadline=None)
@given(recordings())
def test_no_instruction_overwrites_a_value_that_is_still_to_be_read(instructions):
    result = instructions[-1].y
    numbers, widths = assign_buffers(instructions, result)
    holds = {}
    for instruction in instructions:
        for value in (instruction.x, instruction.residual):
            if value is not None:
                assert holds[numbers[value]] is value
                assert numbers[value] != numbers[instruction.y]
        if instruction.y is not result:
            assert instruction.y.width <= widths[numbers[instruction.y]]
        holds[numbers[instruction.y]] = instruction.y
    assert numbers[result] == LOGITS


def test_a_deep_model_needs_no_more_memory_than_a_shallow_one():
    shallow, deep = (tiny_decoder(num_hidden_layers=layers, kernels=kernels()) for layers in (2, 12))
    for model in (shallow, deep):
        model.forward(prompt(3), model.new_store(8))
    assert deep._run.program.widths == shallow._run.program.widths
    assert len(deep._run.program.widths) <= 4
