"""``shard_module`` and ``shard_parameter``: compare, scatter, then change the module, all or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from shard_spec._shared.consensus import problems_of
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.apply.apply import Call, carry_out
from shard_spec.apply.handle import Installed, ShardHandle, UndoLog, put
from shard_spec.apply.tensors import ExecutionPlan, is_sharded, summed_over
from shard_spec.distributed.exchange import group_or_default, on_all_ranks
from shard_spec.distributed.parameter_format import GroupRef, MeshCache
from shard_spec.layout.layout import Layout
from shard_spec.legacy.plan_module import forward_for, output_layout, plan_module
from shard_spec.legacy.root import CompareAndHook
from shard_spec.legacy.rows import BatchRows, LocalRows, ReshardOutput
from shard_spec.sharding_plan import ShardingPlan
from shard_spec.specs import ShardingSpec, as_spec
from shard_spec.specs.base import unknown_spec


class KeepSlowPath:
    """A forward pre-hook that does nothing: nn.TransformerEncoderLayer reads weights past modules without hooks."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Do nothing."""


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def shard_module(
    module: nn.Module, plan: ShardingPlan | Any, src_rank: int = 0, process_group: dist.ProcessGroup | None = None
) -> ShardHandle:
    """Shard ``module`` in place as ``plan`` says, with the values that ``src_rank`` has.

    Every rank of the group calls it. Before anything moves the ranks compare what they are about to do; a problem on
    one rank raises the same error on all, and a call that fails leaves the module as it was.

    Parameters and buffers that the plan names become DTensors; tied ones stay tied, frozen ones frozen. The others get
    the source's values. From then on each rank passes torch's chunk of the batch; other sizes are refused before the
    forward runs. The module computes what the unsharded one does on all chunks, in the order of the ranks:

    - an ``nn.Linear`` with a sharded weight returns a DTensor, the outputs of the whole batch: cut in its last dim
      where the weight's rows are cut, partial sums where its columns are. The next sharded Linear takes it as it is.
    - an ``nn.Embedding`` returns this rank's rows. An ``nn.EmbeddingBag`` keeps a sharded table for a module around it
      that looks ids up itself; its own forward raises.
    - ``output_plan`` lays the output of a module out otherwise; ``return_local_tensor`` gives this rank's rows back.
    - in backward, the loss is the sum of the ranks' losses: gradients of parameters that are not sharded are summed
      over the group as well, so that all parameters train as in the unsharded module.

    Args:
        module: The module. On ranks other than ``src_rank`` its tensors may be on the meta device.
        plan: Ours or torch's ``ShardingPlan``. Ranks in specs are global ranks, every rank of the group named once,
            in one order in the whole plan. A ``Sharder`` replaces the submodule it is given for.
        src_rank: Rank in the group that has the values.
        process_group: Default: the default group.

    Returns:
        A handle with ``plan``, ``actions`` (``explain()``, ``to_json()``) and ``undo()``.

    Raises:
        PlanError: With every problem of every rank, before anything moved.
    """
    group = group_or_default(process_group)
    return _act(module, lambda: plan, src_rank, group, whole=True)


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec | Layout | Any,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> ShardHandle:
    """Shard one parameter or buffer of ``module`` in place.

    As ``shard_module`` with a plan of one entry, but nothing else in the module is looked at: what the other
    parameters hold on each rank, and their gradients, stay as they are, except that gradients of the replicated
    parameters of this very module are summed over the group.

    Args:
        module: The module that has the parameter itself.
        param_name: Its name there, without dots.
        sharding_spec: Ours, torch's, or a ``Layout``.
        src_rank: Rank in the group that has the values.
        process_group: Default: the default group.

    Raises:
        PlanError: Before anything moved, on every rank; ``tied-elsewhere`` when another module has the same parameter
            (shard the module that holds both).
    """
    group = group_or_default(process_group)

    def check() -> list[Problem]:
        name: Any = param_name  # callers are untyped
        if not isinstance(name, str) or "." in name:
            return [
                Problem(
                    "invalid-argument",
                    "param_name",
                    found=repr(param_name),
                    hint="the name of a parameter of this very module; for deeper ones use shard_module",
                )
            ]
        if not isinstance(sharding_spec, Layout) and as_spec(sharding_spec) is None:
            return [unknown_spec("sharding_spec", sharding_spec)]
        return []

    return _act(module, lambda: ShardingPlan({param_name: sharding_spec}), src_rank, group, whole=False, check=check)


# ---- the recipe -----------------------------------------------------------------------------------------------


def _act(
    module: nn.Module,
    plan_of_call: Callable[[], Any],
    src_rank: int,
    group: dist.ProcessGroup,
    *,
    whole: bool,
    check: Callable[[], list[Problem]] = list,
) -> ShardHandle:
    """Shard the ``whole`` module, or only what the plan names. What the functions raise on one rank, all raise."""

    def planned() -> tuple[Any, ExecutionPlan]:
        problems = check()
        try:
            plan = plan_of_call()
            actions = plan_module(module, plan, group, src_rank, whole=whole)
        except Exception as error:
            raise PlanError((*problems_of(error), *problems)) from error
        raise_problems(problems)
        return plan, actions

    what = "shard_module" if whole else "shard_parameter"
    plan, actions = on_all_ranks(group, what, planned, lambda plan_and_actions: plan_and_actions[1].lines)
    ref = GroupRef(group)
    layouts = [action.layout for action in actions.tensors if action.layout is not None]
    meshes = MeshCache(ref, actions.device.type, [*layouts, *map(output_layout, actions.outputs.values())])
    rows = BatchRows(ref, meshes.flat)
    norms = [name for name, each in module.named_modules() if isinstance(each, _BATCH_NORMS)]
    if whole and ref.size > 1 and norms:
        warnings.warn(
            f"shard_module: each rank normalizes with the statistics of its own rows in {', '.join(norms)}, where the "
            "unsharded module uses the full batch; use nn.SyncBatchNorm, or a norm over features",
            stacklevel=3,
        )
    call = Call(module, group, meshes.mesh_of, src_rank=src_rank)

    def finish(installed: Installed, replaced: dict[str, nn.Module], log: UndoLog) -> None:
        for path, new in replaced.items() if ref.size > 1 else ():
            named = [(name, each) for name, each in new.named_parameters() if each.requires_grad]
            owned = [name for name, each in named if not is_sharded(each) and not summed_over(each)]
            if owned:
                warnings.warn(
                    f"shard_module: values and gradients of {', '.join(owned)} in {path} are each rank's own, since a "
                    "Sharder decides about them; where they are replicas, call shard_module inside of the Sharder",
                    stacklevel=5,
                )
        for path, sharded in actions.forwards.items():
            owner = module.get_submodule(path)
            kind = forward_for(owner)
            assert kind is not None
            forward = kind(owner, path, rows, sharded)
            installed.removals.append(put(owner.__dict__, "forward", forward, log))
            installed.forwards[path] = owner, forward
            installed.register(owner.register_forward_pre_hook(KeepSlowPath()), log)
        for path, wanted in actions.outputs.items():
            reshard = ReshardOutput(path, wanted, rows, meshes)
            installed.register(module.get_submodule(path).register_forward_hook(reshard), log)
        for path in actions.locals:
            local = LocalRows(path, rows, path in actions.outputs)
            installed.register(module.get_submodule(path).register_forward_hook(local), log)
        compare = CompareAndHook(rows, everything=actions.everything, others=list(replaced.values()))
        installed.register(compare, log)
        compare.adopt(module)
        # Before the user's own hooks: they may run modules that communicate.
        installed.register(module.register_forward_pre_hook(compare, prepend=True), log)

    return carry_out(call, plan, actions, finish=finish)
