"""The memory of keys and values: what int8 keeps of a vector, moves of slots, memory taken only when written to."""

import resource

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import EngineError
from forerun.kernels import kv_store
from forerun.kernels.kv_store import KVStore, encode
from forerun.kernels.native_rows import native_rows

native = pytest.mark.skipif(native_rows() is None, reason="no native kernels on this machine")
HUGE_PAGE = 2 << 20  # what one write may take
CPU = torch.device("cpu")


def filled(dtype: torch.dtype) -> KVStore:
    store = KVStore.allocate(3, 20, 2, 5, dtype, torch.device("cpu"))
    for seed, part in enumerate((store.keys, store.values)):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed)))
    return store


@pytest.mark.parametrize("by", [pytest.param("native", marks=native), "torch"])
@given(st.permutations(range(20)), st.permutations(range(20)), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_slots_move_all_at_once_in_every_layer(by, sources, targets, count):
    with pytest.MonkeyPatch.context() as patch:
        if by == "torch":
            patch.setattr(kv_store, "native_rows", lambda: None)
        for dtype in (torch.float32, torch.bfloat16):
            store, before = filled(dtype), filled(dtype)
            store.move(np.array(sources[:count], np.int64), np.array(targets[:count], np.int64))
            came_from = {
                **{slot: slot for slot in range(21)},
                **dict(zip(targets[:count], sources[:count], strict=True)),
            }
            for slot, source in came_from.items():
                assert torch.equal(store.keys[:, slot], before.keys[:, source])
                assert torch.equal(store.values[:, slot], before.values[:, source])


@native
@pytest.mark.parametrize(("sources", "targets"), [([21], [0]), ([0], [-1]), ([1, 2], [3])])
def test_a_move_outside_of_the_store_is_refused_and_moves_nothing(sources, targets):
    store = filled(torch.float32)
    with pytest.raises(EngineError, match="move"):
        store.move(np.array(sources, np.int64), np.array(targets, np.int64))
    assert torch.equal(store.keys, filled(torch.float32).keys)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_code_is_the_nearest_of_255_steps_and_the_greatest_number_is_127():
    x = randn(200, 3, 24)
    codes, scales = encode(x)
    assert (codes.abs().amax(-1) == 127).all()
    error = (codes.float() * scales[..., None] - x).abs()
    assert (error <= 0.5001 * scales[..., None]).all()
    assert (scales > 0).all()


def test_halves_are_rounded_to_even():
    codes, scales = encode(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert (codes.tolist(), scales.tolist()) == ([[127, 0, 2, 2, 0, -2]], [1.0])


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-37])
def test_a_vector_of_nothing_has_the_scale_0(tiny):
    codes, scales = encode(torch.full((2, 8), tiny))
    assert not codes.any()
    assert not scales.any()


def test_what_is_not_finite_is_nothing_and_the_largest_numbers_stay_finite():
    largest = torch.finfo(torch.float32).max
    codes, scales = encode(torch.tensor([[torch.nan, torch.inf, -torch.inf, 2.0], [largest, -largest, 1.0, 0.0]]))
    assert codes.tolist() == [[0, 0, 0, 127], [127, -127, 0, 0]]
    assert (codes.float() * scales[:, None]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_moving_slots_moves_all_that_belongs_to_them(dtype):
    store = KVStore.allocate(2, 10, 3, 8, dtype, CPU)
    for layer in range(2):
        store.write(layer, torch.arange(10), randn(10, 3, 8, seed=layer), randn(10, 3, 8, seed=2 + layer))
    every = torch.arange(10)
    before = [(store.read_keys(layer, every), store.read_values(layer, every)) for layer in range(2)]
    store.move(np.array([5, 6, 9]), np.array([4, 5, 0]))
    every[[4, 5, 0]] = torch.tensor([5, 6, 9])
    for layer, (keys, values) in enumerate(before):
        assert torch.equal(store.read_keys(layer, torch.arange(10)), keys[every])
        assert torch.equal(store.read_values(layer, torch.arange(10)), values[every])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_large_cache_takes_memory_once_it_is_written_to(dtype):
    layers, slots = 4, 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = KVStore.allocate(layers, slots, 2, 64, dtype, CPU)
    assert store.nbytes > 1 << 30
    for layer in range(layers):
        store.write(layer, torch.tensor([0, slots]), randn(2, 2, 64), randn(2, 2, 64))
    assert not store.keys[:, 1].any()
    assert not store.keys[:, -2].any()
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert taken < 40 * layers * HUGE_PAGE
