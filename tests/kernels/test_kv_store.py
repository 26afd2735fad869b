"""Moves of slots: all at once, in every layer, natively as by torch; a slot that is not there is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import EngineError
from forerun.kernels import kv_store
from forerun.kernels.kv_store import KVStore
from forerun.kernels.native_rows import native_rows

native = pytest.mark.skipif(native_rows() is None, reason="no native kernels on this machine")


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
