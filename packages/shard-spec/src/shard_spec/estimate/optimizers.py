"""Bytes of optimizer state, and of what a step of the optimizer allocates, for one local tensor.

Common optimizers are a table of slots (tensors as large as the parameter). Every other class of ``torch.optim``, and of
other libraries, makes one step on the meta device for each shape, and its state is what that step leaves.

For optimizers on full matrices it plans the rank that owns each matrix, its bytes, and what the ranks exchange:
`shard_reshard.WholeMatrices` gives each matrix one owner, which holds a master copy and the optimizer's state in full.
The rule is that of its plan of owners, `_shared/owners`. Which matrices there are follows here from a plan's layouts,
there from parameters; an integration test compares both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from shard_spec._shared.dtypes import ITEM_BYTES
from shard_spec._shared.owners import owners_of, update_work
from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec._torch_compat import live_bytes_of
from shard_spec.estimate.step_options import tensors_of
from shard_spec.layout import InterleavedShard, Layout
from shard_spec.plan.resolve import ModelMetadata, TensorMetadata

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class OptimizerState:
    """Optimizer state of each parameter with a gradient.

    Attributes:
        name: Name in reports.
        slots: Number of tensors as large as the (local) parameter.
        scalar_bytes: Further bytes for each parameter: torch counts steps in a float32 scalar. It is on the CPU unless
            the optimizer is ``fused`` or ``capturable``, but counts all the same.
        dtype: Dtype of the slots; None means that of the parameter (or of its master copy).
        master: Dtype of a second, finer copy of each floating parameter, updated by the optimizer; None for none.
        step_slots: Number of tensors as large as the (local) parameter that ``step`` allocates and frees.
        block: Elements of a slot for each float32 scale, in quantised slots (256: blocks of bitsandbytes and torchao).
        smallest: Parameters of fewer local elements have float32 slots in place of quantised ones.
        row_slots: Number of float32 numbers for each local row (row-wise Adagrad of embedding tables: 1).
        factory: Makes the optimizer of a list of parameters, for example the class. What its step on the meta device
            allocates counts in place of ``step_slots``; and its state, where ``slots`` and ``scalar_bytes`` are 0.
        on_owners: True if it updates full matrices on owner ranks, by ``shard_reshard.WholeMatrices``.
    """

    name: str
    slots: int = 0
    scalar_bytes: int = 0
    dtype: str | None = None
    master: str | None = None
    step_slots: int = 0
    block: int = 0
    smallest: int = 0
    row_slots: int = 0
    factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    on_owners: bool = False

    def __post_init__(self) -> None:
        counts = {"slots": self.slots, "scalar_bytes": self.scalar_bytes, "step_slots": self.step_slots}
        counts |= {"block": self.block, "smallest": self.smallest, "row_slots": self.row_slots}
        wrong: list[tuple[str, object, str]] = [
            (name, count, "a number, 0 or more")
            for name, count in counts.items()
            if type(count) is not int or count < 0
        ]
        kinds = {"dtype": self.dtype, "master": self.master}
        wrong += [
            (name, kind, ", ".join(ITEM_BYTES)) for name, kind in kinds.items() if kind not in (None, *ITEM_BYTES)
        ]
        raise_problems(
            Problem("invalid-argument", f"OptimizerState.{name}", found=repr(value), hint=hint)
            for name, value, hint in wrong
        )

    def state_bytes(self, local: Shape, full: Shape, dtype: str) -> int:
        """Return the bytes that are kept between steps for one parameter.

        Args:
            local: Shape on this rank.
            full: Global shape.
            dtype: The parameter's dtype.
        """
        if self.factory is not None and not (self.slots or self.scalar_bytes):
            return _measured_state(self.factory, local, full, self.master or dtype)
        rows = 4 * self.row_slots * (local[0] if local else 1)
        return self.slots * self._slot_bytes(local, dtype) + self.scalar_bytes + rows

    def step_bytes(self, tensors: Sequence[tuple[Shape, str]], *, foreach: bool) -> int:
        """Return the most bytes that a step allocates beside the state, for one rank's parameters in their order.

        Args:
            tensors: Local shape and dtype of each parameter.
            foreach: True if the class updates all of them at once where it can, torch's default off the CPU.
        """
        if self.factory is not None:
            return _measured_step(self.factory, tuple((local, self.master or kind) for local, kind in tensors), foreach)
        slots = [self.step_slots * self._slot_bytes(local, kind) for local, kind in tensors]
        return sum(slots) if foreach else 2 * max(slots, default=0)  # a loop makes a result beside each

    def _slot_bytes(self, local: Shape, dtype: str) -> int:
        numel = prod(local)
        slot = numel * ITEM_BYTES[self.dtype or self.master or dtype]
        if self.block:
            slot = 4 * numel if numel < self.smallest else slot + 4 * -(-numel // self.block)
        return slot


OptimizerLike: TypeAlias = Any
"""A name, `OptimizerState`, class, ``functools.partial`` or instance of an optimizer, mapping of patterns, or None."""

_OPTIM: dict[str, Any] = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
_amsgrad, _momentum = functools.partial(_OPTIM["adam"], amsgrad=True), functools.partial(_OPTIM["sgd"], momentum=0.9)
# Slots and scalars are those of torch.optim 2.13 under the default arguments: a step is slow to import.
OPTIMIZERS: dict[str, OptimizerState] = {
    "none": OptimizerState("none"),
    "sgd": OptimizerState("sgd"),
    "momentum": OptimizerState("momentum", slots=1, factory=_momentum),
    **{name: OptimizerState(name, 2, 4, factory=_OPTIM[name]) for name in ("adam", "adamw", "adamax", "adadelta")},
    "amsgrad": OptimizerState("amsgrad", slots=3, scalar_bytes=4, factory=_amsgrad),
    **{name: OptimizerState(name, 1, 4, factory=_OPTIM[name]) for name in ("adagrad", "rmsprop")},
    # Muon is of torch 2.9.
    **{
        name: OptimizerState(name, factory=_OPTIM[name])
        for name in ("nadam", "radam", "asgd", "rprop", "muon", "adafactor")
        if name in _OPTIM
    },
    "sparseadam": OptimizerState("sparseadam", slots=2),  # steps on sparse gradients alone
    "lion": OptimizerState("lion", slots=1, step_slots=1),
    # bitsandbytes and torchao: codes of one byte, a float32 scale for each 256 of them, float32 below 4,096 elements.
    "adamw8bit": OptimizerState("adamw8bit", slots=2, dtype="uint8", block=256, smallest=4096),
    "lion8bit": OptimizerState("lion8bit", slots=1, dtype="uint8", block=256, smallest=4096),
    "rowwise-adagrad": OptimizerState("rowwise-adagrad", row_slots=1),  # torchrec, FBGEMM
}
_ALIASES = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_fused"), "adamw"),
    **dict.fromkeys(("adam8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "pagedadamw8bit"), "adamw8bit"),
    "paged_adamw": "adamw",
    "lion_8bit": "lion8bit",
    "row_wise_adagrad": "rowwise-adagrad",
    "exact_row_wise_adagrad": "rowwise-adagrad",
}


def state_of_name(name: str) -> OptimizerState:
    """Return the state of an optimizer by name.

    ``mixed-NAME`` has a float32 master copy beside; ``whole-NAME`` updates full matrices on owner ranks.

    Raises:
        PlanError: ``invalid-argument``, with the names.
    """
    lower = name.lower()
    on_owners = lower.startswith("whole-")
    inner = lower.removeprefix("whole-" if on_owners else "mixed-")
    state = OPTIMIZERS.get(_ALIASES.get(inner, inner))
    if state is None:
        raise PlanError(
            Problem(
                "invalid-argument",
                "optimizer",
                found=repr(name)[:200],
                hint=f"one of {', '.join(OPTIMIZERS)} (mixed-NAME: with float32 masters, "
                "whole-NAME: on full matrices by WholeMatrices), a class or an instance, "
                "a mapping from patterns of parameters to these, or OptimizerState(name, slots, scalar_bytes)",
            )
        )
    if on_owners:
        return replace(state, name=f"whole-{state.name}", on_owners=True)
    return replace(state, name=f"mixed-{state.name}", master="float32") if inner != lower else state


@dataclass(frozen=True, eq=False)
class OptimizerChoice:
    """The optimizer of each parameter.

    Attributes:
        name: Name in reports.
        by_name: FQN of a parameter to its state; None if ``default`` is that of all.
        default: State of every parameter.
    """

    name: str
    default: OptimizerState
    by_name: Mapping[str, OptimizerState] | None = None

    def of(self, name: str) -> OptimizerState:
        """Return the state of the parameter called ``name``; one in no group of the optimizer has none."""
        return self.default if self.by_name is None else self.by_name.get(name, OPTIMIZERS["none"])


def choose_optimizer(optimizer: Any, metadata: ModelMetadata, module: object) -> OptimizerChoice:
    """Return the optimizer of each parameter; see ``ShardingPlan.memory`` for the forms.

    Raises:
        PlanError: ``invalid-argument`` for other values, ``unmatched-pattern`` for patterns without a parameter and
            parameters without a pattern, ``not-in-optimizer`` for an instance of another model's parameters.
    """
    if optimizer is None or isinstance(optimizer, str):
        state = state_of_name("none" if optimizer is None else optimizer)
        return OptimizerChoice(state.name, state)
    if isinstance(optimizer, OptimizerState):
        return OptimizerChoice(optimizer.name, optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_instance(optimizer, metadata, module)
    if isinstance(optimizer, Mapping):
        return _of_patterns(optimizer, metadata)
    if callable(optimizer):  # a class, or functools.partial of one
        name = getattr(getattr(optimizer, "func", optimizer), "__name__", "optimizer")
        # A class of one's own may have the name of one of torch's; bitsandbytes' have their own names.
        is_known = isinstance(optimizer, type) and _OPTIM.get(name.lower(), optimizer) is optimizer
        plain = OPTIMIZERS.get(name.lower()) if is_known else None
        state = plain if plain is not None else OptimizerState(name, factory=optimizer)
        return OptimizerChoice(state.name, state)
    state_of_name(repr(optimizer))  # raises
    raise AssertionError


def _of_patterns(rules: Mapping[Any, Any], metadata: ModelMetadata) -> OptimizerChoice:
    """Return the choice by patterns: the first pattern that matches a parameter decides."""
    patterns = {key: Pattern(str(key)) for key in rules}
    states = {key: _state_of_pattern(key, value, metadata) for key, value in rules.items()}
    by_name: dict[str, OptimizerState] = {}
    used = set()
    problems = []
    for tensor in metadata.parameters:
        key = next((key for key, each in patterns.items() if any(map(each.matches, tensor.aliases))), None)
        if key is not None:
            by_name[tensor.name] = states[key]
            used.add(key)
        elif tensor.requires_grad:
            problems.append(
                Problem(
                    "unmatched-pattern",
                    tensor.name,
                    found="no optimizer of the mapping",
                    hint="add a pattern for it, or '**' at the end for the rest",
                )
            )
    problems += [
        Problem(
            "unmatched-pattern",
            str(key),
            found="no parameter is left for this optimizer",
            hint="remove it, or put it before the wider pattern",
        )
        for key in rules
        if key not in used
    ]
    if problems:
        raise PlanError(problems)
    name = " + ".join(dict.fromkeys(state.name for state in states.values()))
    return OptimizerChoice(name, OPTIMIZERS["none"], by_name)


def _state_of_pattern(key: Any, value: Any, metadata: ModelMetadata) -> OptimizerState:
    if isinstance(value, Mapping | torch.optim.Optimizer):  # these have a state for each parameter
        kind, hint = f"a {type(value).__name__}", "give a name, a class or a partial"
        raise PlanError(Problem("invalid-argument", f"optimizer[{key!r}]", found=kind, hint=hint))
    return choose_optimizer(value, metadata, None).default


def _of_instance(optimizer: torch.optim.Optimizer, metadata: ModelMetadata, module: object) -> OptimizerChoice:
    """Return the choice of a live optimizer: its class, with the options of each parameter's group."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    own = {name: value for name, value in vars(optimizer).items() if name in accepted}  # no options of groups
    owners = {id(each): at for at, group in enumerate(optimizer.param_groups) for each in group["params"]}
    states = []
    for group in optimizer.param_groups:
        of_group = {key: value for key, value in group.items() if takes_all or key in accepted}
        options = {key: value for key, value in (own | of_group).items() if key != "params"}
        states.append(OptimizerState(kind.__name__, factory=functools.partial(kind, **options)))
    named = module.named_parameters() if isinstance(module, nn.Module) else ()
    names = {name: id(each) for name, each in named}
    by_name = {t.name: states[owners[names[t.name]]] for t in metadata.parameters if names.get(t.name) in owners}
    if not by_name:
        raise PlanError(
            Problem(
                "not-in-optimizer",
                "optimizer",
                found="it holds no parameter of this model",
                hint=(
                    f"build it from this model's parameters, or pass the class {kind.__name__} or "
                    "a functools.partial of it"
                ),
            )
        )
    return OptimizerChoice(kind.__name__, OPTIMIZERS["none"], by_name)


def _stepped(factory: Callable[[list[nn.Parameter]], Any], tensors: Sequence[tuple[Shape, str]], **mode: bool) -> Any:
    """Return an optimizer of parameters on the meta device, after its first step.

    Raises:
        PlanError: ``unverified`` if the optimizer cannot step on shapes.
    """
    parameters = [
        nn.Parameter(torch.empty(shape, dtype=getattr(torch, kind), device="meta")) for shape, kind in tensors
    ]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    options = getattr(factory, "keywords", {})
    # Kernels for these run on accelerators alone; they keep the same state.
    mode |= {name: False for name in ("fused", "capturable", "differentiable") if options.get(name)}
    more = {"lr": 1e-3} if isinstance(options.get("lr"), torch.Tensor) else {}  # as foreach takes it everywhere
    try:
        optimizer = factory(parameters, **mode, **more)
        live_bytes_of(optimizer.step)
    except Exception as error:  # another library's code
        line = (str(error).splitlines() or [""])[0][:200]
        reason = f"an optimizer that cannot step on shapes alone: {type(error).__name__}: {line}"
        raise PlanError(Problem("unverified", "optimizer", found=reason, hint=_NO_SHAPES)) from error
    return optimizer


_NO_SHAPES = "pass a mapping from patterns to optimizers ('whole-muon': Muon by WholeMatrices), or OptimizerState(...)"


@functools.lru_cache(maxsize=4096)
def _measured_state(factory: Callable[[list[nn.Parameter]], Any], local: Shape, full: Shape, dtype: str) -> int:
    """Return the bytes of one parameter's state after a step on the meta device.

    Raises:
        PlanError: ``unverified`` if the optimizer cannot step on shapes, or keeps rows and columns (Adafactor) of a
            sharded parameter: torch's DTensor has no step for it.
    """
    states = _stepped(factory, [(local, dtype)]).state.values()
    state = [each for values in states for each in tensors_of(values)]  # of lists and dicts too, as Shampoo keeps
    if local != full and any(each.shape != local and each.numel() > 1 for each in state):
        reason = f"state of other shapes than the parameter's, which is {list(full)} in shards of {list(local)}"
        raise PlanError(Problem("unverified", "optimizer", found=reason, hint=_NO_SHAPES))
    return sum(each.nbytes for each in state)


@functools.lru_cache(maxsize=256)
def _measured_step(
    factory: Callable[[list[nn.Parameter]], Any], tensors: tuple[tuple[Shape, str], ...], foreach: bool
) -> int:
    """Return the most bytes that a step on the meta device allocates once there is state."""
    options = getattr(factory, "keywords", {})
    if not tensors or options.get("fused"):  # fused kernels keep their results in registers
        return 0
    accepts = "foreach" in inspect.signature(factory).parameters and options.get("foreach") is None
    # Torch has no kernels for a learning rate on the device, but for capturable steps.
    foreach = foreach and (bool(options.get("capturable")) or not isinstance(options.get("lr"), torch.Tensor))
    return live_bytes_of(_stepped(factory, tensors, **({"foreach": foreach} if accepts else {})).step)


BUCKET_BYTES = 64 * 2**20  # of an owner's matrices in one exchange, by default
Window = tuple[tuple[int, int, int], ...]  # dims of a parameter with the first and the end index of a matrix


class Matrix(NamedTuple):
    """A tensor that one rank updates in full: a parameter, a section of it, or one index of its first dim.

    Attributes:
        parameter: Position of its parameter.
        shape: Its shape.
        window: Its part of the parameter.
        num_bytes: Its bytes.
    """

    parameter: int
    shape: tuple[int, ...]
    window: Window
    num_bytes: int


class OwnedTensor(NamedTuple):
    """A parameter with the optimizer of its matrices, and its dtype in training."""

    metadata: TensorMetadata
    layout: Layout
    state: OptimizerState
    dtype: str


@dataclass(frozen=True)
class Owned:
    """Bytes of matrices on their owners; tuples are by rank.

    Attributes:
        masters: Master copies.
        state: Optimizer state, and the sums by which a rank sees writes to its parameters.
        step: New values until all ranks have theirs, the matrices of two exchanges, and temporaries of an update.
        sent: Bytes that gradients and new values put on the wire in a step, of all ranks.
        count: Number of matrices.
        load: The largest load of a rank over the mean: of updates, and of memory.
    """

    masters: tuple[int, ...]
    state: tuple[int, ...]
    step: tuple[int, ...]
    sent: tuple[int, int]
    count: int
    load: tuple[float, float]

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about the plan of owners, and about what it assumes."""
        work, memory = self.load
        text = (
            f"{self.count} matrices on owner ranks, as shard_reshard.WholeMatrices plans them: master copies and "
            f"state in full; load max/mean {work:.2f} of updates, {memory:.2f} of memory"
        )
        return (
            text,
            "assumed: all ranks are owners, exchanges of 64 MiB, parameters of three dims are stacks of matrices",
        )


def matrices_of(position: int, tensor: OwnedTensor) -> list[Matrix]:
    """Return the matrices of a parameter: experts of a stack are apart, and so are sections of a fused weight."""
    shape, item = tensor.metadata.shape, ITEM_BYTES[tensor.dtype]
    fused = [spec for spec in tensor.layout.specs if isinstance(spec, InterleavedShard)]
    dim = fused[0].dim % len(shape) if fused else 0
    sections = fused[0].section_intervals(shape[dim]) if fused else [(0, shape[dim])] if shape else []
    stacked = len(shape) == 3 and shape[0] > 0 and not (len(sections) > 1 and dim == 0)
    matrices = []
    for index in range(shape[0]) if stacked else (None,):
        expert: Window = () if index is None else ((0, index, index + 1),)
        for start, size in sections if len(sections) > 1 else [(0, -1)]:
            if size:
                own = (*shape[:dim], size, *shape[dim + 1 :]) if size > 0 else shape
                own = own[1:] if stacked else own
                window = (*expert, (dim, start, start + size)) if size > 0 else expert
                matrices.append(Matrix(position, own, window, prod(own) * item))
    return matrices


@lru_cache(maxsize=4096)
def held_by(layout: Layout, shape: tuple[int, ...], window: Window) -> dict[int, int]:
    """Return the number of elements of a matrix on each rank that has some."""
    counts = {}
    for rank in layout.mesh.ranks:
        intervals = dict(enumerate(layout.intervals(rank, shape)))
        for dim, low, high in window:
            cut = ((max(at, low), min(at + size, high)) for at, size in intervals[dim])
            intervals[dim] = tuple((start, max(0, end - start)) for start, end in cut)
        counts[rank] = prod(sum(size for _, size in along) for along in intervals.values())
    return {rank: count for rank, count in counts.items() if count}


def owned_by_ranks(tensors: Sequence[OwnedTensor], ranks: Sequence[int]) -> Owned:
    """Plan the owners of all matrices of ``tensors`` among ``ranks``, and count their bytes."""
    matrices = [matrix for at, tensor in enumerate(tensors) for matrix in matrices_of(at, tensor)]
    position = {rank: at for at, rank in enumerate(ranks)}
    on = []
    for matrix in matrices:
        layout, shape = tensors[matrix.parameter].layout, tensors[matrix.parameter].metadata.shape
        on.append({position[rank]: count for rank, count in held_by(layout, shape, matrix.window).items()})
    costs = [(update_work(matrix.shape), matrix.num_bytes) for matrix in matrices]
    full_on = [
        [at for at, count in has.items() if count == prod(matrix.shape)]
        for matrix, has in zip(matrices, on, strict=True)
    ]
    owners = owners_of(costs, full_on, len(ranks), range(len(ranks)), [None] * len(matrices))
    size, work = len(ranks), [0] * len(ranks)
    masters, state, largest, update = [0] * size, [0] * size, [0] * size, [0] * size
    there = back = 0
    for matrix, (updates, _), has, rank in zip(matrices, costs, on, owners, strict=True):
        tensor = tensors[matrix.parameter]
        kept, item = tensor.state.state_bytes(matrix.shape, matrix.shape, tensor.dtype), ITEM_BYTES[tensor.dtype]
        allocated = tensor.state.step_bytes(((matrix.shape, tensor.dtype),), foreach=False)
        work[rank] += updates
        masters[rank] += matrix.num_bytes
        state[rank] += kept
        largest[rank], update[rank] = max(largest[rank], matrix.num_bytes), max(update[rank], allocated)
        there += (prod(matrix.shape) - has.get(rank, 0)) * item
        back += (sum(has.values()) - has.get(rank, 0)) * item
    staged = [0] * size
    for tensor in tensors:
        for rank, count in held_by(tensor.layout, tensor.metadata.shape, ()).items():
            rows, item = tensor.layout.local_shape(rank, tensor.metadata.shape), ITEM_BYTES[tensor.dtype]
            staged[position[rank]] += count * item
            state[position[rank]] += 8 * rows[0] + count // rows[0] * item if len(rows) > 1 else 8
    step = [staged[at] + 2 * min(masters[at], max(BUCKET_BYTES, largest[at])) + update[at] for at in range(size)]
    load = tuple(max(each) * size / (sum(each) or 1) for each in (work, masters))
    return Owned(tuple(masters), tuple(state), tuple(step), (there, back), len(matrices), (load[0], load[1]))


def redundancy_free(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the owner of each parameter among ``count`` ranks, as torch's ZeroRedundancyOptimizer chooses it.

    The largest goes first, to the rank with the fewest elements so far.
    """
    loads, owners = [0] * count, {}
    for name in sorted(sizes, key=lambda each: -sizes[each]):  # stable: parameters of one size keep their order
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners
