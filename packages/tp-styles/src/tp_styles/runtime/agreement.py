"""Ranks compare what they are about to do, in one exchange: after it all of them go on, or all of them raise."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tp_styles.problems import PlanError, Problem

PLANS = Problem("plans-differ", hint="compare apply_plan's arguments, and plan_styles(...).to_json() of both")
PARTS = Problem("parts-differ", hint="every rank needs the same parameters in the same places")


def agree(
    group: dist.ProcessGroup,
    terms: str,
    fault: Exception | None = None,
    details: Callable[[], list[str]] = list,
    otherwise: Problem = PLANS,
) -> None:
    """Go on where every rank can, and all are about to do the same.

    A rank that raised on its own would leave the others waiting for it in the next collective, until the group's
    timeout ends them with an error that names nothing.

    Args:
        group: Who takes part; all of its ranks call this.
        terms: What the ranks have to agree on.
        fault: What keeps this rank from going on; it is raised here, after the others were told.
        details: The terms in lines, to say where they differ; asked for only then.
        otherwise: What it is called if they differ.

    Raises:
        Exception: This rank's fault.
        PlanError: Another rank's (`another-rank`), or the terms differ.
    """
    digest = "" if fault is not None else hashlib.sha256(terms.encode()).hexdigest()
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (digest, None if fault is None else first_line(fault)), group=group)
    if fault is not None:
        raise fault
    faults = {rank: text for rank, (_, text) in enumerate(found) if text is not None}
    if faults:
        raise PlanError(_elsewhere(rank, text) for rank, text in faults.items())
    different = [rank for rank, (other, _) in enumerate(found) if other != found[0][0]]
    if different:
        lines: list[Any] = [None] * group.size()
        dist.all_gather_object(lines, details(), group=group)
        raise PlanError(_difference(otherwise, different, lines))


def agree_over(meshes: Sequence[DeviceMesh], terms: str, fault: Exception | None) -> None:
    """`agree`, for ranks of several meshes; all dims of each, one after the other.

    Raises:
        Exception: This rank's fault.
        PlanError: Another rank's, or the terms differ.
    """
    for mesh in meshes:
        for dim in range(mesh.ndim):
            try:
                agree(mesh.get_group(dim), terms, fault, terms.splitlines, PARTS)
            except Exception as error:  # those along the other dims have to be told, too
                fault = error
    if fault is not None:
        raise fault


def first_line(fault: Exception) -> str:
    """A fault in one line: the first of its problems, where it has several."""
    if isinstance(fault, PlanError):
        more = len(fault.problems) - 1
        return str(fault.problems[0]) + (f" (and {more} more)" if more else "")
    text = str(fault).splitlines() or [""]
    return f"{type(fault).__name__}: {text[0]}"


def _elsewhere(rank: int, text: str) -> Problem:
    hint = "nothing was changed on any rank; every rank needs the same model, plan and arguments"
    return Problem("another-rank", f"rank {rank}", found=text, hint=hint)


def _difference(otherwise: Problem, different: list[int], lines: list[list[str]]) -> Problem:
    first, other = Counter(lines[0]), Counter(lines[different[0]])
    found = f"ranks {different} differ from rank 0"
    if first != other:
        texts = [repr(next(iter(more)).strip()) if more else "nothing of it" for more in (first - other, other - first)]
        found += f"; rank 0: {texts[0]}, rank {different[0]}: {texts[1]}"
    return replace(otherwise, found=found)
