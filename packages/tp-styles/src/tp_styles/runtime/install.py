"""Puts decisions on modules."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tp_styles.plan.planned import PlannedModule
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
    # On the layer itself: who reads its weight past its forward may be no module that the plan knows.
    handle = module.register_forward_pre_hook(DisableFastPath())
    return [handle.remove, lambda: vars(module).pop("forward", None) and None]


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
