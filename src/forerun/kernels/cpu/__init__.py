"""Native CPU kernels: C++ for AVX2, AVX-512 and AMX, chosen at run time; absent where not built or unable to run.

The sources lie here and are built by setup.py; binding.py is the only module that handles raw pointers.
"""

from forerun.kernels.cpu.kernels import CpuKernels, load_cpu_kernels, unavailable_reason

__all__ = ["CpuKernels", "load_cpu_kernels", "unavailable_reason"]
