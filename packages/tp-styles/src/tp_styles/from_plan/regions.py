"""Regions of a model sharded by a plan: columns, rows, and the planner's metadata."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from tp_styles.from_plan.axis_shards import AxisCuts, split_on_axis
from tp_styles.styles.gqa import Heads
from tp_styles.styles.layers import linear_shape
from tp_styles.values.spec import describe
from tp_styles.values.split import Section, Split

if TYPE_CHECKING:
    from shard_spec.planners.megatron import TPBlock


@dataclass(frozen=True)
class Region:
    """Modules between column-wise and row-wise layers, on each rank's own channels or heads.

    Attributes:
        kind: The planner's kind: `"attention"`, `"mlp"`, `"experts"`, `"embedding"`, `"head"`.
        scope: FQN of the smallest module around all of it.
        columns: FQN of each column-wise layer -> split of its output features.
        row: FQN of the row-wise layer; `""` if there is none.
        row_split: Split of the row-wise layer's input features.
        inner: FQN of each sharded parameter between them -> its split.
        picked: Column-wise layers in full on every rank; each rank computes only the rows of its heads.
        heads: Heads of an attention, None for other kinds.
        parameters: FQN of every sharded parameter of the region -> its split.
        whole: FQNs of replicated parameters inside.
        is_torchs: It is an `nn.MultiheadAttention`.
    """

    kind: str
    scope: str
    columns: dict[str, Split]
    row: str
    row_split: Split
    inner: dict[str, Split]
    picked: dict[str, Split]
    heads: Heads | None
    parameters: dict[str, Split]
    whole: tuple[str, ...] = ()
    is_torchs: bool = False


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
        for unit in planner.analyse(module).units:
            region = _region(module, unit, cuts)
            if region is not None:
                regions.setdefault(f"{unit.name} {unit.kind} {region.row}", region)
                explained |= _aliases(module, region.parameters)
    return list(regions.values())


def uncut_blocks(module: nn.Module, cuts: AxisCuts) -> list[str]:
    """Return FQNs of blocks left replicated by the plan, though columns and rows could be sharded."""
    from shard_spec.planners import MegatronPlanner

    units = MegatronPlanner({cuts.axis: cuts.tp_size}, cuts.axis).analyse(module).units
    blocks = [unit for unit in units if unit.rows and unit.columns]
    return [unit.name for unit in blocks if not any(cut.name in cuts.splits for cut in unit.cuts)]


def _aliases(module: nn.Module, names: dict[str, Split]) -> set[str]:
    wanted = {id(module.get_parameter(name)) for name in names}
    return {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in wanted}


def _region(module: nn.Module, unit: TPBlock, cuts: AxisCuts) -> Region | None:
    """Return the unit's region if the plan shards exactly the unit's parameters, in the same way."""
    from shard_spec import Layout, MeshSpec

    splits = {}
    for cut in unit.cuts:
        layout = Layout(MeshSpec({cuts.axis: cuts.tp_size}), {cuts.axis: cut.placement})
        split, problem = split_on_axis(cut.name, layout, cuts.axis, module.get_parameter(cut.name).shape)
        if split is None or problem is not None or not cuts.agree(cut.name, split):
            return None  # another layout
        splits[cut.name] = split
    if any(name in cuts.splits for name in (*unit.replicated, *unit.row_biases)):  # must stay replicated
        return None
    rows = [cut.name for cut in unit.rows]
    columns = {_owner(cut.name): replace(splits[cut.name], dim=0) for cut in unit.columns if _is_weight(cut.name)}
    heads = _heads(module, unit, splits, cuts.tp_size) if unit.kind == "attention" else None
    row = _owner(rows[0]) if rows else ""
    return Region(
        kind=str(unit.kind),
        scope=unit.name,
        columns=columns,
        row=row,
        row_split=replace(splits[rows[0]], dim=0) if rows else Split.replicated(),
        inner={cut.name: splits[cut.name] for cut in unit.inner},
        picked=dict(_picked(module, unit, heads)),
        heads=heads,
        parameters=splits,
        whole=unit.replicated,
        is_torchs=isinstance(module.get_submodule(unit.name), nn.MultiheadAttention),
    )


def _heads(module: nn.Module, unit: TPBlock, splits: dict[str, Split], tp_size: int) -> Heads | None:
    """Return head counts, from the sizes of the layers and the number of pieces."""
    if isinstance(module.get_submodule(unit.name), nn.MultiheadAttention):
        return None  # its style counts them
    width = splits[unit.rows[0].name].global_size
    outputs = [splits[cut.name].global_size for cut in unit.columns if _is_weight(cut.name)]
    keys = [name for name in unit.replicated if _is_linear_weight(module, name)]
    if keys:  # only the query projection is sharded
        rows = _out_features(module, keys[0])
        queries = unit.num_pieces
        size = width // queries
        count = rows // size
        return Heads(queries, count, tp_size, copies=tp_size // count) if count and tp_size % count == 0 else None
    count = unit.num_pieces
    size = (outputs[1] if len(outputs) > 1 else (outputs[0] - width) // 2) // count  # fused: q, then k and v
    return Heads(width // size, count, tp_size) if size else None


def _picked(module: nn.Module, unit: TPBlock, heads: Heads | None) -> Iterator[tuple[str, Split]]:
    """Yield key and value projections of fewer key-value heads than ranks."""
    if heads is None or heads.copies == 1:
        return
    for name in unit.replicated:
        if _is_linear_weight(module, name):
            rows = _out_features(module, name)
            yield _owner(name), Split(0, (Section(rows, rows // heads.keys, heads.copies),))


def _is_linear_weight(module: nn.Module, name: str) -> bool:
    return _is_weight(name) and linear_shape(describe(module.get_submodule(_owner(name)))) is not None


def _out_features(module: nn.Module, name: str) -> int:
    shape = linear_shape(describe(module.get_submodule(_owner(name))))
    assert shape is not None
    return shape.out_features


def _is_weight(name: str) -> bool:
    return name.rpartition(".")[2] == "weight"


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def sizes_by_name(module: nn.Module) -> dict[str, int]:
    """Return a module's integer attributes."""
    return {key: value for key, value in vars(module).items() if key[0] != "_" and type(value) is int}  # no bool
