"""DistributedDataParallel around a bridged module, guarded against silent errors.

Torch calls two hooks of ours. When a DDP of any kind takes a bridged module as its child, before any
communication, ``_on_registration`` compares the ranks of its group with those of the leaves, and gives the DDP a
``ReducerGuard``. The guard runs before each forward: it compares the set of parameters with that of construction, and
before the first synchronized forward it compares the ranks.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import skip_init

from tp_ddp_bridge._shared._torch_compat import without_overrides
from tp_ddp_bridge._shared.problems import PlanError, Problem, raise_problems
from tp_ddp_bridge._torch_compat import comm_hooks, is_joining, reduced_parameters
from tp_ddp_bridge.consistency.replicas import (
    Scope,
    all_replica_problems,
    mixing_problems,
    raise_on_all_ranks,
    shard_problems,
    structure_lines,
)
from tp_ddp_bridge.layout import bridge_tag, is_replicated_tag, layout_of, tensor_groups


class BridgedDDP(DistributedDataParallel):
    """Result of ``wrap_ddp``: torch's hooks run on its own group, others are tried."""

    def __getstate__(self) -> Any:
        """Refuse a copy or pickle over a group of some ranks, as torch does, with the way on."""
        try:
            return super().__getstate__()  # type: ignore[no-untyped-call]  # torch's
        except RuntimeError as error:
            raise PlanError(
                Problem(
                    "unsupported-wrapper",
                    "DistributedDataParallel",
                    found="torch copies and pickles no DDP over a group of some ranks, and AveragedModel(ddp) copies"
                    " it",
                    hint="the module inside has all the weights: AveragedModel(ddp.module), copy.deepcopy(ddp.module)",
                )
            ) from error

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook on the data-parallel group; a collective of all ranks.

        A hook other than torch's is tried on a small bucket, with other values on each rank. One without an average
        in each step, by design, is accepted with ``hook.is_data_parallel = True``.

        Args:
            state: As in DDP; ``None``, as the state or as its ``process_group``, becomes DDP's group. Another must have
                DDP's ranks.
            hook: As in DDP.

        Raises:
            PlanError: The hook averages over other ranks than DDP's, or computes something other than their average.
        """
        if state is None:
            state = self.process_group
        elif getattr(state, "process_group", state) is None:
            state.process_group = self.process_group  # type: ignore[attr-defined]  # it has one
        scope = _scope_of(self)
        raise_on_all_ranks(scope, "register_comm_hook", [*_hook_problems(self.process_group, hook, state)])
        raise_on_all_ranks(scope, "register_comm_hook", _trial_problems(self, hook, state))
        super().register_comm_hook(state, hook)


def _is_torchs(hook: Callable[..., Any]) -> bool:
    """Return True for torch's own communication hooks, but not for wrappers of others."""
    return hook.__module__.startswith("torch.distributed.algorithms.ddp_comm_hooks") and "." not in hook.__qualname__


def _state_values(state: object) -> dict[str, Any]:
    names = [*getattr(state, "__slots__", ()), *getattr(state, "__dict__", ())]
    return {name: getattr(state, name, None) for name in names}


def _hook_problems(group: dist.ProcessGroup, hook: Any, state: object) -> Iterator[Problem]:
    """Yield a problem for each group in a hook's state with other ranks than DDP's."""
    groups = {
        name: dist.get_process_group_ranks(each)
        for name, each in {"state": state, **_state_values(state)}.items()
        if isinstance(each, dist.ProcessGroup)
    }
    # Torch's hooks read None as the default group, in a state object as well.
    if (state is None and _is_torchs(hook)) or getattr(state, "process_group", group) is None:
        groups["process_group"] = dist.get_process_group_ranks(None)
    own = dist.get_process_group_ranks(group)
    for name, ranks in groups.items():
        if not set(ranks) <= set(own) or (name != "subgroup" and ranks != own):
            yield Problem(
                "mesh-mismatch",
                f"{name} of {getattr(hook, '__name__', 'hook')}",
                found=f"its ranks are {ranks}, DDP averages over {own}: different shards would be mixed",
                hint="make the state with groups of ddp.process_group's ranks",
            )


def _trial_problems(ddp: DistributedDataParallel, hook: Any, state: object) -> list[Problem]:
    """Return how a hook deviates from the data group's average of a small bucket.

    A collective. Only torch's reducer can make a bucket, so a small module gets its own DDP.
    """
    if _is_torchs(hook) or getattr(hook, "is_data_parallel", False):
        return []
    if not isinstance(state, dist.ProcessGroup | None):  # a copy: the trial must not change its counts and memory
        values, state = _state_values(state), copy.copy(state)
        for name, value in values.items():  # each one: PowerSGDState leaves its group out of copies
            setattr(state, name, copy.copy(value) if isinstance(value, dict | list | set | torch.Tensor) else value)
    group, device = ddp.process_group, next(ddp.module.parameters()).device
    # The gradient of its weight is its input, whatever the weight: nothing random is drawn for it.
    probe = DistributedDataParallel(skip_init(nn.Linear, 8, 1, bias=False, device=device), process_group=group)
    probe.register_comm_hook(state, hook)
    ranks, world = dist.get_process_group_ranks(group), dist.get_world_size()
    ramp = torch.arange(1.0, 9.0, device=device)
    scale = {rank: (1 + rank) ** 2 / world**2 for rank in range(world)}  # squares: no two groups have one average
    expected = ramp * sum(scale[rank] for rank in ranks) / len(ranks)
    try:
        with torch.enable_grad():
            probe(ramp * scale[dist.get_rank()]).backward()
        error = float((probe.module.weight.grad - expected).abs().max() / expected.max())
        reason = f"it is {error:.1%} off their average: does it name the group?" if not error < 0.02 else ""
    except Exception as raised:
        reason = f"{type(raised).__name__}: {raised}"
    if not reason:
        return []
    name = getattr(hook, "__name__", "hook")
    return [
        Problem(
            "invalid-hook",
            name,
            found=f"tried on a small bucket of ranks {ranks}, {reason}",
            hint="average over ddp.process_group; for a hook that does not average by design, hook.is_data_parallel ="
            " True",
        )
    ]


# ---- the hook at construction --------------------------------------------------------------------------------------


@functools.cache
def guard_ddp() -> None:
    """From now on guard every DDP around leaves; installed once for the process."""
    register_module_module_registration_hook(_on_registration)


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    # DDP has set its process group by now, and has communicated nothing.
    if child is None or name != "module" or not isinstance(parent, DistributedDataParallel):
        return
    if isinstance(parent, BridgedDDP) or any(bridge_tag(each) is not None for each in child.parameters()):
        raise_problems(_group_problems(child, parent.process_group), "DDP would mix shards")
        parent.register_forward_pre_hook(ReducerGuard(child, parent.parameters_to_ignore))


def _group_problems(module: nn.Module, group: dist.ProcessGroup) -> list[Problem]:
    return mixing_problems(dist.get_rank(), frozenset(dist.get_process_group_ranks(group)), tensor_ranks(module))


def tensor_ranks(module: nn.Module) -> dict[str, frozenset[int]]:
    """Return the mesh's ranks for every shard and DTensor of ``module``."""
    layouts = {name: layout_of(p) for name, p in module.named_parameters() if not is_replicated_tag(p)}
    return {name: frozenset(each.mesh.mesh.flatten().tolist()) for name, each in layouts.items() if each is not None}


def guard_of(ddp: DistributedDataParallel) -> ReducerGuard:
    """Return the guard of a DDP around leaves."""
    return next(hook for hook in ddp._forward_pre_hooks.values() if isinstance(hook, ReducerGuard))


def _scope_of(ddp: DistributedDataParallel) -> Scope:
    """Return the ranks that raise together."""
    return guard_of(ddp).scope or [ddp.process_group, *tensor_groups(ddp.module.parameters())]


# ---- the guard before each forward ---------------------------------------------------------------------------------


class ReducerGuard:
    """Forward pre-hook of a DDP around leaves.

    Attributes:
        scope: The ranks that raise together at the first forward; by default those connected by the groups.
    """

    scope: Scope | None = None
    _reduced: dict[int, torch.Tensor] | None = None
    _accepted: tuple[list[nn.Parameter], list[bool]] | None = None  # by identity, and their requires_grad
    _compared = False

    def __init__(self, module: nn.Module, ignored: Iterable[str]) -> None:
        # DDP builds its reducer of these right afterwards.
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._reduced = {id(each): each for name, each in named if name not in ignored}

    def __call__(self, ddp: DistributedDataParallel, inputs: Any) -> None:
        """Raise if this forward would let replicas diverge."""
        if torch.compiler.is_compiling():
            return  # no exchange in a graph
        parameters = list(ddp.module.parameters())
        with without_overrides():  # of the leaves' class
            trains = [parameter.requires_grad for parameter in parameters]
        accepted = self._accepted
        if accepted is None or trains != accepted[1] or not all(map(operator.is_, parameters, accepted[0])):
            self._check_reducer_parameters(ddp)
            self._accepted = parameters, trains
        # Otherwise ranks need not run the same forwards: evaluation, no_sync(), join() with uneven inputs.
        if not self._compared and ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            if not is_joining(ddp):
                self._compare_ranks(ddp)
            self._compared = True

    def _check_reducer_parameters(self, ddp: DistributedDataParallel) -> None:
        """Raise if trained parameters are missing in the reducer: their replicas would diverge."""
        named = dict(ddp.module.named_parameters())
        if self._reduced is None:
            self._reduced = {id(each): each for each in reduced_parameters(ddp) if each.requires_grad}
        reduced = self._reduced
        if any(isinstance(parameter, DTensor) for parameter in named.values()):
            raise RuntimeError(
                "undo_dp_transform gave the module of this DDP its DTensor parameters back, and DDP cannot reduce "
                "them: wrap it again with wrap_ddp"
            )
        raise_problems(
            Problem(
                "parameter-replaced",
                name,
                found="it trains, but was added, replaced, loaded with assign=True or thawed after DDP was made",
                hint="DDP does not reduce it: do so before wrap_ddp, or call wrap_ddp and build the optimizer again",
            )
            for name, parameter in named.items()
            if parameter.requires_grad and id(parameter) not in reduced and name not in ddp.parameters_to_ignore
        )

    def _compare_ranks(self, ddp: DistributedDataParallel) -> None:
        """Compare groups, shards and replicas of all ranks; they raise together."""
        module, group = ddp.module, ddp.process_group
        scope, hooks = _scope_of(ddp), comm_hooks(ddp)
        problems = _group_problems(module, group)
        problems += [problem for hook, state in hooks for problem in _hook_problems(group, hook, state)]
        raise_on_all_ranks(scope, "first forward of DDP", problems, structure_lines(module))
        if not isinstance(ddp, BridgedDDP):  # a BridgedDDP has tried its hook
            tried = [problem for hook, state in hooks for problem in _trial_problems(ddp, hook, state)]
            raise_on_all_ranks(scope, "first forward of DDP", tried)
        raise_on_all_ranks(scope, "first forward of DDP", shard_problems(module, group))
        # Buffers are synchronized by DDP itself, or are the rank's own.
        groups = (group, *tensor_groups(module.parameters()))
        problems = all_replica_problems((*module.named_parameters(),), groups)
        raise_on_all_ranks(scope, "first forward of DDP", problems)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copied or unpickled DDP makes a new reducer, of its present parameters
