"""FullyShardPlanner: every parameter sharded along dim 0 over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from torch import nn

from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.layout import Layout
from shard_spec.planners.base import Decisions, LayoutPlanner, MeshLike, merge_notes, merged

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Uneven = Literal["shard", "replicate", "refuse"]


class FullyShardPlanner(LayoutPlanner):
    """ZeRO-3, as in ``torch.distributed.fsdp.fully_shard``: dim 0 sharded over one or several axes.

    After another planner (``compose(MegatronPlanner(mesh), FullyShardPlanner(mesh))``) it shards the local shards
    of that planner.

    Args:
        mesh: the axes of the plan.
        axis: one sharding axis or several, outermost first. Other axes replicate (a replica axis beside
            ``axis="dp_shard"`` gives hybrid sharding).
        uneven: treatment of a parameter with rows that do not divide: ``"shard"`` shards it anyway, and the last ranks
            hold fewer rows or none, as FSDP2 does; ``"replicate"`` leaves it replicated, with a note; ``"refuse"``
            raises with all of them.
        min_bytes: smaller parameters stay replicated.
        keep: patterns of parameters that stay replicated.

    Raises:
        PlanError: an axis is not in the mesh; a pattern of `keep` cannot be parsed, or has no match.
    """

    def __init__(
        self,
        mesh: MeshLike | DeviceMesh,
        axis: str | Sequence[str] = "dp",
        *,
        uneven: Uneven = "shard",
        min_bytes: int = 0,
        keep: Sequence[str] = (),
    ) -> None:
        super().__init__(mesh)
        self.axes = (axis,) if isinstance(axis, str) else tuple(axis)
        for name in self.axes:
            self.mesh.axis_size(name)
        if uneven not in ("shard", "replicate", "refuse"):
            raise ValueError(f"uneven={uneven!r}: choose 'shard', 'replicate' or 'refuse'.")
        self.uneven, self.min_bytes = uneven, min_bytes
        self.keep = tuple(Pattern(text) for text in keep)

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        parameters = dict(module.named_parameters())
        self._require_matches(parameters)
        layouts: dict[str, Layout] = {}
        uneven: list[Problem] = []
        for name, parameter in parameters.items():
            if parameter.dim() == 0 or parameter.numel() * parameter.element_size() < self.min_bytes:
                continue
            if any(pattern.matches(name) for pattern in self.keep):
                continue
            cut = Layout(self.mesh, dict.fromkeys(self.axes, "S(0)"), self.axes if len(self.axes) > 1 else None)
            before = {name: given[name]} if name in given else {}
            # Judge the combined layout: a preceding planner may have sharded dim 0 already.
            problem = self._unevenness(name, tuple(parameter.shape), merged(before, {name: cut})[name])
            if problem is not None:
                uneven.append(problem)
            if problem is None or self.uneven == "shard":  # collect first: "refuse" lists all
                layouts[name] = cut
        if uneven and self.uneven == "refuse":
            raise PlanError(uneven, f"{len(uneven)} parameters do not divide")
        notes = merge_notes(uneven) if self.uneven == "replicate" else ()
        return Decisions(layouts, notes)

    def _unevenness(self, name: str, shape: tuple[int, ...], layout: Layout) -> Problem | None:
        """Return the problem if the first and the last rank hold different amounts."""
        first, last = layout.mesh.ranks[0], layout.mesh.ranks[-1]
        if layout.local_shape(first, shape) == layout.local_shape(last, shape):
            return None
        ranks = " x ".join(f"{axis}={self.mesh.axis_size(axis)}" for axis in self.axes)
        reason = f"{shape[0]} rows of shape {shape}, laid out as {layout}, over {ranks}"
        hint = "pad it, replicate it, or allow it with uneven='shard'"
        return Problem("uneven-shards", name, dim=0, axis=self.axes[0], found=reason, hint=hint)

    def _require_matches(self, parameters: Mapping[str, nn.Parameter]) -> None:
        problems = [
            Problem("unmatched-pattern", pattern.text, found="no parameter has a name like this", hint="correct keep=")
            for pattern in self.keep
            if not any(pattern.matches(name) for name in parameters)
        ]
        if problems:
            raise PlanError(problems)
