"""ExecutionPlan: what ``shard_module`` is about to do to one module, decided without communication."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shard_spec import _torch_compat
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.apply.devices import device_of
from shard_spec.apply.forwards.base import ShardedForward
from shard_spec.apply.rank_checks import layout_problems, order_problems, ranks_of
from shard_spec.apply.rank_state import RankState, capture_errors
from shard_spec.apply.shard_tensor import rank_problems, source_problems
from shard_spec.apply.supported_modules import forward_for, unsupported_forward
from shard_spec.apply.tensors import TensorAction, read_tensors
from shard_spec.layout.layout import Layout, in_mesh_order
from shard_spec.layout.mesh import MeshSpec
from shard_spec.plan.content import PlanContent
from shard_spec.plan.resolve import Resolution, examine
from shard_spec.plan.validate import validate
from shard_spec.plan.values import is_spec, to_layout
from shard_spec.specs import ShardingSpec, as_sharder, as_spec


@dataclass(frozen=True)
class ExecutionPlan:
    """Actions on each tensor and module.

    Attributes:
        tensors: One entry for each tensor that is scattered or broadcast; a tied one stands there once.
        forwards: Module FQN to the layout of its weight (None: whole), for modules that get a sharded forward.
        options: For these modules, how they were made, as text: options decide what their forwards communicate.
        sharders: Module FQN to Sharder.
        outputs: Module FQN to what ``output_plan`` wants.
        locals: Module FQNs of ``return_local_tensor``.
        replicas: FQNs of parameters whose gradients are summed over the ranks.
        everything: Whether tensors that the plan does not mention are decided about too.
        src_rank: Rank of the group whose values count.
        source: Where the values come from, as text.
        values: Checksums of the values that every rank has, where they have to be equal.
        device: Device that this rank's pieces lie on.
        problems: Why it cannot be done.
    """

    tensors: tuple[TensorAction, ...] = ()
    forwards: dict[str, Layout | None] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    sharders: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, ShardingSpec | Layout] = field(default_factory=dict)
    locals: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    everything: bool = True
    src_rank: int = 0
    source: str = ""
    values: tuple[str, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    problems: tuple[Problem, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each thing that is done; equal on all ranks, or nothing is done."""
        return (
            f"source: {self.source or f'rank {self.src_rank} of the group'}, pieces on {self.device.type}",
            *(action.line for action in self.tensors),
            *(f"module {path or '(root)'}: sharded forward of {self.options[path]}" for path in self.forwards),
            *(f"module {path}: {type(sharder).__qualname__}" for path, sharder in self.sharders.items()),
            *(f"output of {path or '(root)'}: {_wanted_text(wanted)}" for path, wanted in self.outputs.items()),
            *(f"output of {path or '(root)'}: this rank's rows" for path in self.locals),
            *(f"gradient of {name}: summed over the ranks" for name in self.replicas),
            *(f"values of {text}" for text in self.values),
        )

    @property
    def outcome(self) -> RankState:
        """Header that the ranks compare."""
        return RankState(self.lines, self.problems)

    @property
    def digest(self) -> str:
        """Hash of what is done, equal on all ranks that do the same."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def explain(self, name: str | None = None) -> str:
        """The lines as text; with ``name`` those that mention it."""
        return "\n".join(line for line in self.lines if name is None or name in line)

    def to_json(self) -> str:
        """The lines and the problems as JSON."""
        problems = [vars(problem) for problem in self.problems]
        return json.dumps({"actions": self.lines, "problems": problems, "digest": self.digest}, indent=1)


def plan_module(
    module: nn.Module, plan: Any, group: dist.ProcessGroup, src_rank: int, *, whole: bool = True
) -> ExecutionPlan:
    """Decide what to do to ``module``; changes and sends nothing.

    Args:
        module: The module.
        plan: Ours, or torch's.
        group: The ranks; only asked who they are.
        src_rank: Rank in the group that has the values.
        whole: Whether tensors that the plan does not mention are broadcast too.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    plan = own_plan(plan, ranks)
    found, problems = _resolve(plan, module)
    problems += source_problems(src_rank, len(ranks))
    tensors, more = read_tensors(module, found, dist.get_rank(group), src_rank, whole)
    problems += more
    for action in tensors:
        if action.layout is not None:
            problems += layout_problems(action, ranks)
            problems += _reader_problems(module, action)
    outputs, more = _outputs(plan, ranks)
    problems += more
    problems += order_problems(tensors, outputs)
    problems += _sharder_problems(found, outputs, plan.return_local_tensor or ())
    device, more = device_of(module, plan, found, group)
    problems += more
    forwards = _forwards(module, tensors)
    return ExecutionPlan(
        tensors=tensors,
        forwards=forwards,
        options={path: _options(module.get_submodule(path)) for path in forwards},
        sharders={path: as_sharder(sharder) for path, sharder in sorted(found.sharders.items())},
        outputs=outputs,
        locals=tuple(plan.return_local_tensor or ()),
        replicas=tuple(action.names[0] for action in tensors if action.layout is None and action.kind == "parameter"),
        everything=whole,
        src_rank=src_rank,
        device=device,
        problems=tuple(dict.fromkeys(problems)),
    )


def plan_on_all_ranks(work: Callable[[], ExecutionPlan]) -> tuple[ExecutionPlan | None, RankState]:
    """Return what ``work`` plans, and what to compare between ranks: also when it raises on this one."""

    def both() -> tuple[ExecutionPlan, RankState]:
        actions = work()
        return actions, actions.outcome

    done, failed = capture_errors(both)
    return (None, RankState((), failed)) if done is None else done


def own_plan(plan: Any, ranks: tuple[int, ...]) -> PlanContent:
    """The plan as one of ours; where neither it nor its rules name ranks, on the ranks of the group."""
    if _torch_compat.shard_kind(plan) == "plan":
        plan = PlanContent(plan.plan, plan.output_plan, plan.return_local_tensor)
    if not isinstance(plan, PlanContent):
        found = f"{plan!r:.200} of type {type(plan).__qualname__}"
        raise PlanError(Problem("not-a-plan", "plan", found=found, hint="give a ShardingPlan"))
    own = [value.mesh for value in (plan.output_plan or {}).values() if isinstance(value, Layout)]
    if plan.mesh is None and all(rule.kind in ("spec", "sharder") for rule in plan.rules):
        return plan.on_mesh(own[0] if own else MeshSpec({"rank": len(ranks)}, ranks))
    return plan


def _resolve(plan: PlanContent, module: object) -> tuple[Resolution, list[Problem]]:
    if not isinstance(module, nn.Module):
        found = f"{type(module).__qualname__}"
        raise PlanError(Problem("not-a-module", "module", found=found, hint="give an nn.Module"))
    return examine(plan, module), list(validate(plan, module))


def _reader_problems(module: nn.Module, action: TensorAction) -> list[Problem]:
    problems = []
    for fqn in action.names:
        path, _, name = fqn.rpartition(".")
        problem = unsupported_forward(module, path, name, fqn)
        if problem is not None:
            problems.append(problem)
    return problems


def _outputs(plan: PlanContent, ranks: tuple[int, ...]) -> tuple[dict[str, ShardingSpec | Layout], list[Problem]]:
    outputs: dict[str, ShardingSpec | Layout] = {}
    problems: list[Problem] = []
    for path, value in (plan.output_plan or {}).items():
        try:
            wanted = as_spec(value) if is_spec(value) else to_layout(value, plan.mesh)
        except PlanError:
            continue  # validate lists it
        assert wanted is not None
        name = f"output_plan[{path!r}]"
        try:
            named = ranks_of(wanted)
        except PlanError as error:
            problems += [replace(problem, name=name) for problem in error.problems]
            continue
        outputs[path] = in_mesh_order(wanted) if isinstance(wanted, Layout) else wanted
        if named is not None:
            problems += rank_problems(name, named, ranks)
    return outputs, problems


def _sharder_problems(found: Resolution, outputs: Mapping[str, object], local: tuple[str, ...]) -> list[Problem]:
    problems = []
    for argument, paths in (("output_plan", tuple(outputs)), ("return_local_tensor", local)):
        for path in paths:
            if any(path.startswith(sharder + ".") for sharder in found.sharders):
                text = f"{argument} names a module inside of one that a Sharder replaces"
                problems.append(Problem("inside-sharder", path, found=text, hint="name the Sharder's module"))
    return problems


def _forwards(module: nn.Module, tensors: tuple[TensorAction, ...]) -> dict[str, Layout | None]:
    """The modules that get a sharded forward, each under one of its FQNs."""
    forwards: dict[str, Layout | None] = {}
    path_of: dict[nn.Module, str] = {}
    for action in tensors:
        if action.layout is None:
            continue
        for fqn in action.names:
            path, _, name = fqn.rpartition(".")
            owner = module.get_submodule(path)
            forward = forward_for(owner)
            if forward is None or name not in forward.tensors:
                continue
            path = path_of.setdefault(owner, path)
            if name == "weight":
                forwards[path] = action.layout
            else:
                forwards.setdefault(path, _earlier_layout(owner))
    return forwards


def _options(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"


def _earlier_layout(module: nn.Module) -> Layout | None:
    """Return the layout of the weight after an earlier call."""
    forward = module.__dict__.get("forward")
    return forward.sharding.layout if isinstance(forward, ShardedForward) and forward.sharding is not None else None


def _wanted_text(wanted: ShardingSpec | Layout) -> str:
    if not isinstance(wanted, Layout):
        return repr(wanted)
    return f"{wanted} on ranks {list(wanted.mesh.ranks)} as {' x '.join(map(str, wanted.mesh.shape))}"
