"""Options of a training step, its batch, and the units that FSDP2 gathers in it.

Memory, activations and communication read the options here. A plan fixes layouts, not their use: roles of axes say it
(:mod:`shard_spec.layout.mesh`), and here a layout becomes the role of one weight along a model axis. A batch is
given as a shape of token ids, or the arguments of forward.

Units of data parallelism have what they send, and the memory of FSDP2's schedule: in a step on the meta device FSDP2's
buffers are allocated when FSDP2 allocates them.

A *unit* is a module that ``fully_shard`` wraps, with its parameters as one group. Forward of a unit receives its
parameters in a buffer, copies them out (the *full* parameters), and frees them afterwards; backward gathers them again,
the unit before ahead of time, and sends full gradients from another buffer.

Data-parallel ranks gather and scatter the parameters of a unit together, as ``fully_shard`` does. A unit is a wrapped
module with the parameters that no unit inside of it has; the root takes the rest. One unit is one all-gather for each
use and one reduction of its gradients.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, TypedDict

import torch
from torch import nn

from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec._torch_compat import map_tensors
from shard_spec.layout import AxisRoles, Layout, MeshSpec, SpecialShard, StageShard
from shard_spec.plan.resolve import ModelMetadata, Resolution, TensorMetadata, require_floating

Loss: TypeAlias = "str | Callable[[Any, Any], torch.Tensor] | None"
LOSSES = ("causal-lm", "vocab-parallel")
POLICY = ("param_dtype", "reduce_dtype", "output_dtype")


class StepOptions(TypedDict, total=False):
    """Options of a training step: ``accumulate`` forwards and backwards, then the optimizer's step.

    Attributes:
        data_axes: Axes along which ranks see different samples; ranks along the others see the same. Default: the
            roles of the plan (planners know theirs), then those of conventional names (dp, fsdp, tp, ...), which the
            result repeats as an assumption. An axis of neither is refused.
        dtype: Dtype of all floating tensors after a conversion, as by ``module.to(dtype)``.
        loss: For logits of token ids: ``"causal-lm"`` (default), the cross entropy of the next token, on gathered
            logits; ``"vocab-parallel"``, the same on logits that stay sharded along the vocabulary. Or a function
            ``loss(output, batch)``; or None: the loss is not counted. A loss returned by forward itself (labels in
            ``batch``) is counted as it is.
        checkpointing: True counts as if each block, a child of a `ModuleList`, were recomputed in backward. Blocks
            checkpointed by the model itself are counted so anyway.
        units: FQNs or patterns of the modules that ``fully_shard`` wraps beside the root. Default: each block.
        accumulate: Number of batches before the optimizer's step, 1 by default; ``batch`` is one of them.
        sync: ``"each"`` (default): gradients are reduced after each backward; ``"last"``: after the last one alone
            (``set_requires_gradient_sync``, ``no_sync``), and full gradients are held until then.
        reshard_after_forward: False: units of ``fully_shard`` stay gathered between forward and backward.
        mp_policy: ``fully_shard``'s ``MixedPrecisionPolicy``, or a mapping of its ``param_dtype`` (gathered parameters
            and compute), ``reduce_dtype`` and ``output_dtype`` to names of dtypes.
        ddp: ``DistributedDataParallel``'s buckets for replicated parameters: ``"buckets"``, or ``"views"`` with
            ``gradient_as_bucket_view``. None: gradients are reduced in place.
        autocast: Dtype of ``torch.autocast`` around forward and loss. One within the forward counts as it is.
        zero: 1 counts optimizer state on one rank a parameter along the data axes, as torch's
            ``ZeroRedundancyOptimizer`` shares it out.
        context: What attention exchanges along context axes: ``"gather"`` (default), keys and values of all ranks; or
            ``"ulysses"``, heads for tokens: queries, keys, values and results.
    """

    data_axes: Collection[str] | None
    dtype: str | None
    loss: Loss
    checkpointing: bool
    units: Collection[str] | None
    accumulate: int
    sync: str
    reshard_after_forward: bool
    mp_policy: Any
    ddp: str | None
    autocast: str | None
    zero: int | None
    context: str


def policy_of(options: StepOptions) -> dict[str, str | None]:
    """Return the dtypes of the mixed-precision policy by its fields' names; None where it has none."""
    policy = options.get("mp_policy")
    if policy is None:
        return dict.fromkeys(POLICY)
    if isinstance(policy, Mapping):
        unknown = [Problem("unknown-name", f"mp_policy[{key!r}]", found="no field of a policy", hint=", ".join(POLICY))
                   for key in policy if key not in POLICY]  # fmt: skip
        raise_problems(unknown)
        return {key: policy.get(key) for key in POLICY}
    if not any(hasattr(policy, key) for key in POLICY):
        hint = f"MixedPrecisionPolicy, or a mapping of {', '.join(POLICY)}"
        raise PlanError(Problem("wrong-type", "mp_policy", found=repr(policy), hint=hint))
    dtypes = {key: getattr(policy, key, None) for key in POLICY}
    return {key: None if dtype is None else str(dtype).removeprefix("torch.") for key, dtype in dtypes.items()}


def check_options(options: StepOptions) -> None:
    """Refuse options that are wrong on every plan.

    Raises:
        PlanError: With every wrong option.
    """
    names = StepOptions.__annotations__
    near = {name: difflib.get_close_matches(name, names) or names for name in options if name not in names}
    raise_problems(
        [
            Problem("unknown-name", name, found="no option of a step", hint=", ".join(hint))
            for name, hint in near.items()
        ]
    )
    require_floating(options.get("dtype"), *policy_of(options).values())
    loss: Any = options.get("loss", "causal-lm")
    accumulate: Any = options.get("accumulate", 1)  # callers are untyped
    zero: Any = options.get("zero")
    ways = {2: "plan with FullyShardPlanner and pass reshard_after_forward=False", 3: "plan with FullyShardPlanner"}
    reshard: Any = options.get("reshard_after_forward", True)
    choices = ("sync", ("each", "last")), ("ddp", (None, "buckets", "views")), ("context", ("gather", "ulysses"))
    names_given = [(name, options.get(name)) for name in ("data_axes", "units")]
    rules = (
        *(
            # An iterator would be empty when it is read again.
            (
                not (given is None or (isinstance(given, Collection) and all(isinstance(each, str) for each in given))),
                name,
                given,
                "a name, or a list of names",
            )
            for name, given in names_given
        ),
        (
            not _is_loss(loss),
            "loss",
            loss,
            f"one of {', '.join(map(repr, LOSSES))}, a function loss(output, batch), or None",
        ),
        (
            not isinstance(options.get("checkpointing", False), bool),
            "checkpointing",
            options.get("checkpointing"),
            "True or False",
        ),
        (
            options.get("autocast") not in (None, "bfloat16", "float16"),
            "autocast",
            options.get("autocast"),
            "bfloat16, float16, or None",
        ),
        (
            isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1,
            "accumulate",
            accumulate,
            "a number of batches, 1 or more",
        ),
        (
            not isinstance(reshard, bool),  # torch takes an int for a smaller mesh between the passes
            "reshard_after_forward",
            reshard,
            "True or False; a number of ranks, onto which fully_shard would reshard, is not counted",
        ),
        *(
            (options.get(name, values[0]) not in values, name, options.get(name, values[0]), f"one of {values}")
            for name, values in choices
        ),
        (
            zero not in (None, 1) or isinstance(zero, bool),
            "zero",
            zero,
            ways.get(zero, "1, or None") if isinstance(zero, int) else "1, or None",
        ),
    )
    problems = [
        Problem("invalid-argument", name, found=repr(value), hint=hint) for wrong, name, value, hint in rules if wrong
    ]
    if options.get("sync") == "last" and accumulate == 1:
        problems.append(
            Problem(
                "conflicting-arguments",
                "sync",
                found="gradients are reduced once anyway",
                hint="pass accumulate= with the number of batches, or leave it out",
            )
        )
    raise_problems(problems)


def _is_loss(loss: Any) -> bool:
    """Return True for a name, None, or a function; torch's own losses take an output and its targets."""
    if loss is None or isinstance(loss, str):
        return loss is None or loss in LOSSES
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    return callable(loss) and getattr(kind, "__module__", "") != "torch.nn.modules.loss"


def check_effects(options: StepOptions, *, shards: bool, replicates: bool) -> None:
    """Refuse options without effect on a plan.

    Args:
        options: As the caller gave them.
        shards: True if a data axis of several ranks shards parameters, as ``fully_shard`` does.
        replicates: True if there is a data axis of several ranks.

    Raises:
        PlanError: With every such option.
    """
    of_replicas, along = "leave it out for this plan", "along a data axis of several ranks"
    rules = [
        *(
            (
                name,
                options.get(name) not in (None, True) and not shards,
                "no data axis of several ranks shards parameters, so this option has no effect",
                "leave it out, or shard parameters along a data axis as FullyShardPlanner does",
            )
            for name in ("mp_policy", "reshard_after_forward")
        ),
        *(
            (name, bool(options.get(name)) and (shards or not replicates), text, of_replicas)
            for name, text in (
                ("zero", f"ZeroRedundancyOptimizer shares out the state of replicas {along}"),
                ("ddp", f"DistributedDataParallel wraps models that are replicated {along}"),
            )
        ),
    ]
    raise_problems(
        Problem("conflicting-arguments", name, found=found, hint=hint) for name, wrong, found, hint in rules if wrong
    )


# Class of module -> (output dim of its weight, input dim).
_LINEAR = {"Linear": (0, 1), "Conv1D": (1, 0)}
_EMBEDDING = {"Embedding": (1, 0)}


def uncounted_axes(mesh: MeshSpec, roles: AxisRoles, counted: Iterable[str] = ()) -> list[str]:
    """Return remarks on uncounted costs along axes of several ranks, but those of ``counted`` activations."""
    remarks = (
        ("expert", "experts stay where they are; the exchange of tokens for them is not counted"),
        ("context", "tokens of one sample lie on several ranks; what attention exchanges is not counted"),
        ("stage", "every stage counts as planned; what stages send each other is not counted"),
    )
    axes = ((axis, text) for role, text in remarks for axis in roles.axes(role) if mesh.axis_size(axis) > 1)
    return [f"{axis}: {text}" for axis, text in axes if axis not in counted]


def expert_modules(parameters: Iterable[TensorMetadata]) -> frozenset[str]:
    """Return FQNs of modules with several experts in one parameter, counted by dim 0."""
    stacked = (tensor for tensor in parameters if len(tensor.shape) == 3 and tensor.shape[0] > 1)
    return frozenset(t.name.rpartition(".")[0] for t in stacked if not t.module_type.startswith("Conv"))


def is_embedding(tensor: TensorMetadata) -> bool:
    """Return True if the tensor is a lookup table, not a factor of a product."""
    return tensor.module_type in _EMBEDDING


def role(tensor: TensorMetadata, layout: Layout, axis: str) -> str:
    """Return the role along ``axis``: ``"column"`` (outputs), ``"row"`` (inputs), ``"cut"`` (else) or ``"whole"``."""
    spec = layout.specs[layout.mesh.axis_index(axis)]
    if spec.dim is None or layout.mesh.axis_size(axis) == 1 or isinstance(spec, StageShard):  # one rank holds all
        return "whole"
    dims = _LINEAR.get(tensor.module_type) or _EMBEDDING.get(tensor.module_type)
    is_weight = len(tensor.shape) == 2 and tensor.name.rsplit(".", 1)[-1].startswith("weight")
    if dims is None or not is_weight:
        return "cut"
    return "column" if spec.dim % len(tensor.shape) == dims[0] else "row"


Batch: TypeAlias = Sequence[int] | Any
"""Numbers count the step of all ranks: ``(sequences, length)`` of token ids. Tensors are what one rank passes to
forward: one tensor, a tuple of arguments, or a mapping of keyword arguments."""


def forward_inputs(
    module: nn.Module, batch: Batch, mesh: MeshSpec, roles: AxisRoles
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return one rank's arguments of ``module.forward``; token ids are zeros on the meta device.

    Sequences are divided along data axes, the tokens of each sequence along context axes.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not is_token_batch(batch):
        return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})
    if isinstance(batch, int) or len(batch) != 2 or min(batch) < 1:  # tokens alone have no shape
        raise PlanError(
            Problem(
                "invalid-argument",
                "batch",
                found=f"{batch!r:.100}",
                hint="give (sequences, length), or what one rank passes to forward",
            )
        )
    context = roles.axes("context")
    sides = ("sequences", [axis for axis in roles.data if axis not in context]), ("tokens of a sequence", context)
    shares = [prod(map(mesh.axis_size, axes)) for _, axes in sides]
    raise_problems(
        Problem(
            "does-not-divide",
            "batch",
            axis=axes[0],
            found=f"{size} {what} over {ranks} ranks of {', '.join(axes)}",
            hint=f"give a multiple of {ranks}",
        )
        for size, ranks, (what, axes) in zip(batch, shares, sides, strict=True)
        if size % ranks
    )
    local = (size // ranks for size, ranks in zip(batch, shares, strict=True))
    tokens = torch.zeros(*local, dtype=torch.long, device="meta")
    if "input_ids" in inspect.signature(module.forward).parameters:  # transformers
        return (), {"input_ids": tokens}
    return (tokens,), {}


def is_token_batch(batch: Batch) -> bool:
    """Return True if ``batch`` is made of numbers: ``(sequences, length)`` of token ids, or wrong."""
    return isinstance(batch, int) or (isinstance(batch, Sequence) and all(isinstance(each, int) for each in batch))


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit.

    Attributes:
        gathered: Of its parameters, in the dtype of compute.
        reduced: Of its full gradients, in the dtype of the reduction.
        sharded: Of its gradients' shards on one rank.
        result: Of the reduction's result on one rank, in the dtype of the reduction.
        is_replicated: Replicas sum the results (HSDP), which FSDP2 holds until backward ends.
    """

    gathered: int
    reduced: int
    sharded: int
    result: int
    is_replicated: bool


@dataclass(frozen=True)
class Schedule:
    """Options of the schedule; see `StepOptions`.

    Attributes:
        reshard_after_forward: Units are freed between forward and backward.
        holds_full: Full gradients of earlier batches are held, which no reduction has freed.
        adds_shards: Shards are added to those of earlier batches.
        input_dtype: Dtype of units' floating inputs; None: as they are.
        output_dtype: Dtype of units' floating outputs; None: as they are.
    """

    reshard_after_forward: bool = True
    holds_full: bool = False
    adds_shards: bool = False
    input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None


def schedule_of(options: StepOptions) -> Schedule:
    """Return the schedule of FSDP2's units."""
    policy, last = policy_of(options), options.get("sync") == "last"
    dtypes = (policy[key] for key in ("param_dtype", "output_dtype"))
    return Schedule(
        options.get("reshard_after_forward", True),
        last,
        options.get("accumulate", 1) > 1 and not last,
        *(None if dtype is None else getattr(torch, dtype) for dtype in dtypes),
    )


class FullyShard:
    """Context of a step: receive buffers, gathered parameters, and full gradients until they are sent.

    Args:
        model: The model of the step.
        units: FQN of each unit to its bytes.
        parameters: FQN of each unit to its parameters on meta.
        schedule: Options.
        allocate: Allocates a buffer of so many bytes, recorded as gathered; with ``lasting`` a shard of gradients,
            which stays until the end of the step.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, UnitBytes],
        parameters: Mapping[str, list[torch.Tensor]],
        schedule: Schedule,
        allocate: Callable[..., torch.Tensor],
    ) -> None:
        self._schedule = schedule
        self._units = {name: (sizes, parameters[name], model.get_submodule(name)) for name, sizes in units.items()}
        self._recomputed: list[str] = []  # units gathered for backward whose forward runs again, the innermost last
        self._allocate = allocate
        self._full: dict[str, torch.Tensor] = {}  # parameters by unit
        self._held: dict[str, torch.Tensor] = {}  # gradients of earlier batches by unit
        self._received: tuple[str, torch.Tensor | None] = ("", None)  # unit and buffer of the last all-gather
        self._sent: torch.Tensor | None = None  # buffer of the last reduce-scatter
        self._results: list[torch.Tensor] = []  # that replicas sum
        self._order: list[str] = []  # of forward
        self._phase = "forward"  # then "backward"; "repeated" once backward has gathered a unit as a forward does
        self._handles: list[Any] = []

    def __enter__(self) -> FullyShard:
        for name, (sizes, owned, unit) in self._units.items():
            before, after = functools.partial(self._before, name), functools.partial(self._after, name)
            self._handles.append(unit.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(unit.register_forward_hook(after))
            if self._schedule.holds_full:
                self._held[name] = self._allocate(sizes.reduced)
                # A new gradient is added to the one held, and freed: at once, or after its unit in another dtype.
                for parameter in owned if sizes.reduced == sizes.gathered else ():
                    hook: Any = parameter.register_post_accumulate_grad_hook
                    self._handles.append(hook(lambda each: setattr(each, "grad", None)))
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._full):  # the root, and units whose inputs ask for no gradient
            self._scatter(name)
        for handle in self._handles:
            handle.remove()

    @property
    def notes(self) -> list[str]:
        """Lines about what the schedule has not counted."""
        line = (
            "re-entrant checkpoints: units are gathered once more for their recomputation, which communication does not"
            " count, and fully_shard may free the root earlier: an upper bound"
        )
        return [line] if self._phase == "repeated" else []

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._phase != "forward":
            if name in self._full:
                self._recomputed.append(name)
                return None
            self._phase = "repeated"  # a re-entrant checkpoint, whose first forward has no graph
        # A buffer is kept until the next unit is copied out, so that the copy out of it and that gather overlap.
        received = name, self._allocate(self._units[name][0].gathered)
        self._full[name] = self._allocate(self._units[name][0].gathered)
        self._received = received
        dtype = self._schedule.input_dtype

        def entered(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return mapped(value, entered)
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            if name and value.requires_grad and torch.is_grad_enabled():  # the root is scattered at the end
                # The output of the unit before has a hook too, which has to come after this one.
                value = value.view_as(value)
                value.register_hook(lambda grad: self._scatter(name))
            return value

        return entered(args), entered(kwargs)

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if self._recomputed[-1:] == [name]:
            self._recomputed.pop()
            return None
        if not name:
            self._received = "", None
        elif self._schedule.reshard_after_forward:
            del self._full[name]
        self._order.append(name)
        for tensor in tensors_of(output, set()):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self._gather_again(name))
        dtype = self._schedule.output_dtype
        if dtype is None:
            return None
        return map_tensors(output, lambda each: each.to(dtype) if each.is_floating_point() else each)

    def _gather_again(self, name: str) -> None:
        self._phase = self._phase if self._phase == "repeated" else "backward"
        if name not in self._order:
            return
        *before, _ = self._order[: self._order.index(name) + 1]
        self._order.remove(name)
        if not self._schedule.reshard_after_forward:
            self._received = "", None  # everything is there
            return
        if name:
            if self._received[0] != name:
                self._received = name, self._allocate(self._units[name][0].gathered)
            self._full[name] = self._allocate(self._units[name][0].gathered)
        self._received = "", None
        if before:
            self._received = before[-1], self._allocate(self._units[before[-1]][0].gathered)  # gathered ahead

    def _scatter(self, name: str) -> None:
        if self._full.pop(name, None) is not None:
            self._sent = None
            if name in self._held:  # first added to the gradients held, then sent
                self._drop_gradients(name)
            self._sent = self._allocate(self._units[name][0].reduced)
            self._held.pop(name, None)
            self._drop_gradients(name)
            sizes = self._units[name][0]
            casts = sizes.result != sizes.sharded
            # The shards themselves are the result, unless it is cast, or added to those of earlier batches.
            if casts or self._schedule.adds_shards:
                results = [self._allocate(sizes.result)]
                self._results += results if sizes.is_replicated else []
                results += [self._allocate(sizes.sharded)] if casts and self._schedule.adds_shards else []
            self._allocate(sizes.sharded, lasting=True)

    def _drop_gradients(self, name: str) -> None:
        for parameter in self._units[name][1]:
            parameter.grad = None


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors of a container; with ``seen`` also from attributes of its objects (a key-value cache)."""
    if isinstance(value, torch.Tensor):
        # A sparse gradient's memory is that of its indices and values.
        yield from (value._indices(), value._values()) if value.layout == torch.sparse_coo else (value,)
    elif isinstance(value, list | tuple | Mapping):
        for item in value if isinstance(value, list | tuple) else value.values():
            yield from tensors_of(item, seen)
    elif seen is not None and hasattr(value, "__dict__") and id(value) not in seen:
        seen.add(id(value))  # objects may refer to each other in circles
        yield from tensors_of(vars(value), seen)


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to each item of a list, tuple or dict; other values pass unchanged."""
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(function, value)) if type(value) in (list, tuple) else value
    return value


def replaced(value: Any, old: object, new: object) -> Any:
    """Return a container with ``new`` in place of ``old``. No closure that calls itself: its circle would keep both."""
    return new if value is old else mapped(value, lambda each: replaced(each, old, new))


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind for one tensor or unit in a step.

    Attributes:
        axis: Mesh axis of the communicating groups.
        op: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"`` or ``"p2p"`` (to the next stage).
        what: Kind of content: ``"parameters"``, ``"gradients"`` or ``"activations"``.
        name: FQN of the tensor or of the unit's module; ``""`` is the root.
        full_bytes: Bytes of the full buffer of one group: after a gather, before a scatter, in a reduction.
        count: Number of collectives in a step.
        group_size: Ranks in a group.
        stage: Pipeline stage whose ranks send; None for all.
    """

    axis: str
    op: str
    what: str
    name: str
    full_bytes: int
    count: int
    group_size: int
    stage: int | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by each rank in the step, at a ring's minimum."""
        if self.op == "p2p":
            return float(self.count * self.full_bytes)
        passes = 2 if self.op == "all_reduce" else 1  # reduce-scatter, then all-gather
        return self.count * passes * self.full_bytes * (self.group_size - 1) / self.group_size


def block_names(metadata: ModelMetadata) -> list[str]:
    """Return FQNs of the repeated blocks: children of outermost `ModuleList`s of several modules."""
    children: dict[str, list[str]] = {}
    for name in metadata.modules:  # in the order of the modules: outer ones first
        if name and metadata.modules.get(name.rpartition(".")[0]) == "ModuleList":
            children.setdefault(name.rpartition(".")[0], []).append(name)
    blocks: dict[str, None] = {}
    for name in (name for names in children.values() if len(names) > 1 for name in names):
        if not any(name[:at] in blocks for at in range(len(name)) if name[at] == "."):
            blocks[name] = None
    return list(blocks)


def units_of(metadata: ModelMetadata, units: Iterable[str] | None) -> dict[str, list[TensorMetadata]]:
    """Return the parameters of each unit by the FQN of its module. ``""`` is the root.

    ``units`` are FQNs or patterns of wrapped modules beside the root. By default they are the repeated blocks.
    """
    names = block_names(metadata)
    if units is not None:
        patterns = [Pattern(text) for text in ([units] if isinstance(units, str) else units)]
        names = [name for name in metadata.modules if name and any(each.matches(name) for each in patterns)]
        unused = [each.text for each in patterns if not any(each.matches(name) for name in metadata.modules)]
        if unused:
            raise PlanError(
                [
                    Problem(
                        "unmatched-pattern",
                        text,
                        found="no module",
                        hint="FQNs of modules that fully_shard wraps, or patterns of them",
                    )
                    for text in unused
                ]
            )
    members: dict[str, list[TensorMetadata]] = {name: [] for name in (*names, "")}
    for tensor in metadata.parameters:
        path = tensor.name.rpartition(".")[0]
        while path not in members:  # the innermost unit around it; the root is around all
            path = path.rpartition(".")[0]
        members[path].append(tensor)
    return members


def unit_transfers(resolution: Resolution, roles: AxisRoles, options: StepOptions) -> list[Transfer]:
    """Return each unit's collectives along data axes, in the order of the units.

    The root is gathered once a batch, since FSDP2 frees it at the end alone; other units for forward and for backward.

    Raises:
        PlanError: For options that are wrong, or of no effect on this plan.
    """
    check_options(options)
    units, policy = options.get("units"), policy_of(options)
    compute, accumulate = policy["param_dtype"] or options.get("dtype"), options.get("accumulate", 1)
    reduce = policy["reduce_dtype"] or compute
    in_backward = options.get("reshard_after_forward", True)
    mesh, data_axes = resolution.one_mesh, roles.data
    mesh_at = {axis: at for at, axis in enumerate(mesh.axis_names)}
    experts = expert_modules(resolution.metadata.parameters)
    transfers: list[Transfer] = []
    for unit, tensors in units_of(resolution.metadata, units).items():
        sums: dict[tuple[str, str, str, int | None], int] = {}
        for tensor in tensors:
            layout = resolution.layouts.get(tensor.name)
            if layout is None:  # a Sharder's
                continue
            # Of plain chunks rank 0 has the most elements.
            special = any(isinstance(spec, SpecialShard) and not isinstance(spec, StageShard) for spec in layout.specs)
            first = prod(layout.local_shape(layout.first_rank, tensor.shape))
            stage = next(iter(layout.stages.values()), None)
            numel = max(map(prod, layout.local_shapes(tensor.shape))) if special else first
            # experts stay on their expert axis: tokens travel
            stays = roles.axes("expert") if tensor.name.rpartition(".")[0] in experts else ()
            for axis in data_axes:
                if mesh.axis_size(axis) == 1 or (axis in stays and role(tensor, layout, axis) != "whole"):
                    continue
                trains, is_whole = tensor.trains, role(tensor, layout, axis) == "whole"
                size = tensor.bytes_of(numel, compute)
                reduced = tensor.bytes_of(numel, reduce)
                if is_whole and trains and not tensor.sparse_grad:
                    key = axis, "all_reduce", "gradients", stage
                    sums[key] = sums.get(key, 0) + reduced
                if is_whole:
                    continue
                # Other data axes that shard the tensor are gathered first, from the last axis to the first.
                later = [other for other in data_axes if other not in stays and mesh_at[other] >= mesh_at[axis]]
                pieces = prod(mesh.axis_size(other) for other in later if role(tensor, layout, other) != "whole")
                moved = (("all_gather", "parameters", size), ("reduce_scatter", "gradients", reduced))
                for op, what, own in moved if trains else moved[:1]:
                    sums[axis, op, what, stage] = sums.get((axis, op, what, stage), 0) + own * pieces
        for (axis, op, what, stage), size in sums.items():
            uses = accumulate * (1 + (bool(unit) and in_backward)) if op == "all_gather" else accumulate
            uses = 1 if op != "all_gather" and options.get("sync") == "last" else uses
            transfers.append(Transfer(axis, op, what, unit, size, uses, mesh.axis_size(axis), stage))
    check_effects(
        options,
        shards=any(each.op == "all_gather" for each in transfers),
        replicates=any(mesh.axis_size(axis) > 1 for axis in data_axes),
    )
    return transfers


def unit_bytes(resolution: Resolution, transfers: Iterable[Transfer], options: StepOptions) -> dict[str, UnitBytes]:
    """Return the bytes of each unit that is gathered along data axes, by its FQN."""
    full: dict[tuple[str, str], int] = {}
    for each in transfers:  # the outermost axis gathers what inner ones have gathered
        full[each.name, each.op] = max(full.get((each.name, each.op), 0), each.full_bytes)
    members, dtype = units_of(resolution.metadata, options.get("units")), options.get("dtype")
    policy = policy_of(options)
    reduce = policy["reduce_dtype"] or policy["param_dtype"] or dtype
    sizes = {}
    for unit in (unit for unit, op in full if op == "all_gather"):
        trained = [each for each in members[unit] if each.requires_grad and each.name in resolution.layouts]
        layouts = [resolution.layouts[each.name] for each in trained]
        numels = [prod(at.local_shape(at.first_rank, each.shape)) for each, at in zip(trained, layouts, strict=True)]
        shards, results = (
            sum(each.bytes_of(numel, kind) for each, numel in zip(trained, numels, strict=True))
            for kind in (dtype, reduce)
        )
        sent = full.get((unit, "reduce_scatter"), 0)
        sizes[unit] = UnitBytes(full[unit, "all_gather"], sent, shards, results, (unit, "all_reduce") in full)
    return sizes
