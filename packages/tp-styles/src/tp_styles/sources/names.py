"""Style names of Hugging Face's tensor-parallel plans as styles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import Partial, Replicate

from tp_styles.plan.planned import match_plan
from tp_styles.problems import PlanError, Problem
from tp_styles.sources.blocks import add_learned_activations, keep_ties
from tp_styles.styles.attention import GQAParallel
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.blocks import (
    IdentityExpert,
    LatentKVParallel,
    LoRAParallel,
    NoParallel,
    ParametersParallel,
)
from tp_styles.styles.expert_parallel import ExpertParallel
from tp_styles.styles.linear import ColwiseParallel, FusedColwiseParallel, RowwiseParallel
from tp_styles.styles.prepare_module import PrepareModuleOutput
from tp_styles.values import is_below

# Name in plans -> style of a module.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "packed_colwise": partial(FusedColwiseParallel, 2),
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel,
    "embedding_colwise": partial(ColwiseParallel, output_layouts=Replicate()),
    "replicated_with_grad_allreduce": partial(NoParallel, sum_gradient=True),
    "replicate": NoParallel,
    "all_reduce": partial(PrepareModuleOutput, output_layouts=Partial(), desired_output_layouts=Replicate()),
    "moe_identity_expert": IdentityExpert,
    "ep_dispatch_experts": ExpertParallel,
}

ROLES = {
    "moe_tp_experts": "experts",
    "all_reduce": "sum",
    "local_params": "local",
}
TODAY = tuple(dict.fromkeys((*STYLES, *ROLES, "packed_rowwise", "mla_kv_a_proj", "grouped_gemm")))

# Names of transformers 4.5x and early 5.x -> today's.
OLDER = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
    "local_packed_rowwise": "packed_rowwise",
    "local_packed_colwise": "packed_colwise",
    "replicated": "replicate",
    "gather": "all_reduce",
    "local": "local_params",
    "vocab_parallel": "embedding_rowwise",
}


def todays_names(plan: Mapping[str, str]) -> dict[str, str]:
    """Translate the plan to today's names.

    Raises:
        PlanError: Unknown names, all of them at once.
    """
    supported = {**{name: name for name in TODAY}, **OLDER}
    unknown = [(key, name) for key, name in plan.items() if name not in supported]
    if unknown:
        raise PlanError(
            Problem("invalid-argument", key, found=repr(name), hint="known are " + ", ".join(TODAY))
            for key, name in unknown
        )
    return {key: supported[name] for key, name in plan.items()}


# Names of an attention's projections: all three that read its input, and one of those that write its output.
INPUTS = "q_proj", "k_proj", "v_proj"
OUTPUTS = "o_proj", "out_proj", "dense"


def from_hf_tp_plan(model: nn.Module, plan: Mapping[str, str] | None = None) -> dict[str, ParallelStyle]:
    """Convert a Hugging Face tensor-parallel or expert-parallel plan to styles.

    Args:
        model: A transformers model; on the meta device too.
        plan: Name pattern -> style name; by default the model's own `tp_plan`. `model.ep_plan` gives whole experts.

    Returns:
        FQN -> style, for `apply_plan`. Names of the plan missing in the model are ignored, as in transformers: plans
        name the layers of all variants of a family.

    Raises:
        PlanError: The model has no plan, or the plan has unsupported style names.
    """
    if not hasattr(model, "named_modules"):
        raise PlanError(
            Problem(
                "wrong-type",
                "model",
                found=type(model).__name__,
                hint="pass the model; of a configuration AutoModelForCausalLM.from_config makes one, on the meta device"
                " too",
            )
        )
    if plan is None:
        plan = getattr(model, "tp_plan", None)
    if not plan:
        raise PlanError(Problem("missing-argument", type(model).__name__, found="no tp_plan", hint="pass plan="))
    named = _entries(model, todays_names(plan))  # raises all unknown names at once
    styles = {name: _style(model, name, named) for name in _modules(model, named)}
    if not styles:
        raise PlanError(
            Problem(
                "unmatched-pattern",
                type(model).__name__,
                found="no name of the plan is one of its modules",
                hint="of a wrapper pass the model inside (peft: get_base_model())",
            )
        )
    experts = [name for name, style in styles.items() if isinstance(style, ExpertParallel)]
    # The experts' style has all that is below them: transformers' plan names the norm behind them apart.
    styles = {n: s for n, s in styles.items() if n in experts or not any(is_below(n, other) for other in experts)}
    keep_ties(model, styles)
    add_learned_activations(model, styles)
    styles = _with_heads(model, styles)
    # Last: the styles before are decided as without adapters.
    return {name: _beside_adapter(model.get_submodule(name), style) for name, style in styles.items()}


def _beside_adapter(module: nn.Module, style: ParallelStyle) -> ParallelStyle:
    """Return the style of a linear layer, with peft's low-rank update if there is one."""
    if not isinstance(getattr(module, "base_layer", None), nn.Linear):  # no adapter
        return style
    return LoRAParallel(style) if isinstance(style, ColwiseParallel | RowwiseParallel) else style


def _entries(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Map FQNs of modules and parameters in the plan to style names. Exact names beat globs.

    Raises:
        PlanError: ``ambiguous-pattern`` if two globs give one name different styles.
    """
    names = [name for name, _ in model.named_modules() if name] + [name for name, _ in model.named_parameters()]
    matches, problems = match_plan(names, plan, strict=False)
    if problems:
        raise PlanError(problems)
    return {name: plan[pattern] for name, pattern in matches.items()}


def _modules(model: nn.Module, named: Mapping[str, str]) -> list[str]:
    """List modules named in the plan, themselves or by one of their own parameters."""
    parameters = {name for name, _ in model.named_parameters()}
    wanted = {name.rpartition(".")[0] if name in parameters else name for name in named}
    return [name for name, _ in model.named_modules() if name in wanted]


def _style(model: nn.Module, name: str, named: Mapping[str, str]) -> ParallelStyle:
    module = model.get_submodule(name)
    kind = named.get(name, "local_params")  # only its parameters are named
    own = {key: named[f"{name}.{key}"] for key in module._parameters if f"{name}.{key}" in named}
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return style_of(kind, own, text, name)


def style_of(kind: str, own: Mapping[str, str], config: Any, name: str) -> ParallelStyle:
    """Return the style of a module by its name in a plan.

    Args:
        kind: Today's name.
        own: Name of an own parameter that the plan names -> its style name.
        config: Configuration of the text model.
        name: The module's name, for errors.

    Raises:
        PlanError: The style name is for parameters only.
    """
    if "grouped_gemm" in own.values() and kind != "ep_dispatch_experts":
        raise PlanError(
            Problem(
                "invalid-argument",
                name,
                found="'grouped_gemm' of its parameters",
                hint='whole experts of a rank need their tokens: name the module "ep_dispatch_experts" in the plan',
            )
        )
    if kind in ROLES and (own or kind != "all_reduce"):
        return ParametersParallel(own, role=ROLES[kind])
    if kind == "mla_kv_a_proj":
        return LatentKVParallel(int(config.qk_rope_head_dim))  # of each head's key
    if kind not in STYLES:
        raise PlanError(
            Problem("invalid-argument", name, found=repr(kind), hint="it has a meaning for parameters only")
        )
    return STYLES[kind]()  # a new style for each module


def _with_heads(model: nn.Module, styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Shard attention with the four usual projections by heads, never within a head."""
    for name, module in model.named_modules():
        if name in styles or any(styles.get(f"{name}.{key}") != ColwiseParallel() for key in INPUTS):
            continue
        ends = [key for key in OUTPUTS if styles.get(f"{name}.{key}") == RowwiseParallel()]
        style = attention_style(module, ends)
        if style is not None:
            for key in (*INPUTS, *ends):
                del styles[f"{name}.{key}"]  # now by the attention's style
            styles[name] = style
    return styles


def attention_style(module: nn.Module, ends: Sequence[str]) -> GQAParallel | None:
    """Return an attention's style by heads, or None. It has four linear layers, one among `ends`."""
    size = getattr(module, "head_dim", None)
    layers = {key: getattr(module, key, None) for key in (*INPUTS, *ends)}
    layers = {key: getattr(layer, "base_layer", layer) for key, layer in layers.items()}  # below adapters
    if len(ends) != 1 or not isinstance(size, int) or not all(isinstance(v, nn.Linear) for v in layers.values()):
        return None
    rows = {key: cast(nn.Linear, layers[key]).weight.shape[0] for key in INPUTS}
    width = cast(nn.Linear, layers[ends[0]]).weight.shape[1]
    if any(count % size for count in (*rows.values(), width)) or rows["q_proj"] % width:
        return None
    heads, kv_heads = width // size, rows["k_proj"] // size
    if rows["k_proj"] != rows["v_proj"] or heads % kv_heads:
        return None
    return GQAParallel(num_heads=heads, num_kv_heads=kv_heads, kv_replicate=True, o=ends[0])
