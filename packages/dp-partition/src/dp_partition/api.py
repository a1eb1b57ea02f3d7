"""The two doors: `distribute` runs a train step as it is written, `compile` makes it one graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dp_partition._shared.problems import PlanError, Problem
from dp_partition.analysis import explain_messages, explain_sums, messages_of
from dp_partition.distributed import DistributedRunner
from dp_partition.eager.step import EagerStep
from dp_partition.plan.placements import DataParallelStyle, name_of, parse_style, without_compiler
from dp_partition.plan.plan import (
    Batch,
    CommConfig,
    PartitionPlan,
    Semantics,
    Settings,
    Style,
    choice,
    reduction_problems,
)
from dp_partition.runner import Runner
from dp_partition.runtime.saving import own_mesh
from dp_partition.runtime.state import unsharded

EagerStyle = Literal["fully_shard", "replicate", "hybrid"]


@overload
def distribute(
    train_step: Callable[..., Any],
    *,
    mesh: DeviceMesh,
    style: EagerStyle | DataParallelStyle = ...,
    bucket_mb: float = ...,
    reduce_dtype: torch.dtype | None = ...,
    full: Literal["keep", "refuse"] = ...,
    observe: bool = ...,
    check: Literal["first", "never"] = ...,
) -> DistributedStep: ...


@overload
def distribute(
    train_step: Sequence[Callable[..., Any]],
    *,
    mesh: DeviceMesh,
    style: EagerStyle | DataParallelStyle = ...,
    bucket_mb: float = ...,
    reduce_dtype: torch.dtype | None = ...,
    full: Literal["keep", "refuse"] = ...,
    observe: bool = ...,
    check: Literal["first", "never"] = ...,
) -> list[DistributedStep]: ...


def distribute(
    train_step: Callable[..., Any] | Sequence[Callable[..., Any]],
    *,
    mesh: DeviceMesh,
    style: EagerStyle | DataParallelStyle = "fully_shard",
    bucket_mb: float = 25,
    reduce_dtype: torch.dtype | None = None,
    full: Literal["keep", "refuse"] = "keep",
    observe: bool = True,
    check: Literal["first", "never"] = "first",
) -> DistributedStep | list[DistributedStep]:
    """Make a train step, written for one device, run data-parallel as it is written.

    Every call runs the step's own Python: branches on values, counters, hooks, any optimizer. Nothing is traced.
    Gradients are averaged over the ranks in each backward pass, as under DDP, or parameters lie in FSDP2's shards.

    Args:
        train_step: Function of a model, its optimizer and a batch, in any order and number, or with them in ``self``, a
            closure or globals. A list: several steps over one model, such as those of a GAN, with one placement.
        mesh: One-dimensional mesh of the data-parallel ranks; for ``"hybrid"`` one of two axes.
        style: ``"fully_shard"``: parameters, gradients and optimizer state in shards; ``"replicate"``: full on each
            rank; ``"hybrid"``: sharded over the mesh's second axis, replicated along its first.
        bucket_mb: Largest size of a bucket of gradients of full parameters, in MiB.
        reduce_dtype: Dtype in which gradients are reduced; None: their own.
        full: Parameters that FSDP2 cannot hold (read outside of a forward, say): ``"keep"`` leaves them full on every
            rank, with a warning and the reason in `DistributedStep.explain`; ``"refuse"`` raises.
        observe: Run the first call on full parameters, to find those beyond FSDP2. ``False`` shards all before it, for
            a model that does not fit full beside its gradients; uses beyond FSDP2 raise then.
        check: ``"first"`` compares the first two calls of a step with the step on a full copy of everything it uses,
            in shards three; ``"never"`` none. Full parameters are compared between the ranks in calls 1, 2, 4, 8, ...
            in any case.

    Returns:
        The step, to be called like the function; for a list as many steps.

    Raises:
        PlanError: For invalid settings, all in one error.
    """
    functions: list[Any] = list(train_step) if isinstance(train_step, Sequence) else [train_step]
    problems = [*choice("check", check, ("first", "never")), *choice("full", full, ("keep", "refuse"))]
    problems += reduction_problems(reduce_dtype)
    if bucket_mb < 0:
        problems.append(Problem("invalid-argument", "bucket_mb", found=str(bucket_mb), hint="use 0 or more"))
    parsed = _parsed(style, problems)
    if parsed in (DataParallelStyle.DEFAULT, DataParallelStyle.ZERO1, DataParallelStyle.ZERO2):
        problems.append(
            Problem(
                "invalid-argument",
                "style",
                found=parsed.name.lower(),
                hint="use 'fully_shard', 'replicate' or 'hybrid'; dp_partition.compile has the other styles",
            )
        )
    problems += _mesh_problems(mesh, parsed)
    for function in functions or [None]:
        problems += _step_problems(function)
    if problems:
        raise PlanError(problems, "dp_partition.distribute")
    mesh, comm = own_mesh(mesh), CommConfig(int(bucket_mb * (1 << 20)), reduce_dtype=reduce_dtype)
    settings = Settings(parsed, comm=comm, check=check, full=full, observe=observe)
    steps = [without_compiler(function, mesh) for function in functions]
    eager = EagerStep(steps, mesh, ", ".join(map(name_of, steps)), settings)
    wrapped = [DistributedStep(DistributedRunner(eager, number, settings)) for number in range(len(steps))]
    return wrapped if isinstance(train_step, Sequence) else wrapped[0]


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
    mark_dynamic: int | Sequence[int] = (),
    share: CompiledStep | None = None,
) -> CompiledStep:
    """Make a train step, written for one device, one data-parallel graph of forward, backward and optimizer.

    Whatever the step reads from Python is a constant of the graph: a number in a closure, a flag of a module, an
    attribute of a config. A call that finds another value in a place that the graph's key follows takes a new trace. A
    sampled comparison with the step finds changes elsewhere, and names the last compared call that was equal.

    The first call traces ``train_step`` with its arguments and places the model's parameters and the optimizer's state
    on the mesh; every call runs the partitioned graph. Afterwards the parameters are DTensors. A step that cannot be a
    graph raises, with the line of its code; nothing else is run in its place. `distribute` runs such steps.

    Args:
        train_step: Function of a model, its optimizer and a batch, in any order and number; it runs backward and steps
            the optimizer. It must not depend on values of tensors, and clears gradients
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
        check: Calls to compare with a run of the step on a copy of everything it uses: ``"sampled"``:
            calls 1, 2 and one drawn from each [2^k, 2^(k+1)), ``"first"``: calls 1 and 2, ``"never"``: none;
            but for ``"never"`` also the first call of a trace made by all ranks.
        mark_dynamic: Dims of the tensor arguments with changing lengths: one trace then serves all lengths. A trace in
            need of numbers is replaced, with a warning, by one for each length.
        share: Another step, to use its placed parameters (evaluation, a second training step); mesh, style and
            placements are its.

    Raises:
        PlanError: For invalid settings; at the first call, for steps that cannot be a graph.
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
    parsed = _parsed(style, problems)
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
    )
    problems += settings.problems()
    problems += _mesh_problems(mesh, parsed)
    problems += _step_problems(train_step)
    if problems or mesh is None:  # all problems in one error
        raise PlanError(problems, "dp_partition.compile")
    return CompiledStep(Runner(train_step, own_mesh(mesh), settings, base))


def _parsed(style: str | DataParallelStyle, problems: list[Problem]) -> DataParallelStyle:
    """Return the style; for an unknown one add the problem, and return one to collect further problems with."""
    try:
        return parse_style(style)
    except PlanError as error:
        problems += error.problems
        return DataParallelStyle.REPLICATE


def _mesh_problems(mesh: DeviceMesh | None, style: DataParallelStyle) -> list[Problem]:
    axes = 2 if style is DataParallelStyle.HYBRID else 1
    if mesh is None:
        return [Problem("missing-mesh", "mesh", found="neither mesh nor share", hint="pass a one-dimensional mesh")]
    if not hasattr(mesh, "ndim"):  # a fake mesh is no DeviceMesh
        return [Problem("wrong-type", "mesh", found=f"{mesh!r:.100}", hint="pass a DeviceMesh, from init_device_mesh")]
    if mesh.ndim == axes:
        return []
    of_two = "pass a mesh of two axes: replicas along the first, shards along the second; or style='fully_shard'"
    hint = of_two if axes == 2 else 'pass one axis of it, as mesh["dp"], or use style="hybrid"'
    return [Problem("invalid-mesh", "mesh", found=f"a mesh with {mesh.ndim} axes", hint=hint)]


def _step_problems(step: object) -> list[Problem]:
    if callable(step) and not isinstance(step, torch.nn.Module):
        return []
    return [
        Problem(
            "wrong-type",
            "train_step",
            found=type(step).__name__,
            hint="pass the function that trains, train_step(model, optimizer, batch); the model is its argument",
        )
    ]


class Step:
    """A step of either door: calls of it, and its name."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on this rank's batch."""
        return self._runner.call(args, kwargs)

    @property
    def name(self) -> str:
        """Name of the original function."""
        return str(self._runner.name)


class DistributedStep(Step):
    """A train step that runs as written on every rank. Made by `distribute`; call it like the original function."""

    _runner: DistributedRunner

    @property
    def plan(self) -> PartitionPlan:
        """Placement of parameters, gradients and state; available after the first call."""
        return self._runner.plan()

    def explain(self, name: str | None = None) -> str:
        """Text about one parameter, or about all and the comparisons."""
        return self.plan.explain(name)

    def unsharded(self, writeback: bool = True) -> AbstractContextManager[None]:
        """Hold full plain parameters in the block, for evaluation or a checkpoint, on every rank alike.

        The parameters of the block are valid in it only: optimizers and lists of them are stale afterwards, and
        raise errors.

        Args:
            writeback: Keep values written to the parameters, those before an error in the block too.
        """
        return self._runner.eager.unsharded(writeback=writeback)

    def release(self) -> None:
        """Restore full plain parameters and state in model and optimizer, for good; of all steps of a list."""
        self._runner.eager.release()


class CompiledStep(Step):
    """A train step as one graph. Made by `compile`; call it like the original function."""

    _runner: Runner

    @property
    def num_traces(self) -> int:
        """Number of times the function was traced: once for every new shape, mode or constant."""
        return self._runner.traces.num_traces

    @property
    def plan(self) -> PartitionPlan:
        """Placement of parameters, gradients and state; available after the first call."""
        return replace(self._runner.bound().plan, checks=self._runner.checks())

    @property
    def graph(self) -> fx.GraphModule:
        """The partitioned graph of the last call, with local shapes in ``node.meta["val"]``."""
        self._runner.bound()  # not before the first call
        assert self._runner.traces.latest is not None
        module = self._runner.traces.latest.with_local_values()
        module.recompile()  # passes change the graph, not its code
        return module

    def explain(self, name: str | None = None) -> str:
        """Text about one parameter, or about all and what a step sends and reads."""
        lines = [self.plan.explain(name)]
        messages = messages_of(self.graph.graph, self.plan.world)
        if name is not None:
            return "\n".join([*lines, *explain_messages(messages, self.plan[name].info.name)])
        lines += explain_sums(messages)
        if self._runner.traces.reads.past:
            lines.append(f"  reads past its arguments: {', '.join(sorted(self._runner.traces.reads.past))}")
        return "\n".join(lines)

    def unsharded(self, writeback: bool = True) -> AbstractContextManager[None]:
        """Hold full plain parameters in the block, for eager code on every rank alike.

        The parameters are valid in the block only: optimizers and lists of them are stale afterwards, and
        raise errors. A step that shares another's parameters unshards the same ones.

        Args:
            writeback: Keep values written to the parameters, also after an error. A nested block leaves that to the
                outer one.
        """
        self._runner.bound()  # not before the first call
        return unsharded(self._runner.owner.bound(), writeback)  # a step that shares has no parameters of its own

    def release(self) -> None:
        """Restore full plain parameters and state in model and optimizer, for good. Not for a step that shares."""
        self._runner.release()


def runner_of(step: Step) -> Any:
    """Return the runner of a step, for the package's own tools: a `Runner` or a `DistributedRunner`."""
    return step._runner
