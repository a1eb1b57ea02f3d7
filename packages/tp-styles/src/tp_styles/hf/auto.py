"""A plan for a model that nobody wrote one for."""

from __future__ import annotations

import importlib.util

from torch import nn

from tp_styles.hf.plan import from_hf_tp_plan
from tp_styles.plan.planned import plan_styles
from tp_styles.problems import PlanError, Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.fused import FusedColwiseParallel
from tp_styles.styles.mha import MultiheadAttentionParallel
from tp_styles.styles.region import PickedColwiseParallel
from tp_styles.styles.transformer import TransformerLayerParallel


def auto_plan(model: nn.Module, *, tp_size: int = 2) -> dict[str, ParallelStyle]:
    """Styles for a model: its own Hugging Face plan, else torch's transformer layers, else `[shard-spec]`'s planner.

    Blocks that a model's own plan leaves whole (shared experts, attention of some mixtures of experts) are added where
    the planner is installed, recognises them, and their rehearsal is right (see `from_sharding_plan`).

    `plan_styles(model, auto_plan(model), tp_size).left_alone` lists what stays whole.

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
        return _with_what_it_leaves(model, from_hf_tp_plan(model), tp_size)
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

        from tp_styles.from_plan.convert import from_sharding_plan

        layouts = MegatronPlanner({"tp": tp_size}, kv_replicate=True).build_plan(model)
        planned = from_sharding_plan(layouts, model, unproven="gather")
        if planned:
            return _dealt_out(planned)
        hint = "write a plan; the planner recognised no block"
    else:
        hint = "write a plan, or install tp-styles[shard-spec] for its planner"
    raise PlanError(Problem("nothing-recognised", type(model).__name__, found="no block that is known", hint=hint))


def _with_what_it_leaves(model: nn.Module, styles: dict[str, ParallelStyle], tp_size: int) -> dict[str, ParallelStyle]:
    if importlib.util.find_spec("shard_spec") is None:
        return styles
    from tp_styles.from_plan.convert import styles_of_free_regions

    planned = plan_styles(model, styles, tp_size)
    free = {left.name for left in planned.left_alone}
    whole = [module.name for module in planned.modules if module.spec.compute not in ("none", "foreign")]
    more = styles_of_free_regions(model, tp_size, free)
    blocks = {name for name in more if name in styles or any(name.startswith(f"{parent}.") for parent in whole)}
    return styles if blocks else {**styles, **_dealt_out(more)}


def _dealt_out(styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Key and value projections of few heads: a layout has them whole on every rank, a style need not."""
    return {
        name: FusedColwiseParallel((style.rows,), unit=style.unit, copies=style.copies)
        if isinstance(style, PickedColwiseParallel)
        else style
        for name, style in styles.items()
    }
