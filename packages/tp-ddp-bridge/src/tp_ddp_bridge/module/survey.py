"""Survey of a module: its DTensors, where they are registered, and every problem. Reads only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tp_ddp_bridge._shared.problems import Problem
from tp_ddp_bridge._torch_compat import default_axis_order, local_of, torch_bridge_hooks, torch_bridge_spec
from tp_ddp_bridge.layout import Layout, is_replicated_tag, layout_of
from tp_ddp_bridge.module.view import View


@dataclass(eq=False)
class Registration:
    """One place of a tensor: ``owner._parameters[name]`` or ``owner._buffers[name]``."""

    owner: nn.Module
    name: str
    fqns: list[str]


@dataclass(eq=False)
class SurveyedTensor:
    """One DTensor, leaf or local shard with all its registrations.

    Attributes:
        tensor: The object that is registered.
        layout: Its layout.
        kind: ``"parameter"``, ``"buffer"``, or ``"local"`` for a local shard that the bridge did not make.
        is_leaf: ``tensor`` is a leaf already.
        registrations: All of them, in the module's order.
    """

    tensor: torch.Tensor
    layout: Layout
    kind: str
    is_leaf: bool
    registrations: list[Registration] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first FQN."""
        return self.registrations[0].fqns[0]

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, sharing memory."""
        return local_of(self.tensor) if isinstance(self.tensor, DTensor) else self.tensor

    def __str__(self) -> str:
        names = [fqn for registration in self.registrations for fqn in registration.fqns]
        sizes = zip(self.layout.axes, self.layout.mesh.shape, self.layout.placements, strict=True)
        places = ", ".join(f"{axis}[{size}]={placement}" for axis, size, placement in sizes)
        head = f"{names[0]}  {self.kind}  {self.tensor.dtype}"
        frozen = "" if self.tensor.requires_grad or self.kind == "buffer" else "  frozen"
        tied = f"  (tied: {', '.join(names[1:])})" if len(names) > 1 else ""
        shapes = f"global {tuple(self.layout.shape)} -> local {tuple(self.local.shape)}"
        return f"{head}  {shapes}  {places}{frozen}{tied}"


@dataclass(eq=False)
class Survey:
    """All tensors of a module that matter to the bridge.

    Attributes:
        bridgeable: DTensors, and leaves that are bridged already; ties once.
        local: Parameters that are local shards already. They are left as they are.
        plain: The other parameters, by their first name.
        problems: Everything that prevents the module from being bridged.
    """

    bridgeable: list[SurveyedTensor]
    local: list[SurveyedTensor]
    plain: dict[str, nn.Parameter]
    problems: list[Problem]

    @property
    def distributed(self) -> list[SurveyedTensor]:
        """Everything that lies on a mesh."""
        return [*self.bridgeable, *self.local]


def survey(module: nn.Module, *, buffers: bool = True) -> Survey:
    """Collect every DTensor of ``module``, every leaf, and every problem.

    Args:
        module: Any module.
        buffers: Whether DTensor buffers count.
    """
    bridgeable: dict[int, SurveyedTensor] = {}
    local: dict[int, SurveyedTensor] = {}
    plain: dict[int, tuple[str, nn.Parameter]] = {}
    for owner, prefixes in _owners(module):
        views: dict[str, View] = owner.__dict__.get("_dp_views", {})
        parameters: Any = [("parameter", *item) for item in owner._parameters.items()]
        for kind, name, tensor in (*parameters, *(("buffer", *item) for item in owner._buffers.items() if buffers)):
            if tensor is None:
                continue
            registration = Registration(owner, name, [f"{prefix}.{name}" if prefix else name for prefix in prefixes])
            layout = Layout.of(tensor) if isinstance(tensor, DTensor) else None
            if layout is None and name in views:
                layout = views[name].layout
            if layout is not None:
                is_leaf = not isinstance(tensor, DTensor)
                entry = bridgeable.setdefault(id(tensor), SurveyedTensor(tensor, layout, kind, is_leaf))
                entry.registrations.append(registration)
            elif kind == "parameter":
                layout = None if is_replicated_tag(tensor) else layout_of(tensor)
                if layout is not None:
                    entry = local.setdefault(id(tensor), SurveyedTensor(tensor, layout, "local", False))
                    entry.registrations.append(registration)
                else:
                    assert isinstance(tensor, nn.Parameter)
                    plain.setdefault(id(tensor), (registration.fqns[0], tensor))
    problems = list(_module_problems(module))
    for each in bridgeable.values():
        problems += _tensor_problems(each)
    reason, hint = "an uninitialized parameter", "run the module once before bridging"
    problems += [
        Problem("uninitialized-parameter", name, found=reason, hint=hint)
        for name, parameter in plain.values()
        if nn.parameter.is_lazy(cast(torch.Tensor, parameter))
    ]
    return Survey(list(bridgeable.values()), list(local.values()), dict(plain.values()), problems)


def bridge_plan(module: nn.Module, *, buffers: bool = True) -> str:
    """Return what ``pre_dp_module_transform`` does, or did, to ``module`` as text; communicates and changes nothing.

    Args:
        module: A module with DTensor parameters, bridged or not.
        buffers: Whether DTensor buffers are bridged.

    Returns:
        One line for each leaf with its global and local shape, for each other parameter, and for each problem.
    """
    surveyed = survey(module, buffers=buffers)
    plain = [f"{name}  parameter  plain: replicated on every tensor-parallel rank" for name in surveyed.plain]
    return "\n".join([*map(str, surveyed.distributed), *plain, *map(str, surveyed.problems)])


def _owners(module: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield each submodule once, with all its names."""
    names: dict[nn.Module, list[str]] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        names.setdefault(submodule, []).append(name)
    yield from names.items()


def _module_problems(module: nn.Module) -> Iterator[Problem]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: no module can be one of its
    hooks = [
        hook for part in module.modules() for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    ]
    swapped = torch_bridge_hooks(hooks)
    for name, submodule in module.named_modules():
        if isinstance(submodule, DistributedDataParallel):
            hint = "bridge its .module before wrapping it"
            yield Problem("already-applied", name, found="a DistributedDataParallel", hint=hint)
        if isinstance(submodule, torch.jit.ScriptModule):
            yield Problem("unsupported-wrapper", name, found="a ScriptModule", hint="use the module as plain PyTorch")
        if fsdp is not None and isinstance(submodule, fsdp.FSDPModule):
            hint = "FSDP shards over the data axis itself; use it without DDP"
            yield Problem("unsupported-wrapper", name, found="an FSDP module", hint=hint)
        local = [
            key for key, value in submodule.named_parameters(recurse=False) if torch_bridge_spec(value) is not None
        ]
        left = [key for key, value in submodule.__dict__.items() if isinstance(value, DTensor)]
        if local or (left and swapped):
            names = ", ".join(local or left)
            reason = f"torch's own _pre_dp_module_transform ran on {names} (it made frozen parameters trainable)"
            hint = "build it again and use wrap_ddp(module, mesh=mesh), or bridge before DDP(device_mesh=...)"
            yield Problem("unsupported-wrapper", name, found=reason, hint=hint)


def _tensor_problems(surveyed: SurveyedTensor) -> Iterator[Problem]:
    layout, tensor, name = surveyed.layout, surveyed.tensor, surveyed.name
    for axis, placement in zip(layout.axes, layout.placements, strict=True):
        if placement.is_partial():
            hint = "redistribute it to Shard or Replicate before bridging"
            yield Problem("partial-value", name, axis=axis, found=f"placement {placement}", hint=hint)
    if layout.mesh.get_coordinate() is None:
        reason = "this rank is not in the tensor's mesh"
        yield Problem("rank-outside-mesh", name, found=reason, hint="bridge it on the mesh's ranks only")
    if isinstance(tensor, DTensor):
        if not default_axis_order(tensor):
            reason = "mesh axes that share a tensor dim shard it in another order than the mesh's"
            hint = "redistribute it to Shard placements in mesh order"
            yield Problem("invalid-layout", name, found=reason, hint=hint)
        device = surveyed.local.device.type
        if device not in (layout.mesh.device_type, "meta"):
            reason = f"local tensor on {device!r}, mesh for {layout.mesh.device_type!r}"
            yield Problem("device-mismatch", name, found=reason, hint="move the module to the mesh's device first")
