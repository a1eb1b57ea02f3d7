"""Plan a model automatically."""

from __future__ import annotations

import importlib.util
import warnings

from torch import nn

from tp_styles._shared.problems import own_errors
from tp_styles.from_plan.convert import from_sharding_plan, styles_of_free_regions
from tp_styles.hf.plan import from_hf_tp_plan
from tp_styles.plan.planned import PlannedModule, TPPlan, plan_styles
from tp_styles.problems import PlanError, Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.fused import FusedColwiseParallel
from tp_styles.styles.mha import MultiheadAttentionParallel, TransformerLayerParallel
from tp_styles.styles.tp_block import ColwiseKVReplicated
from tp_styles.values.spec import is_below, names_of_parameters


@own_errors()  # of shard-spec, which it calls
def auto_plan(model: nn.Module, *, tp_size: int = 2) -> dict[str, ParallelStyle]:
    """Plan a model: by its Hugging Face plan, torch's transformer layers or `[shard-spec]`'s planner, in this order.

    If installed, the planner adds blocks missing in a model's own plan (shared experts, attention of some mixtures of
    experts), and drops attention in which a parameter without a style acts on all heads.

    `plan_styles(model, auto_plan(model), tp_size).unstyled` lists the unsharded parameters; to make them DTensors
    too, pass `rest="replicated"` to `apply_plan`.

    Args:
        model: The model; on the meta device too.
        tp_size: Number of ranks. The planner's styles are for this number alone; `apply_plan` refuses another.

    Returns:
        FQN -> style, for `apply_plan`. It warns if less than half of the parameters are sharded.

    Raises:
        PlanError: Nothing was recognised.
    """
    styles = _without_broken_ties(model, _styles(model, tp_size))  # tied weights: all or none
    share, largest = sharded_share(model, plan_styles(model, styles, tp_size))
    if not share:
        hint = "write a plan; or install tp-styles[shard-spec] for its planner"
        raise PlanError(Problem("unmatched-pattern", type(model).__name__, found="no block that is known", hint=hint))
    if share < 0.5:
        text = (
            f"auto_plan shards {share:.1%} of the parameters of {type(model).__name__}; the largest others: {largest}"
        )
        warnings.warn(text, stacklevel=2)
    return styles


def sharded_share(model: nn.Module, plan: TPPlan) -> tuple[float, str]:
    """Return the sharded share of a model's elements, and names of the largest unsharded parameters."""
    sharded = {
        module.info.where(name)
        for module in plan.modules
        for name, spec in module.spec.parameters
        if not spec.split.is_replicated
    }
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    left = {tied[0]: sizes[tied[0]] for tied in names_of_parameters(model) if not sharded.intersection(tied)}
    total = sum(sizes.values())
    largest = sorted(left, key=lambda name: -left[name])[:3]
    return (1 - sum(left.values()) / total if total else 0.0), ", ".join(largest)


def _styles(model: nn.Module, tp_size: int) -> dict[str, ParallelStyle]:
    has_planner = importlib.util.find_spec("shard_spec") is not None  # without importing it
    plan = getattr(model, "tp_plan", None) or {}
    if any("*" in pattern for pattern in plan):  # some models plan only their head
        styles = from_hf_tp_plan(model)
        if not has_planner:
            return styles
        return _with_what_it_leaves(model, _without_mixed_heads(model, styles, tp_size), tp_size)
    layers = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    blocks = [name for name, module in model.named_modules() if isinstance(module, layers)]
    if blocks:
        styles = {name: TransformerLayerParallel() for name in blocks}
        alone = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.MultiheadAttention) and not any(name.startswith(f"{b}.") or not b for b in blocks)
        ]
        return styles | {name: MultiheadAttentionParallel() for name in alone}  # outside of layers
    if not has_planner:
        return {}
    from shard_spec.planners import MegatronPlanner

    layouts = MegatronPlanner({"tp": tp_size}, kv_replicate=True).build_plan(model)
    return _dealt_out(from_sharding_plan(layouts, model, unproven="gather"))


def _without_mixed_heads(model: nn.Module, styles: dict[str, ParallelStyle], tp_size: int) -> dict[str, ParallelStyle]:
    """Drop attention in which a parameter without a style may act across heads (doge's `A`)."""
    from shard_spec.planners import MegatronPlanner

    left = MegatronPlanner({"tp": tp_size}, kv_replicate=True).analyse(model).left_whole
    unstyled = {parameter.name for parameter in plan_styles(model, styles, tp_size).unstyled}
    mixing = {problem.name for problem in left.values() if problem.code == "partial-gradient"} & unstyled
    homes = [name.rpartition(".")[0] for name in mixing]
    return {name: style for name, style in styles.items() if not any(is_below(name, home) for home in homes)}


def _with_what_it_leaves(model: nn.Module, styles: dict[str, ParallelStyle], tp_size: int) -> dict[str, ParallelStyle]:
    planned = plan_styles(model, styles, tp_size)
    free = {left.name for left in planned.unstyled}
    replicated = [module.name for module in planned.modules if module.spec.compute not in ("none", "foreign")]
    more = styles_of_free_regions(model, tp_size, free)
    blocks = {name for name in more if name in styles or any(name.startswith(f"{parent}.") for parent in replicated)}
    return styles if blocks else {**styles, **_dealt_out(more)}


def _without_broken_ties(model: nn.Module, styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Drop styles of modules tied to a module without a style (the bias of BERT's head)."""
    owners = [{name.rpartition(".")[0] for name in names} for names in names_of_parameters(model)]
    remaining = dict(styles)
    changed = True
    while changed:  # dropping a head's style drops its tied embedding's too
        claimed = {where for planned in plan_styles(model, remaining, 2).modules for where in _places(planned)}
        broken = [names & claimed for names in owners if len(names) > 1 and names - claimed and names & claimed]
        changed = any(remaining.pop(name, None) is not None for names in broken for name in names)
    return remaining


def _places(found: PlannedModule) -> set[str]:
    """Return FQNs of the modules with a style's parameters."""
    return {found.info.where(name).rpartition(".")[0] for name, _ in found.spec.parameters}


def _dealt_out(styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Shard key and value projections of few heads: only a layout needs them replicated."""
    return {
        name: FusedColwiseParallel((style.rows,), unit=style.unit, copies=style.copies)
        if isinstance(style, ColwiseKVReplicated)
        else style
        for name, style in styles.items()
    }
