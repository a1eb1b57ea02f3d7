"""Plans from JSON, of ours or of strangers: read whole, or refused with one error."""

from __future__ import annotations

import json
from typing import Any

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.base import ShardMap
from shard_reshard.layout.dtypes import ITEMSIZES
from shard_reshard.layout.view import shard_map_from_json

MAX_CHARS = 64 << 20

Fields = tuple[tuple[int, ...], str, str, ShardMap, ShardMap, int | None, bool]


def read_fields(text: str, wanted: int) -> Fields:
    """The fields of a `ReshardPlan`, in its order, from what ``to_json`` wrote in the format ``wanted``."""
    if len(text) > MAX_CHARS:
        raise _malformed(f"{len(text)} characters, more than {MAX_CHARS}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"no JSON: {error}") from None
    if not isinstance(data, dict):
        raise _malformed(f"a {type(data).__name__} where an object is expected")
    if data.get("format") != wanted:
        found, hint = f"format {str(data.get('format'))[:40]!r}", f"this version reads format {wanted}"
        raise PlanError(Problem("invalid-file", found=found, hint=hint))
    try:
        return _fields(data)
    except PlanError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise _malformed(f"{type(error).__name__}: {error}") from None


def _fields(data: dict[str, Any]) -> Fields:
    shape, limit, adjoint = data["shape"], data["max_workspace_bytes"], data["adjoint"]
    if not (isinstance(shape, list) and all(_is_size(size) for size in shape)):
        raise _malformed("a shape that is no list of sizes")
    unknown = [name for name in (data["dtype"], data["out_dtype"]) if name not in ITEMSIZES]
    if unknown:
        raise _malformed(f"no dtype of this torch: {unknown[0]!r}")
    if not (limit is None or _is_size(limit)) or not isinstance(adjoint, bool):
        raise _malformed("max_workspace_bytes or adjoint of another type")
    src, dst = (shard_map_from_json(shape, data[side]) for side in ("src", "dst"))
    return tuple(shape), data["dtype"], data["out_dtype"], src, dst, limit, adjoint


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _malformed(found: str) -> PlanError:
    return PlanError(Problem("invalid-plan", found=found[:200], hint="pass what ReshardPlan.to_json wrote"))
