"""Actions of a call, and the handle that undoes them.

`ExecutionPlan` has the actions, tensor by tensor; beside it stand the tensors that a call makes, and hooks of their
gradients. `ShardHandle` has the replaced tensors, and undo; the log of a call's changes and Sharders come with it.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shard_spec import _torch_compat
from shard_spec._shared.consensus import HEADER_BYTES, all_gather_header, all_gather_objects, problems_of
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec._shared.sharding_info import Section, ShardingInfo
from shard_spec._shared.stale_parameters import mark_current, mark_stale
from shard_spec.distributed import GroupRef, ParameterFormat, choose_format, gather_shards, on_all_ranks
from shard_spec.layout import Layout
from shard_spec.plan.resolve import TensorMetadata
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
    name = metadata.name
    problems = replacing_problems(tensor, name) if replaces else []
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
    rules = (
        (
            type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided,
            f"a {type(tensor).__qualname__} of layout {tensor.layout}",
            "only plain dense tensors are sharded",
        ),
        (
            tensor.grad is not None,
            "it has a gradient, which would be lost",
            "call zero_grad(set_to_none=True) first",
        ),
        (  # Other hooks than ours would be lost with the tensor.
            any(not isinstance(hook, SumGradient) for hook in _torch_compat.tensor_hooks(tensor)),
            "it has gradient hooks, which would be lost",
            "register them after sharding",
        ),
    )
    return [Problem("unsupported-tensor", name, found=found, hint=hint) for wrong, found, hint in rules if wrong]


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
    # Each rank would scale by the ids of its own rows alone, and replicas would drift apart.
    problems += [
        Problem(
            "unsupported-option",
            name,
            found=f"a replicated table with {option}",
            hint="shard this table, or leave the option out",
        )
        for option in ("max_norm", "scale_grad_by_freq")
        if any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) and getattr(owner, option) for owner in owners)
    ]
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


Undo: TypeAlias = Callable[[], object]
UndoLog: TypeAlias = list[Undo]


@contextmanager
def undone_on_failure() -> Iterator[UndoLog]:
    """Yield a log of changes. If the block raises, they are undone, last first."""
    log: UndoLog = []
    try:
        yield log
    except BaseException:
        while log:
            log.pop()()
        raise
    log.clear()  # the old tensors can be freed


def put(table: dict[str, Any], key: str, value: object, log: UndoLog) -> Undo:
    """Set an entry of a module's table, in its place, and log and return the way back."""
    before = {key: table[key]} if key in table else {}

    def undo() -> None:
        table.update(before) if before else table.pop(key, None)

    log.append(undo)
    table[key] = value
    return undo


class Snapshot:
    """Registered state of a module and its submodules, to restore if a Sharder fails."""

    def __init__(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        attributes = [vars(each) for each in (*module.modules(), *tensors)]
        inner = [value for table in attributes for value in table.values() if isinstance(value, dict)]
        # A shard_module within the Sharder adds hooks on gradients of replicated parameters.
        self._hooks = [(tensor, tensor._backward_hooks) for tensor in tensors]
        hooked = [hooks for _, hooks in self._hooks if hooks is not None]
        self._tables = [(table, table.copy()) for table in (*attributes, *inner, *hooked)]

    def restore(self) -> None:
        """Restore every attribute, table and gradient hook; in-place writes to values are not undone."""
        for table, items in self._tables:
            table.clear()
            table.update(items)
        for tensor, hooks in self._hooks:
            tensor._backward_hooks = hooks


def run_sharders(
    module: nn.Module, actions: ExecutionPlan, group: dist.ProcessGroup, log: UndoLog
) -> dict[str, nn.Module]:
    """Call the Sharders in the order of their FQNs. If one fails on a rank, all ranks raise."""

    def run() -> dict[str, nn.Module]:
        tensors = {}
        try:
            for path, sharder in actions.sharders.items():
                old = module.get_submodule(path)
                log.append(Snapshot(old).restore)
                new = sharder.shard(old)
                if not isinstance(new, nn.Module):
                    raise PlanError(
                        Problem(
                            "wrong-type",
                            path,
                            found=f"{type(sharder).__qualname__}.shard returned {type(new).__qualname__}",
                            hint="return an nn.Module",
                        )
                    )
                tensors[path] = new
        except Exception as error:
            _await_peers(group, problems_of(error))
            raise
        _await_peers(group, ())
        return tensors

    def lines(sharded: dict[str, nn.Module]) -> list[str]:
        return [f"{path}: {type(new).__qualname__}" for path, new in sharded.items()]

    return on_all_ranks(group, "a Sharder failed", run, lines)


def _await_peers(group: dist.ProcessGroup, problems: tuple[Problem, ...]) -> None:
    """Join comparisons of ranks inside a Sharder until every rank has left its Sharders.

    A Sharder may call ``shard_module``: if this rank's failed before that, its peers wait in the comparison.
    """
    subject = "Sharders"
    done = subject.encode().ljust(HEADER_BYTES, b"\0")
    while set(all_gather_header(group, done, subject)) != {done}:
        all_gather_objects(group, (subject, (), problems), subject)


@dataclass
class Placed:
    """One replaced tensor."""

    places: tuple[tuple[dict[str, Any], str, str], ...]  # (table of a module, name, FQN); several if it is tied
    value: torch.Tensor
    before: weakref.ref[torch.Tensor]  # the previous value, while other objects still hold it
    layout: Layout | None
    shape: tuple[int, ...]  # global

    @property
    def name(self) -> str:
        """First FQN."""
        return self.places[0][2]


@dataclass
class Installed:
    """Changes of one call."""

    placed: list[Placed] = field(default_factory=list)
    removals: UndoLog = field(default_factory=list)  # of its hooks and forwards
    forwards: dict[str, tuple[nn.Module, object]] = field(default_factory=dict)  # as they have to be at an undo
    final: list[Problem] = field(default_factory=list)  # changes that cannot be undone

    def register(self, hook: Any, log: UndoLog) -> None:
        """Remove a hook of torch at undo, or at a failure of this call."""
        log.append(hook.remove)
        self.removals.append(hook.remove)


class ShardHandle:
    """Handle returned by ``shard_module``, ``shard_parameter`` and ``plan.apply``.

    Attributes:
        plan: The applied plan.
        actions: The actions, tensor by tensor: ``explain()``, ``to_json()``, ``digest``.
        module: The sharded module.
    """

    def __init__(
        self, plan: Any, actions: Any, module: nn.Module, group: dist.ProcessGroup, installed: Installed
    ) -> None:
        self.plan = plan
        self.actions = actions
        self.module = module
        self._group = group
        self._installed = installed
        self._undone = False
        # An optimizer that still trains a replaced parameter raises.
        reason = "an optimizer, or another module, still holds the full parameter; the module trains its shard"
        hint = "build the optimizer after the module is sharded; shard a module that holds all ties"
        for placed in installed.placed:
            if isinstance(original := placed.before(), nn.Parameter):
                mark_stale(original, Problem("parameter-replaced", placed.name, found=reason, hint=hint))

    def __repr__(self) -> str:
        state = "undone" if self._undone else f"{len(self._installed.placed)} tensors"
        return f"ShardHandle({type(self.module).__name__}, {state})"

    def undo(self) -> nn.Module:
        """Unshard the module, with its current values and gradients; a collective.

        Parameters that other objects still hold, such as an optimizer built before, come back as the same objects;
        others as new ones. Tensors overwritten with the source's values keep these.

        Raises:
            PlanError: On every rank, without changes: ``already-applied``; ``model-changed`` if a tensor or a forward
                was replaced after the call (undo later calls first); ``sharder-nesting``.
        """
        on_all_ranks(self._group, "undo", self._check_undo, list)
        full_tensors = [self._whole(placed) for placed in self._installed.placed]
        for removal in reversed(self._installed.removals):
            removal()
        for placed, value in zip(self._installed.placed, full_tensors, strict=True):
            for table, name, _ in placed.places:
                table[name] = value
            mark_current(value)
            if isinstance(placed.value, nn.Parameter):
                mark_stale(
                    placed.value,
                    Problem(
                        "parameter-replaced",
                        placed.name,
                        found="undo() gave the module a full parameter; an optimizer still holds the shard",
                        hint="build the optimizer again",
                    ),
                )
        self._undone = True
        self._installed = Installed()  # frees the shards
        return self.module

    def _check_undo(self) -> list[str]:
        """Raise if this rank cannot undo the call; return what ranks compare before they gather."""
        if self._undone:
            raise PlanError(
                Problem("already-applied", found="this handle was undone before", hint="shard the module again")
            )
        problems = list(self._installed.final)
        problems += [
            Problem(
                "model-changed",
                path,
                found="its forward was replaced after this call",
                hint="undo later calls first",
            )
            for path, (module, forward) in self._installed.forwards.items()
            if module.__dict__.get("forward") is not forward
        ]
        lines = []
        for placed in self._installed.placed:
            problems += [
                Problem(
                    "model-changed",
                    fqn,
                    found="another tensor has replaced the sharded one",
                    hint="undo later calls first, or put the sharded tensor back",
                )
                for table, name, fqn in placed.places
                if table.get(name) is not placed.value
            ]
            grad = "no gradient" if placed.value.grad is None else f"with a gradient of {placed.value.grad.dtype}"
            lines.append(f"undo {placed.name}: {placed.value.dtype}, {grad}".replace("torch.", ""))
        raise_problems(problems)
        return lines

    def _whole(self, placed: Placed) -> torch.Tensor:
        """Return the full tensor with its gradient; a collective."""
        value = self._gathered(placed.value, placed)
        grad = placed.value.grad
        held = placed.before()
        if held is not None and not held.is_meta:  # the same object: its optimizer holds it
            with torch.no_grad():
                held.copy_(value)
            restored = held.requires_grad_(placed.value.requires_grad)
        elif isinstance(placed.value, nn.Parameter):
            restored = nn.Parameter(value, requires_grad=placed.value.requires_grad)
            restored.__dict__.update(user_attributes(placed.value))
        else:
            restored = value
        if grad is not None:
            restored.grad = self._gathered(grad, placed).to(restored.device)
        return restored

    def _gathered(self, tensor: torch.Tensor, placed: Placed) -> torch.Tensor:
        """Gather a tensor of the layout of ``placed``; any dtype, unlike ``full_tensor``."""
        if isinstance(tensor, DTensor):
            assert isinstance(placed.value, DTensor)
            with torch.no_grad():
                tensor = tensor.redistribute(placements=placed.value.placements).to_local()
        assert placed.layout is not None
        return gather_shards(tensor, placed.layout, placed.shape, self._group)


def place(module: nn.Module, action: TensorAction, old: torch.Tensor, value: torch.Tensor, log: UndoLog) -> Placed:
    """Put ``value`` in place of ``old``, under each of its names, with the user's attributes."""
    value.__dict__.update(user_attributes(old))  # e.g. weight-decay flags
    places = []
    for fqn in action.names:
        path, _, name = fqn.rpartition(".")
        owner = module.get_submodule(path)
        table: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
        put(table, name, value, log)
        places.append((table, name, fqn))
    return Placed(tuple(places), value, weakref.ref(old), action.layout, action.shape)


# Attributes of a parameter that torch and this repository write themselves.
_OWN_ATTRIBUTES = {"_sharding_info", "_is_param", "_local_tensor", "_spec", "_stale_problem", "_stale_successor"}


def user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the user's attributes of a parameter, for the tensor that replaces it."""
    return {name: value for name, value in vars(tensor).items() if name not in _OWN_ATTRIBUTES}
