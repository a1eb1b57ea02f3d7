"""A plan for a model that nobody wrote one for."""

from __future__ import annotations

import importlib.util

from torch import nn

from tp_styles.from_plan.convert import from_sharding_plan, styles_of_free_regions
from tp_styles.hf.plan import from_hf_tp_plan
from tp_styles.plan.planned import PlannedModule, plan_styles
from tp_styles.problems import PlanError, Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.fused import FusedColwiseParallel
from tp_styles.styles.mha import MultiheadAttentionParallel
from tp_styles.styles.tp_block import ColwiseKVReplicated, TPBlockParallel
from tp_styles.styles.transformer import TransformerLayerParallel


def auto_plan(model: nn.Module, *, tp_size: int = 2) -> dict[str, ParallelStyle]:
    """Styles for a model: its own Hugging Face plan, else torch's transformer layers, else `[shard-spec]`'s planner.

    Blocks that a model's own plan leaves whole (shared experts, attention of some mixtures of experts) are added where
    the planner is installed, recognises them, and their rehearsal is right (see `from_sharding_plan`).

    `plan_styles(model, auto_plan(model), tp_size).unstyled` lists what stays whole.

    Args:
        model: The model; on the meta device too.
        tp_size: Number of ranks. What the planner finds is for this number alone; `apply_plan` refuses another.

    Returns:
        FQN -> style, for `apply_plan`.

    Raises:
        PlanError: Nothing was recognised.
    """
    plan = getattr(model, "tp_plan", None) or {}
    if any("*" in pattern for pattern in plan):  # some models have one for their head alone
        return _without_broken_ties(model, _with_what_it_leaves(model, from_hf_tp_plan(model), tp_size))
    layers = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    blocks = [name for name, module in model.named_modules() if isinstance(module, layers)]
    if blocks:
        styles: dict[str, ParallelStyle] = {name: TransformerLayerParallel() for name in blocks}
        alone = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.MultiheadAttention) and not any(name.startswith(f"{b}.") or not b for b in blocks)
        ]
        return styles | {name: MultiheadAttentionParallel() for name in alone}
    if importlib.util.find_spec("shard_spec") is not None:
        from shard_spec.planners import MegatronPlanner

        layouts = MegatronPlanner({"tp": tp_size}, kv_replicate=True).build_plan(model)
        planned = from_sharding_plan(layouts, model, unproven="gather")
        if planned:
            return _without_broken_ties(model, _without_shared_biases(model, _dealt_out(planned)))
        hint = "write a plan; the planner recognised no block"
    else:
        hint = "write a plan, or install tp-styles[shard-spec] for its planner"
    raise PlanError(Problem("unmatched-pattern", type(model).__name__, found="no block that is known", hint=hint))


def _with_what_it_leaves(model: nn.Module, styles: dict[str, ParallelStyle], tp_size: int) -> dict[str, ParallelStyle]:
    if importlib.util.find_spec("shard_spec") is None:
        return styles
    planned = plan_styles(model, styles, tp_size)
    free = {left.name for left in planned.unstyled}
    whole = [module.name for module in planned.modules if module.spec.compute not in ("none", "foreign")]
    more = styles_of_free_regions(model, tp_size, free)
    blocks = {name for name in more if name in styles or any(name.startswith(f"{parent}.") for parent in whole)}
    return styles if blocks else {**styles, **_dealt_out(more)}


def _without_broken_ties(model: nn.Module, styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Leave whole what shares a parameter with a module that no style stands on (the bias of BERT's head)."""
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    kept = dict(styles)
    changed = True
    while changed:  # a head without a style takes the embedding that it is tied to with it
        claimed = {where for found in plan_styles(model, kept, 2).modules for where in _places(found)}
        broken = [
            names & claimed for names in owners.values() if len(names) > 1 and names - claimed and names & claimed
        ]
        changed = any(kept.pop(name, None) is not None for names in broken for name in names)
    return kept


def _places(found: PlannedModule) -> set[str]:
    """FQNs of the modules that hold the parameters of a style."""
    return {found.info.where(name).rpartition(".")[0] for name, _ in found.spec.parameters}


def _without_shared_biases(model: nn.Module, styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Leave attention whole that shares a relative bias of all heads with other modules.

    The bias of one layer is handed to others (T5), or comes from a module beside the attention (BEiT): as an argument,
    which no style of the attention divides by heads.
    """
    biases = [name for name, _ in model.named_parameters() if "relative" in name and "bias" in name]
    kept = dict(styles)
    for region, style in styles.items():
        if not isinstance(style, TPBlockParallel) or not style.attributes:
            continue
        own = [name for name in biases if name.startswith(f"{region}.")]
        kind = type(model.get_submodule(region))
        alike = [name for name, module in model.named_modules() if type(module) is kind]
        handed_on = own and not all(any(bias.startswith(f"{name}.") for bias in biases) for name in alike)
        beside = [b for b in biases if not any(b.startswith(f"{name}.") for name in alike)]
        near = [b for b in beside if region.startswith(_grandparent(b))]
        if handed_on or near:
            kept = {name: one for name, one in kept.items() if name != region and not name.startswith(f"{region}.")}
    return kept


def _grandparent(name: str) -> str:
    """FQN prefix of the module around the one that holds a parameter."""
    around = name.rpartition(".")[0].rpartition(".")[0]
    return f"{around}." if around else ""


def _dealt_out(styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Key and value projections of few heads: a layout has them whole on every rank, a style need not."""
    return {
        name: FusedColwiseParallel((style.rows,), unit=style.unit, copies=style.copies)
        if isinstance(style, ColwiseKVReplicated)
        else style
        for name, style in styles.items()
    }
