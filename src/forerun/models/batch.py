"""TokenBatch under the name by which users of models know it; it is defined where the kernels can see it."""

from forerun.kernels.batch import AttentionPath, IntArray, TokenBatch

__all__ = ["AttentionPath", "IntArray", "TokenBatch"]
