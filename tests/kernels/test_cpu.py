"""The native kernels: agreement with double precision, and the same bits in any company, on any threads."""

import itertools
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError, EngineError
from forerun.kernels.base import AttentionSpec, Mixture, Norm
from forerun.kernels.batch import AttentionPath, TokenBatch
from forerun.kernels.cpu import CpuKernels, binding, load_cpu_kernels, unavailable_reason
from forerun.kernels.cpu.weights import memory_runs
from forerun.kernels.kv_store import KVStore
from forerun.kernels.reference import ReferenceKernels

SETS = binding.supported()
pytestmark = pytest.mark.skipif(not SETS, reason="no native kernels on this machine")
KERNELS = [CpuKernels(isa, threads) for isa in SETS for threads in (1, 2)]
each = pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: f"{k.name}-{k.threads}")
DTYPES = [torch.float32, torch.bfloat16]
CACHES = [*DTYPES, torch.int8]
CPU = torch.device("cpu")


def tolerance(kernels, dtype):
    """Of a product of a few hundred terms of size 1. AMX has 16 of 24 bits of an activation beside bfloat16 weights."""
    return {"rtol": 1e-5, "atol": 1e-3 if kernels.name == "amx" and dtype is torch.bfloat16 else 1e-4}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled_store(slots, kv_heads, head_dim, dtype, layers=1):
    store = KVStore.allocate(layers, slots, kv_heads, head_dim, dtype, CPU)
    for layer in range(layers):
        keys, values = (randn(*store.keys.shape, seed=seed)[layer] for seed in (1, 2))
        store.write(layer, torch.arange(slots + 1), keys, values)
    return store


def batch_of(paths, positions, slots, token_ids=None, logit_rows=None):
    """paths: (slots, rows, group, shared) each."""
    rows = len(positions)
    return TokenBatch(
        np.zeros(rows, np.int64) if token_ids is None else np.array(token_ids, np.int64),
        np.array(positions, np.int64),
        np.array(slots, np.int64),
        [AttentionPath(np.array(s, np.int64), np.array(r, np.int64), g, n) for s, r, g, n in paths],
        np.arange(rows) if logit_rows is None else np.array(logit_rows, np.int64),
    )


def chain(slots, first, rows=None, group=0):
    """Rows for positions first ... of one sequence."""
    rows = np.arange(len(slots) - first) if rows is None else rows
    return batch_of([(slots, rows, group, first)], range(first, len(slots)), slots[first:])


# Linear layers


@each
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "features"), [(1, 8), (1, 1), (7, 13), (33, 40), (96, 64), (65, 576), (160, 1)])
def test_product_agrees_with_double_precision(kernels, dtype, out, features):
    weight, bias = randn(out, features).to(dtype), randn(out, seed=1)
    packed = kernels.pack(weight, bias)
    for rows in (1, 2, 3, 5, 6, 7, 13, 64):
        x, residual = randn(rows, features, seed=rows), randn(rows, out, seed=3)
        want = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(kernels.norm_project(x, None, packed).double(), want, **tolerance(kernels, dtype))
        added = kernels.project_add(x, packed, residual)
        torch.testing.assert_close(added.double(), want + residual.double(), **tolerance(kernels, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_has_the_same_bits_in_any_company_with_any_threads_and_instructions(dtype):
    """One chain of fused multiply-adds per element: not even the instruction set shows, but for bfloat16 on AMX."""
    for out, features in ((1, 8), (33, 40), (100, 64), (577, 131)):
        weight, bias, x = randn(out, features).to(dtype), randn(out), randn(64, features, seed=5)
        first = {}
        for kernels in KERNELS:
            packed = kernels.pack(weight, bias)
            mine = torch.cat([kernels.norm_project(row[None], None, packed) for row in x])
            alone = first.setdefault(kernels.name == "amx" and dtype is torch.bfloat16, mine)
            assert torch.equal(mine, alone)
            for rows in range(1, 65):
                start = (rows * 7) % (65 - rows)
                got = kernels.norm_project(x[start : start + rows], None, packed)
                assert torch.equal(got, alone[start : start + rows]), (kernels.name, rows, start)


@each
def test_a_column_of_a_product_has_the_same_bits_however_the_weight_is_cut(kernels):
    weight, x = randn(200, 72).bfloat16(), randn(9, 72)
    whole = kernels.norm_project(x, None, kernels.pack(weight))
    for cut in (1, 16, 31, 100, 199):
        parts = [kernels.norm_project(x, None, kernels.pack(part)) for part in (weight[:cut], weight[cut:])]
        assert torch.equal(torch.cat(parts, 1), whole)


def test_many_weights_share_the_arena_without_touching_each_other():
    kernels = CpuKernels(SETS[-1], 2)
    weights = [randn(n, k, seed=n).bfloat16() for n, k in itertools.product((1, 31, 64), (1, 17, 200))]
    packed = [kernels.pack(weight) for weight in weights]
    for weight, own in zip(weights, packed, strict=True):
        x = randn(3, weight.shape[1])
        want = x @ weight.float().T
        torch.testing.assert_close(kernels.norm_project(x, None, own), want, **tolerance(kernels, torch.bfloat16))


# Norms and other operations on rows


def norm_in_double(x, norm):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight.double()


@each
@pytest.mark.parametrize("features", [8, 24, 61, 576])
def test_norms_before_and_after_a_product(kernels, features):
    before, after = Norm(randn(features), 1e-6), Norm(randn(40), 1e-5)
    weight, x, residual = randn(40, features), randn(20, features, seed=1), randn(20, 40, seed=2)
    packed = kernels.pack(weight)
    want = norm_in_double(x, before) @ weight.double().T
    got = kernels.norm_project(x, before, packed)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    want = residual.double() + norm_in_double(x.double() @ weight.double().T, after)
    got = kernels.project_add(x, packed, residual, after)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    for start, rows in ((0, 1), (3, 1), (5, 15), (19, 1)):
        part = slice(start, start + rows)
        assert torch.equal(kernels.project_add(x[part], packed, residual[part], after), got[part])


@each
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_agrees_with_double_precision(kernels, activation):
    values = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-20, -1e-20, 3e4, -3e4])])
    for size in (1, 15, 16, 40, len(values)):
        gate, up = values[-size:].repeat(3, 1), randn(3, size)
        got = kernels.gate(torch.cat([gate, up], 1), activation)
        wide = gate.double()
        activated = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh")
        torch.testing.assert_close(got.double(), activated * up.double(), rtol=3e-6, atol=1e-6)
        assert torch.equal(kernels.gate(torch.cat([gate, up], 1)[1:2], activation), got[1:2])


@each
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_scales_rows_of_the_table(kernels, dtype):
    table = randn(50, 24).to(dtype)
    batch = batch_of([(range(10), range(10), 0, 0)], range(10), range(10), token_ids=[0, 49, 3, 3, 7, 8, 9, 10, 11, 12])
    prepared = kernels.prepare(batch, filled_store(16, 1, 8, dtype), [])
    assert torch.equal(kernels.embed(table, prepared, 4.5), table[batch.token_ids].float() * 4.5)


@each
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_of_the_wanted_rows_in_their_order(kernels, dtype, softcap):
    weight, norm, x = randn(77, 48).to(dtype), Norm(randn(48), 1e-6), randn(12, 48, seed=1)
    batch = batch_of([(range(12), range(12), 0, 0)], range(12), range(12), logit_rows=[11, 0, 5, 5])
    prepared = kernels.prepare(batch, filled_store(16, 1, 8, dtype), [])
    packed = kernels.pack(weight)
    got = kernels.logits(x, norm, packed, prepared, softcap)
    want = norm_in_double(x[[11, 0, 5, 5]], norm) @ weight.double().T
    want = want if softcap is None else torch.tanh(want / softcap) * softcap
    torch.testing.assert_close(got.double(), want, **tolerance(kernels, dtype))
    none = batch_of([(range(12), range(12), 0, 0)], range(12), range(12), logit_rows=[])
    assert kernels.logits(x, norm, packed, kernels.prepare(none, prepared.store, []), softcap).shape == (0, 77)


@each
def test_mixture_agrees_with_the_reference_and_keeps_its_bits(kernels):
    def build(made):
        return Mixture(
            made.pack(randn(6, 16, seed=1)),
            [made.pack(randn(48, 16, seed=10 + e)) for e in range(6)],
            [made.pack(randn(16, 24, seed=20 + e)) for e in range(6)],
            top_k=3,
            renormalise=True,
        )

    reference, norm, x, residual = ReferenceKernels(), Norm(randn(16), 1e-6), randn(32, 16, seed=2), randn(32, 16)
    mixture = build(kernels)
    got = kernels.mixture_add(x, norm, mixture, "silu", residual)
    want = reference.mixture_add(x, norm, build(reference), "silu", residual)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 5, 31):
        some = slice(32 - rows, 32)
        assert torch.equal(kernels.mixture_add(x[some], norm, mixture, "silu", residual[some]), got[some])


@each
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(("head_dim", "turning"), [(32, 32), (64, 32), (24, 10), (256, 256), (320, 320)])
@pytest.mark.parametrize("head_norms", [False, True])
def test_rotation_agrees_with_the_reference_and_writes_keys_and_values(kernels, dtype, head_dim, turning, head_norms):
    reference = ReferenceKernels()
    norms = [Norm(randn(head_dim, seed=s), 1e-6) if head_norms else None for s in (1, 2)]
    spec = AttentionSpec(6, 2, head_dim, 0.1, query_norm=norms[0], key_norm=norms[1])
    angles = torch.arange(100)[:, None] * torch.linspace(0.01, 1, turning // 2)
    tables = [(angles.cos(), angles.sin())]
    batch = chain(np.random.default_rng(0).permutation(40)[:30], 19)  # 11 rows
    qkv = randn(11, 10 * head_dim)
    stores = [filled_store(40, 2, head_dim, dtype, layers=2) for _ in range(2)]
    got = kernels.rotate_and_write(qkv, spec, 1, kernels.prepare(batch, stores[0], tables), stores[0])
    prepared = reference.prepare(batch, stores[1], tables)
    want = reference.rotate_and_write(F.pad(qkv, (0, 0, 0, 5)), spec, 1, prepared, stores[1])[:11]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    # Keys may differ in their last bit before they are rounded: to a neighbouring bfloat16, or code.
    rtol, atol = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 1e-5), torch.int8: (1e-5, 0.06)}[dtype]
    keys, expected = (store.read_keys(1, torch.arange(40)) for store in stores)
    torch.testing.assert_close(keys, expected, rtol=rtol, atol=atol)
    assert (keys - expected).abs().mean() < 1e-3
    assert torch.equal(stores[0].values[:, :-1], stores[1].values[:, :-1])
    if dtype is torch.int8:
        assert torch.equal(stores[0].value_scales[:, :-1], stores[1].value_scales[:, :-1])
    one = batch_of([(batch.paths[0].slots, [0], 0, 0)], [25], [batch.slots[6]])
    kept = stores[0].keys.clone()
    again = kernels.rotate_and_write(qkv[6:7], spec, 1, kernels.prepare(one, stores[0], tables), stores[0])
    assert torch.equal(again, got[6:7])
    assert torch.equal(stores[0].keys, kept)


@each
def test_values_are_rounded_to_nearest_even_as_torch_does_and_written_as_zero_where_not_finite(kernels):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 64 * 64, dtype=np.uint32)
    bits[:4] = [0x3F808000, 0x3F818000, 0x7F800000, 0xFF800000]  # ties to even, infinities
    values = torch.from_numpy(bits.view(np.float32).copy()).view(64, 64)
    store = filled_store(64, 1, 64, torch.bfloat16)
    batch = batch_of([(range(64), range(64), 0, 0)], range(64), range(64))
    prepared = kernels.prepare(batch, store, [(torch.ones(64, 32), torch.zeros(64, 32))])
    kernels.rotate_and_write(torch.cat([values] * 3, 1), AttentionSpec(1, 1, 64, 1.0), 0, prepared, store)
    want = values.bfloat16()
    numbers = values.isfinite()
    assert torch.equal(store.values[0, :64, 0][numbers], want[numbers])
    assert not numbers.all()
    assert (store.values[0, :64, 0][~numbers] == 0).all()


@each
def test_codes_of_keys_and_values_are_those_of_the_store_itself_whatever_the_numbers(kernels):
    """Sizes over all of the exponents, zeros, ties, and what is not finite."""
    generator, rows, size = np.random.default_rng(0), 300, 40
    numbers = generator.standard_normal((rows, size)).astype(np.float32)
    numbers *= np.exp2(generator.integers(-149, 127, (rows, 1))).astype(np.float32)
    numbers[0] = 0.0
    numbers[1] = np.arange(size) + 0.5
    numbers[1, 0] = 127.0
    numbers[2, 3:6] = np.inf, -np.inf, np.nan
    numbers[3] = np.nan
    numbers[4, 7] = np.finfo(np.float32).max
    numbers[5:20] = generator.integers(0, 1 << 32, (15, size), np.uint32).view(np.float32)
    rotated = np.concatenate([numbers] * 3, 1)  # a query head, a key head and a value head; no feature turns
    store, want = (KVStore.allocate(1, rows, 1, size, torch.int8, CPU) for _ in range(2))
    batch = batch_of([(range(rows), range(rows), 0, 0)], range(rows), range(rows))
    prepared = kernels.prepare(batch, store, [(torch.ones(rows, 0), torch.zeros(rows, 0))])
    kernels.rotate_and_write(torch.from_numpy(rotated), AttentionSpec(1, 1, size, 1.0), 0, prepared, store)
    one_head = torch.from_numpy(numbers)[:, None]
    want.write(0, torch.arange(rows), one_head, one_head)
    for part in ("keys", "values", "key_scales", "value_scales"):
        assert torch.equal(getattr(store, part), getattr(want, part)), part


# Attention


@each
@pytest.mark.parametrize("head_dim", [8, 40, 64])
def test_attention_over_codes_has_the_bits_of_attention_over_the_numbers_that_they_stand_for(kernels, head_dim):
    codes, numbers = (filled_store(200, 2, head_dim, dtype) for dtype in (torch.int8, torch.float32))
    every = torch.arange(201)
    numbers.write(0, every, codes.read_keys(0, every), codes.read_values(0, every))
    for first, length in ((0, 1), (0, 70), (130, 131), (150, 190)):
        batch = chain(np.random.default_rng(1).permutation(200)[:length], first)
        q, spec = randn(length - first, 6 * head_dim, seed=3), AttentionSpec(6, 2, head_dim, 0.3)
        got, want = (kernels.attend(q, spec, 0, kernels.prepare(batch, s, []), s) for s in (codes, numbers))
        assert torch.equal(got, want)


def attention_in_double(q, store, spec, batch):
    out = torch.zeros(batch.rows, spec.heads * spec.head_dim, dtype=torch.float64)
    group = spec.heads // spec.kv_heads
    for path in batch.paths:
        for row in path.rows:
            position = int(batch.positions[row])
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            slots = torch.from_numpy(path.slots[first : position + 1])
            k = store.read_keys(0, slots).double().repeat_interleave(group, 1)
            v = store.read_values(0, slots).double().repeat_interleave(group, 1)
            scores = torch.einsum("hd,khd->hk", q[row].double().view(spec.heads, -1), k) * spec.scale
            if spec.softcap is not None:
                scores = torch.tanh(scores / spec.softcap) * spec.softcap
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v).flatten()
    return out


@each
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 96, 128, 256, 12, 264])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_attention_agrees_with_double_precision(kernels, dtype, head_dim, group):
    store = filled_store(300, 2, head_dim, dtype)
    free = np.random.default_rng(0).permutation(300)
    batch = batch_of(
        [(free[:140], range(5), 0, 135), (free[140:141], [5], 1, 0), (free[141:270], [6, 7], 2, 127)],
        [*range(135, 140), 0, 127, 128],
        [*free[135:140], free[140], *free[268:270]],
    )
    q = randn(8, 2 * group * head_dim, seed=3)
    for window, softcap in ((None, None), (1, None), (70, 5.0)):
        spec = AttentionSpec(2 * group, 2, head_dim, head_dim**-0.5, window=window, softcap=softcap)
        got = kernels.attend(q, spec, 0, kernels.prepare(batch, store, []), store)
        want = attention_in_double(q, store, spec, batch)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@each
def test_attention_of_one_row_with_many_heads_that_share_keys_ends(kernels):
    store = filled_store(64, 1, 8, torch.float32)
    for heads in (13, 16, 64):
        spec, batch, q = AttentionSpec(heads, 1, 8, 0.3), chain(np.arange(40), 39), randn(1, heads * 8)
        got = kernels.attend(q, spec, 0, kernels.prepare(batch, store, []), store)
        torch.testing.assert_close(got.double(), attention_in_double(q, store, spec, batch), rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 260),
    chunk=st.integers(1, 90),
    others=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 20)), max_size=4),
    window=st.sampled_from([None, 1, 3, 64, 90]),
    softcap=st.sampled_from([None, 4.0]),
    shape=st.sampled_from([(1, 1, 8), (3, 1, 32), (4, 2, 64), (8, 1, 40), (5, 5, 16), (10, 2, 256)]),
    dtype=st.sampled_from(CACHES),
)
def test_attention_of_a_row_has_the_same_bits_in_any_company(length, chunk, others, window, softcap, shape, dtype):
    """The last rows of a sequence: one by one, as a chunk, and as a chunk between other sequences."""
    heads, kv_heads, head_dim = shape
    spec = AttentionSpec(heads, kv_heads, head_dim, 0.35, window=window, softcap=softcap)
    store = filled_store(1024, kv_heads, head_dim, dtype)
    free = np.random.default_rng(length).permutation(1024)
    mine, free = free[:length], free[length:]
    first, features = max(0, length - chunk), heads * head_dim
    queries = randn(length - first, features, seed=4)
    paths, positions, slots = [], [], []
    for group, (size, rows) in enumerate(others):
        own, free, start = free[:size], free[size:], max(0, size - rows)
        paths.append((own, np.arange(size - start) + len(positions), group, start))
        positions.extend(range(start, size))
        slots.extend(own[start:])
    crowd = len(positions)
    paths.append((mine, np.arange(length - first) + crowd, len(others), first))
    crowded = batch_of(paths, [*positions, *range(first, length)], [*slots, *mine[first:]])
    crowd_queries = torch.cat([randn(crowd, features, seed=5), queries])
    for isa, kernels in ((kernels.name, kernels) for kernels in KERNELS if kernels.threads == 2):
        single = next(kernels for kernels in KERNELS if kernels.name == isa and kernels.threads == 1)
        together = kernels.attend(queries, spec, 0, kernels.prepare(chain(mine, first), store, []), store)
        for position in range(first, length, 1 + (length - first) // 20):
            prepared = single.prepare(chain(mine[: position + 1], position), store, [])
            row = queries[position - first :][:1]
            assert torch.equal(single.attend(row, spec, 0, prepared, store)[0], together[position - first])
        around = kernels.attend(crowd_queries, spec, 0, kernels.prepare(crowded, store, []), store)
        assert torch.equal(around[crowd:], together)


@settings(max_examples=30, deadline=None)
@given(
    context=st.sampled_from([1, 5, 62, 63, 64, 65, 130, 190]),
    parents=st.lists(st.integers(-1, 30), min_size=1, max_size=20),
    window=st.sampled_from([None, 2, 66]),
    group=st.sampled_from([1, 3, 8]),
    dtype=st.sampled_from(CACHES),
)
def test_a_tree_node_has_the_bits_of_its_branch_alone(context, parents, window, group, dtype):
    spec = AttentionSpec(2 * group, 2, 32, 0.3, window=window)
    store = filled_store(300, 2, 32, dtype)
    free = np.random.default_rng(context).permutation(300)
    committed, node_slots = free[:context], free[context : context + len(parents) + 1]
    parents = [-1, *(min(parent + 1, index) for index, parent in enumerate(parents))]  # node 0 is the root
    branches = []  # the nodes from the root to each node
    for node, parent in enumerate(parents):
        branches.append([*(branches[parent] if parent >= 0 else []), node])
    leaves = [node for node in range(len(parents)) if node not in parents]
    paths, taken = [], set()
    for leaf in leaves:
        rows = [node for node in branches[leaf] if node not in taken]
        taken.update(rows)
        paths.append(([*committed, *node_slots[branches[leaf]]], rows, 7, context))
    positions = [context + len(branch) - 1 for branch in branches]
    tree = batch_of(paths, positions, node_slots)
    q = randn(len(parents), 2 * group * 32)
    for kernels in KERNELS:
        got = kernels.attend(q, spec, 0, kernels.prepare(tree, store, []), store)
        for node, branch in enumerate(branches):
            alone = chain(np.concatenate([committed, node_slots[branch]]), positions[node])
            want = kernels.attend(q[node : node + 1], spec, 0, kernels.prepare(alone, store, []), store)
            assert torch.equal(got[node], want[0]), (kernels.name, node)


@each
def test_attention_with_large_scores_neither_overflows_nor_loses_the_winner(kernels):
    store = filled_store(100, 1, 16, torch.float32)
    spec = AttentionSpec(2, 1, 16, 100.0)
    batch, q = chain(np.arange(100), 90), randn(10, 32)
    got = kernels.attend(q, spec, 0, kernels.prepare(batch, store, []), store)
    torch.testing.assert_close(got.double(), attention_in_double(q, store, spec, batch), rtol=1e-3, atol=1e-3)


@each
def test_weights_of_attention_are_exact_to_the_rounding_of_their_scores(kernels):
    """Values are the unit matrix, so that the output is the weights; scores reach from 0 to -85."""
    scores = torch.linspace(-85, 0, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    store = filled_store(64, 1, 64, torch.float32)
    store.keys[0, :64, 0] = 0.0
    store.keys[0, :64, 0, 0] = scores
    store.values[0, :64, 0] = torch.eye(64)
    batch, q = chain(np.arange(64), 63), F.one_hot(torch.tensor([0]), 64).float()
    got = kernels.attend(q, AttentionSpec(1, 1, 64, 1.0), 0, kernels.prepare(batch, store, []), store)[0]
    want = scores.double().softmax(0)
    assert (((got - want) / want).abs() < (4 + 1.5 * scores.abs().double()) * 2**-24).all()


# The edges


@each
def test_what_does_not_fit_is_refused_before_a_pointer_is_used(kernels):
    store = filled_store(16, 1, 8, torch.float32)
    tables = [(torch.ones(20, 4), torch.zeros(20, 4))]
    packed = kernels.pack(randn(4, 8))
    good = chain(np.arange(10), 5)
    prepared = kernels.prepare(good, store, tables)
    spec = AttentionSpec(1, 1, 8, 1.0)
    refused = [
        lambda: kernels.norm_project(randn(2, 9), None, packed),
        lambda: kernels.norm_project(randn(2, 8).double(), None, packed),
        lambda: kernels.norm_project(randn(2, 8), Norm(randn(9), 1e-6), packed),
        lambda: kernels.project_add(randn(2, 8), packed, randn(1, 4)),
        lambda: kernels.pack(randn(4, 8).half()),
        lambda: kernels.pack(randn(0, 8)),
        lambda: kernels.prepare(chain(np.arange(10, 20), 5), store, tables),
        lambda: kernels.prepare(batch_of([(range(5), [0], 0, 0)], [5], [5]), store, tables),
        lambda: kernels.prepare(batch_of([(range(5), [0], 0, 0)], [4, 4], [4, 5]), store, tables),
        lambda: kernels.prepare(batch_of([(range(5), [0, 0], 0, 0)], [3, 4], [3, 4]), store, tables),
        lambda: kernels.prepare(batch_of([(range(5), [0], 0, 6)], [4], [4]), store, tables),
        lambda: kernels.prepare(batch_of([([0] * 30, [0], 0, 0)], [25], [0]), store, tables),
        lambda: kernels.prepare(batch_of([(range(5), [0], 0, 0)], [4], [4], logit_rows=[1]), store, tables),
        lambda: kernels.attend(randn(4, 8), spec, 0, prepared, store),
        lambda: kernels.attend(randn(5, 8), spec, 1, prepared, store),
        lambda: kernels.attend(randn(5, 16), AttentionSpec(2, 2, 8, 1.0), 0, prepared, store),
        lambda: kernels.attend(randn(5, 8), spec, 0, prepared, filled_store(8, 1, 8, torch.float32)),
        lambda: kernels.embed(
            randn(3, 8), kernels.prepare(batch_of([([0], [0], 0, 0)], [0], [0], [3]), store, []), 1.0
        ),
    ]
    for call in refused:
        with pytest.raises(EngineError):
            call()


def test_rows_that_are_not_contiguous_are_copied():
    kernels, weight, x = KERNELS[0], randn(5, 8), randn(8, 6).T
    got = kernels.norm_project(x, None, kernels.pack(weight))
    torch.testing.assert_close(got, x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", SETS)
def test_the_instruction_set_can_be_forced(monkeypatch, isa):
    monkeypatch.setenv("FORERUN_CPU_ISA", isa.upper())
    assert load_cpu_kernels(1).name == isa
    assert unavailable_reason() is None


def test_the_reference_can_be_forced(monkeypatch):
    monkeypatch.setenv("FORERUN_CPU_ISA", "reference")
    assert load_cpu_kernels() is None
    assert "FORERUN_CPU_ISA" in unavailable_reason()


def test_an_unknown_instruction_set_is_refused_with_what_is_possible(monkeypatch):
    monkeypatch.setenv("FORERUN_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match=r"sse9.*reference, avx2"):
        load_cpu_kernels()


@pytest.mark.parametrize("threads", [0, -1, 1025, 2**32])
def test_threads_that_cannot_be_are_refused(threads):
    with pytest.raises(ConfigError, match="allowed are 1"):
        load_cpu_kernels(threads)


def test_results_are_float32_whatever_torch_makes_by_default():
    kernels, weight, x = KERNELS[0], randn(40, 32), randn(3, 32)
    want = kernels.norm_project(x, None, kernels.pack(weight))
    gated = kernels.gate(x, "silu")
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(kernels.norm_project(x, None, kernels.pack(weight)), want)
            assert torch.equal(kernels.gate(x, "silu"), gated)
        finally:
            torch.set_default_dtype(torch.float32)


def test_heads_that_share_nothing_evenly_are_refused():
    with pytest.raises(EngineError, match="multiple"):
        AttentionSpec(3, 2, 8, 1.0)


def test_without_the_library_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("FORERUN_CPU_ISA", raising=False)
    monkeypatch.setattr(binding, "LIBRARY", tmp_path / "missing.so")
    binding.library.cache_clear()
    try:
        assert load_cpu_kernels() is None
        assert "compiler" in unavailable_reason()
    finally:
        binding.library.cache_clear()


def test_threads_that_sleep_are_woken_and_a_forked_child_works_alone():
    script = """
import os, time, torch
from forerun.kernels.cpu import load_cpu_kernels
kernels = load_cpu_kernels(3)
weight, x = torch.ones(4096, 64), torch.ones(2, 64)
packed = kernels.pack(weight)
for _ in range(20):
    assert (kernels.norm_project(x, None, packed) == 64).all()
    time.sleep(0.002)
child = os.fork()
if not child:
    os._exit(0 if (kernels.norm_project(x, None, packed) == 64).all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_many_jobs_from_two_python_threads_do_not_mix():
    kernels = next(kernels for kernels in KERNELS if kernels.threads == 2)
    packed, inputs = kernels.pack(randn(300, 40)), [randn(rows, 40, seed=rows) for rows in (1, 5, 17, 40)]
    want = [kernels.norm_project(x, Norm(torch.ones(40), 1e-6), packed) for x in inputs]
    failures = []

    def work():
        for _ in range(200):
            for x, expected in zip(inputs, want, strict=True):
                if not torch.equal(kernels.norm_project(x, Norm(torch.ones(40), 1e-6), packed), expected):
                    failures.append(len(x))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_exponential_of_the_library_is_within_two_units_in_the_last_place():
    """Seen through silu of negative numbers: x / (1 + e^-x) = x e^x for large -x."""
    x = torch.linspace(-60, -25, 100_001)
    got = KERNELS[0].gate(torch.cat([x, torch.ones_like(x)])[None], "silu")[0].double()
    want = x.double() * torch.exp(x.double())
    assert float(((got - want) / want).abs().max()) < 3 * 2**-23
    assert math.isfinite(float(got.abs().max()))


# Reading the weights


@each
@pytest.mark.parametrize("size", [0, 8, 63, 64, 1000, 4096 + 24, 1 << 20, (1 << 22) + 520])
def test_reading_memory_takes_in_every_word(kernels, size):
    memory = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    words = memory[: size // 8 * 8].view(np.int64)
    assert binding.library().forerun_read(kernels._context, memory.ctypes.data, size) == words.sum()


@each
def test_weights_side_by_side_are_read_as_one_run_and_none_twice(kernels):
    kernels = CpuKernels(kernels.name, kernels.threads)
    packed = [kernels.pack(randn(64, 48, seed=seed), randn(64)) for seed in range(3)]
    runs = memory_runs([*packed, packed[0]])
    assert [size for _, size in runs if size > 1000] == [3 * 64 * 48 * 4]
    assert kernels.weight_reader(packed)() == sum(size for _, size in runs)
