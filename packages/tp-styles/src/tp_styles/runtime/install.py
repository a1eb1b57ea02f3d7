"""Install decisions on modules, and undo them: our forwards, or hooks around a module's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tp_styles._shared.stale_parameters import is_stale, mark_stale
from tp_styles.plan.model import PlannedModule, TPPlan, shared_inputs
from tp_styles.plan.style import ParallelStyle
from tp_styles.problems import PlanError, Problem, StyleInputError
from tp_styles.runtime.attention import AttentionForward
from tp_styles.runtime.forwards import (
    ColumnLinear,
    ColumnLinearKVReplicated,
    DividedInput,
    Forward,
    LatentKV,
    ModuleForward,
    ModuleRowEmbedding,
    ModuleRowLinear,
    Output,
    RowEmbedding,
    RowLinear,
    move_inputs,
    move_outputs,
)
from tp_styles.runtime.redistribute import BlockInput, Redistribute, TPGroup
from tp_styles.values import Redistribution, Split, StyleSpec, describe, is_below


@dataclass
class ModuleChange:
    """Changes of one module, for undo.

    Attributes:
        module: The module.
        parameters: Replaced parameters by name, until the plan is fully applied.
        replaced: Their names, afterwards.
        splits: Splits of the new parameters.
        attributes: Former values of plain attributes.
        removers: Functions to remove hooks and forwards.
    """

    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    splits: dict[str, Split] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    removers: list[Callable[[], None]] = field(default_factory=list)


def take_back(changes: list[ModuleChange]) -> None:
    """Restore forwards, hooks and attributes."""
    for change in reversed(changes):  # in reverse: a later change may cover an earlier one
        for remove in reversed(change.removers):
            remove()
        for name, value in change.attributes.items():
            setattr(change.module, name, value)


def restore(changes: list[ModuleChange]) -> None:
    """Restore everything, the parameters too."""
    for change in changes:
        change.module._parameters.update(change.parameters)
    take_back(changes)


def settle(model: nn.Module, changes: list[ModuleChange]) -> None:
    """Release the full parameters and mark them stale: training one raises an error."""
    names = {module: name for name, module in model.named_modules()}
    for change in changes:
        path = names.get(change.module, "")
        for name, original in change.parameters.items():
            if not is_stale(original):  # a tied one is marked once
                fqn = f"{path}.{name}" if path else name
                mark_stale(
                    original,
                    Problem(
                        "parameter-replaced",
                        fqn,
                        found="an optimizer, or another module, still holds the full parameter; the module trains its"
                        " shard",
                        hint="build the optimizer after the plan is applied; apply it to a module that holds all ties",
                    ),
                    change.module._parameters.get(name),
                )
        change.replaced = tuple(change.parameters)
        change.parameters.clear()


# ---------------------------------------------------------------------------------------------- styles of torch

# Every table of hooks of a module.
TABLES = [key for key, value in vars(nn.Module()).items() if "hooks" in key and isinstance(value, dict)]


def apply_torch_style(
    planned: PlannedModule, module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None
) -> list[ModuleChange]:
    """Apply a style with only `_apply`; find its changes by comparing before and after."""
    before = [
        (child, dict(child._parameters), {key: set(vars(child)[key]) for key in TABLES}, dict(vars(child)))
        for child in module.modules()
    ]
    planned.style.src_data_rank = src_data_rank  # torch's styles read it
    try:
        returned = planned.style._apply(module, mesh)
    except BaseException:
        restore(_differences(before))  # it may have stopped halfway
        raise
    changes = _differences(before)
    if returned is not module:
        restore(changes)
        raise PlanError(
            Problem(
                "model-changed",
                planned.name,
                found=f"{planned.style!r} returned another module",
                hint="a style works on the module it is given",
            )
        )
    return changes


_Before = list[tuple[nn.Module, dict[str, Any], dict[str, set[int]], dict[str, Any]]]


def _differences(before: _Before) -> list[ModuleChange]:
    changes = []
    for child, parameters, hooks, attributes in before:
        replaced = {key: value for key, value in parameters.items() if child._parameters.get(key) is not value}
        change = ModuleChange(child, parameters={key: value for key, value in replaced.items() if value is not None})
        tables = [(vars(child)[table], keys) for table, keys in hooks.items()]
        change.removers += [KeyRemover(table, key) for table, keys in tables for key in table if key not in keys]
        change.removers += [KeyRemover(vars(child), key) for key in vars(child) if key not in attributes]
        if "forward" in attributes and vars(child)["forward"] is not attributes["forward"]:
            change.attributes["forward"] = attributes["forward"]
        changes.append(change)
    return changes


@dataclass
class KeyRemover:
    table: dict[Any, Any]
    key: Any

    def __call__(self) -> None:
        self.table.pop(self.key, None)


# Names of forwards in `StyleSpec.compute`; a style of another package passes its subclass of `Forward` itself.
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
    "latent-kv": LatentKV,
}


def forward_of(spec: StyleSpec) -> type[Forward] | None:
    """Return the forward that a style gives its module; None for hooks, a style of torch, or nothing."""
    kind = spec.compute if isinstance(spec.compute, type) else FORWARDS.get(spec.compute)
    if kind is None and spec.compute not in ("none", "dtensor", "hooks", "foreign"):
        names = ", ".join([*FORWARDS, "none", "dtensor", "hooks"])
        raise PlanError(
            Problem("unknown-name", "compute", found=repr(spec.compute), hint=f"a subclass of Forward, or {names}")
        )
    return kind


def checked_modules(plan: TPPlan) -> list[str]:
    """Return FQNs of regions, and of other styled modules with code that is not ours."""
    alone = []
    for planned in plan.modules:
        forward = forward_of(planned.spec)
        is_foreign = planned.spec.compute == "foreign" or (forward is not None and forward.is_checked_alone)
        if is_foreign and not any(is_below(planned.name, region) for region in plan.regions):
            alone.append(planned.name)
    return [*plan.regions, *alone]


def install_module(planned: PlannedModule, module: nn.Module, axis: TPGroup) -> list[Callable[[], None]]:
    """Give the module its forward or its hooks.

    Args:
        planned: Decision for the module.
        module: The module; its parameters are local already.
        axis: Its ranks.

    Returns:
        Functions to undo everything.
    """
    spec = planned.spec
    if spec.compute == "none":
        return []  # children have the styles
    if spec.compute == "dtensor":
        return _prepare_hooks(planned, module, axis)
    if spec.compute == "hooks":
        removers: list[Callable[[], None]] = []
        if spec.inputs:
            hook = MoveInputs(module, spec, axis, planned.name)
            removers.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        if spec.outputs:
            removers.append(module.register_forward_hook(MoveOutputs(spec, axis, planned.name)).remove)
        return removers
    forward = forward_of(spec)
    assert forward is not None
    vars(module)["forward"] = forward(module, spec, axis, planned.name)  # hooks still run around it
    # On the layer itself: code that reads its weight directly may be in a module outside of the plan.
    handle = module.register_forward_pre_hook(DisableFastPath())
    return [handle.remove, lambda: vars(module).pop("forward", None) and None]


def changes_below(module: nn.Module) -> list[ModuleChange]:
    """Let the module's forward change modules below, and return its changes."""
    forward = vars(module).get("forward")
    below = forward.install_below() if isinstance(forward, Forward) else []
    return [ModuleChange(child, attributes=attributes, removers=removers) for child, attributes, removers in below]


def share_inputs(model: nn.Module, plan: TPPlan, axis: TPGroup) -> None:
    """Let column-wise layers bring in the tensor that they all read once. Row-wise layers end it."""
    together: dict[tuple[str, Redistribution], tuple[list[str], list[str]]] = {}
    for name, groups, rows in shared_inputs(plan):
        parent, _, last = name.rpartition(".")
        for flow, names in groups.items():
            # Attention and feed-forward of a layer may read one tensor (Cohere); layers of a list follow each other.
            columns, ends = together.setdefault((name if last.isdigit() else parent, flow), ([], []))
            columns += names
            ends += rows
    for columns, ends in together.values():
        if len(columns) > 1:
            forwards = [vars(model.get_submodule(name))["forward"] for name in columns]
            moves = [next(iter(vars(model.get_submodule(name))["forward"].moves.values())) for name in ends]
            first = next(iter(forwards[0].moves.values()))
            block = BlockInput(first.flow, axis, ", ".join(columns) + first.name.removeprefix(columns[0]), moves[-1])
            for forward in forwards:
                forward.enter = forward.moves[next(iter(forward.moves))] = block
            for move in moves:
                move.ends.append(block)


def _prepare_hooks(planned: PlannedModule, module: nn.Module, axis: TPGroup) -> list[Callable[[], None]]:
    style = planned.style
    assert isinstance(style, ParallelStyle)
    removers: list[Callable[[], None]] = []
    if style._prepare_input is not None:
        before = PrepareInput(style, axis, planned.info.arguments)
        removers.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    if style._prepare_output is not None:
        removers.append(module.register_forward_hook(PrepareOutput(style, axis)).remove)
    return removers


class DisableFastPath:
    """No-op hook: disables the fast path of modules that read their children's weights directly."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Do nothing."""


class MoveInputs:
    """Pre-hook with keywords: redistributes inputs by argument name."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        self.names = describe(module).arguments or tuple(name for name, _ in spec.inputs)
        moves = {key: Redistribute(flow, axis, f"{name}({key})") for key, flow in spec.inputs}
        self.moves = {key: move if spec.local_input else move.to_dtensor for key, move in moves.items()}
        self.name = name
        self.num_positional = spec.num_positional  # None: any number

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the inputs in their layouts.

        Raises:
            StyleInputError: More inputs than layouts.
        """
        if self.num_positional is not None and len(args) > self.num_positional:
            raise StyleInputError(
                Problem(
                    "argument-count",
                    f"{self.name}(...)",
                    found=f"{len(args)} positional inputs",
                    hint=f"the style lays out {self.num_positional}; give None for an input to leave alone",
                ),
                "module inputs and input_layouts should have same length!",
            )
        return move_inputs(self.moves, self.names, args, kwargs)


class MoveOutputs:
    """Forward hook: redistributes outputs."""

    def __init__(self, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        self.name = name
        self.leaves = [
            None if flow is None else Output(flow, axis, f"{name} ->", local=spec.local_output, inplace_ok=False)
            for flow in spec.outputs
        ]

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the outputs in their layouts."""
        return move_outputs(self.leaves, output, self.name)


class PrepareInput:
    """Pre-hook of the first styles. The style's function prepares the first input, later ones are kept."""

    def __init__(self, style: ParallelStyle, axis: TPGroup, names: tuple[str, ...]) -> None:
        assert style._prepare_input is not None
        self.function = style._prepare_input
        self.mesh = axis.mesh
        self.names = names

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return all inputs, the first one prepared, by position or by name."""
        if args:
            prepared = self.function(args, self.mesh)  # as the first styles' hooks did
            return (prepared if isinstance(prepared, tuple) else (prepared, *args[1:])), kwargs
        name = next((name for name in self.names if name in kwargs), None)
        if name is None:
            return args, kwargs
        prepared = self.function((kwargs[name],), self.mesh)
        return args, {**kwargs, name: prepared[0] if isinstance(prepared, tuple) else prepared}


class PrepareOutput:
    """Forward hook of the first styles: the style's function prepares the output."""

    def __init__(self, style: ParallelStyle, axis: TPGroup) -> None:
        assert style._prepare_output is not None
        self.function = style._prepare_output
        self.mesh = axis.mesh

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the prepared output."""
        return self.function(output, self.mesh)
