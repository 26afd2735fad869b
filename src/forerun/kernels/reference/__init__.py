"""The operations in plain torch, on any device: what every other implementation must agree with."""

from forerun.kernels.reference.kernels import ReferenceKernels

__all__ = ["ReferenceKernels"]
