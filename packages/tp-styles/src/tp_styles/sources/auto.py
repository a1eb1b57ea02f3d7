"""`auto_plan`: complete the plan that a model brings, or make a plan."""

from __future__ import annotations

import importlib.util
import warnings

from torch import nn
from torch.distributed.tensor import Replicate

from tp_styles._shared.problems import own_errors
from tp_styles.plan.model import TPPlan
from tp_styles.plan.planned import plan_styles
from tp_styles.problems import PlanError, Problem
from tp_styles.sources.axis_splits import AxisCuts
from tp_styles.sources.blocks import region_of, styles_of_blocks
from tp_styles.sources.names import from_hf_tp_plan
from tp_styles.styles.attention import TransformerLayerParallel
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.expert_parallel import ExpertParallel, expert_modules
from tp_styles.styles.linear import ColwiseParallel
from tp_styles.values import is_below, names_of_parameters


@own_errors()  # of shard-spec, which it calls
def auto_plan(model: nn.Module, *, tp_size: int = 2, ep_size: int | None = None) -> dict[str, ParallelStyle]:
    """Plan a model by its Hugging Face plan, else torch's layers, else `[shard-spec]`'s planner.

    If installed, the planner adds blocks missing in a model's own plan (shared experts, attention of some mixtures of
    experts). Layers of attention that acts on all heads at once are sharded one by one; so are linear layers of unknown
    blocks if less than 70 % of the parameters would be sharded otherwise.

    `plan_styles(model, auto_plan(model), tp_size).unstyled` lists the unsharded parameters; to make them DTensors
    too, pass `rest="replicated"` to `apply_plan`.

    Args:
        model: The model; on the meta device too.
        tp_size: Number of ranks. The planner's styles are for this number alone; `apply_plan` refuses another.
        ep_size: Number of ranks with whole experts: `tp_size` for both on one axis, or any number with `tp_size=1`,
            for the experts alone. By default every rank has a shard of each expert.

    Returns:
        FQN -> style, for `apply_plan`. It warns if less than half of the parameters are sharded.

    Raises:
        PlanError: Nothing was recognised.
    """
    experts = _whole_experts(model, tp_size, ep_size) if ep_size is not None else {}
    if experts and tp_size == 1:
        return experts
    styles = _without_broken_ties(model, _styles(model, tp_size))  # tied weights: all or none
    if experts:
        styles = {n: s for n, s in styles.items() if not any(is_below(n, name) for name in experts)} | experts
    planned = plan_styles(model, styles, tp_size)
    if 0 < sharded_share(model, planned)[0] < 0.7:  # nothing known at all is an error below
        styles = _without_broken_ties(model, {**styles, **_gathered(model, planned)})
        planned = plan_styles(model, styles, tp_size)
    share, largest = sharded_share(model, planned)
    if not share:
        raise PlanError(
            Problem(
                "unmatched-pattern",
                type(model).__name__,
                found="no block that is known",
                hint="write a plan; or install tp-styles[shard-spec] for its planner",
            )
        )
    if share < 0.5:
        warnings.warn(
            f"auto_plan shards {share:.1%} of the parameters of {type(model).__name__}; largest unsharded: {largest}",
            stacklevel=2,
        )
    return styles


def _whole_experts(model: nn.Module, tp_size: int, ep_size: int) -> dict[str, ParallelStyle]:
    if tp_size not in (1, ep_size):
        raise PlanError(
            Problem(
                "conflicting-arguments",
                "ep_size",
                found=f"{ep_size} beside tp_size={tp_size}",
                hint="one axis has one size; for two axes plan each: auto_plan(model, tp_size=1, ep_size=N) gives the"
                " experts",
            )
        )
    names = expert_modules(model)
    if not names:
        raise PlanError(
            Problem(
                "unmatched-pattern",
                type(model).__name__,
                found="no experts that are known",
                hint="ExpertParallel(parameters=, inputs=) takes modules of your own",
            )
        )
    return {name: ExpertParallel() for name in names}


def _gathered(model: nn.Module, plan: TPPlan) -> dict[str, ParallelStyle]:
    """Style further linear layers between full activations: an all-gather each, no full weight on a rank."""
    free = {left.name for left in plan.unstyled}
    # Beside column-wise layers activations may be shards; a block with parameters of its own (Mamba's) may read the
    # weights of its layers itself.
    left_out = {name.rpartition(".")[0] for columns, _ in plan.regions.values() for name in columns}
    left_out |= {name for name, module in model.named_modules() if module._parameters}
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and f"{name}.weight" in free]
    style = ColwiseParallel(output_layouts=Replicate())
    return {name: style for name in names if name.rpartition(".")[0] not in left_out}


def sharded_share(model: nn.Module, plan: TPPlan) -> tuple[float, str]:
    """Return the sharded share of a model's elements, and names of the largest unsharded parameters."""
    sharded = {name for name, spec in plan.parameters.items() if not spec.split.is_replicated}
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
        return _with_what_it_leaves(model, _without_mistakes(model, styles, tp_size), tp_size)
    layers = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    blocks = [name for name, module in model.named_modules() if isinstance(module, layers)]
    if blocks:
        styles = {name: TransformerLayerParallel() for name in blocks}
        return _with_what_it_leaves(model, styles, tp_size) if has_planner else styles
    return styles_of_blocks(model, tp_size) if has_planner else {}


def _without_mistakes(model: nn.Module, styles: dict[str, ParallelStyle], tp_size: int) -> dict[str, ParallelStyle]:
    """Drop blocks that mix heads (doge's `A`), and those that the planner shards otherwise."""
    from shard_spec.planners import MegatronPlanner

    analysis = MegatronPlanner({"tp": tp_size}, kv_replicate=True).analyse(model)
    planned = plan_styles(model, styles, tp_size)
    unstyled = {parameter.name for parameter in planned.unstyled}
    mixing = {problem.name for problem in analysis.left_whole.values() if problem.code == "partial-gradient"} & unstyled
    dropped = [name.rpartition(".")[0] for name in mixing]
    splits = {name: spec.split for name, spec in planned.parameters.items() if not spec.split.is_replicated}
    cuts = AxisCuts("tp", tp_size, splits)
    # Inkling's own plan gives a rank rows of the gate alone, or of what it gates, where one weight holds both.
    for block in analysis.units:
        left = unstyled.intersection(block.replicated)  # norms of heads, whose gradients nobody sums (sarvam_moe)
        is_fused = block.kind == "experts" and region_of(model, block, cuts) is None
        dropped += [block.name] if (left or is_fused) and all(cut.name in cuts.splits for cut in block.cuts) else []
    return {
        name: style for name, style in styles.items() if not any(is_below(name, name_above) for name_above in dropped)
    }


def _with_what_it_leaves(model: nn.Module, styles: dict[str, ParallelStyle], tp_size: int) -> dict[str, ParallelStyle]:
    planned = plan_styles(model, styles, tp_size)
    free = {left.name for left in planned.unstyled}
    replicated = [module.name for module in planned.modules if module.spec.compute not in ("none", "foreign")]
    more = styles_of_blocks(model, tp_size, free)
    blocks = {name for name in more if name in styles or any(name.startswith(f"{parent}.") for parent in replicated)}
    return styles if blocks else {**styles, **more}


def _without_broken_ties(model: nn.Module, styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Drop styles of modules tied to an unstyled one (the bias of BERT's head)."""
    owners = [{name.rpartition(".")[0] for name in names} for names in names_of_parameters(model)]
    remaining = dict(styles)
    changed = True
    while changed:  # dropping a head's style drops its tied embedding's too
        claimed = {name.rpartition(".")[0] for name in plan_styles(model, remaining, 2).parameters}
        broken = [names & claimed for names in owners if len(names) > 1 and names - claimed and names & claimed]
        changed = any(remaining.pop(name, None) is not None for names in broken for name in names)
    return remaining
