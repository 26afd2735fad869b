"""Attention over the pairs of `layout`: scores per pair, then each row's parts put together in a fixed order."""

import torch
from torch import Tensor

from forerun.kernels.base import AttentionSpec
from forerun.kernels.kv_store import KVStore
from forerun.kernels.reference.layout import KEY_BLOCK, QUERY_TILE, AttentionLayout
from forerun.kernels.reference.tiles import exactly


def attend(q: Tensor, store: KVStore, layer: int, spec: AttentionSpec, layout: AttentionLayout) -> Tensor:
    """Softmax(q K^T * scale) V over each row's visible keys in one layer of the store.

    q: float32 [rows', heads * head_dim]. Returns float32 [rows', heads * head_dim].
    """
    pairs = len(layout.tile_rows)
    group, size = spec.heads // spec.kv_heads, spec.head_dim
    queries = q.view(-1, spec.kv_heads, group, size)[layout.tile_rows]  # [pairs, tile, kv_heads, group, size]
    queries = queries.permute(0, 2, 3, 1, 4).reshape(pairs * spec.kv_heads, group * QUERY_TILE, size)
    keys = _by_head(store.read_keys(layer, layout.key_slots))
    scores = torch.bmm(queries, keys.transpose(1, 2)) * spec.scale
    if spec.softcap is not None:
        scores = exactly(torch.tanh, scores / spec.softcap) * spec.softcap
    scores = scores.view(pairs, spec.kv_heads * group, QUERY_TILE, KEY_BLOCK)
    scores = scores.masked_fill(~layout.visible[:, None], -torch.inf)
    top = scores.amax(-1)
    weights = exactly(torch.exp, scores - _finite(top)[..., None])
    values = _by_head(store.read_values(layer, layout.key_slots))
    sums = torch.bmm(weights.view(pairs * spec.kv_heads, group * QUERY_TILE, KEY_BLOCK), values)
    return _combine(top, weights.sum(-1), sums.view(pairs, spec.heads, QUERY_TILE, size), layout)


def _by_head(gathered: Tensor) -> Tensor:
    """Keys (or values) [pairs, KEY_BLOCK, kv_heads, head_dim] as [pairs * kv_heads, KEY_BLOCK, head_dim]."""
    return gathered.transpose(1, 2).reshape(-1, KEY_BLOCK, gathered.shape[-1])


def _combine(top: Tensor, weight: Tensor, sums: Tensor, layout: AttentionLayout) -> Tensor:
    """Rescale each row's parts to their common maximum and add them up."""
    top_parts = _lanes(top[..., None], layout, fill=-torch.inf)
    scale = exactly(torch.exp, top_parts - _finite(top_parts.amax(1, keepdim=True)))
    weight_sum = _ordered_sum(_lanes(weight[..., None], layout) * scale)
    value_sum = _ordered_sum(_lanes(sums, layout) * scale)
    return (value_sum / weight_sum.clamp_min(torch.finfo(torch.float32).tiny)).flatten(1)


def _lanes(x: Tensor, layout: AttentionLayout, fill: float = 0.0) -> Tensor:
    """x [pairs, heads, QUERY_TILE, size] by row and part: [rows', blocks, heads, size]; `fill` for the null lane."""
    lanes = x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
    return torch.cat([lanes, lanes.new_full((1, *lanes.shape[1:]), fill)])[layout.parts]


def _ordered_sum(parts: Tensor) -> Tensor:
    """Sum over dimension 1 (a power of two), always neighbours first: zeros at the end change no bit."""
    while parts.shape[1] > 1:
        parts = parts[:, 0::2] + parts[:, 1::2]
    return parts[:, 0]


def _finite(top: Tensor) -> Tensor:
    """A maximum over nothing (-inf) becomes 0, so that differences with it are not NaN."""
    return torch.where(top == -torch.inf, 0.0, top)
