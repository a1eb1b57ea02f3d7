"""A plan's splits along one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from tp_styles.problems import PlanError, Problem
from tp_styles.values import Section, Split

if TYPE_CHECKING:
    from shard_spec import Layout, ShardingPlan


@dataclass(frozen=True)
class AxisCuts:
    """Parameters sharded by one mesh axis.

    Attributes:
        axis: Name of the axis.
        tp_size: Its size.
        splits: FQN -> split, under every name of a tied parameter; replicated ones are left out.
    """

    axis: str
    tp_size: int
    splits: dict[str, Split]

    def agree(self, name: str, other: Split) -> bool:
        """True if the plan gives every rank the same rows of the parameter as `other`."""
        own = self.splits.get(name)
        if own is None or own.dim != other.dim or own.global_size != other.global_size:
            return False
        return all(  # same rows, even if described by other sections
            rows_of(own, rank, self.tp_size) == rows_of(other, rank, self.tp_size) for rank in range(self.tp_size)
        )


def cuts_on_axis(plan: ShardingPlan, module: nn.Module, axis: str) -> AxisCuts:
    """Read the splits of a plan along one axis.

    Raises:
        PlanError: Settings unknown to styles: outputs, Sharders, other kinds of shards; no such axis.
    """
    resolution = plan.resolve(module)
    problems = _beside_layouts(plan, resolution)
    layouts: dict[str, Layout] = {
        name: resolution[name] for name, _ in module.named_parameters(remove_duplicate=False) if name in resolution
    }
    sizes = {layout.mesh.axis_size(axis) for layout in layouts.values() if axis in layout.mesh.axis_names}
    if layouts and len(sizes) != 1:
        problems.append(
            Problem(
                "unknown-axis",
                axis=axis,
                found=f"sizes {sorted(sizes)}" if sizes else "no layout on a mesh with it",
                hint="pass axis=, one that has one size",
            )
        )
    splits = {}
    for name, layout in layouts.items():
        split, problem = split_on_axis(name, layout, axis, module.get_parameter(name).shape)
        problems += [problem] if problem is not None else []
        if split is not None:
            splits[name] = split
    if problems:
        raise PlanError(dict.fromkeys(problems), "no style can express parts of this plan:")
    return AxisCuts(axis, next(iter(sizes), 1), splits)  # 1: nothing is sharded


def _beside_layouts(plan: ShardingPlan, resolution: Any) -> list[Problem]:
    """List settings of a plan beside layouts of parameters: none of them may be ignored."""
    problems = [
        Problem("invalid-argument", name, found=str(value), hint="use PrepareModuleOutput, or output_layouts=")
        for name, value in (plan.output_plan or {}).items()
    ]
    problems += [
        Problem("invalid-argument", name, hint="styles give local tensors; leave it out")
        for name in plan.return_local_tensor or ()
    ]
    return problems + [
        Problem(
            "invalid-argument", name, found=type(sharder).__name__, hint="a Sharder is code; apply it with shard_spec"
        )
        for name, sharder in resolution.sharders.items()
    ]


def split_on_axis(name: str, layout: Layout, axis: str, shape: tuple[int, ...]) -> tuple[Split | None, Problem | None]:
    """Return a parameter's split along the axis, None if replicated, or the problem."""
    if axis not in layout.mesh.axis_names:
        return None, None
    term: Any = layout.specs[layout.mesh.axis_names.index(axis)]
    if str(term) == "R":  # replicated on this axis
        return None, None
    hint = "styles know Shard, BlockShard and InterleavedShard"
    if term.dim is None:
        return None, Problem("layout-mismatch", name, axis=axis, found=str(layout), hint=hint)
    dim = term.dim % len(shape)
    cutting = layout.sharded_axes
    order = layout.order or tuple(cutting)  # default: the order of the mesh
    before = [other for other in order[: order.index(axis)] if cutting[other] % len(shape) == dim]
    if before:
        return None, Problem(
            "invalid-layout",
            name,
            dim=dim,
            axis=axis,
            found=f"{layout}: {before[0]} shards dim {dim} before {axis}",
            hint="let the axis shard first",
        )
    sections = _sections(term, shape[dim])
    if sections is None:
        return None, Problem("layout-mismatch", name, dim=dim, axis=axis, found=str(layout), hint=hint)
    return Split(dim, sections), None


def _sections(term: Any, size: int) -> tuple[Section, ...] | None:
    from shard_spec import BlockShard, InterleavedShard, UnevenShard  # installed: it made the layout

    if isinstance(term, BlockShard):
        return (Section(size, unit=term.block),) if not term.cyclic and size % term.block == 0 else None
    if isinstance(term, InterleavedShard):
        if isinstance(term.sections, int):
            return (Section(size // term.sections),) * term.sections if size % term.sections == 0 else None
        return tuple(map(Section, term.sections))
    return None if isinstance(term, UnevenShard) else (Section(size),)


def rows_of(split: Split, rank: int, tp_size: int) -> list[tuple[int, int]]:
    """Return ranges without empty ones, adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in split.ranges(rank, tp_size):
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
