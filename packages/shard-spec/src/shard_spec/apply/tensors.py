"""TensorAction: one parameter or buffer and what may stand in the way; LocalParameter: a shard of a fused weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shard_spec._shared.problems import Problem
from shard_spec._shared.sharding_info import Section, ShardingInfo
from shard_spec.apply.gradients import foreign_hooks
from shard_spec.distributed.parameter_format import ParameterFormat
from shard_spec.layout.layout import Layout
from shard_spec.plan.metadata import TensorMetadata


@dataclass(frozen=True)
class TensorAction:
    """One tensor of the module.

    Attributes:
        names: Its FQNs; several where it is tied.
        kind: ``"parameter"`` or ``"buffer"``.
        shape: Global shape.
        dtype: Its dtype.
        requires_grad: Whether it gets a gradient.
        layout: Where its shards go; None: it stays whole and gets the source's values.
    """

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    layout: Layout | None

    @property
    def line(self) -> str:
        """The action as text."""
        where = "whole"
        if self.layout is not None:
            mesh = self.layout.mesh
            axes = f" as {' x '.join(map(str, mesh.shape))}" if mesh.ndim > 1 else ""
            where = f"{self.layout} on ranks {list(mesh.ranks)}{axes}"
        grad = "" if self.requires_grad else ", frozen"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} {' = '.join(self.names)}: {dtype} {list(self.shape)}{grad} -> {where}"


def tensor_at(module: nn.Module, fqn: str) -> Any:
    """The registered parameter or buffer called ``fqn``."""
    path, _, name = fqn.rpartition(".")
    owner = module.get_submodule(path)
    return owner._parameters[name] if name in owner._parameters else owner._buffers[name]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a shard of a larger one already."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "_sharding_info")


def action_of(tensor: torch.Tensor, metadata: TensorMetadata, layout: Layout | None) -> TensorAction:
    """Return the action that puts ``tensor`` into ``layout``."""
    grad = bool(tensor.requires_grad)
    return TensorAction(metadata.aliases, metadata.kind, metadata.shape, tensor.dtype, grad, layout)


def missing_values(tensor: torch.Tensor, name: str, needed: bool) -> list[Problem]:
    """Return the problem of a meta tensor whose values are needed."""
    hint = "load values first, or use source='meta' of plan.apply; only the source rank needs values of its own"
    reason = "a meta tensor where values are needed"
    return [Problem("no-data", name, found=reason, hint=hint)] if needed and tensor.is_meta else []


def replacing_problems(tensor: torch.Tensor, name: str) -> list[Problem]:
    """Return what would be lost or wrong if a DTensor replaced ``tensor``."""
    if is_sharded(tensor):
        reason, hint = "it is sharded already", "undo that first, or leave it out of the plan"
        return [Problem("already-applied", name, found=reason, hint=hint)]
    problems = []
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        reason = f"a {type(tensor).__qualname__} of layout {tensor.layout}"
        problems.append(Problem("unsupported-tensor", name, found=reason, hint="only plain dense tensors are sharded"))
    if tensor.grad is not None:
        reason, hint = "it has a gradient, which would be lost", "call zero_grad(set_to_none=True) first"
        problems.append(Problem("unsupported-tensor", name, found=reason, hint=hint))
    if foreign_hooks(tensor):
        reason, hint = "it has gradient hooks, which would be lost", "register them after sharding"
        problems.append(Problem("unsupported-tensor", name, found=reason, hint=hint))
    return problems


def replica_problems(owners: list[nn.Module], name: str) -> list[Problem]:
    """Return options of a tensor's modules that use the ids of the full batch, which a rank does not have."""
    problems = []
    if any(getattr(owner, "sparse", False) is True for owner in owners):
        hint = "turn sparse=True off: the gradients of replicated parameters are summed over the ranks"
        problems.append(Problem("sparse-gradient", name, found="a module with sparse gradients", hint=hint))
    for option in ("max_norm", "scale_grad_by_freq"):
        # Each rank would scale by the ids of its own rows alone, and replicas would drift apart.
        if any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) and getattr(owner, option) for owner in owners):
            hint = "shard this table, or leave the option out"
            problems.append(Problem("unsupported-option", name, found=f"a replicated table with {option}", hint=hint))
    return problems


class LocalParameter(nn.Parameter):
    """A local parameter with ``_sharding_info``, which copies and pickles keep (those of ``nn.Parameter`` lose it).

    ``_sharding_info`` is ``(device_mesh, placements, global_shape, global_stride, sections)`` with one
    ``(size, unit, copies)`` for each section of the sharded dim; each section is cut on its own.
    """

    _sharding_info: ShardingInfo

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalParameter:
        if id(self) not in memo:
            copied = LocalParameter(self.detach().clone(), self.requires_grad)
            copied.__dict__.update(self.__dict__)
            memo[id(self)] = copied
        twin: LocalParameter = memo[id(self)]
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.detach(), self.requires_grad, dict(self.__dict__))


class InfoOnSave:
    """State-dict hook of a module: its local shards in ``state_dict()`` say what they are shards of.

    ``state_dict()`` detaches tensors, which drops their attributes; ``dcp_state_dict`` needs this one.
    """

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Mark the module's own tensors in ``state``."""
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            info = getattr(value, "_sharding_info", None)
            if info is not None and prefix + name in state:
                state[prefix + name]._sharding_info = info


def _rebuild(data: torch.Tensor, requires_grad: bool, attributes: dict[str, Any]) -> LocalParameter:
    parameter = LocalParameter(data, requires_grad)
    parameter.__dict__.update(attributes)
    return parameter


def sharding_info(mesh: DeviceMesh, expression: ParameterFormat, shape: tuple[int, ...]) -> ShardingInfo:
    """Return the description of a shard of a tensor of global ``shape``."""
    stride = torch.empty(shape, device="meta").stride()
    sections = tuple(Section(size) for size in expression.sections)
    return ShardingInfo(mesh, expression.placements, torch.Size(shape), stride, sections)
