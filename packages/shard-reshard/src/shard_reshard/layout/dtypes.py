"""Element types by name: plans know how many bytes an element has without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_reshard._shared.problems import PlanError, Problem

if TYPE_CHECKING:
    import torch

ITEMSIZES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex32": 4,
    "complex128": 16,
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1
    ),
}

FLOATING = frozenset(name for name in ITEMSIZES if name.startswith(("float", "bfloat", "complex")))
# Types that are reduced in float32 and rounded once at the end.
REDUCED_IN_FLOAT32 = frozenset(name for name in FLOATING if name.startswith(("float16", "bfloat16", "float8")))
_SPELLINGS = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32"}
_SPELLINGS |= {"short": "int16", "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32"}


def dtype_name(dtype: torch.dtype | str) -> str:
    """The plain name of a dtype: ``"float32"`` for ``torch.float32``, ``"torch.float"`` and ``"float32"``."""
    name = str(dtype).removeprefix("torch.")
    name = _SPELLINGS.get(name, name)
    if name not in ITEMSIZES:
        raise PlanError(Problem("unsupported-dtype", "dtype", found=repr(dtype), hint=f"one of {', '.join(ITEMSIZES)}"))
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called ``name``."""
    import torch

    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
