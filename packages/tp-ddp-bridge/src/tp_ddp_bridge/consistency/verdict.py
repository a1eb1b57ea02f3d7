"""One verdict over all ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tp_ddp_bridge._shared.consensus import assert_consistent
from tp_ddp_bridge._shared.problems import PlanError, Problem


class Jury:
    """The ranks that raise together: those of a mesh, or all that several groups connect.

    Args:
        where: A mesh of any number of axes. Or groups in an order that all ranks share, for example the data-parallel
            group and then the tensor-parallel ones: what one rank finds reaches its peers in the first, and theirs in
            the next.
    """

    def __init__(self, where: DeviceMesh | Sequence[dist.ProcessGroup]) -> None:
        self.steps: list[DeviceMesh | dist.ProcessGroup] = [where] if isinstance(where, DeviceMesh) else list(where)

    def agree(self, subject: str, problems: Sequence[Problem], lines: Sequence[str] = ()) -> None:
        """Return on every rank, or raise on every rank; a collective.

        Args:
            subject: The call, for messages.
            problems: Everything that keeps this rank from going on.
            lines: Facts that have to be equal on all ranks.

        Raises:
            PlanError: The problems of all ranks.
        """
        error: Exception | None = PlanError(problems) if problems else None
        for step in self.steps:
            try:
                assert_consistent(step, subject, lines, error)
            except Exception as agreed:
                error = agreed  # also in the next group, whose other members do not have it yet
        if isinstance(error, PlanError):
            raise PlanError(_merged(error.problems), error.summary) from None
        if error is not None:
            raise error


def _merged(problems: Iterable[Problem]) -> list[Problem]:
    """Return one problem for each tensor and rule: several groups may have found it, each on its ranks."""
    merged: dict[Problem, Problem] = {}
    for problem in problems:
        key = replace(problem, found="")
        present = merged.get(key)
        if present is None:
            merged[key] = problem
        elif problem.found not in present.found:
            merged[key] = replace(present, found=f"{present.found}; {problem.found}")
    return list(merged.values())
