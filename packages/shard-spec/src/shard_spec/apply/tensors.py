"""ExecutionPlan: the actions of a call, tensor by tensor; the tensors that it makes, and hooks of their gradients."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shard_spec import _torch_compat
from shard_spec._shared.problems import Problem
from shard_spec._shared.sharding_info import Section, ShardingInfo
from shard_spec.distributed import GroupRef, ParameterFormat, choose_format
from shard_spec.layout.layout import Layout
from shard_spec.plan.metadata import TensorMetadata
from shard_spec.specs import ShardingSpec


@dataclass(frozen=True)
class TensorAction:
    """One tensor of the module."""

    names: tuple[str, ...]  # its FQNs; several where it is tied
    kind: str  # "parameter" or "buffer"
    shape: tuple[int, ...]  # global
    dtype: torch.dtype
    requires_grad: bool
    layout: Layout | None  # None: it stays whole and gets the source's values
    format: ParameterFormat | None = None  # of the layout

    @property
    def line(self) -> str:
        """The action as text."""
        where = "whole" if self.layout is None else _on_ranks(self.layout)
        grad = "" if self.requires_grad else ", frozen"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} {' = '.join(self.names)}: {dtype} {list(self.shape)}{grad} -> {where}"


def _on_ranks(wanted: ShardingSpec | Layout) -> str:
    if not isinstance(wanted, Layout):
        return repr(wanted)
    shape = wanted.mesh.shape
    axes = f" as {' x '.join(map(str, shape))}" if len(shape) > 1 else ""
    return f"{wanted} on ranks {list(wanted.mesh.ranks)}{axes}"


def tensor_at(module: nn.Module, fqn: str) -> Any:
    """The registered parameter or buffer called ``fqn``."""
    path, _, name = fqn.rpartition(".")
    owner = module.get_submodule(path)
    return owner._parameters[name] if name in owner._parameters else owner._buffers[name]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a shard of a larger one already."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "_sharding_info")


def action_of(
    tensor: torch.Tensor,
    metadata: TensorMetadata,
    layout: Layout | None,
    *,
    replaces: bool,
    needs_values: bool,
    local: bool = False,
) -> tuple[TensorAction, list[Problem]]:
    """Return the action that puts ``tensor`` into ``layout``, and the reasons against it.

    Args:
        tensor: As it is in the module.
        metadata: Its names and global shape.
        layout: None: it stays whole.
        replaces: Another tensor takes its place.
        needs_values: Its values on this rank count.
        local: Allow formats that a forward on DTensors alone cannot take: local shards and strided ones.
    """
    name, problems = metadata.name, []
    if replaces:
        problems += replacing_problems(tensor, name)
    if needs_values and tensor.is_meta:
        problems.append(
            Problem(
                "no-data",
                name,
                found="a meta tensor where values are needed",
                hint=(
                    "load values first, or use source='meta' of plan.apply; only the source "
                    "rank needs values of its own"
                ),
            )
        )
    chosen = None if layout is None else choose_format(layout, metadata.shape, name, local=local, strided=local)
    if isinstance(chosen, Problem):
        problems.append(chosen)
        chosen = None
    grad = bool(tensor.requires_grad)
    action = TensorAction(metadata.aliases, metadata.kind, metadata.shape, tensor.dtype, grad, layout, chosen)
    return action, problems


def replacing_problems(tensor: torch.Tensor, name: str) -> list[Problem]:
    """Return what would be lost or wrong if a DTensor replaced ``tensor``."""
    if is_sharded(tensor):
        return [
            Problem(
                "already-applied",
                name,
                found="it is sharded already",
                hint="undo that first, or leave it out of the plan",
            )
        ]
    problems = []
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        problems.append(
            Problem(
                "unsupported-tensor",
                name,
                found=f"a {type(tensor).__qualname__} of layout {tensor.layout}",
                hint="only plain dense tensors are sharded",
            )
        )
    if tensor.grad is not None:
        problems.append(
            Problem(
                "unsupported-tensor",
                name,
                found="it has a gradient, which would be lost",
                hint="call zero_grad(set_to_none=True) first",
            )
        )
    # Other hooks than ours would be lost with the tensor.
    if any(not isinstance(hook, SumGradient) for hook in _torch_compat.tensor_hooks(tensor)):
        problems.append(
            Problem(
                "unsupported-tensor",
                name,
                found="it has gradient hooks, which would be lost",
                hint="register them after sharding",
            )
        )
    return problems


def replica_problems(owners: list[nn.Module], name: str) -> list[Problem]:
    """Return options of a tensor's modules that need the ids of the full batch."""
    problems = []
    if any(getattr(owner, "sparse", False) is True for owner in owners):
        problems.append(
            Problem(
                "sparse-gradient",
                name,
                found="a module with sparse gradients",
                hint="turn sparse=True off: the gradients of replicated parameters are summed over the ranks",
            )
        )
    for option in ("max_norm", "scale_grad_by_freq"):
        # Each rank would scale by the ids of its own rows alone, and replicas would drift apart.
        if any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) and getattr(owner, option) for owner in owners):
            problems.append(
                Problem(
                    "unsupported-option",
                    name,
                    found=f"a replicated table with {option}",
                    hint="shard this table, or leave the option out",
                )
            )
    return problems


@dataclass(frozen=True, eq=False)
class LayGradient:
    """A tensor hook on a DTensor parameter: its gradient, laid out like the parameter.

    A DTensor op that gathers a sharded parameter by itself leaves a whole gradient, one that replicates it partial
    sums. Both are right, but take more memory than the plan says, and every op of an optimizer reduces them again.
    """

    placements: tuple[Placement, ...]

    # Torch warns that hooks of a tensor are not saved with it; without it a module computes the same.
    __torch_unserializable__ = True

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        """Redistribute; a plain gradient (somebody made the parameter local) is handed on."""
        if isinstance(grad, DTensor) and tuple(grad.placements) != self.placements:
            return grad.redistribute(placements=self.placements)
        return grad


@dataclass(frozen=True, eq=False)
class SumGradient:
    """A tensor hook: the gradient summed over the group, in each backward before it is accumulated."""

    group: GroupRef
    note: Callable[[], None]  # ranks compare at the next forward what they have summed

    # Torch warns that hooks of a tensor are not saved with it; CompareAndHook puts them back at the next forward.
    __torch_unserializable__ = True

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the sum; every rank's backward calls it in the same order."""
        self.note()
        refuse_second_derivative()
        summed = grad.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.group.group)
        return summed


def refuse_second_derivative() -> None:
    """Raise in a backward with ``create_graph=True``: its result would lack what other ranks add."""
    if torch.is_grad_enabled():
        raise RuntimeError("a sharded module has no second derivatives: leave out create_graph=True")


def summed_over(parameter: torch.Tensor) -> list[GroupRef]:
    """The groups over which the gradient of ``parameter`` is summed."""
    return [hook.group for hook in _torch_compat.tensor_hooks(parameter) if isinstance(hook, SumGradient)]


def counted_on(here: bool, value: torch.Tensor, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``value`` where ``here``, else ``otherwise`` (default: zeros), to which no gradient goes.

    Every rank keeps the value in its graph, so that hooks on it run everywhere, but only some ranks count.
    """
    other = torch.zeros_like(value) if otherwise is None else otherwise
    return torch.where(value.new_full((), here, dtype=torch.bool), value, other.detach())  # filled there: no copy


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
        return memo[id(self)]  # type: ignore[no-any-return]  # a memo is untyped

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


@dataclass(frozen=True)
class ExecutionPlan:
    """Actions on each tensor and module; tables are keyed by the FQN of a module."""

    tensors: tuple[TensorAction, ...] = ()  # scattered or broadcast; a tied one stands there once
    forwards: dict[str, tuple[str, ...]] = field(default_factory=dict)  # sharded forward: names of sharded tensors
    options: dict[str, str] = field(default_factory=dict)  # of these modules; their forwards communicate accordingly
    sharders: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, ShardingSpec | Layout] = field(default_factory=dict)  # of ``output_plan``
    locals: tuple[str, ...] = ()  # modules of ``return_local_tensor``
    everything: bool = True  # tensors that the plan does not mention are decided about too
    src_rank: int = 0  # rank of the group whose values count
    source: str = ""  # where the values come from, as text
    values: tuple[str, ...] = ()  # checksums of values that have to be equal on every rank
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of this rank's shards

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each action; they have to be equal on all ranks."""
        return (
            f"source: {self.source or f'rank {self.src_rank} of the group'}, shards on {self.device.type}",
            *(action.line for action in self.tensors),
            *(f"module {path or '(root)'}: sharded forward of {self.options[path]}" for path in self.forwards),
            *(f"module {path}: {type(sharder).__qualname__}" for path, sharder in self.sharders.items()),
            *(f"output of {path or '(root)'}: {_on_ranks(wanted)}" for path, wanted in self.outputs.items()),
            *(f"output of {path or '(root)'}: this rank's rows" for path in self.locals),
            *(f"values of {text}" for text in self.values),
        )

    @property
    def digest(self) -> str:
        """Hash of the actions, equal on all ranks with equal actions."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def explain(self, name: str | None = None) -> str:
        """Return the lines as text; with ``name`` those that mention it."""
        return "\n".join(line for line in self.lines if name is None or name in line)

    def to_json(self) -> str:
        """The lines as JSON."""
        return json.dumps({"actions": self.lines, "digest": self.digest}, indent=1)
