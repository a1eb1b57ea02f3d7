"""A plan's splits along one mesh axis, and the planner's regions that they shard."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from tp_styles.problems import PlanError, Problem
from tp_styles.styles.attention import Heads
from tp_styles.styles.linear import LinearShape, linear_shape
from tp_styles.values import Section, Split, describe

if TYPE_CHECKING:
    from shard_spec import Layout, ShardingPlan
    from shard_spec.planners.megatron import TPBlock


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
        reason = f"sizes {sorted(sizes)}" if sizes else "no layout on a mesh with it"
        problems.append(Problem("unknown-axis", axis=axis, found=reason, hint="pass axis=, one that has one size"))
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
        reason = f"{layout}: {before[0]} shards dim {dim} before {axis}"
        return None, Problem("invalid-layout", name, dim=dim, axis=axis, found=reason, hint="let the axis shard first")
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


@dataclass(frozen=True)
class Region:
    """A block of the planner that the plan shards as the planner would.

    Attributes:
        block: The planner's: its kind, the smallest module around it, its layers.
        splits: FQN of every sharded parameter of it -> its split.
        heads: Heads of an attention, None for other kinds.
        picked: Column-wise layers in full on every rank; each rank computes only the rows of its heads.
    """

    block: TPBlock
    splits: dict[str, Split]
    heads: Heads | None
    picked: dict[str, Split]

    @property
    def columns(self) -> dict[str, Split]:
        """FQN of each column-wise layer -> split of its output features."""
        weights = [cut.name for cut in self.block.columns if _is_weight(cut.name)]
        return {owner_of(name): replace(self.splits[name], dim=0) for name in weights}

    @property
    def row(self) -> str:
        """FQN of the row-wise layer; `""` if there is none."""
        return owner_of(self.block.rows[0].name) if self.block.rows else ""


FUSED_ORDERS = (None, "sections", "heads", "groups", "pairs")


def find_regions(module: nn.Module, cuts: AxisCuts) -> list[Region]:
    """Return regions recognised by the planner and sharded by the plan as the planner would."""
    from shard_spec.planners import MegatronPlanner

    regions: dict[str, Region] = {}
    explained: set[str] = set()
    # The order of a fused weight is not always recognised: try each one against the plan.
    for fused in FUSED_ORDERS if cuts.splits else ():
        if explained >= cuts.splits.keys():
            break
        planner = MegatronPlanner({cuts.axis: cuts.tp_size}, cuts.axis, kv_replicate=True, fused=fused)  # type: ignore[arg-type]
        for block in planner.analyse(module).units:
            region = region_of(module, block, cuts)
            if region is not None:
                regions.setdefault(f"{block.name} {block.kind} {region.row}", region)
                ids = {id(module.get_parameter(name)) for name in region.splits}
                explained |= {n for n, p in module.named_parameters(remove_duplicate=False) if id(p) in ids}
    return list(regions.values())


def region_of(module: nn.Module, block: TPBlock, cuts: AxisCuts) -> Region | None:
    """Return the block's region if the plan shards exactly its parameters, in its way."""
    from shard_spec import Layout, MeshSpec

    splits = {}
    for cut in block.cuts:
        layout = Layout(MeshSpec({cuts.axis: cuts.tp_size}), {cuts.axis: cut.placement})
        split, problem = split_on_axis(cut.name, layout, cuts.axis, module.get_parameter(cut.name).shape)
        if split is None or problem is not None or not cuts.agree(cut.name, split):
            return None  # another layout
        splits[cut.name] = split
    if any(name in cuts.splits for name in (*block.replicated, *block.row_biases)):  # must stay replicated
        return None
    counted = block.kind == "attention" and not is_torchs(module, block)  # the style of torch's counts its own
    heads = _heads(module, block, splits, cuts.tp_size) if counted else None
    picked: dict[str, Split] = {}
    for name in block.replicated:
        if heads is not None and heads.copies > 1 and (shape := _linear(module, name)):  # fewer heads than ranks
            rows = shape.out_features
            picked[owner_of(name)] = Split(0, (Section(rows, rows // heads.keys, heads.copies),))
    return Region(block, splits, heads, picked)


def is_torchs(module: nn.Module, block: TPBlock) -> bool:
    """True if a block is an `nn.MultiheadAttention`."""
    return isinstance(module.get_submodule(block.name), nn.MultiheadAttention)


def _heads(module: nn.Module, block: TPBlock, splits: dict[str, Split], tp_size: int) -> Heads | None:
    """Return head counts, from the sizes of the layers and the number of pieces."""
    width = splits[block.rows[0].name].global_size
    outputs = [splits[cut.name].global_size for cut in block.columns if _is_weight(cut.name)]
    keys = [shape for name in block.replicated if (shape := _linear(module, name))]
    if keys:  # only the query projection is sharded
        queries = block.num_pieces
        count = keys[0].out_features // (width // queries)
        return Heads(queries, count, tp_size, copies=tp_size // count) if count and tp_size % count == 0 else None
    count = block.num_pieces
    size = (outputs[1] if len(outputs) > 1 else (outputs[0] - width) // 2) // count  # fused: q, then k and v
    return Heads(width // size, count, tp_size) if size else None


def _linear(module: nn.Module, name: str) -> LinearShape | None:
    """Return the sizes of the linear layer with this weight; None for other parameters."""
    return linear_shape(describe(module.get_submodule(owner_of(name)))) if _is_weight(name) else None


def _is_weight(name: str) -> bool:
    return name.rpartition(".")[2] == "weight"


def owner_of(name: str) -> str:
    return name.rpartition(".")[0]
