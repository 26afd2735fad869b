"""Native CPU kernels: C++ for AVX2 and AVX-512, chosen at run time; absent where they were not built or cannot run.

The sources lie here and are built by setup.py; binding.py is the only module that handles raw pointers.
"""

from forerun.kernels.cpu.kernels import CpuKernels, load_cpu_kernels, unavailable_reason

__all__ = ["CpuKernels", "load_cpu_kernels", "unavailable_reason"]
