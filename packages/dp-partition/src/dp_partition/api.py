"""The front end: `compile` makes a train step for one device data-parallel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dp_partition._shared.problems import PlanError, Problem
from dp_partition.analysis import explain_messages, explain_sums, messages_of
from dp_partition.plan.placements import DataParallelStyle, parse_style
from dp_partition.plan.plan import Batch, CommConfig, PartitionPlan, Semantics, Settings, Style
from dp_partition.runner import Runner, eager_plan
from dp_partition.runtime.state import unsharded


def compile(
    train_step: Callable[..., Any],
    *,
    mesh: DeviceMesh | None = None,
    style: Style | DataParallelStyle = "default",
    semantics: Semantics = "local",
    batch: Batch | None = None,
    placements: Mapping[str, Placement] | None = None,
    bucket_mb: float = 25,
    prefetch: int = 1,
    reshard_after_forward: bool | Collection[str] = True,
    accumulate: int = 1,
    reduce_dtype: torch.dtype | None = None,
    check: str = "sampled",
    capture: Literal["auto", "always", "never"] = "auto",
    full: Literal["keep", "refuse"] = "keep",
    observe: bool = True,
    mark_dynamic: int | Sequence[int] = (),
    share: Step | None = None,
) -> Step:
    """Make a train step, written for one device, run data-parallel.

    The first call traces ``train_step`` with its arguments (forward, backward, optimizer) and places the model's
    parameters and the optimizer's state on the mesh; every call runs the partitioned graph. Afterwards the parameters
    are DTensors.

    Args:
        train_step: Function of a model, its optimizer and a batch, in any order and number; it runs backward and steps
            the optimizer. To be a graph it must not depend on values of tensors, and clears gradients
            (``optim.zero_grad()``). Of a step under `torch.compile` the original is taken: compile the model instead.
        mesh: One-dimensional mesh of the data-parallel ranks; for ``"hybrid"`` one of two axes.
        style: Placement of parameters: ``"default"``, ``"replicate"``, ``"zero1"``, ``"zero2"``, ``"fully_shard"``,
            ``"hybrid"`` (fully sharded over the mesh's second axis, replicated along its first), a `DataParallelStyle`.
        semantics: ``"local"``: the step as written on each rank's batch, gradients averaged over the ranks (as DDP
            and FSDP do). ``"global"``: equal to one device on the ranks' batches together, for any loss.
        batch: Batch dim of tensor arguments, for global semantics and accumulation. Under global
            semantics every rank passes as many rows.
        placements: Name patterns -> ``Replicate()`` or ``Shard(0)``, for parameters outside of the style.
        bucket_mb: Largest size of a bucket of parameters or gradients, in MiB; 0 sends every tensor by itself.
        prefetch: Number of parameter buckets in flight ahead of compute, and of gradient buckets behind it.
        reshard_after_forward: Free sharded parameters after forward and gather them again for backward:
            ``True`` all, ``False`` none, or the full names of some.
        accumulate: Number of micro-batches of a call's batch; one reduction per call.
        reduce_dtype: Dtype of the reduction of gradients: they are cast before they are sent, averaged by the
            collective (in float16 divided before and after the sum), and cast back; None reduces in their own.
        check: Calls to compare with an eager run of the step on a copy of everything it uses: ``"sampled"``:
            calls 1, 2 and one drawn from each [2^k, 2^(k+1)), ``"first"``: calls 1 and 2, ``"never"``: none;
            but for ``"never"`` also the first call of a trace made by all ranks. Eagerly: calls 1 and 2, in shards 3.
        capture: ``"auto"``: a step that traces and passes its check runs as a graph, any other one eagerly on the same
            ranks, with the reason in a warning; ``"always"`` raises instead; ``"never"`` runs it eagerly at once.
            Eagerly parameters are replicated, or in FSDP2's shards under every style but ``"replicate"``.
        full: For an eager step in shards: ``"keep"`` leaves parameters beyond FSDP2 full, ``"refuse"`` raises.
        observe: An eager step runs its first call on full parameters, to find those beyond FSDP2. ``False`` shards all
            before it, for a model that does not fit full beside its gradients; uses beyond FSDP2 raise then.
        mark_dynamic: Dims of the tensor arguments with changing lengths: one trace then serves all lengths. A trace in
            need of numbers is replaced, with a warning, by one for each length.
        share: Another step, to use its placed parameters (evaluation); mesh, style and placements are its.

    Raises:
        PlanError: For invalid settings; at the first call, for steps that cannot run with them.
    """
    problems: list[Problem] = []
    base = None if share is None else runner_of(share)
    if base is not None:
        if mesh is not None or placements is not None or reduce_dtype is not None:
            text = "mesh, placements or reduce_dtype beside share"
            problems.append(Problem("conflicting-arguments", "share", found=text, hint="leave them out"))
        mesh, style = base.mesh, base.settings.style  # the parameters are placed already
    if semantics == "local" and batch is not None and accumulate == 1:
        hint = "local semantics runs the step on each rank's own arguments; leave batch out"
        problems.append(Problem("conflicting-arguments", "batch", found=repr(batch), hint=hint))
    parsed = DataParallelStyle.DEFAULT  # to collect further problems
    try:
        parsed = parse_style(style)
    except PlanError as error:
        problems += error.problems
    reshard = reshard_after_forward
    if not isinstance(reshard, bool):
        if isinstance(reshard, str):  # else a set of letters
            hint = "pass True, False, or a list of full names"
            problems.append(Problem("invalid-argument", "reshard_after_forward", found=repr(reshard), hint=hint))
        reshard = frozenset(reshard)  # settings are hashable values
    settings = Settings(
        parsed,
        semantics,
        dict(placements or {}),
        (batch or Batch()).dim,
        CommConfig(int(bucket_mb * (1 << 20)), prefetch, reduce_dtype),
        accumulate,
        reshard,
        check,
        (mark_dynamic,) if isinstance(mark_dynamic, int) else tuple(mark_dynamic),
        capture,
        full,
        observe,
    )
    problems += settings.problems()
    axes = 2 if parsed is DataParallelStyle.HYBRID else 1
    if mesh is None:
        hint = "pass a one-dimensional mesh"
        problems.append(Problem("missing-mesh", "mesh", found="neither mesh nor share", hint=hint))
    elif not hasattr(mesh, "ndim"):  # a fake mesh is no DeviceMesh
        hint = "pass a DeviceMesh, from init_device_mesh"
        problems.append(Problem("wrong-type", "mesh", found=f"{mesh!r:.100}", hint=hint))
    elif mesh.ndim != axes:
        of_two = "pass a mesh of two axes: replicas along the first, shards along the second; or style='fully_shard'"
        hint = of_two if axes == 2 else 'pass one axis of it, as mesh["dp"], or use style="hybrid"'
        problems.append(Problem("invalid-mesh", "mesh", found=f"a mesh with {mesh.ndim} axes", hint=hint))
    if isinstance(train_step, torch.nn.Module) or not callable(train_step):
        hint = "pass the function that trains, train_step(model, optimizer, batch); the model is its argument"
        problems.append(Problem("wrong-type", "train_step", found=type(train_step).__name__, hint=hint))
    if problems or mesh is None:  # all problems in one error
        raise PlanError(problems, "dp_partition.compile")
    return Step(Runner(train_step, mesh, settings, base))


class Step:
    """A data-parallel train step. Made by `compile`; call it like the original function."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on this rank's batch."""
        return self._runner.call(args, kwargs)

    @property
    def name(self) -> str:
        """Name of the original function."""
        return self._runner.name

    @property
    def num_traces(self) -> int:
        """Number of times the function was traced: once for every new shape, mode or constant."""
        return self._runner.num_traces

    @property
    def plan(self) -> PartitionPlan:
        """Placement of parameters, gradients and state; available after the first call."""
        eager = self._runner.eager
        if eager is not None:
            return eager_plan(eager, self._runner.settings.style)
        return replace(self._runner.bound().plan, checks=self._runner.checks())

    @property
    def graph(self) -> fx.GraphModule:
        """The partitioned graph of the last call, with local shapes in ``node.meta["val"]``."""
        if self._runner.eager is not None:
            hint = "capture='always' raises what keeps it from being traced"
            raise PlanError(Problem("not-traceable", self.name, found="the step runs eagerly", hint=hint))
        self._runner.bound()  # not before the first call
        assert self._runner.latest is not None
        module = self._runner.latest.with_local_values()
        module.recompile()  # passes change the graph, not its code
        return module

    def explain(self, name: str | None = None) -> str:
        """Text about one parameter, or about all and what a step sends and reads."""
        lines = [self.plan.explain(name)]
        if self._runner.eager is not None:
            return lines[0]
        messages = messages_of(self.graph.graph, self.plan.world)
        if name is not None:
            return "\n".join([*lines, *explain_messages(messages, self.plan[name].info.name)])
        lines += explain_sums(messages)
        if self._runner.reads.past:
            lines.append(f"  reads past its arguments: {', '.join(sorted(self._runner.reads.past))}")
        return "\n".join(lines)

    def unsharded(self, writeback: bool = True) -> AbstractContextManager[None]:
        """Hold full plain parameters in the block, for eager code on every rank alike.

        The parameters are valid in the block only: optimizers and lists of them are stale afterwards, and
        raise errors. A step that shares another's parameters unshards the same ones.

        Args:
            writeback: Keep values written to the parameters. A nested block leaves that to the outer one.
        """
        owner = self._runner.owner  # a step that shares has no parameters of its own
        if owner.eager is not None:
            return owner.eager.unsharded(writeback=writeback)
        self._runner.bound()  # not before the first call
        return unsharded(owner.bound(), writeback)

    def release(self) -> None:
        """Restore full plain parameters and state in model and optimizer, for good. Not for a step that shares."""
        self._runner.release()


def runner_of(step: Step) -> Runner:
    """Return the runner of a step, for the package's own tools."""
    return step._runner
