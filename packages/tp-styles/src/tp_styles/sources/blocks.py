"""Blocks that shard-spec's planner recognises, as styles that train like the full module."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tp_styles.problems import PlanError, Problem
from tp_styles.sources.axis_splits import AxisCuts, cuts_on_axis, split_on_axis
from tp_styles.styles.attention import GROUPS, KEY_HEADS, QUERY_HEADS, Heads, MultiheadAttentionParallel
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.blocks import BlockParallel, ColwiseKVReplicated, NoParallel, ParametersParallel
from tp_styles.styles.linear import (
    ColwiseParallel,
    FusedColwiseParallel,
    LinearShape,
    RowwiseParallel,
    linear_shape,
)
from tp_styles.values import Section, Split, describe, is_below, names_of_parameters

if TYPE_CHECKING:
    from shard_spec.planners.megatron import TPBlock


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


def styles_of_blocks(module: nn.Module, tp_size: int, free: set[str] | None = None) -> dict[str, ParallelStyle]:
    """Return styles of every block that the planner recognises.

    Args:
        module: The model.
        tp_size: Number of ranks.
        free: FQNs of parameters without a style: only blocks of these, and no vocabulary. None for all.
    """
    from shard_spec.planners import MegatronPlanner

    planner = MegatronPlanner({"tp": tp_size}, vocabulary=free is None, kv_replicate=True)
    cuts = cuts_on_axis(planner.build_plan(module), module, "tp")
    if free is not None:
        units = [unit for unit in planner.analyse(module).units if unit.rows and unit.columns]
        units = [unit for unit in units if {*(cut.name for cut in unit.cuts), *unit.replicated} <= free]
        chosen = {cut.name for unit in units for cut in unit.cuts}
        cuts = replace(cuts, splits={n: s for n, s in cuts.splits.items() if n in chosen})
    return Conversion(module, cuts, refuses=False).styles()


class Conversion:
    """Conversion of one plan for one model.

    Args:
        module: The model.
        cuts: The plan's.
        refuses: What has no style is a problem, and parameters lie as planned; else it is left replicated, and ranks
            hold only the rows of their key-value heads.
    """

    def __init__(self, module: nn.Module, cuts: AxisCuts, *, refuses: bool) -> None:
        self.module, self.cuts, self.refuses = module, cuts, refuses
        self.found: dict[str, ParallelStyle] = {}
        self.problems: list[Problem] = []  # raised together at the end

    def styles(self) -> dict[str, ParallelStyle]:
        regions = find_regions(self.module, self.cuts)
        explained: set[int] = set()
        for region in regions:
            reason = mixes(self.module, region)
            if reason and self.refuses:
                text, hint = f"{region.block.kind} by columns and rows: {reason}", "leave it replicated"
                self.problems.append(Problem("slices-mix", region.block.name, found=text, hint=hint))
            elif reason or (not self.refuses and self._has_adapters(region, regions)):
                self._gather(region)
            else:
                self._divide(region)
            explained |= {id(self.module.get_parameter(name)) for name in region.splits}
        if self.refuses:
            self._refuse_others({n for n in self.cuts.splits if id(self.module.get_parameter(n)) not in explained})
        add_learned_activations(self.module, self.found)
        keep_ties(self.module, self.found, self.cuts.splits)  # last: it needs the styles of the other names
        if self.problems:
            raise PlanError(dict.fromkeys(self.problems), "the plan cannot be carried out by styles:")
        ordered = [name for name, _ in self.module.named_modules(remove_duplicate=False)]
        return {name: self.found[name] for name in ordered if name in self.found}

    # ------------------------------------------------------------------ styles

    def _has_adapters(self, region: Region, regions: list[Region]) -> bool:
        """True if blocks inside have outputs of its columns' size: they are added (zamba2)."""
        where, widths = region.block.name, {split.global_size for split in region.columns.values() if region.row}
        inner = [
            candidate
            for candidate in regions
            if candidate.row and candidate.block.name != where and is_below(candidate.block.name, where)
        ]
        return any(self.module.get_parameter(candidate.block.rows[0].name).shape[0] in widths for candidate in inner)

    def _divide(self, region: Region) -> None:
        if is_torchs(self.module, region.block):
            self.found[region.block.name] = MultiheadAttentionParallel()
            return
        if region.block.kind == "experts":
            self._experts(region)
            return
        inner = bool(region.row) and bool(region.columns)  # otherwise outputs are gathered
        for name, split in region.columns.items():
            self.found[name] = column(split, Shard(-1) if inner else Replicate())
        for name, split in region.picked.items():
            (section,) = split.sections
            # A plan's layout keeps them in full on every rank.
            self.found[name] = (
                ColwiseKVReplicated(section.size, unit=section.unit, copies=section.copies)
                if self.refuses
                else FusedColwiseParallel((section.size,), unit=section.unit, copies=section.copies)
            )
        if region.row:
            self.found[region.row] = RowwiseParallel()
        if inner:
            self._between(region)

    def _gather(self, region: Region) -> None:
        """Style each layer of a block that no rank can compute alone, between full activations."""
        self.found |= {name: column(split, Replicate()) for name, split in region.columns.items()}
        if all(section.unit == 1 for section in region.splits[region.block.rows[0].name].sections):
            self.found[region.row] = RowwiseParallel(input_layouts=Replicate())  # the input is sliced here

    def _between(self, region: Region) -> None:
        """Add styles for counts, parameters and dropouts inside the block."""
        counts = local_counts(self.module, region)
        cut: dict[str, dict[str, int]] = {}
        summed: dict[str, list[str]] = {}
        for name in (each.name for each in region.block.inner):
            owner, _, key = name.rpartition(".")
            dim = region.splits[name].dim
            assert dim is not None
            cut.setdefault(owner, {})[key] = dim
        for name in region.block.replicated:
            owner, _, key = name.rpartition(".")
            if owner not in region.picked:  # these have a style of their own
                summed.setdefault(owner, []).append(key)
        taken = inspect.signature(self.module.get_submodule(region.block.name).forward).parameters
        for name in LEARNED_POSITIONS if region.block.kind == "attention" else ():
            if name in taken:
                summed.setdefault(region.block.name, []).append(name)
        for owner in dict.fromkeys((*counts, *cut, *summed)):  # one style for each module
            module = self.module.get_submodule(owner)
            entry = self.found.get(owner)  # a module with two blocks
            before = entry.attributes if isinstance(entry, BlockParallel) and isinstance(entry.attributes, dict) else {}
            attributes = {**before, **counts.get(owner, {})}
            if owner not in cut and not attributes and {n for n, _ in module.named_parameters()} == set(summed[owner]):
                self.found[owner] = NoParallel(sum_gradient=True)
            elif attributes or owner in cut or owner in summed:
                self.found[owner] = BlockParallel(
                    shard=cut.get(owner),
                    sum_gradient=summed.get(owner, ()),
                    attributes=attributes,
                    tp_size=self.cuts.tp_size,
                )

    def _experts(self, region: Region) -> None:
        names = {name.rpartition(".")[2]: split for name, split in region.splits.items()}
        module = self.module.get_submodule(region.block.name)
        kinds = {}
        for key, split in names.items():
            parameter = module.get_parameter(key)
            kind = "rowwise" if split.dim == parameter.dim() - 1 and not key.endswith("bias") else "colwise"
            kinds[key] = f"packed_{kind}" if len(split.sections) > 1 else kind
        for key, _ in module.named_parameters():
            kinds.setdefault(key, "rowwise")  # the bias after the down projection, replicated
        self.found[region.block.name] = ParametersParallel(kinds, role="experts")

    def _refuse_others(self, names: set[str]) -> None:
        """Refuse sharded layers outside of all regions."""
        for name in dict.fromkeys(owner_of(n) for n in self.cuts.splits if n in names):
            keys = sorted(n.rpartition(".")[2] for n in names if owner_of(n) == name)
            self.problems.append(
                Problem(
                    "plan-not-executable",
                    name,
                    axis=self.cuts.axis,
                    found=", ".join(f"{key}: {self.cuts.splits[below(name, key)]}" for key in keys),
                    hint="it is part of no recognised block that the plan shards by columns and rows: leave it"
                    " replicated. For a"
                    " data-parallel axis use FSDP or shard_spec.apply_plan",
                )
            )


def mixes(module: nn.Module, region: Region) -> str:
    """Return the reason against computing a rank's heads alone; else an empty text."""
    where = region.block.name
    if region.block.kind != "attention" or is_torchs(module, region.block) or not region.row:
        return ""
    if region.heads is None:
        return "its heads cannot be counted, or do not divide by the ranks"
    attention = module.get_submodule(where)
    mixing = [name for name in ("alibi", "position_bias") if name in inspect.signature(attention.forward).parameters]
    # A module beside the attention adds a bias of all heads, to all attention below their parent (BEiT).
    biases = [name for name, _ in module.named_parameters() if "relative" in name and "bias" in name]
    parents = [owner_of(owner_of(name)) for name in biases if not is_below(name, where)]
    mixing += [f"a bias from {parent}" for parent in parents if parent and is_below(where, parent)]
    own = [name for name in region.block.replicated if owner_of(name) == where]
    if type(attention).__name__ == "TrOCRAttention":  # views into as many channels as come in
        return "its forward takes the width of all heads from its input"
    if mixing:
        return f"it takes a bias of all heads: {mixing[0]}"
    return f"{own[0]} acts on all heads" if own else ""


def add_learned_activations(module: nn.Module, styles: dict[str, ParallelStyle]) -> None:
    """Add styles for activation functions with parameters, beside column-wise and row-wise layers of one module."""
    usual = ("act", "act_fn", "activation", "activation_fn")
    for name, child in module.named_modules():
        parent, _, last = name.rpartition(".")
        learned = (last in usual or isinstance(child, nn.PReLU)) and any(True for _ in child.parameters())
        if not learned or name in styles:
            continue
        beside = [styles.get(below(parent, key)) for key, _ in module.get_submodule(parent).named_children()]
        # A column-wise layer that gathers its output leaves full channels.
        columns = [
            candidate
            for candidate in beside
            if isinstance(candidate, ColwiseParallel) and candidate.output_layouts == (Shard(-1),)
        ]
        if columns and any(isinstance(candidate, RowwiseParallel) for candidate in beside):
            styles[name] = NoParallel(sum_gradient=True)  # it runs on this rank's channels


def keep_ties(module: nn.Module, styles: dict[str, ParallelStyle], splits: Mapping[str, Split] | None = None) -> None:
    """Style a tied weight's other layers with the same split, by rows of the vocabulary.

    Args:
        module: The model.
        styles: FQN -> style; completed in place.
        splits: FQN -> split of a plan; other weights stay without a style. None for embeddings of any weight.
    """
    for names in names_of_parameters(module):
        owners = [owner_of(name) for name in names]
        key, heads = names[0].rpartition(".")[2], [styles.get(owner) for owner in owners]
        for owner in owners if len(owners) > 1 and any(heads) else ():
            if key == "bias" and owner not in styles and ColwiseParallel(output_layouts=Replicate()) in heads:
                styles[owner] = BlockParallel(shard={key: 0})  # BERT's head holds the bias of its last layer, too
            split = None if splits is None else splits.get(below(owner, "weight"))
            if owner in styles or (splits is not None and split is None):
                continue
            tied = module.get_submodule(owner)
            if isinstance(tied, nn.Embedding):
                styles[owner] = RowwiseParallel()
            elif split is not None and linear_shape(describe(tied)) is not None:
                styles[owner] = column(replace(split, dim=0), Replicate())


def local_counts(module: nn.Module, region: Region) -> dict[str, dict[str, int]]:
    """Map FQNs of modules with columns, and of the block's own, to local attributes.

    An attribute counts heads, or channels of all heads, if it has one of the usual names and the right value.
    """
    heads, sizes = region.heads, {}
    if heads is not None:
        width = region.splits[region.block.rows[0].name].global_size
        size = width // heads.queries
        queries, keys = (heads.queries, heads.local_queries), (heads.keys, heads.local_keys)
        sizes = dict.fromkeys((*QUERY_HEADS, "h", "heads", "nh", "num_q_heads"), queries)
        sizes |= dict.fromkeys((*KEY_HEADS, "kv_heads", "n_kv", "nkv"), keys)
        groups = heads.queries // heads.keys, heads.local_groups
        sizes |= dict.fromkeys((*GROUPS, "groups", "kv_groups", "repeats", "n_groups"), groups)
        sizes |= dict.fromkeys(WIDTHS, (width, heads.local_queries * size))
        sizes |= dict.fromkeys(KEY_WIDTHS, (heads.keys * size, heads.local_keys * size))
    counts: dict[str, dict[str, int]] = {}
    for name in dict.fromkeys([owner_of(name) for name in region.columns] + [region.block.name]):
        counted = [(key, n) for key, n in vars(module.get_submodule(name)).items() if type(n) is int and key in sizes]
        local = {key: sizes[key][1] for key, n in counted if sizes[key][0] == n}
        if local:
            counts[name] = local
    return counts


LEARNED_POSITIONS = ("sinusoidal_pos",)
"""Arguments of an attention that come from a table of parameters (RoFormer's) and turn the vectors of each head."""
# Usual names of the channels of all query heads, and of all key-value heads.
WIDTHS = (
    *("split_size", "inner_dim", "all_head_size", "q_size", "d_attn", "inner_size"),
    *("embed_dim", "hidden_size", "d_model", "n_embd", "n_state", "dim", "width"),
)
KEY_WIDTHS = "kv_size", "kv_dim"


def column(split: Split, output: Any) -> ParallelStyle:
    """Return the column-wise style for a split of the output features."""
    if len(split.sections) == 1 and split.sections[0].unit == 1:
        return ColwiseParallel(output_layouts=output)
    return FusedColwiseParallel(
        tuple(s.size for s in split.sections), unit=tuple(s.unit for s in split.sections), output_layouts=output
    )


def below(name: str, attribute: str) -> str:
    """Return the FQN of a module's attribute."""
    return f"{name}.{attribute}" if name else attribute
