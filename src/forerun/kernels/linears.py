"""Where a decoder's packed linear layers come from. The plain way: each is made and packed when it is asked for."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from forerun.kernels.base import Kernels
from forerun.kernels.quantized import QuantizedWeight

MadeLinear = tuple[Tensor | QuantizedWeight, Tensor | None]
"""A weight [out, in], and a bias, float32 [out], or None."""


class Linears:
    """Packs linear layers one after the other, in the order of execution, and counts what they take.

    weight_bytes: of the weights and biases so far.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.weight_bytes = 0

    def linear(self, name: str, make: Callable[[], MadeLinear]) -> Any:
        """The packed layer of that name, unique in its model; `make` is called if it has to be packed."""
        weight, bias = make()
        self.weight_bytes += weight.nbytes + (0 if bias is None else bias.nbytes)
        return self._kernels.pack(weight, bias)

    def finish(self) -> None:
        """All layers have been asked for."""
