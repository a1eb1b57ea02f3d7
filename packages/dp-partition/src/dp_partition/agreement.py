"""Ranks take up a program together, or all refuse it: what one cannot trace, or traced otherwise, the others hear of.

A rank that raised alone would leave the others in their first collective until the group's timeout; ranks whose
programs issue different collectives could fill each other's tensors with what was meant for others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from dp_partition.axes import gather_objects
from dp_partition.messages import carried_names, is_collective
from dp_partition.problems import PlanError, Problem

T = TypeVar("T")

HINTS = {
    "batch": "under global semantics every rank passes as many rows as the others",
    "collectives": "run the same step on every rank, with the same style, bucket_mb, prefetch and "
    "reshard_after_forward (where batches differ in size, 'auto' may choose differently: say True or False)",
    "plan": "give every rank the same model, style, semantics and placements",
    "settings": "call compile with the same arguments on every rank",
}


def collectives_digest(graph: fx.Graph) -> str:
    """Which collectives a graph issues, of whose values and in which order; batch sizes are not part of it."""
    lines = [
        f"{node.target} {' '.join(name for source in node.all_input_nodes for name in carried_names(source))}"
        for node in graph.nodes
        if is_collective(node)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def batch_text(leaves: list[Any]) -> str:
    """Shapes and dtypes of tensors among arguments."""
    return ", ".join(f"{list(one.shape)} {one.dtype}" for one in leaves if isinstance(one, torch.Tensor))


def together(mesh: DeviceMesh, name: str, attempt: Callable[[], tuple[T, Mapping[str, str]]]) -> T:
    """What ``attempt`` made, once every rank has made it alike; all ranks of the mesh have to call this.

    Args:
        mesh: The ranks.
        name: What is attempted, for errors.
        attempt: Returns a value, and facts about it that must be equal on every rank. Must not communicate.

    Raises:
        PlanError: On every rank, where another rank's attempt failed or its facts differ.
        Exception: This rank's own, if its attempt failed.
    """
    if mesh.size() == 1:
        return attempt()[0]
    value, facts, error = None, {}, None
    try:
        value, found = attempt()
        facts = dict(found)
    except Exception as raised:
        error = raised
    said = None if error is None else f"{type(error).__name__}: {error}"
    rows = gather_objects(mesh, (said, facts))
    if error is not None:
        raise error
    problems = _failures(name, rows) or _differences(name, rows)
    if problems:
        raise PlanError(problems, f"{name}: the ranks do not agree")
    return value  # type: ignore[return-value]  # attempt's, since it did not raise


def _failures(name: str, rows: list[tuple[str | None, dict[str, str]]]) -> list[Problem]:
    hint = "mend it there; this rank has changed nothing"
    return [
        Problem("another-rank", name, found=f"rank {rank} raised {said}", hint=hint)
        for rank, (said, _) in enumerate(rows)
        if said is not None
    ]


def _differences(name: str, rows: list[tuple[str | None, dict[str, str]]]) -> list[Problem]:
    found = []
    for key, value in rows[0][1].items():
        other = next((rank for rank, (_, facts) in enumerate(rows) if facts.get(key) != value), None)
        if other is not None:
            shown = f"{key}: {value} on rank 0, {rows[other][1].get(key)} on rank {other}"
            found.append(Problem("ranks-disagree", name, found=shown, hint=HINTS[key]))
    return found


__all__ = ["batch_text", "collectives_digest", "together"]
