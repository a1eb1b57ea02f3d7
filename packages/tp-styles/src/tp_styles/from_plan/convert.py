"""`from_sharding_plan`: convert a plan's shards to styles that train like the full module, or raise."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tp_styles._shared.problems import own_errors
from tp_styles.from_plan.regions import (
    AxisCuts,
    Region,
    cuts_on_axis,
    find_regions,
    is_torchs,
    owner_of,
    sizes_by_name,
    uncut_blocks,
)
from tp_styles.problems import PlanError, Problem
from tp_styles.styles.attention import GROUPS, KEY_HEADS, QUERY_HEADS, MultiheadAttentionParallel
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.blocks import BlockParallel, ColwiseKVReplicated, NoParallel, ParametersParallel
from tp_styles.styles.linear import ColwiseParallel, FusedColwiseParallel, RowwiseParallel, linear_shape
from tp_styles.values import Split, describe, is_below, names_of_parameters

if TYPE_CHECKING:
    from shard_spec import ShardingPlan

Unproven = Literal["refuse", "gather"]
Choice = Literal["refuse", "gather", "leave"]


@own_errors()  # of shard-spec, which it calls
def from_sharding_plan(
    plan: ShardingPlan, module: nn.Module, *, axis: str = "tp", unproven: Unproven = "refuse"
) -> dict[str, ParallelStyle]:
    """Convert a `shard_spec.ShardingPlan` to styles, for one axis of its mesh.

    The axis is tensor parallel: activations between blocks are the same on all of its ranks. Sharded layers of one of
    the planner's blocks (attention by heads, a feed-forward block by channels, experts, the vocabulary's ends) keep
    their activations sharded in between. Head counts inside become local, gradients of parameters inside (norms of
    heads) are summed. `apply_plan` compares each block with the original in its first call.

    Args:
        plan: The plan; its other axes are for other packages.
        module: The model; on the meta device too.
        axis: Name of the tensor-parallel axis.
        unproven: Sharded layers outside of blocks, or in a block whose heads no rank can compute alone: `"refuse"`
            raises, `"gather"` shards each layer between replicated activations, at the price of communication.

    Returns:
        FQN -> style, for `apply_plan`; without layers not sharded by the axis.

    Raises:
        PlanError: Layouts without a style, blocks that cannot be sharded; all of them at once. A plan for a
            data-parallel axis (FSDP) is refused, too.
    """
    if unproven not in ("refuse", "gather"):
        raise PlanError(Problem("invalid-argument", "unproven", found=repr(unproven), hint='"refuse" or "gather"'))
    cuts = cuts_on_axis(plan, module, axis)
    conversion = _Conversion(module, cuts, unproven)
    if getattr(plan, "certificate", None) is not None:  # an optimised plan
        conversion.refuse_mixtures()
    return conversion.styles()


def styles_of_free_regions(module: nn.Module, tp_size: int, free: set[str]) -> dict[str, ParallelStyle]:
    """Return styles of every block recognised by the planner among some parameters.

    Args:
        module: The model.
        tp_size: Number of ranks.
        free: FQNs of parameters without a style.
    """
    from shard_spec.planners import MegatronPlanner

    planner = MegatronPlanner({"tp": tp_size}, vocabulary=False, kv_replicate=True)
    units = [unit for unit in planner.analyse(module).units if unit.rows and unit.columns]
    units = [unit for unit in units if {*(cut.name for cut in unit.cuts), *unit.replicated} <= free]
    chosen = {cut.name for unit in units for cut in unit.cuts}
    cuts = cuts_on_axis(planner.build_plan(module), module, "tp")  # of all blocks, filtered below
    chosen_cuts = replace(cuts, splits={n: s for n, s in cuts.splits.items() if n in chosen})
    return _Conversion(module, chosen_cuts, "leave").styles()


class _Conversion:
    """Conversion of one plan for one model."""

    def __init__(self, module: nn.Module, cuts: AxisCuts, unproven: Choice) -> None:
        self.module, self.cuts, self.unproven = module, cuts, unproven
        self.found: dict[str, ParallelStyle] = {}
        self.problems: list[Problem] = []  # raised together at the end

    def refuse_mixtures(self) -> None:
        """Refuse unsharded blocks of an optimised plan: it splits their batch or sequence along the axis."""
        hint = "activations differ between the axis's ranks there, which no style expresses; plan with MegatronPlanner"
        self.problems += [
            Problem("plan-not-executable", name, axis=self.cuts.axis, found="a block by batch or sequence", hint=hint)
            for name in uncut_blocks(self.module, self.cuts)
        ]

    def styles(self) -> dict[str, ParallelStyle]:
        regions = find_regions(self.module, self.cuts)
        explained: set[int] = set()
        for region in regions:
            reason = mixes(self.module, region)
            if not reason:
                self._divide(region)
            elif self.unproven == "refuse":
                self.problems.append(_not_separable(region, reason))
            if not reason or self.unproven != "gather":
                explained |= {id(self.module.get_parameter(name)) for name in region.splits}
        self._alone({n for n in self.cuts.splits if id(self.module.get_parameter(n)) not in explained})
        self._tied()  # last: it needs the styles of the other names
        if self.problems:
            raise PlanError(dict.fromkeys(self.problems), "the plan cannot be carried out by styles:")
        ordered = [name for name, _ in self.module.named_modules(remove_duplicate=False)]
        return {name: self.found[name] for name in ordered if name in self.found}

    # ------------------------------------------------------------------ styles

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
            self.found[name] = ColwiseKVReplicated(section.size, unit=section.unit, copies=section.copies)
        if region.row:
            self.found[region.row] = RowwiseParallel()
        if inner:
            self._between(region)

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
        for name in learned_activations(self.module, region):
            for key, _ in self.module.get_submodule(name).named_parameters():
                summed.setdefault(name, []).append(key)
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

    def _alone(self, names: set[str]) -> None:
        """Style sharded layers outside of all regions."""
        if self.unproven == "leave":  # only recognised blocks get styles
            return
        for name in dict.fromkeys(n.rpartition(".")[0] for n in self.cuts.splits if n in names):
            module = self.module.get_submodule(name)
            keys = {key for key in module._parameters if f"{name}.{key}".lstrip(".") in names}
            style, problem = gathering(self.cuts, name, module, keys)
            if problem is not None:
                self.problems.append(problem)
            elif style is not None and self.unproven == "gather":
                self.found.setdefault(name, style)
            else:
                self.problems.append(no_region(self.cuts, name, keys))

    def _tied(self) -> None:
        """Style a tied weight's other layers with the same split."""
        for names in names_of_parameters(self.module):
            owners = [name.rpartition(".")[0] for name in names]
            if not any(name in self.found for name in owners):
                continue
            for name in owners:
                module = self.module.get_submodule(name)
                split = self.cuts.splits.get(below(name, "weight"))
                if name in self.found or split is None:
                    continue
                if isinstance(module, nn.Embedding):
                    self.found[name] = RowwiseParallel()
                elif linear_shape(describe(module)) is not None:
                    self.found[name] = column(replace(split, dim=0), Replicate())


def mixes(module: nn.Module, region: Region) -> str:
    """Return the reason against computing a rank's heads of an attention alone; empty if there is none."""
    home = region.block.name
    if region.block.kind != "attention" or is_torchs(module, region.block) or not region.row:
        return ""
    if region.heads is None:
        return "its heads cannot be counted, or do not divide by the ranks"
    attention = module.get_submodule(home)
    mixing = [name for name in ("alibi", "position_bias") if name in inspect.signature(attention.forward).parameters]
    # A module beside the attention adds a bias of all heads, to all attention below their parent (BEiT).
    biases = [name for name, _ in module.named_parameters() if "relative" in name and "bias" in name]
    parents = [owner_of(owner_of(name)) for name in biases if not is_below(name, home)]
    mixing += [f"a bias from {parent}" for parent in parents if parent and is_below(home, parent)]
    own = [name for name in region.block.replicated if owner_of(name) == home]
    if type(attention).__name__ in FULL_WIDTH:
        return "its forward takes the width of all heads from its input"
    if mixing:
        return f"it takes a bias of all heads: {mixing[0]}"
    return f"{own[0]} acts on all heads" if own else ""


FULL_WIDTH = frozenset({"TrOCRAttention"})
"""Attention of transformers with a view into as many channels as come in, which no attribute makes local."""


def learned_activations(module: nn.Module, region: Region) -> list[str]:
    """List activation functions with parameters in a feed-forward block, between columns and rows."""
    home = region.block.name
    if region.block.kind != "mlp":
        return []
    inside = module.get_submodule(home).named_modules()
    children = [(below(home, name), child) for name, child in inside if name]  # without the block itself
    usual = ("act", "act_fn", "activation", "activation_fn")
    return [
        name
        for name, child in children
        if (isinstance(child, nn.PReLU) or name.rpartition(".")[2] in usual) and any(True for _ in child.parameters())
    ]


def local_counts(module: nn.Module, region: Region) -> dict[str, dict[str, int]]:
    """Map FQNs of modules with columns, and of the module around the block, to local attributes.

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
        sizes_of_rank = sizes_by_name(module.get_submodule(name)).items()
        local = {key: sizes[key][1] for key, value in sizes_of_rank if key in sizes and sizes[key][0] == value}
        if local:
            counts[name] = local
    return counts


WIDTHS: tuple[str, ...] = ("split_size", "inner_dim", "all_head_size", "q_size", "d_attn", "inner_size")
WIDTHS += ("embed_dim", "hidden_size", "d_model", "n_embd", "n_state", "dim", "width")
KEY_WIDTHS = "kv_size", "kv_dim"
"""Usual names of the channels of all query heads, and of all key-value heads."""


def _not_separable(region: Region, reason: str) -> Problem:
    hint = 'leave it replicated; or unproven="gather" shards each of its layers on its own'
    return Problem(
        "slices-mix", region.block.name, found=f"{region.block.kind} by columns and rows: {reason}", hint=hint
    )


def no_region(cuts: AxisCuts, name: str, keys: set[str]) -> Problem:
    """Return the error for a layer outside of all regions."""
    reason = ", ".join(f"{key}: {cuts.splits[below(name, key)]}" for key in sorted(keys))
    hint = (
        "it is part of no recognised block that the plan shards by columns and rows. For a data-parallel axis use "
        'FSDP or shard_spec.apply_plan; for a tensor-parallel one unproven="gather" makes it right on its own'
    )
    return Problem("plan-not-executable", name, axis=cuts.axis, found=reason, hint=hint)


def gathering(
    cuts: AxisCuts, name: str, module: nn.Module, keys: set[str]
) -> tuple[ParallelStyle | None, Problem | None]:
    """Return the style for a layer between replicated activations, or the problem."""
    info = describe(module, name)
    weight, bias = (cuts.splits.get(below(name, key)) for key in ("weight", "bias"))
    shape = linear_shape(info)
    if shape is not None and weight is not None:
        by_rows = weight.dim == shape.out_dim  # of the weight: output features
        has_bias = module._parameters.get("bias") is not None
        if has_bias and (not cuts.agree(below(name, "bias"), replace(weight, dim=0)) if by_rows else bias):
            hint = "shard the bias with the rows of its weight, and replicate it with the columns"
            return None, Problem("layout-mismatch", below(name, "bias"), found=str(bias or "whole"), hint=hint)
        if by_rows:
            return column(replace(weight, dim=0), Replicate()), None
        if weight.is_single and all(section.unit == 1 for section in weight.sections):
            return RowwiseParallel(input_layouts=Replicate()), None  # the input is sliced here
    if isinstance(module, nn.Embedding) and weight is not None and weight.is_single:
        by_rows = weight.dim == 0
        return RowwiseParallel() if by_rows else ColwiseParallel(output_layouts=Replicate()), None
    reason = f"{type(module).__name__} with " + ", ".join(
        f"{key}: {cuts.splits[below(name, key)]}" for key in sorted(keys)
    )
    hint = "styles shard nn.Linear and nn.Embedding weights; keep this one replicated on the axis"
    return None, Problem("layout-mismatch", name, axis=cuts.axis, found=reason, hint=hint)


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
