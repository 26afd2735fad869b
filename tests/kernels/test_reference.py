"""The reference operations: what they compute, and that a row's bits depend on that row alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.kernels.base import AttentionSpec, Mixture, Norm
from forerun.kernels.batch import AttentionPath, TokenBatch
from forerun.kernels.kv_store import KVStore
from forerun.kernels.reference import ReferenceKernels
from forerun.kernels.reference.kernels import rms_norm
from forerun.kernels.reference.tiles import linear, pad_rows

KERNELS = ReferenceKernels("cpu")


def batch_of(sequences, store_slots, wanted=None):
    """A TokenBatch of chains: (slots of the whole sequence, first position computed) per sequence."""
    positions, slots, paths = [], [], []
    for group, (sequence_slots, first) in enumerate(sequences):
        rows = np.arange(len(positions), len(positions) + len(sequence_slots) - first)
        positions.extend(range(first, len(sequence_slots)))
        slots.extend(sequence_slots[first:])
        paths.append(AttentionPath(np.array(sequence_slots, np.int64), rows, group, first))
    total = len(positions)
    return TokenBatch(
        np.zeros(total, np.int64),
        np.array(positions, np.int64),
        np.array(slots, np.int64),
        paths,
        np.arange(total) if wanted is None else wanted,
    )


def attention_in_double(q, keys, values, spec, batch):
    out = np.zeros((batch.rows, spec.heads * spec.head_dim))
    for path in batch.paths:
        for row in path.rows:
            position = batch.positions[row]
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            slots = path.slots[first : position + 1]
            k = keys[slots].double().repeat_interleave(spec.heads // spec.kv_heads, 1)
            v = values[slots].double().repeat_interleave(spec.heads // spec.kv_heads, 1)
            scores = torch.einsum("hd,khd->hk", q[row].double().view(spec.heads, -1), k) * spec.scale
            if spec.softcap is not None:
                scores = torch.tanh(scores / spec.softcap) * spec.softcap
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v).flatten().numpy()
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 64, 100])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_attention_agrees_with_double_precision(window, softcap):
    torch.manual_seed(0)
    spec = AttentionSpec(heads=6, kv_heads=2, head_dim=16, scale=0.3, window=window, softcap=softcap)
    store = KVStore.allocate(1, 512, 2, 16, torch.float32, torch.device("cpu"))
    store.keys.normal_()
    store.values.normal_()
    slots = np.random.default_rng(0).permutation(512)
    batch = batch_of([(slots[:150], 100), (slots[200:203], 0), (slots[300:430], 129)], 512)
    q = torch.randn(pad_rows(torch.zeros(batch.rows)).shape[0], 96)
    prepared = KERNELS.prepare(batch, store, [])
    got = KERNELS.attend(q, spec, 0, prepared, store)[: batch.rows]
    want = attention_in_double(q, store.keys[0], store.values[0], spec, batch)
    np.testing.assert_allclose(got.numpy(), want, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 200),
    chunk=st.integers(1, 70),
    others=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 20)), max_size=4),
    window=st.sampled_from([None, 3, 64, 90]),
    kv_heads=st.sampled_from([1, 2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
def test_attention_of_a_row_is_the_same_in_any_company(length, chunk, others, window, kv_heads, dtype):
    """The last `chunk` rows of a sequence, alone one by one or together and with other sequences around."""
    torch.manual_seed(1)
    spec = AttentionSpec(heads=4, kv_heads=kv_heads, head_dim=8, scale=0.35, window=window)
    store = KVStore.allocate(1, 1024, kv_heads, 8, dtype, torch.device("cpu"))
    store.write(0, torch.arange(1024), torch.randn(1024, kv_heads, 8), torch.randn(1024, kv_heads, 8))
    free = iter(np.random.default_rng(2).permutation(1024).tolist())
    mine = [next(free) for _ in range(length)]
    first = max(0, length - chunk)
    queries = torch.randn(length, 32)

    def attend(sequences, q):
        batch = batch_of(sequences, 1024)
        return KERNELS.attend(pad_rows(q), spec, 0, KERNELS.prepare(batch, store, []), store)[: batch.rows]

    alone = torch.cat([attend([(mine[: p + 1], p)], queries[p : p + 1]) for p in range(first, length)])
    before = [([next(free) for _ in range(n)], max(0, n - rows)) for n, rows in others]
    crowd = sum(len(slots) - start for slots, start in before)
    together = attend([*before, (mine, first)], torch.cat([torch.randn(crowd, 32), queries[first:]]))
    assert torch.equal(together[crowd:], alone)


def test_a_tree_node_sees_its_ancestors_as_in_a_real_sequence():
    """Two branches after a committed context give each node the bits that the branch alone would give."""
    torch.manual_seed(3)
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=0.35)
    store = KVStore.allocate(1, 256, 2, 8, torch.float32, torch.device("cpu"))
    store.keys.normal_()
    store.values.normal_()
    for context in (5, 62, 63, 64, 130):
        committed, left, right = list(range(context)), [200, 201, 202], [200, 210, 211]
        q = torch.randn(5, 32)  # root 200, left 201 202, right 210 211
        paths = [
            AttentionPath(np.array(committed + left), np.array([0, 1, 2]), 0, context),
            AttentionPath(np.array(committed + right), np.array([3, 4]), 0, context),
        ]
        positions = np.array([context, context + 1, context + 2, context + 1, context + 2])
        slots = np.array([200, 201, 202, 210, 211])
        tree = TokenBatch(np.zeros(5, np.int64), positions, slots, paths, np.arange(5))
        got = KERNELS.attend(pad_rows(q), spec, 0, KERNELS.prepare(tree, store, []), store)[:5]
        for branch, rows in ((left, [0, 1, 2]), (right, [0, 3, 4])):
            for depth, row in enumerate(rows):
                chain = batch_of([(committed + branch[: depth + 1], context + depth)], 256)
                alone = KERNELS.attend(pad_rows(q[row : row + 1]), spec, 0, KERNELS.prepare(chain, store, []), store)
                assert torch.equal(got[row], alone[0]), (context, row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out", "features"), [(1, 8), (96, 64), (513, 40)])
def test_a_row_of_a_product_is_the_same_in_any_company(dtype, out, features):
    torch.manual_seed(4)
    packed = KERNELS.pack(torch.randn(out, features).to(dtype), torch.randn(out))
    x = torch.randn(40, features)
    alone = torch.cat([linear(pad_rows(row[None]), packed)[:1] for row in x])
    for rows in (1, 2, 7, 16, 17, 40):
        for start in (0, 3, 40 - rows):
            chunk = x[start : start + rows]
            assert torch.equal(linear(pad_rows(chunk), packed)[: len(chunk)], alone[start : start + rows])


def test_norm_of_a_row_is_the_same_in_any_company():
    x = torch.randn(64, 96)
    norm = Norm(torch.rand(96), 1e-6)
    want = (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.weight).float()
    torch.testing.assert_close(rms_norm(x, norm), want)
    for rows in (16, 32, 48):
        assert torch.equal(rms_norm(x[:rows], norm), rms_norm(x, norm)[:rows])


def test_mixture_of_experts_is_the_same_in_any_company_and_agrees_with_double_precision():
    torch.manual_seed(5)
    experts, hidden, inner = 5, 32, 24
    gate_up = [torch.randn(2 * inner, hidden) / math.sqrt(hidden) for _ in range(experts)]
    down = [torch.randn(hidden, inner) / math.sqrt(inner) for _ in range(experts)]
    router = torch.randn(experts, hidden)
    mixture = Mixture(
        KERNELS.pack(router), [KERNELS.pack(w) for w in gate_up], [KERNELS.pack(w) for w in down], 2, True
    )
    x = torch.randn(32, hidden)
    got = KERNELS.mixture_add(x, None, mixture, "silu", torch.zeros_like(x))
    shares = (x.double() @ router.double().T).softmax(-1)
    for row in range(32):
        top, chosen = shares[row].topk(2)
        want = torch.zeros(hidden, dtype=torch.float64)
        for share, expert in zip(top / top.sum(), chosen, strict=True):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            want += share * (down[expert].double() @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(got[row].double(), want, atol=1e-4, rtol=1e-4)
        one = pad_rows(x[row : row + 1])
        alone = KERNELS.mixture_add(one, None, mixture, "silu", torch.zeros_like(one))
        assert torch.equal(alone[0], got[row])


def test_activations_do_not_depend_on_how_threads_share_the_rows():
    """Thread counts that cut rows in odd places; 80 rows together against 16 at a time."""
    gate_up = torch.randn(80, 2000, generator=torch.Generator().manual_seed(6)) * 4
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            for activation in ("silu", "gelu_tanh"):
                together = KERNELS.gate(gate_up, activation)
                apart = torch.cat([KERNELS.gate(gate_up[at : at + 16], activation) for at in range(0, 80, 16)])
                assert torch.equal(together, apart), (threads, activation)
    finally:
        torch.set_num_threads(before)
