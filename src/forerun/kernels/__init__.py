"""The operations that models are made of, one folder per device behind one protocol (`base.Kernels`)."""

import logging
from pathlib import Path

import torch

from forerun.kernels.base import Kernels
from forerun.kernels.linears import Linears
from forerun.kernels.quantized import ActivationBits

logger = logging.getLogger(__name__)


def choose_kernels(device: torch.device | str, activation_bits: ActivationBits = 16) -> Kernels:
    """The best kernels for a device: native code on a CPU that has it, the torch reference anywhere else.

    activation_bits: of the activations that quantised weights are multiplied with.
    """
    from forerun.kernels.cpu import load_cpu_kernels, unavailable_reason
    from forerun.kernels.reference import ReferenceKernels

    device = torch.device(device)
    if device.type != "cpu":
        return ReferenceKernels(device, activation_bits)
    native = load_cpu_kernels(activation_bits=activation_bits)
    if native is None:
        logger.warning("no native CPU kernels, the torch reference is many times slower: %s", unavailable_reason())
    return native or ReferenceKernels(device, activation_bits)


def open_linears(kernels: Kernels, place: Path) -> Linears:
    """Linear layers for these kernels, kept on disk in packed form if that is worth it. place: see `PackedFile`."""
    from forerun.kernels.cpu import CpuKernels

    if not isinstance(kernels, CpuKernels):
        return Linears(kernels)
    from forerun.kernels.cpu.packed_file import PackedFile

    return PackedFile(kernels, place)
