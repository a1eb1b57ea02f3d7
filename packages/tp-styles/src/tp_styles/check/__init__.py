"""The check by execution: sharded modules against their original forwards on full weights.

`checker` schedules the checks, `runs` executes one run on detached copies. `compare` compares two runs.
"""

from __future__ import annotations

from contextvars import ContextVar

IN_ORIGINAL: ContextVar[bool] = ContextVar("tp_styles_in_original", default=False)
"""True while an original runs on full weights. Our own functions inside a forward then take full tensors."""

IN_FLOAT64: ContextVar[bool] = ContextVar("tp_styles_in_float64", default=False)
"""True in a sharded run of a check in float64. A region not checked there may be in its own type."""
