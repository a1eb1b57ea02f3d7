"""Puts decisions on modules."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tp_styles.plan.planned import PlannedModule, TPPlan
from tp_styles.plan.style import Style
from tp_styles.runtime.attention import AttentionForward
from tp_styles.runtime.collectives import TPGroup
from tp_styles.runtime.forwards import (
    ColumnLinear,
    ColumnLinearKVReplicated,
    DividedInput,
    ExpertDispatch,
    Forward,
    LatentKV,
    ModuleForward,
    ModuleRowEmbedding,
    ModuleRowLinear,
    RowEmbedding,
    RowLinear,
)
from tp_styles.runtime.module_hooks import DisableFastPath, MoveInputs, MoveOutputs, PrepareInput, PrepareOutput

FORWARDS: dict[str, type[Forward]] = {
    "column-linear": ColumnLinear,
    "picked-column-linear": ColumnLinearKVReplicated,
    "row-linear": RowLinear,
    "row-embedding": RowEmbedding,
    "multihead-attention": AttentionForward,
    "module": ModuleForward,
    "module-row-linear": ModuleRowLinear,
    "module-row-embedding": ModuleRowEmbedding,
    "divided-input": DividedInput,
    "expert-dispatch": ExpertDispatch,
    "latent-kv": LatentKV,
}
"""What a style's `compute` names, and what runs then."""


def install_module(found: PlannedModule, module: nn.Module, axis: TPGroup) -> list[Callable[[], None]]:
    """Give the module its forward or its hooks.

    Args:
        found: What was decided for it.
        module: The module; its parameters are local already.
        axis: Over which ranks.

    Returns:
        Functions that take everything back.
    """
    spec = found.spec
    if spec.compute == "none":
        return []
    if spec.compute == "dtensor":
        return _prepare_hooks(found, module, axis)
    if spec.compute == "hooks":
        removers: list[Callable[[], None]] = []
        if spec.inputs:
            hook = MoveInputs(module, spec, axis, found.name)
            removers.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        if spec.outputs:
            removers.append(module.register_forward_hook(MoveOutputs(spec, axis, found.name)).remove)
        return removers
    vars(module)["forward"] = FORWARDS[spec.compute](module, spec, axis, found.name)
    return [lambda: vars(module).pop("forward", None) and None]


def disable_fast_paths(model: nn.Module, plan: TPPlan) -> list[Callable[[], None]]:
    """Keep modules from reading the weights of modules below them past our forwards.

    A module with such a fast path, as `nn.TransformerEncoderLayer`, looks first for hooks on itself and below. One
    hook on each module with a styled child is enough; hooks on the children would cost time in each of their calls.

    Args:
        model: What the plan was applied to.
        plan: What was done to it.

    Returns:
        Functions that take everything back.
    """
    styled = {model.get_submodule(found.name) for found in plan.modules if found.spec.compute in FORWARDS}
    # A module may have several parents. The parent of the model itself is not known.
    places = [module for module in model.modules() if not styled.isdisjoint(module.children())]
    places += styled.intersection([model])
    return [module.register_forward_pre_hook(DisableFastPath()).remove for module in places]


def _prepare_hooks(found: PlannedModule, module: nn.Module, axis: TPGroup) -> list[Callable[[], None]]:
    style = found.style
    assert isinstance(style, Style)
    removers: list[Callable[[], None]] = []
    if style._prepare_input is not None:
        before = PrepareInput(style, axis, found.info.arguments)
        removers.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    if style._prepare_output is not None:
        removers.append(module.register_forward_hook(PrepareOutput(style, axis)).remove)
    return removers
