"""Values of a rule, and their layouts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import SpecialShard
from shard_spec.specs.base import ShardingSpec

if TYPE_CHECKING:
    from shard_spec.layout.placements import PlacementLike
    from shard_spec.specs.shards import Sharder

LayoutLike: TypeAlias = "Layout | str | PlacementLike | Sequence[PlacementLike] | Mapping[str, PlacementLike]"
PlanValue: TypeAlias = "LayoutLike | ShardingSpec | Sharder | Any"


def is_spec(value: object) -> bool:
    """Return True if ``value`` is a sharding spec: ours, a user's subclass, or one of torch's own."""
    return not isinstance(value, type) and callable(getattr(value, "build_metadata", None))


def is_sharder(value: object) -> bool:
    """Return True if ``value`` is a Sharder: it shards a full module by itself."""
    plain = isinstance(value, Layout | str | Mapping | Sequence)
    return not plain and not isinstance(value, type) and not is_spec(value) and callable(getattr(value, "shard", None))


def is_placement(value: object) -> bool:
    """Return True if ``value`` is a single placement."""
    if isinstance(value, SpecialShard):
        return True
    types = sys.modules.get("torch.distributed.tensor.placement_types")
    return types is not None and isinstance(value, types.Placement)


def as_placements(value: Any) -> Any:
    """Convert ``value`` to the form of ``Layout``: a single placement is that of the only axis."""
    return [value] if is_placement(value) else value


def to_layout(value: PlanValue, mesh: MeshSpec | None) -> Layout:
    """Return the layout of ``value`` on ``mesh``; not for specs and Sharders.

    Raises:
        PlanError: ``missing-mesh`` if it needs a mesh and there is none; problems of :class:`Layout`; ``wrong-type``.
    """
    if isinstance(value, Layout):
        return value
    is_layout_like = is_placement(value) or isinstance(value, str | Mapping | Sequence)
    if not is_layout_like:  # before the mesh: the type is the first error
        raise PlanError(
            Problem(
                "wrong-type",
                found=f"{value!r:.200} of type {type(value).__qualname__}",
                hint="give placements, a Layout, text such as 'dp:R, tp:S(0)', a ShardingSpec or a Sharder",
            )
        )
    if mesh is None:  # placements alone have no axes
        raise PlanError(
            Problem(
                "missing-mesh", found=f"{value!r:.200}", hint="pass mesh= to the plan, or a Layout that has its own"
            )
        )
    return Layout(mesh, as_placements(value))
