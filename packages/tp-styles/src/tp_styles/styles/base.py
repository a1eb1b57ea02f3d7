"""The contract of every style, with the function that applies one to a module by itself."""

from __future__ import annotations

from tp_styles.apply import apply_staged
from tp_styles.plan.style import ParallelStyle, PrepareInput, PrepareOutput

__all__ = ["ParallelStyle", "PrepareInput", "PrepareOutput"]

# `plan/` lies below `apply`: the class there gets the function with which torch's `parallelize_module` calls a style.
ParallelStyle._applies = staticmethod(apply_staged)
