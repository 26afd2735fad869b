"""The operations that models are made of, one folder per device behind one protocol (`base.Kernels`)."""

import torch

from forerun.kernels.base import Kernels


def choose_kernels(device: torch.device | str, threads: int | None = None) -> Kernels:
    """The best kernels for a device: native code on a CPU that has it, the torch reference anywhere else.

    threads: CPU threads of the native kernels; None = as many as torch uses.
    """
    from forerun.kernels.cpu import load_cpu_kernels
    from forerun.kernels.reference import ReferenceKernels

    device = torch.device(device)
    native = load_cpu_kernels(threads) if device.type == "cpu" else None
    return native or ReferenceKernels(device)
