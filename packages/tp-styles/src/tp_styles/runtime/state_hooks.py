"""State dicts with global shapes, and local parameters that stay shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_styles._shared.dtensor import as_dtensor
from tp_styles._shared.sectioned_tensor import SectionedTensor, is_sectioned
from tp_styles._shared.shard_values import plain
from tp_styles._shared.sharding_info import ATTRIBUTE, ShardingInfo
from tp_styles._torch_compat import local_of
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.parameters import ShardParameter, lost_shard, rebuild, split_of


class _StandIn:
    """Base of replacements for module methods that ignore sharding.

    Args:
        module: The module.
        names: Its sharded parameters.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        self.module = module
        self.names = names

    def parts(self) -> dict[str, ShardParameter]:
        """Return the local parameters with sharding metadata."""
        parameters = {name: self.module._parameters.get(name) for name in self.names}
        return {name: part for name, part in parameters.items() if isinstance(part, ShardParameter)}


class PreserveShardingOnApply(_StandIn):
    """Replacement of a module's `_apply`: `to_empty()` and its like create parameters without metadata."""

    def __call__(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Run the module's own `_apply`; new parameters get the old ones' metadata."""
        module = self.module
        before = {name: (part, dict(vars(part))) for name, part in self.parts().items()}
        type(module)._apply(module, lambda x: plain(fn(x)), recurse)  # torch makes a parameter of no value of a shard
        for name, (old, description) in before.items():
            new = module._parameters.get(name)
            if new is not None and new is not old:
                module._parameters[name] = rebuilt = rebuild(new.detach(), new.requires_grad, description)
                rebuilt.grad = new.grad
        return module


class ResetFullParameters(_StandIn):
    """Replacement of a module's `reset_parameters`: runs on full parameters, then takes their shards.

    Bounds depend on the number of input features: on a shard of the columns they would be too wide.
    """

    def __call__(self) -> None:
        """Run the module's own `reset_parameters`, with equal default generators on all ranks."""
        module: Any = self.module
        parts = {name: part for name, part in self.parts().items() if not part.is_meta}
        try:
            for name, part in parts.items():
                module._parameters[name] = nn.Parameter(_local(part).new_zeros(_info(part).shape))
            type(module).reset_parameters(module)
            full = {name: module._parameters[name].detach() for name in parts}
        finally:  # after an error too
            module._parameters.update(parts)
        for name, part in parts.items():
            _local(part).copy_(_cut(full[name], _info(part), name))

    def parts(self) -> dict[str, Any]:
        """Return the local parameters, and DTensors on CPU. There torch draws the same numbers for each shard."""
        parameters: dict[str, Any] = {name: self.module._parameters.get(name) for name in self.names}
        on_cpu = {n: p for n, p in parameters.items() if isinstance(p, DTensor) and p.device.type == "cpu"}
        # FSDP2's, on a mesh of two dims, are left to torch: a split describes one dim of a mesh.
        return super().parts() | {name: part for name, part in on_cpu.items() if part.device_mesh.ndim == 1}


def _local(part: ShardParameter | DTensor) -> torch.Tensor:
    return local_of(part).detach() if isinstance(part, DTensor) else part.detach()


def _info(part: ShardParameter | DTensor) -> ShardingInfo:
    if isinstance(part, DTensor):
        return ShardingInfo(part.device_mesh, part.placements, part.shape, part.stride())
    return part._sharding_info


class FullModelOnly:
    """Replacement of a method of transformers' models for full parameters.

    Args:
        model: The model.
        name: Name of the method.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own method if a state dict is passed.

        Raises:
            PlanError: None is passed.
        """
        if kwargs.get("state_dict") is not None:
            return getattr(type(self.model), self.name)(self.model, *args, **kwargs)
        raise PlanError(
            Problem(
                "local-shard-as-full",
                type(self.model).__name__,
                found=f"{self.name} on shards",
                hint=FULL_MODEL[self.name],
            )
        )


# Method of a model of transformers -> the call to use.
FULL_MODEL = {
    "save_pretrained": "on every rank save_pretrained(path, is_main_process=rank == 0,"
    " state_dict=tp_styles.full_state_dict(model))",
    "resize_token_embeddings": "resize before apply_plan; or handle.undo(), resize, and apply the plan again",
}


class GlobalOnSave:
    """State-dict hook: stores local parameters as DTensors, or as `SectionedTensor`s if they have sections.

    Nothing is communicated and no memory copied.

    Args:
        names: The module's sharded parameters.
        shards: The plain shards among them.
    """

    def __init__(self, names: tuple[str, ...], shards: tuple[str, ...]) -> None:
        self.names = names
        self.shards = shards

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace this module's entries.

        Raises:
            PlanError: A shard was replaced by a parameter without sharding metadata.
        """
        present = ((name, module._parameters.get(name)) for name in self.shards)
        # None, or a tensor during a functional call, is no parameter.
        lost = {n: p for n, p in present if isinstance(p, nn.Parameter | DTensor) and not hasattr(p, ATTRIBUTE)}
        if lost:
            raise PlanError(lost_shard(prefix + name, parameter) for name, parameter in lost.items())
        for name in self.names:
            parameter = module._parameters.get(name)
            value = state.get(prefix + name)
            if not isinstance(parameter, ShardParameter) or isinstance(value, nn.Parameter | DTensor):
                continue  # `keep_vars=True` gets the parameters themselves
            if isinstance(value, torch.Tensor):
                mesh, placements, shape, stride, sections = info = parameter._sharding_info
                local = value.detach()
                state[prefix + name] = (
                    SectionedTensor.of(local, info) if sections else as_dtensor(local, mesh, placements, shape, stride)
                )


class LocalOnLoad:
    """Load hook: takes DTensors of any layout, `SectionedTensor`s and full tensors."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace this module's entries by values in the layouts of its parameters."""
        for name in self.names:
            parameter, value = module._parameters.get(name), state.get(prefix + name)
            if isinstance(value, torch.Tensor) and isinstance(parameter, DTensor | ShardParameter):
                state[prefix + name] = _as_parameter(value, parameter, prefix + name)


def _as_parameter(value: torch.Tensor, parameter: nn.Parameter, key: str) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
        if isinstance(value, DTensor) and value.device_mesh == mesh and value.shape == shape:
            # `assign=True` would install another layout, and the module's forward takes a shard
            return value if value.placements == placements else value.redistribute(placements=placements)
        if isinstance(value, DTensor) and mesh.ndim > 1:
            return value  # FSDP2's, on a mesh of two dims: torch's own loading compares
        local = _cut(value, _info(parameter), key)
        return as_dtensor(local, mesh, placements, shape)
    assert isinstance(parameter, ShardParameter)
    if isinstance(value, ShardParameter):
        return value  # a shard already
    return rebuild(_cut(value, parameter._sharding_info, key), parameter.requires_grad, vars(parameter))


def _cut(value: torch.Tensor, info: ShardingInfo, key: str) -> torch.Tensor:
    """Return this rank's shard of an entry; communicates only if the entry has another layout."""
    mesh, placements, shape = info.mesh, info.placements, info.shape
    if is_sectioned(value):
        if value._sharding_info == info:
            return value.plain()
        value = value.full_tensor()
    if isinstance(value, DTensor):
        if not info.sections and value.device_mesh == mesh and value.shape == shape:
            return value.redistribute(placements=placements).to_local()
        value = value.full_tensor()
    if value.shape != shape:
        raise PlanError(
            Problem(
                "shape-mismatch",
                key,
                found=f"shape {tuple(value.shape)}",
                hint=f"the full tensor has {tuple(shape)}; pass it, a DTensor, or what state_dict() returned",
            )
        )
    return split_of(info).take(value, mesh.get_local_rank(), mesh.size())
