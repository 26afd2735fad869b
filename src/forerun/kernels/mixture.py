"""The routing of a mixture of experts, the same on every device; products and activation are the device's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.base import Mixture


def mix(
    x: Tensor, mixture: Mixture, linear: Callable[[Tensor, Any], Tensor], gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sum of the chosen experts' gated MLPs, weighted by their shares. x and the result: float32 [rows, hidden].

    linear: product with a packed weight, for any number of rows, whose rows do not depend on their company. gate: the
    activation of gate and up projections side by side.
    """
    shares, order = torch.softmax(linear(x, mixture.router), dim=-1).sort(dim=-1, descending=True, stable=True)
    top, experts = shares[:, : mixture.top_k], order[:, : mixture.top_k]  # of equal experts the first
    if mixture.renormalise:
        total = top[:, 0]
        for rank in range(1, mixture.top_k):  # column by column: the order does not depend on the number of rows
            total = total + top[:, rank]
        top = top / total[:, None]
    out = torch.zeros_like(x)
    for expert in experts.unique().tolist():  # ascending, so that a row always adds its experts in the same order
        rows, rank = (experts == expert).nonzero(as_tuple=True)
        hidden = gate(linear(x[rows], mixture.gate_up[expert]))
        out[rows] += linear(hidden, mixture.down[expert]) * top[rows, rank][:, None]
    return out
