"""Whether passes over rows of logits, and moves of slots, are done natively here. The one place that decides it.

What they mean is said in numpy or torch by those who ask, and that is what happens where this gives None.
"""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.kernels.cpu.rows import RowPasses


@cache
def native_rows() -> "RowPasses | None":
    """The native passes; None without the native library, or where FORERUN_CPU_ISA asks for the reference."""
    from forerun.kernels.cpu import binding
    from forerun.kernels.cpu.rows import RowPasses

    return None if binding.chosen() == "reference" else RowPasses()
