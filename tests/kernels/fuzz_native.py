"""Odd shapes through every native operation. A script, because it runs under sanitizers, which must be loaded first.

Each case is drawn from a seed. What comes out must be finite and, row by row, what the row gives alone.
"""

import argparse
import random
from collections.abc import Callable

import numpy as np
import torch

from forerun.kernels.base import AttentionSpec, Mixture, Norm
from forerun.kernels.batch import AttentionPath, TokenBatch
from forerun.kernels.cpu import CpuKernels, binding
from forerun.kernels.kv_store import KVStore
from forerun.kernels.quantized import QuantizedWeight
from tests.models.tiny import FAMILIES, tiny_decoder

MOST_NUMBERS = 1 << 22  # of a weight, so that a case stays quick


def main() -> None:
    """Run the cases asked for on every instruction set; the first that fails ends the script with its seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for isa in binding.supported():
        for seed in range(arguments.seed, arguments.seed + arguments.cases):
            draw = random.Random(seed)
            torch.manual_seed(seed)
            kernels = CpuKernels(isa, draw.choice([1, 2, 3]), draw.choice([8, 16]))
            case = draw.choice(CASES)
            try:
                case(draw, kernels)
            except Exception as error:
                raise SystemExit(f"{isa}, seed {seed}, {case.__name__}: {type(error).__name__}: {error}") from error
        print(f"{isa}: {arguments.cases} cases")


def linear_layers(draw: random.Random, kernels: CpuKernels) -> None:
    """Products of every format, with norms, residuals and chosen rows."""
    columns = draw.choice([1, 7, 32, 64, 96, 100, 576, 1027, 2048])
    out = draw.choice([1, 2, 15, 17, 31, 33, 100, 577])
    weight = any_weight(draw, out, columns)
    packed = kernels.pack(weight, torch.randn(out) if draw.random() < 0.5 else None)
    rows = draw.choice([1, 2, 5, 7, 13, 16, 33, 70])
    x, norm = torch.randn(rows, columns), draw.choice([None, Norm(torch.randn(columns), 1e-6)])
    check_rows(x, lambda some: kernels.norm_project(some, norm, packed))
    after = draw.choice([None, Norm(torch.randn(out), 1e-6)])
    residual = torch.randn(rows, out)
    together = kernels.project_add(x, packed, residual, after)
    assert torch.equal(kernels.project_add(x[-1:], packed, residual[-1:], after), together[-1:])


def vocabularies(draw: random.Random, kernels: CpuKernels) -> None:
    """Embedding and logits, from one token to the largest vocabulary."""
    vocabulary = draw.choice([1, 2, 31, 512, 49_152, 262_144])
    columns = draw.choice([size for size in (1, 8, 24, 64, 200) if size * vocabulary <= MOST_NUMBERS * 4])
    table = torch.randn(vocabulary, columns, dtype=draw.choice([torch.float32, torch.bfloat16]))
    rows = draw.choice([1, 3, 9])
    token_ids = [draw.randrange(vocabulary) for _ in range(rows)]
    wanted = [draw.randrange(rows) for _ in range(draw.choice([0, 1, rows]))]
    store = KVStore.allocate(1, rows, 1, 8, torch.float32, torch.device("cpu"))
    path = AttentionPath(np.arange(rows), np.arange(rows), 0, 0)
    batch = TokenBatch(np.array(token_ids), np.arange(rows), np.arange(rows), [path], np.array(wanted, np.int64))
    prepared = kernels.prepare(batch, store, [])
    embedded = kernels.embed(table, prepared, 1.5)
    assert torch.equal(embedded, table[token_ids].float() * 1.5)
    packed = kernels.pack(table)
    logits = kernels.logits(embedded, Norm(torch.ones(columns), 1e-6), packed, prepared, draw.choice([None, 5.0]))
    assert logits.shape == (len(wanted), vocabulary)
    assert logits.isfinite().all()


def attention(draw: random.Random, kernels: CpuKernels) -> None:
    """Rotation, writing and attention, from an empty context to 8192 tokens, over scattered slots."""
    kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4, 5, 6, 7, 8])
    head_dim = draw.choice([32, 40, 64, 96, 128, 160, 256])
    context = draw.choice([0, 1, 15, 63, 64, 65, 200, 1000, 8192 if head_dim <= 64 and kernels.threads == 2 else 700])
    rows = draw.choice([1, 2, 5, 17])
    length = context + rows
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.int8])
    store = KVStore.allocate(1, length + 3, kv_heads, head_dim, dtype, CPU)
    store.write(0, torch.arange(length + 4), *torch.randn(2, length + 4, kv_heads, head_dim))
    slots = np.random.default_rng(draw.randrange(1000)).permutation(length + 3)[:length]
    half = draw.choice([head_dim // 2, head_dim // 4, 1])
    angles = torch.randn(length, half)
    window = draw.choice([None, 1, 64, 100])
    head_norm = draw.choice([None, Norm(torch.randn(head_dim), 1e-6)])
    spec = AttentionSpec(
        kv_heads * group, kv_heads, head_dim, head_dim**-0.5, window, draw.choice([None, 20.0]), head_norm, head_norm
    )
    path = AttentionPath(slots, np.arange(rows), 0, context)
    batch = TokenBatch(np.zeros(rows, np.int64), np.arange(context, length), slots[context:], [path], np.arange(rows))
    prepared = kernels.prepare(batch, store, [(angles.cos(), angles.sin())])
    qkv = torch.randn(rows, (spec.heads + 2 * kv_heads) * head_dim)
    queries = kernels.rotate_and_write(qkv, spec, 0, prepared, store)
    together = kernels.attend(queries, spec, 0, prepared, store)
    assert together.isfinite().all()
    last = TokenBatch(
        np.zeros(1, np.int64), np.array([length - 1]), slots[-1:], [AttentionPath(slots, np.array([0]), 0, length - 1)],
        np.array([0]),
    )  # fmt: skip
    alone = kernels.attend(queries[-1:], spec, 0, kernels.prepare(last, store, []), store)
    assert torch.equal(alone, together[-1:])


def gates(draw: random.Random, kernels: CpuKernels) -> None:
    """The gate on rows of any size and magnitude."""
    size, rows = draw.choice([1, 7, 96, 300, 1536]), draw.choice([1, 3, 20])
    activation = draw.choice(["silu", "gelu_tanh"])
    x = torch.randn(rows, 2 * size) * draw.choice([1e-3, 1.0, 50.0])
    check_rows(x, lambda some: kernels.gate(some, activation))


def mixtures(draw: random.Random, kernels: CpuKernels) -> None:
    """Experts, from one of one to four of eight."""
    experts, hidden, inner = draw.choice([1, 2, 8]), draw.choice([8, 64, 96]), draw.choice([8, 32, 64])
    top_k = draw.randint(1, min(4, experts))
    form = draw.random()
    mixture = Mixture(
        router=kernels.pack(torch.randn(experts, hidden)),
        gate_up=[kernels.pack(any_weight(random.Random(form), 2 * inner, hidden)) for _ in range(experts)],
        down=[kernels.pack(any_weight(random.Random(form), hidden, inner)) for _ in range(experts)],
        top_k=top_k,
        renormalise=draw.random() < 0.5,
    )
    rows = draw.choice([1, 2, 9, 30])
    x = torch.randn(rows, hidden)
    check_rows(x, lambda some: kernels.mixture_add(some, None, mixture, "silu", some))


def whole_models(draw: random.Random, kernels: CpuKernels) -> None:
    """A recorded program over a prompt and then a step, against the same in one batch."""
    dtype, bits = draw.choice([(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 8), (torch.bfloat16, 4)])
    cache = draw.choice([None, torch.int8])
    model = tiny_decoder(draw.choice(FAMILIES), dtype=dtype, kernels=kernels, bits=bits, cache=cache)
    length = draw.choice([2, 5, 70])
    store = model.new_store(length + 1)
    slots = np.random.default_rng(length).permutation(length)
    token_ids = np.array([draw.randrange(512) for _ in range(length)])

    def step(first: int, last: int) -> torch.Tensor:
        rows = np.arange(last - first)
        path = AttentionPath(slots[:last], rows, 0, first)
        return model.forward(
            TokenBatch(token_ids[first:last], np.arange(first, last), slots[first:last], [path], rows[-1:]), store
        )

    whole = step(0, length)
    step(0, length - 1)
    assert torch.equal(step(length - 1, length), whole)
    assert whole.isfinite().all()


CPU = torch.device("cpu")
CASES: list[Callable[[random.Random, CpuKernels], None]] = [
    linear_layers, linear_layers, vocabularies, attention, attention, gates, mixtures, whole_models
]  # fmt: skip


def any_weight(draw: random.Random, out: int, columns: int) -> torch.Tensor | QuantizedWeight:
    """A weight in one of the formats that fit."""
    forms = ["fp32", "bf16", "int8", *(f"{bits}-{g}" for g in (32, 64) if columns % g == 0 for bits in (4, 8))]
    form = draw.choice(forms)
    if form in ("fp32", "bf16"):
        return torch.randn(out, columns, dtype=torch.float32 if form == "fp32" else torch.bfloat16)
    if form == "int8":
        return QuantizedWeight(torch.randint(-128, 128, (out, columns)).to(torch.int8), torch.rand(out))
    bits, group = map(int, form.split("-"))
    low, high, kind = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, (out, columns)).to(kind)
    scales = torch.randn(out, columns // group).half()
    minima = torch.randn(out, columns // group).half() if draw.random() < 0.5 else None
    return QuantizedWeight(
        codes, scales, minima, group, 4 if bits == 4 else 8, 8 if bits == 4 and minima is None else 0
    )


def check_rows(x: torch.Tensor, operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The rows together are finite, and the first and last are what they are alone."""
    together = operation(x)
    assert together.isfinite().all()
    for row in {0, len(x) - 1}:
        assert torch.equal(operation(x[row : row + 1].contiguous())[0], together[row])


if __name__ == "__main__":
    main()
