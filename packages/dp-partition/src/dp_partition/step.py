"""The front end: `compile` wraps a train step, the first call traces and places, later calls run the graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.optim import Optimizer

from dp_partition._torch_compat import pytree
from dp_partition.agreement import batch_text, collectives_digest, together
from dp_partition.binding import Binding, as_dtensor, local_of
from dp_partition.bucket import Traffic
from dp_partition.capture.attributes import check_traceable
from dp_partition.capture.hypers import find_hypers, static_signature
from dp_partition.capture.subject import Subject, find_subject
from dp_partition.capture.trace import fill_result
from dp_partition.failure import guarded
from dp_partition.link import Link, Machine
from dp_partition.messages import explain_messages, messages_of
from dp_partition.plan import PartitionPlan, TensorInfo, check_plan, plan_placements
from dp_partition.problems import PlanError, Problem
from dp_partition.program import Program, build_program
from dp_partition.randomness import Stream
from dp_partition.shown import show_listing
from dp_partition.styles import DataParallelStyle, parse_style
from dp_partition.survey import survey


@dataclass(frozen=True)
class Batch:
    """Where the batch stands in the tensor arguments of a step.

    Attributes:
        dim: The batch dim of every tensor argument that has dims.
    """

    dim: int = 0


class Step:
    """A train step that runs data-parallel. Made by `compile`; call it like the function it was made from."""

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: DeviceMesh,
        style: DataParallelStyle,
        semantics: str,
        placements: Mapping[str, Placement],
        equal: str,
        batch_dim: int = 0,
        traffic: Traffic = Traffic(),  # noqa: B008 - a frozen value
        accumulate: int = 1,
        rng: str | None = None,
        share: Step | None = None,
        passes: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
        reshard: str | bool = "auto",
    ) -> None:
        self.reshard = reshard
        self.accumulate, self.rng, self.share = accumulate, rng, share
        self.stream: Stream | None = None
        self.passes, self.traffic = passes, traffic
        self.batch_dim = batch_dim
        self.function, self.mesh, self.style, self.semantics = function, mesh, style, semantics
        self.placements, self.equal = dict(placements), equal
        self.binding: Binding | None = None
        self.programs: dict[Any, list[Program]] = {}
        self.agreed: list[Mapping[str, str]] = []
        self.gathered_again: frozenset[str] | None = None
        self.latest: Program | None = None
        self.num_traces = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on this rank's batch."""
        binding = self.binding
        if binding is None:
            binding, program = self.start(args, kwargs)
        else:
            self.check_subject(binding, args, kwargs)
            program = self.find_program(binding, args, kwargs)
        return self.run(binding, program, args, kwargs)

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Binding, Program]:
        """The first call: plan, trace and partition; only when all that succeeded, place the tensors."""
        binding, program, facts = together(self.mesh, self.name, lambda: self.prepare(args, kwargs))
        if self.share is None:
            binding.place(self.equal)
            if self.rng is not None:
                self.stream = Stream(self.mesh, self.rng)
        self.binding = binding
        self.agreed.append(facts)
        if self.reshard == "auto" and self.semantics == "local":
            self.gathered_again = program.gathered_again()
        self.remember(binding.subject, args, kwargs, program)
        return binding, program

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Binding, Program, Mapping[str, str]], Mapping[str, str]]:
        """Plan, trace and partition without communication; with the facts that ranks have to agree on."""
        base = None if self.share is None else self.share.bound()
        subject = find_subject(self.function, args, kwargs)
        if base is None:
            check_traceable(subject)
            plan = self.plan_for(subject, self.mesh.size())
        else:
            self.check_shared(base, subject)
            plan = base.plan
        program = self.build(subject, plan, args, kwargs)
        facts = self.facts(plan, program, args, kwargs)
        return (Binding(subject, plan, self.mesh), program, facts), facts

    def facts(
        self, plan: PartitionPlan, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mapping[str, str]:
        """What has to be equal on every rank before a program runs."""
        settings = (self.semantics, self.equal, self.accumulate, self.rng, self.batch_dim)
        facts = {
            "plan": plan.digest,
            "settings": ", ".join(map(str, settings)),
            "collectives": collectives_digest(program.module.graph),
        }
        if self.semantics == "global":
            facts["batch"] = batch_text(pytree.tree_leaves((args, kwargs)))
        return facts

    def plan_for(self, subject: Subject, world: int) -> PartitionPlan:
        """Where everything would lie on ``world`` ranks.

        Raises:
            PlanError: With all problems of the plan.
        """
        plan = plan_placements(
            [TensorInfo(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in subject.params.items()],
            self.style,
            world,
            semantics=self.semantics,
            overrides=self.placements,
            aliases={a: n for a, n in subject.aliases.items() if n in subject.params},
        )
        check_plan(plan)
        return plan

    def check_shared(self, base: Binding, subject: Subject) -> None:
        """Raise unless a step that uses what another step placed is given that step's model, and no optimizer."""
        placed = {id(param) for param in base.params.values()}
        foreign = [name for name, param in subject.params.items() if id(param) not in placed]
        if foreign or subject.optimizers:
            hint = "pass the model of the step it shares with, and no optimizer"
            found = f"parameter {foreign[0]} is not placed by it" if foreign else "an optimizer is passed"
            raise PlanError(Problem("not-shared", self.name, found=found, hint=hint))

    def build(self, subject: Subject, plan: PartitionPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """Trace and partition for the arguments at hand."""
        self.num_traces += 1
        settings = (self.batch_dim, self.traffic, self.accumulate, self.resharding)
        program = build_program(self.function, args, kwargs, subject, plan, self.mesh, *settings)
        if self.passes is not None:
            program.capture.module = self.passes(program.module)
        return program

    @property
    def resharding(self) -> str | bool | frozenset[str]:
        """What is gathered again for backward; once chosen it stays, so that a rank that retraces alone does as all."""
        return self.reshard if self.gathered_again is None else self.gathered_again

    def remember(self, subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program) -> None:
        self.programs.setdefault(self.key(subject, args, kwargs), []).append(program)
        self.latest = program

    def find_program(self, binding: Binding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """The program whose guards hold for these arguments; traced now if there is none."""
        hypers = {h: h.read(binding.subject.optimizers) for h in find_hypers(binding.subject.optimizers)}
        for program in self.programs.get(self.key(binding.subject, args, kwargs), ()):
            if program.holds_for(hypers):
                self.latest = program
                return program
        program = self.retrace(binding, args, kwargs)
        self.remember(binding.subject, args, kwargs, program)
        return program

    def retrace(self, binding: Binding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """A program for new arguments.

        Under global semantics all ranks' batches change together, and agree. Under local semantics a rank may retrace
        alone, for a last batch of its own, as long as its collectives stay those that were agreed on.
        """

        def attempt() -> tuple[tuple[Program, Mapping[str, str]], Mapping[str, str]]:
            program = self.build(binding.subject, binding.plan, args, kwargs)
            facts = self.facts(binding.plan, program, args, kwargs)
            return (program, facts), facts

        if self.semantics == "global":
            return together(self.mesh, self.name, attempt)[0]
        made, facts = attempt()
        if facts not in self.agreed:
            together(self.mesh, self.name, lambda: (made, facts))
            self.agreed.append(facts)
        return made[0]

    def key(self, subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a trace depends on: shapes, dtypes, structure, constants, modes, which state there is."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        training = tuple(m.training for _, root in subject.modules for m in root.modules())
        states = tuple(
            tuple(sorted(map(str, optimizer.state[p]))) if p in optimizer.state else ()
            for optimizer in subject.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        )
        trained = tuple(p.requires_grad for p in subject.params.values())
        signature = static_signature(subject.optimizers)
        autocast = (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
        constants = (signature, autocast, subject.attributes())
        return tuple(map(_leaf_key, leaves)), spec, training, states, trained, constants

    def check_subject(self, binding: Binding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if this step was placed for another model or optimizer."""
        leaves = pytree.tree_leaves((args, kwargs))
        known: list[Any] = [m for _, m in binding.subject.modules] + list(binding.subject.optimizers)
        given = [leaf for leaf in leaves if isinstance(leaf, nn.Module | Optimizer)]
        if {id(one) for one in given} != {id(one) for one in known}:
            hint = "call release() on the step first, or compile a step of its own"
            raise PlanError(
                Problem("other-model", self.name, found="called with another model or optimizer", hint=hint)
            )
        binding.check_in_place()

    def run(self, binding: Binding, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph and put new state in place."""
        inputs = self.gather_inputs(binding, program, args, kwargs)
        entries = list(zip(program.inputs, inputs, strict=True))
        kept = {e.label: tensor for e, tensor in entries if e.kind in ("param", "state")}
        buffers = {e.label: tensor for e, tensor in entries if e.kind == "buffer"}
        drawing = self.stream.drawing() if self.stream is not None else nullcontext()
        with torch.no_grad(), guarded(kept, buffers), drawing:
            values = program.module(*inputs)
        self.store(binding, program, values)
        return fill_result(program.capture, values)

    def gather_inputs(
        self, binding: Binding, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Local tensors and numbers for the placeholders, in order."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        subject = binding.subject
        values: list[Any] = []
        for entry in program.inputs:
            if entry.kind == "param":
                values.append(local_of(binding.params[entry.name].data))
            elif entry.kind == "buffer":
                values.append(subject.buffers[entry.name])
            elif entry.kind == "state":
                values.append(
                    local_of(subject.optimizers[entry.optimizer].state[binding.params[entry.name]][entry.key])
                )
            elif entry.kind == "hyper":
                assert entry.hyper is not None
                values.append(entry.hyper.read(subject.optimizers))
            else:
                values.append(tensors[int(entry.name)])
        return values

    def store(self, binding: Binding, program: Program, values: tuple[Any, ...]) -> None:
        """Buffers and state that the step replaced."""
        for value, entry, placement in zip(values, program.capture.outputs, program.output_placements, strict=True):
            if entry.kind == "buffer":
                replace_buffer(binding, entry.name, value)
            elif entry.kind == "state":
                param = binding.params[entry.name]
                new = value
                if placement is not None and tuple(value.shape) == binding.local_state_shape(entry.name) and value.ndim:
                    new = as_dtensor(value, param, self.mesh, placement)
                binding.subject.optimizers[entry.optimizer].state[param][entry.key] = new

    @property
    def name(self) -> str:
        """Name of the function the step was made from."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def plan(self) -> PartitionPlan:
        """Where parameters, gradients and state lie; there after the first call."""
        return self.bound().plan

    @property
    def graph(self) -> fx.GraphModule:
        """The partitioned graph of the last call; ``print`` shows it with local shapes and node types."""
        if self.latest is None:
            raise self.not_started()
        return show_listing(self.latest.with_local_values())

    def bound(self) -> Binding:
        if self.binding is None:
            raise self.not_started()
        return self.binding

    def not_started(self) -> PlanError:
        return PlanError(Problem("not-started", self.name, found="nothing is placed yet", hint="call the step once"))

    def explain(self, name: str | None = None) -> str:
        """Text about one parameter, by its full name, or about all."""
        text = self.plan.explain(name)
        if name is None:
            return text
        messages = messages_of(self.graph.graph, self.plan.world)
        return "\n".join([text, *explain_messages(messages, self.plan[name].info.name)])

    def report(self, path: str | os.PathLike[str], link: Link | None = None, machine: Machine | None = None) -> None:
        """Write a page that loads nothing: messages over time, memory over nodes, placement of every parameter.

        Args:
            path: The file to write.
            link: The network that times are modelled for; default ``Link()``.
            machine: The device that times are modelled for; default ``Machine()``.
        """
        from dp_partition.report.page import write_page

        plan, rank, chosen = self.plan, self.mesh.get_local_rank(), (link or Link(), machine or Machine())
        write_page(path, self.name, plan, rank, survey(self.graph.graph, plan, rank, *chosen), *chosen)

    def unsharded(self, writeback: bool = True) -> AbstractContextManager[None]:
        """Within the block the model holds whole plain parameters, for eager code on every rank alike.

        Args:
            writeback: Keep what the block writes into the parameters.
        """
        return self.bound().unsharded(writeback)

    def release(self) -> None:
        """Give model and optimizer back: plain whole parameters and state, for good."""
        self.bound().release()
        self.binding, self.latest, self.gathered_again = None, None, None
        self.programs.clear()
        self.agreed.clear()


def replace_buffer(binding: Binding, name: str, value: torch.Tensor) -> None:
    """Put a new tensor where a buffer was."""
    for fqn, module, attribute, is_param in binding.slots:
        if not is_param and binding.subject.aliases.get(fqn, fqn) == name:
            module._buffers[attribute] = value
    binding.subject.buffers[name] = value


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, nn.Module | Optimizer):
        return id(leaf)
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf


def compile(
    train_step: Callable[..., Any],
    *,
    mesh: DeviceMesh | None = None,
    style: str | DataParallelStyle = "default",
    semantics: str = "local",
    batch: Batch | None = None,
    placements: Mapping[str, Placement] | None = None,
    equal: str = "broadcast",
    bucket_mb: float = 25,
    prefetch: int = 1,
    reshard_after_forward: str | bool = "auto",
    accumulate: int = 1,
    rng: str | None = None,
    share: Step | None = None,
) -> Step:
    """Make a train step, written for one device, run data-parallel.

    The first call traces ``train_step`` with its arguments (forward, backward, optimizer) and places the model's
    parameters and the optimizer's state on the mesh; every call runs the partitioned graph. Afterwards the parameters
    are DTensors.

    Args:
        train_step: Function of a model, its optimizer and a batch, in any order and number; it runs backward and steps
            the optimizer. It must not depend on values of tensors, and clears gradients (``optim.zero_grad()``).
        mesh: One-dimensional mesh of the data-parallel ranks.
        style: How parameters lie: ``"default"``, ``"replicate"``, ``"zero1"``, ``"zero2"``, ``"fully_shard"`` or a
            `DataParallelStyle`.
        semantics: ``"local"``: the step as written on each rank's batch, gradients averaged over the ranks (what DDP
            and FSDP do). ``"global"``: equal to one device on the ranks' batches together, whatever the loss does.
        batch: Which dim of tensor arguments is the batch, for global semantics and accumulation. Under global
            semantics every rank passes as many rows.
        placements: Name patterns -> ``Replicate()`` or ``Shard(0)``, for parameters that shall not follow the style.
        equal: Ranks must start from equal values: ``"broadcast"`` takes rank 0's, ``"check"`` raises if they differ.
        bucket_mb: Greatest size of a bucket of parameters or gradients, in MiB; 0 sends every tensor by itself.
        prefetch: How many buckets of parameters are on their way ahead of compute, and of gradients behind it.
        reshard_after_forward: Whether sharded parameters are let go after forward and gathered again for backward:
            ``True`` all, ``False`` none, ``"auto"`` those that are idle where most memory is live.
        accumulate: Number of micro-batches that a call's batch is worked through in; one reduction per call.
        rng: Random numbers of the step: ``None`` draws from the rank's default generator, as DDP does; ``"same"`` and
            ``"per_rank"`` draw from a stream of the step's own that starts from rank 0's seed.
        share: Another step, whose placed parameters this one uses (evaluation); mesh, style and placements are its.

    Raises:
        PlanError: For settings that cannot be carried out; at the first call, for steps that cannot.
    """
    problems = []
    if share is not None:
        if mesh is not None or placements is not None:
            hint = "leave mesh and placements out"
            problems.append(Problem("no-effect", "share", found="mesh or placements beside share", hint=hint))
        mesh, style = share.mesh, share.style
    problems += _choice("semantics", semantics, ("local", "global"))
    problems += _choice("equal", equal, ("broadcast", "check"))
    problems += _choice("reshard_after_forward", reshard_after_forward, ("auto", True, False))
    problems += _choice("rng", rng, (None, "same", "per_rank"))
    if semantics == "local" and batch is not None and accumulate == 1:
        hint = "local semantics runs the step on each rank's own arguments; leave batch out"
        problems.append(Problem("no-effect", "batch", found=repr(batch), hint=hint))
    if semantics == "global" and (accumulate > 1 or rng == "same"):
        hint = "use semantics='local'"
        problems.append(Problem("needs-local", "accumulate" if accumulate > 1 else "rng", found="global", hint=hint))
    if accumulate < 1 or prefetch < 0 or bucket_mb < 0:
        problems.append(Problem("out-of-range", "accumulate, prefetch or bucket_mb", found="a number below its least"))
    parsed = DataParallelStyle.DEFAULT
    try:
        parsed = parse_style(style)
    except PlanError as error:
        problems += error.problems
    if mesh is None:
        problems.append(Problem("no-mesh", "mesh", found="neither mesh nor share", hint="pass a one-dimensional mesh"))
    elif mesh.ndim != 1:
        hint = 'pass one axis of it, as mesh["dp"]'
        problems.append(Problem("mesh-not-1d", "mesh", found=f"a mesh with {mesh.ndim} axes", hint=hint))
    if problems or mesh is None:
        raise PlanError(problems, "dp_partition.compile")
    traffic = Traffic(int(bucket_mb * (1 << 20)), prefetch)
    dim = (batch or Batch()).dim
    return Step(
        train_step,
        mesh,
        parsed,
        semantics,
        placements or {},
        equal,
        dim,
        traffic,
        accumulate,
        rng,
        share,
        reshard=reshard_after_forward,
    )


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> list[Problem]:
    if value in allowed:
        return []
    hint = f"use one of {', '.join(map(repr, allowed))}"
    return [Problem(f"unknown-{name}", name, found=repr(value), hint=hint)]
