"""Looking at a module: its DTensors, where they are registered, and what would go wrong.

Reads only. ``survey`` gives live objects for the acting modules; ``bridge_plan`` gives the printable plan.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tp_ddp_bridge._torch_compat import default_axis_order, local_of, torch_bridge_hooks, torch_bridge_spec
from tp_ddp_bridge.layout import Layout, layout_of
from tp_ddp_bridge.plan import BridgePlan, ViewEntry
from tp_ddp_bridge.problems import Problem
from tp_ddp_bridge.view import View


@dataclass(eq=False)
class Place:
    """One registration of a tensor: ``owner._parameters[name]`` or ``owner._buffers[name]``."""

    owner: nn.Module
    name: str
    fqns: list[str]


@dataclass(eq=False)
class Found:
    """One DTensor, or one leaf of a module that is bridged already, with all its registrations.

    Attributes:
        tensor: The object that is registered.
        layout: Its layout.
        kind: ``"parameter"``, ``"buffer"``, or ``"local"`` for a local parameter of someone else's making.
        bridged: Whether ``tensor`` is a leaf already.
        places: Every registration, in the module's order.
    """

    tensor: torch.Tensor
    layout: Layout
    kind: str
    bridged: bool
    places: list[Place] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first FQN."""
        return self.places[0].fqns[0]

    @property
    def local(self) -> torch.Tensor:
        """This rank's part, sharing memory."""
        return local_of(self.tensor) if isinstance(self.tensor, DTensor) else self.tensor

    def entry(self) -> ViewEntry:
        """The printable form."""
        return ViewEntry(
            names=tuple(fqn for place in self.places for fqn in place.fqns),
            kind=self.kind,
            shape=tuple(self.layout.shape),
            local_shape=tuple(self.local.shape),
            placements=tuple(str(placement) for placement in self.layout.placements),
            axes=self.layout.axes,
            mesh_shape=tuple(self.layout.mesh.shape),
            dtype=str(self.tensor.dtype),
            requires_grad=self.tensor.requires_grad,
        )


@dataclass(eq=False)
class Survey:
    """All tensors of a module that matter to the bridge.

    Attributes:
        found: DTensors and leaves, ties once.
        local: Parameters that are local shards of someone else's making: they carry ``_sharding_info`` and are left
            alone.
        plain: The other parameters, with their first name.
        problems: What keeps the module from being bridged.
    """

    found: list[Found]
    local: list[Found]
    plain: dict[str, nn.Parameter]
    problems: list[Problem]

    @property
    def laid_out(self) -> list[Found]:
        """Everything that lies on a mesh."""
        return [*self.found, *self.local]

    @property
    def plan(self) -> BridgePlan:
        """The printable form."""
        return BridgePlan(tuple(found.entry() for found in self.laid_out), tuple(self.plain), tuple(self.problems))


def survey(module: nn.Module, *, buffers: bool = True) -> Survey:
    """Collect every DTensor of ``module``, every leaf that is bridged already, and every problem.

    Args:
        module: Any module.
        buffers: Whether DTensor buffers count.
    """
    problems = list(module_problems(module))
    found: dict[int, Found] = {}
    local: dict[int, Found] = {}
    plain: dict[str, nn.Parameter] = {}
    plain_ids: set[int] = set()
    for prefix, owner, names in owners(module):
        views: dict[str, View] = owner.__dict__.get("_dp_views", {})
        tensors: list[tuple[str, str, torch.Tensor | None]] = [
            ("parameter", *item) for item in owner._parameters.items()
        ]
        tensors += [("buffer", *item) for item in owner._buffers.items()] if buffers else []
        for kind, name, tensor in tensors:
            if tensor is None:
                continue
            layout = _layout(tensor, views.get(name))
            fqns = [f"{alias}.{name}" if alias else name for alias in names]
            if layout is None and kind == "parameter" and not hasattr(tensor, "_dp_marked"):
                layout = layout_of(tensor)
                if layout is not None:
                    other = local.setdefault(id(tensor), Found(tensor, layout, "local", False))
                    other.places.append(Place(owner, name, fqns))
                    continue
            if layout is None:
                if kind == "parameter" and id(tensor) not in plain_ids:
                    assert isinstance(tensor, nn.Parameter)
                    plain_ids.add(id(tensor))
                    plain[f"{prefix}.{name}" if prefix else name] = tensor
                continue
            bridged = not isinstance(tensor, DTensor)
            one = found.setdefault(id(tensor), Found(tensor, layout, kind, bridged))
            one.places.append(Place(owner, name, fqns))
    for one in found.values():
        problems += tensor_problems(one)
    for name, parameter in plain.items():
        problems += plain_problems(name, parameter)
    return Survey(list(found.values()), list(local.values()), plain, problems)


def owners(module: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Each submodule once, with its first name and all its names."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        modules[id(submodule)] = submodule
        names.setdefault(id(submodule), []).append(name)
    for key, submodule in modules.items():
        yield names[key][0], submodule, names[key]


def _layout(tensor: torch.Tensor, view: View | None) -> Layout | None:
    if isinstance(tensor, DTensor):
        return Layout.of(tensor)
    return None if view is None else view.layout


def module_problems(module: nn.Module) -> Iterator[Problem]:
    """What is wrong with the module as such."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    hooks = [
        hook for part in module.modules() for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    ]
    swapped = torch_bridge_hooks(hooks)
    for name, submodule in module.named_modules():
        if isinstance(submodule, DistributedDataParallel):
            yield Problem(
                "already-wrapped", name, found="a DistributedDataParallel", hint="bridge its .module before wrapping it"
            )
        if isinstance(submodule, torch.jit.ScriptModule):
            yield Problem("script-module", name, found="a ScriptModule", hint="use the module as plain PyTorch")
        if fsdp is not None and isinstance(submodule, fsdp.FSDPModule):
            yield Problem(
                "fsdp", name, found="an FSDP module", hint="FSDP shards over the data axis itself; use it without DDP"
            )
        local = [
            key for key, value in submodule.named_parameters(recurse=False) if torch_bridge_spec(value) is not None
        ]
        left = [key for key, value in submodule.__dict__.items() if isinstance(value, DTensor)]
        if local or (left and swapped):
            yield Problem(
                "torch-bridge",
                name,
                found=f"torch's own _pre_dp_module_transform ran on {', '.join(local or left)} (it made frozen "
                "parameters trainable)",
                hint="build the module anew and use wrap_ddp(module, mesh=mesh), or bridge before DDP(device_mesh=...)",
            )


def tensor_problems(found: Found) -> Iterator[Problem]:
    """What is wrong with one DTensor."""
    layout, tensor = found.layout, found.tensor
    for axis, placement in zip(layout.axes, layout.placements, strict=True):
        if placement.is_partial():
            yield Problem(
                "partial",
                found.name,
                axis=axis,
                found=f"placement {placement}",
                hint="redistribute it to Shard or Replicate before bridging",
            )
    if layout.mesh.get_coordinate() is None:
        yield Problem(
            "outside-mesh",
            found.name,
            found="this rank is not in the tensor's mesh",
            hint="bridge it on the mesh's ranks only",
        )
    if isinstance(tensor, DTensor):
        if not default_axis_order(tensor):
            yield Problem(
                "axis-order",
                found.name,
                found="mesh axes that share a tensor dim cut it in another order than the mesh's",
                hint="redistribute it to Shard placements in mesh order",
            )
        device = found.local.device.type
        if device not in (layout.mesh.device_type, "meta"):
            yield Problem(
                "device",
                found.name,
                found=f"local tensor on {device!r}, mesh for {layout.mesh.device_type!r}",
                hint="move the module to the mesh's device first",
            )


def plain_problems(name: str, parameter: torch.Tensor) -> Iterator[Problem]:
    """What is wrong with a parameter that is no DTensor."""
    if nn.parameter.is_lazy(parameter):
        yield Problem("lazy", name, found="an uninitialized parameter", hint="run the module once before bridging")


def bridge_plan(module: nn.Module, *, buffers: bool = True) -> BridgePlan:
    """What ``pre_dp_module_transform`` does, or did, to ``module``. Communicates nothing and changes nothing.

    Args:
        module: A module with DTensor parameters, bridged or not.
        buffers: Whether DTensor buffers are bridged.
    """
    return survey(module, buffers=buffers).plan
