"""Survey of a module: its DTensors, their registrations, and every problem. Reads only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tp_ddp_bridge._shared.problems import Problem
from tp_ddp_bridge._torch_compat import WEIGHT_NORMS, default_axis_order, local_of, torch_bridged
from tp_ddp_bridge.layout import Layout, is_replicated_tag, layout_of
from tp_ddp_bridge.module.view import BridgedModule, View, views_of


@dataclass(eq=False)
class SurveyedTensor:
    """One DTensor or leaf with all its registrations.

    Attributes:
        tensor: The registered object.
        layout: Its layout.
        kind: ``"parameter"`` or ``"buffer"``.
        is_leaf: ``tensor`` is a leaf already.
        name: Its first FQN.
        registrations: Each owner, the tensor's name in it and its FQN, in the module's order; several for a tie.
    """

    tensor: torch.Tensor
    layout: Layout
    kind: str
    is_leaf: bool
    name: str
    registrations: list[tuple[nn.Module, str, str]] = field(default_factory=list)


@dataclass(eq=False)
class Survey:
    """All tensors of a module for the bridge.

    Attributes:
        bridgeable: DTensors, and existing leaves; ties once.
        meshes: Meshes of DTensors, leaves, and local shards of other packages, which stay as they are.
        plain: The other parameters, by their first name.
        problems: All reasons against bridging the module.
    """

    bridgeable: list[SurveyedTensor]
    meshes: list[DeviceMesh]
    plain: dict[str, nn.Parameter]
    problems: list[Problem]


def survey(module: nn.Module) -> Survey:
    """Collect every DTensor of ``module``, every leaf, and every problem."""
    bridgeable: dict[int, SurveyedTensor] = {}  # by id: ties are one
    meshes: list[DeviceMesh] = []
    plain: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, owner in module.named_modules():
        views: dict[str, View] = views_of(owner)  # of an earlier bridge
        tables = {"parameter": owner._parameters, "buffer": owner._buffers}
        for kind, name, tensor in ((kind, *item) for kind, table in tables.items() for item in table.items()):
            if tensor is None:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            layout = Layout.of(tensor) if isinstance(tensor, DTensor) else None
            if layout is None and name in views:
                layout = views[name].layout
            if layout is not None:
                entry = SurveyedTensor(tensor, layout, kind, not isinstance(tensor, DTensor), fqn)
                bridgeable.setdefault(id(tensor), entry).registrations.append((owner, name, fqn))
            elif kind == "parameter":
                layout = None if is_replicated_tag(tensor) else layout_of(tensor)
                if layout is None:
                    assert isinstance(tensor, nn.Parameter)
                    plain.setdefault(id(tensor), (fqn, tensor))
            if layout is not None:
                meshes.append(layout.mesh)
    problems = list(_module_problems(module))
    for each in bridgeable.values():
        problems += _tensor_problems(each)
    reason, hint = "an uninitialized parameter", "run the module once before bridging"
    problems += [
        Problem("uninitialized-parameter", name, found=reason, hint=hint)
        for name, parameter in plain.values()
        if nn.parameter.is_lazy(cast(torch.Tensor, parameter))
    ]
    return Survey(list(bridgeable.values()), meshes, dict(plain.values()), problems)


def _module_problems(module: nn.Module) -> Iterator[Problem]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if not imported, no module is one of its
    is_bridged = any(isinstance(part, BridgedModule) for part in module.modules())
    for name, submodule in module.named_modules():
        if isinstance(submodule, DistributedDataParallel):
            yield Problem(
                "already-applied",
                name,
                found="a DistributedDataParallel",
                hint="pass its .module; a model is bridged before DDP wraps it",
            )
        if isinstance(submodule, torch.jit.ScriptModule):
            yield Problem("unsupported-wrapper", name, found="a ScriptModule", hint="use the module as plain PyTorch")
        if fsdp is not None and isinstance(submodule, fsdp.FSDPModule):
            yield Problem(
                "unsupported-wrapper",
                name,
                found="an FSDP module",
                hint="FSDP shards over the data axis itself; use it without DDP",
            )
        if not is_bridged and torch_bridged(submodule):  # else it ran on leaves, without effect
            yield Problem(
                "unsupported-wrapper",
                name,
                found="torch's own _pre_dp_module_transform ran on it (and made frozen parameters trainable)",
                hint="build it again and use wrap_ddp(module, mesh=mesh), or bridge before DDP(device_mesh=...)",
            )
        parts = (*submodule.children(), *submodule._forward_pre_hooks.values())
        norms = [each.dim for each in parts if isinstance(each, WEIGHT_NORMS)]  # magnitude, direction: registered last
        trained = [p for p in list(submodule._parameters.values())[-2:] if isinstance(p, DTensor) and p.requires_grad]
        if trained and any(dim in (0, trained[-1].ndim - 1) for dim in norms):  # torch fuses these
            yield Problem(
                "module-not-shardable",
                name,
                found="weight_norm has no backward for DTensors",
                hint="leave this layer out of tensor parallelism, or freeze it",
            )


def _tensor_problems(surveyed: SurveyedTensor) -> Iterator[Problem]:
    layout, tensor, name = surveyed.layout, surveyed.tensor, surveyed.name
    for axis, placement in zip(layout.axes, layout.placements, strict=True):
        if placement.is_partial():
            yield Problem(
                "partial-value",
                name,
                axis=axis,
                found=f"placement {placement}",
                hint="redistribute it to Shard or Replicate before bridging",
            )
    if layout.mesh.get_coordinate() is None:
        yield Problem(
            "rank-outside-mesh",
            name,
            found="this rank is not in the tensor's mesh",
            hint="bridge it on the mesh's ranks only",
        )
    if isinstance(tensor, DTensor):
        if not default_axis_order(tensor):
            yield Problem(
                "invalid-layout",
                name,
                found="mesh axes that share a tensor dim shard it in another order than the mesh's",
                hint="redistribute it to Shard placements in mesh order",
            )
        device = local_of(tensor).device.type
        if device not in (layout.mesh.device_type, "meta"):
            yield Problem(
                "device-mismatch",
                name,
                found=f"local tensor on {device!r}, mesh for {layout.mesh.device_type!r}",
                hint="move the module to the mesh's device first",
            )
