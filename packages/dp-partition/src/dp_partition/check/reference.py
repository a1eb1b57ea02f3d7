"""The reference, and its comparison with the graph: the step's own Python on a copy, with the graph's semantics.

Local semantics: on this rank's batch, gradients averaged over the ranks. Global semantics: on all ranks' rows.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard

from dp_partition._shared.copying import Copier, Transform
from dp_partition._shared.execution_check import as_double, relative_error
from dp_partition._shared.function_names import names_used
from dp_partition._torch_compat import FakeTensor, pytree, without_fsdp
from dp_partition.capture.fingerprint import ById, FunctionReads
from dp_partition.capture.inputs import close_arguments, open_result, states_by_id
from dp_partition.capture.reach import Reach
from dp_partition.capture.state import StepState, index_tensors
from dp_partition.check.gradients import (
    FAILED,
    FINISHED,
    OUT_OF_MEMORY,
    GradientAverage,
    NotComparableError,
    PeerStoppedError,
)
from dp_partition.plan.placements import shard_group, shard_world
from dp_partition.plan.plan import Settings
from dp_partition.runtime.consensus import full_copies
from dp_partition.runtime.state import Binding, live_tensors, local_shard, state_name


@dataclass
class StepCopy:
    """A step with everything it uses, apart from the live one."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    step_state: StepState


@dataclass
class Outcome:
    """Tensors, numbers and results of a run of the step."""

    leaves: list[Any]  # its result, flattened
    spec: Any  # its structure
    tensors: dict[str, torch.Tensor]  # local shards of parameters, state and buffers afterwards, by name
    before: dict[str, torch.Tensor]  # the same, before the run
    numbers: dict[str, Any]  # plain values in optimizer state and parameter groups

    def value(self, name: str) -> Any:
        """Return a tensor, or a leaf of the result, by name: ``result``, or ``result N``."""
        if name in self.tensors or not name.startswith("result"):
            return self.tensors.get(name)
        index = int(name.removeprefix("result") or 0)
        return self.leaves[index] if index < len(self.leaves) else None

    def add_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        """Add gradients from before the step's clipping or scaling, by parameter."""
        for name, gradient in gradients.items():
            self.tensors[f"{name} gradient"] = gradient
            self.before[f"{name} gradient"] = torch.zeros_like(gradient)


@dataclass
class ReferenceEnd:
    """End of a reference run: an outcome, an error (the step's or about it), or neither."""

    outcome: Outcome | None = None
    error: BaseException | None = None
    is_own: bool = False
    unchecked: str = ""


def copy_step(
    function: Callable[..., Any], arguments: Any, binding: Binding, transform: Transform | None = None
) -> StepCopy:
    """Copy a step in its present state. Placed tensors become full and plain: all ranks of a sharded step call this.

    Raises:
        CannotCopyError: On this rank, after all communication.
    """
    change = transform or (lambda tensor: tensor)  # for the variations of a check
    replaced: dict[int, torch.Tensor] = {}
    params = list(binding.step_state.params.values())
    states = [x for *_, state in binding.step_state.states() for x in state.values() if isinstance(x, DTensor)]
    param_ids = set(map(id, params))
    states += [x for x in Reach(function, arguments).tensors if isinstance(x, DTensor) and id(x) not in param_ids]
    for index, full in enumerate(full_copies([*params, *states], binding.mesh)):  # fused kernels go by memory
        if index >= len(params):
            replaced[id(states[index - len(params)])] = change(full)
            continue
        plain, param = nn.Parameter(change(full), params[index].requires_grad), params[index]
        vars(plain).update({k: v for k, v in vars(param).items() if not isinstance(v, torch.Tensor)})
        replaced[id(param)] = plain
    args, kwargs = arguments
    step_state = binding.step_state
    owned = leading_to([*(module for _, module in step_state.modules), *step_state.optimizers, *params], function)
    copier = Copier(replaced, transform, owned, without_fsdp)  # parameters are full in the copy
    parts = (function, args, kwargs, step_state.modules, step_state.optimizers, params)
    new_function, new_args, new_kwargs, modules, optimizers, copies = copier.copy(parts)
    copied_state = StepState(modules, optimizers)
    index_tensors(copied_state)
    # The live step's names: those of another step with which it shares, of trained tensors in no module as well.
    copied_state.params = dict(zip(binding.step_state.params, copies, strict=True))
    copied_state.aliases = dict(step_state.aliases)
    return StepCopy(new_function, new_args, new_kwargs, copied_state)


def leading_to(owned: list[Any], function: Callable[..., Any]) -> set[int]:
    """Return the ids of some objects, and of the globals of a step's functions that lead to them.

    A copy of a step that names a scheduler as a global would otherwise step the live one, whose optimizer is the live
    one, too.
    """
    ids = set(map(id, owned))
    tables = [
        (value.__globals__, name)
        for value in Reach(function).seen.values()
        if isinstance(value, types.FunctionType)
        for name in names_used(value)
        if name in value.__globals__
    ]
    values = {id(table[name]): table[name] for table, name in tables}
    for item, value in values.items():
        if item not in ids:
            reached = Reach(value)
            if not ids.isdisjoint(reached.seen) or not ids.isdisjoint(map(id, reached.tensors)):
                ids.add(item)
    return ids


def run_reference(
    copied: StepCopy,
    binding: Binding,
    settings: Settings,
    averages: bool,
    wanted: dict[str, Placement] | None = None,
    *,
    is_eager: bool = False,
    means: frozenset[int] = frozenset(),
) -> ReferenceEnd:
    """Run a copy to its end, on all ranks alike. Random numbers come from the generators' present state.

    Args:
        copied: The copy.
        binding: The placed model and optimizers.
        settings: Those of the reduction.
        averages: The graph averages gradients: some ranks alone may call a step that evaluates.
        wanted: Placement of each gradient for the outcome.
        is_eager: As an eager step: what `torch.autograd.grad` returns is this rank's, and Python values may change.
        means: Leaves of the result that are means over micro-batches; others, such as a norm of the mean gradient, are
            those of the last one.
    """
    local = settings.semantics == "local"
    average = GradientAverage(copied.step_state.params, binding.mesh, settings.comm, local and averages)
    average.of_grad = not is_eager
    arguments = (copied.args, copied.kwargs)
    before = _locals(copied.step_state, binding, clone=True) | argument_values(arguments, torch.clone)
    constants = FunctionReads(copied.function)
    placed = {id(module) for _, module in copied.step_state.modules}
    python_before = _plain(constants.read(placed))
    try:
        if local and settings.accumulate > 1:
            result = _run_micro_batches(copied, average, settings, means)
        elif local:
            with average.installed():
                result = copied.function(*copied.args, **copied.kwargs)
        else:
            result, arguments = _run_global(copied, average, binding, settings)
        average.meet(FINISHED)  # no peer may still wait for an average
    except PeerStoppedError:
        if average.stopped == OUT_OF_MEMORY:
            return ReferenceEnd(unchecked="out of memory on another rank")
        text = "raises on another rank" if average.stopped == FAILED else "runs other backward passes on other ranks"
        return ReferenceEnd(unchecked=f"the eager run {text}")
    except NotComparableError as reason:
        with suppress(PeerStoppedError):  # peers may wait in an average
            average.meet(FINISHED)
        return ReferenceEnd(unchecked=f"the step {reason}")
    except Exception as error:
        if is_out_of_memory(error):
            with suppress(PeerStoppedError):
                average.meet(OUT_OF_MEMORY)
            return ReferenceEnd(unchecked="out of memory")
        with suppress(PeerStoppedError):
            average.meet(FAILED)
        return ReferenceEnd(error=error, is_own=True)
    if not is_eager and _plain(constants.read(placed)) != python_before:
        # The graph runs none of the step's Python, so the next call would find the values of this one.
        return ReferenceEnd(error=RuntimeError("its run changes Python values that it reads, such as a counter"))
    leaves, spec = pytree.tree_flatten(open_result(result))
    leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def rows(value: torch.Tensor) -> torch.Tensor:
        is_whole = local or value.ndim <= settings.batch_dim
        return value.detach() if is_whole else cut(value.detach(), Shard(settings.batch_dim), binding)

    tensors = _locals(copied.step_state, binding) | argument_values(arguments, rows)
    if any(isinstance(item, FakeTensor) for item in (*leaves, *tensors.values())):
        return ReferenceEnd(
            error=RuntimeError("it uses a fake tensor: a cache outside its arguments has one of the trace")
        )
    outcome = Outcome(leaves, spec, tensors, before, numbers_of(copied.step_state))
    outcome.add_gradients(argument_gradients(arguments, rows))
    if average.averages or not local:
        wanted = wanted or {}
        full = {name: gradient for name, gradient in average.noted.items() if name in wanted}
        cuts = {name: cut(gradient, wanted[name], binding) for name, gradient in full.items() if gradient is not None}
        outcome.add_gradients(cuts)
    return ReferenceEnd(outcome)


def _plain(value: Any) -> Any:
    """Return a fingerprint without objects compared by identity: caches may be filled."""
    if isinstance(value, tuple | frozenset):
        return tuple(map(_plain, value))
    return None if isinstance(value, ById) else value


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed, on a device or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _run_micro_batches(copied: StepCopy, average: GradientAverage, settings: Settings, means: frozenset[int]) -> Any:
    """Run the step on each micro-batch. Only the last one's update counts, with the mean of all gradients."""
    count, dim = settings.accumulate, settings.batch_dim
    average.micro.count = count

    def clone(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def rows(value: Any, index: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim <= dim:
            return value
        size = value.shape[dim] // count
        return value.detach().narrow(dim, index * size, size).requires_grad_(value.requires_grad)

    values = [param.detach().clone() for param in copied.step_state.params.values()]  # start of each micro-batch
    results = []
    for index in range(count):
        average.micro.is_last = index == count - 1
        # Restored after all micro-batches but the last.
        states = [
            {param: {key: clone(value) for key, value in state.items()} for param, state in optimizer.state.items()}
            for optimizer in copied.step_state.optimizers
        ]
        args, kwargs = pytree.tree_map(partial(rows, index=index), (copied.args, copied.kwargs))
        with average.installed():
            results.append(pytree.tree_flatten(open_result(copied.function(*args, **kwargs))))
        if average.micro.is_last:
            break  # its update is the step's
        with torch.no_grad():
            for param, value in zip(copied.step_state.params.values(), values, strict=True):
                param.copy_(value)  # undoes the update
                param.grad = None  # summed in `average`
        for optimizer, before in zip(copied.step_state.optimizers, states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(before)  # in place: the step may hold the dict

    leaves, spec = results[-1]
    for place in means:
        leaves[place] = torch.stack([values[place].detach() for values, _ in results]).mean()
    return close_arguments(pytree.tree_unflatten(leaves, spec))


def _run_global(copied: StepCopy, average: GradientAverage, binding: Binding, settings: Settings) -> Any:
    """Run the step on all ranks' rows. Random draws would be one device's, not the ranks': then no comparison."""
    group, world = shard_group(binding.mesh), shard_world(binding.mesh)

    def all_rows(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim <= settings.batch_dim or world == 1:
            return value
        mine = value.detach().contiguous()  # as collectives need it
        rows = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(rows, mine, group=group)
        full = torch.cat(rows, settings.batch_dim).requires_grad_(value.requires_grad)
        if value.is_leaf and value.grad is not None:
            full.grad = all_rows(value.grad)
        return full

    args, kwargs = pytree.tree_map(all_rows, (copied.args, copied.kwargs))
    before = _generator_states()  # to detect draws
    with average.installed():
        result = copied.function(*args, **kwargs)
    if world > 1 and not all(map(torch.equal, before, _generator_states())):
        raise NotComparableError("draws random numbers under global semantics")
    return result, (args, kwargs)


def _generator_states() -> list[torch.Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # never initialises CUDA
    return [torch.get_rng_state(), *cuda]


def _locals(step_state: StepState, binding: Binding, *, clone: bool = False) -> dict[str, torch.Tensor]:
    """Return this rank's shards of a copy's tensors, in the layouts of the live ones."""
    live = {name: tensor for name, _, _, tensor in live_tensors(binding.step_state)}
    shards: dict[str, torch.Tensor] = {}
    for name, _, _, tensor in live_tensors(step_state):
        if not _is_dense(tensor):
            continue
        like = live.get(name)
        shard = tensor.detach()
        if isinstance(like, DTensor) and like.shape == tensor.shape:
            shard = cut(shard, like.placements[-1], binding)
        shards[name] = shard.clone() if clone else shard
    return shards


def cut(tensor: torch.Tensor, placement: Placement, binding: Binding) -> torch.Tensor:
    return local_shard(tensor, placement, binding.world, binding.rank, is_view=True)


def live_outcome(
    step_state: StepState,
    arguments: Any,
    result: Any,
    values: Callable[[Iterable[torch.Tensor]], Iterable[torch.Tensor]],
) -> Outcome:
    """Return the outcome of a call, tensors as given by ``values``: this rank's, or full ones."""
    live = {name: tensor for name, _, _, tensor in live_tensors(step_state, arguments) if _is_dense(tensor)}
    tensors = {name: value.detach() for name, value in zip(live, values(live.values()), strict=True)}
    outcome = Outcome(*pytree.tree_flatten(open_result(result)), tensors, {}, numbers_of(step_state))
    outcome.add_gradients(argument_gradients(arguments, torch.Tensor.detach))
    return outcome


def argument_values(arguments: Any, rows: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's rows of tensor arguments, which a step may write, by name."""
    leaves = enumerate(pytree.tree_leaves(arguments))
    return {f"argument {index}": rows(leaf.detach()) for index, leaf in leaves if _is_dense(leaf)}


def argument_gradients(arguments: Any, rows: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's rows of the gradients of tensor arguments, by name."""
    leaves = enumerate(pytree.tree_leaves(arguments))
    gradients = {index: leaf.grad for index, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_leaf}
    return {f"argument {index}": rows(gradient) for index, gradient in gradients.items() if _is_dense(gradient)}


def _is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    """Return True for comparable tensors: no kernel subtracts all sparse or nested ones."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested


def numbers_of(step_state: StepState) -> dict[str, Any]:
    """Return plain values of optimizers, and modes of modules and parameters, by name."""
    numbers: dict[str, Any] = {f"{name} requires_grad": p.requires_grad for name, p in step_state.params.items()}
    for prefix, root in step_state.modules:
        numbers |= {f"{path}.training": module.training for path, module in root.named_modules(prefix=prefix)}
    names = {id(param): fqn for fqn, param in step_state.params.items()}
    states = states_by_id(step_state.optimizers)
    for number, optimizer in enumerate(step_state.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            plain = {key: value for key, value in group.items() if isinstance(value, bool | int | float | str | tuple)}
            numbers |= {f"optim{number}.param_groups[{index}][{key!r}]": value for key, value in plain.items()}
        for param in [param for param in states[number] if param in names]:
            plain = {k: v for k, v in states[number][param].items() if isinstance(v, bool | int | float | str)}
            numbers |= {state_name(number, names[param], entry): value for entry, value in plain.items()}
    return numbers


# A larger error is compared with the spread of right results (`noise`).
SUSPICIOUS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# Accepted change of an integer tensor by rounding: a prediction at a near tie.
INTEGERS = 0.01
_ROUNDING = {torch.float64: 2.2e-16}  # float32's otherwise: gradients are computed in it, or cancel alike


@dataclass(frozen=True)
class Difference:
    """One value with a difference."""

    name: str  # parameter, buffer, state entry or result
    error: float  # relative to the step's change; infinite for another shape, dtype or value
    found: str  # the first different elements, or the values
    noise: float = 0.0  # spread of right results; 0 if not measured

    def __str__(self) -> str:
        size = "" if math.isinf(self.error) else f"by {self.error:.1e} of what the step changes: "
        return f"{size}{self.found}"


def differences(graph: Outcome, reference: Outcome) -> list[Difference]:
    """Return values with differences beyond usual rounding; results first."""
    mismatches: list[Difference] = []
    if len(graph.leaves) != len(reference.leaves):
        counts = f"{len(graph.leaves)} values, expected {len(reference.leaves)}"
        mismatches.append(Difference("result", math.inf, counts))
    for index, (got, want) in enumerate(zip(graph.leaves, reference.leaves, strict=False)):
        name = "result" if len(graph.leaves) == 1 else f"result {index}"
        if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
            error = relative_error(got, want)
            if error > tolerance(want):
                mismatches.append(Difference(name, error, first_difference(got, want)))
        elif not _equal(got, want):
            mismatches.append(Difference(name, _number_error(got, want), f"{got!r:.80}, expected {want!r:.80}"))
    # Most tensors are equal to the last bit, which one kernel tells.
    unequal: dict[str, torch.Tensor] = {}
    for name, want in reference.tensors.items():
        got = graph.tensors.get(name)
        is_like = got is not None and (got.dtype, got.device, got.shape) == (want.dtype, want.device, want.shape)
        if got is None or not is_like or not torch.equal(got, want):
            unequal[name] = want
    largest: dict[str, float] = {}  # root mean square of changes, by the key of a state entry; "" for parameters
    for name, value in reference.tensors.items() if unequal else ():
        start = reference.before.get(name)
        if value.numel() and value.is_floating_point() and start is not None and start.shape == value.shape:
            change, kind = (value.double() - start.double()).nan_to_num(0.0, 0.0, 0.0), name.partition(" ")[2]
            largest[kind] = max(largest.get(kind, 0.0), float(change.square().mean().sqrt()))
    for name, want in unequal.items():
        if name not in graph.tensors:
            mismatches.append(Difference(name, math.inf, "the graph makes no such state"))
            continue
        got, before = graph.tensors[name], reference.before.get(name)
        # Rounding of other values that cancel to (nearly) nothing here, for example in the gradient of a centred bias.
        typical = largest.get(name.partition(" ")[2], 0.0)
        floor = _ROUNDING.get(want.dtype, 1.2e-7) * typical * math.sqrt(want.numel())
        error = relative_error(got, want, before=before, noise=floor)
        if error > tolerance(want):
            mismatches.append(Difference(name, error, first_difference(got, want)))
    pairs = {name: (graph.numbers[name], want) for name, want in reference.numbers.items() if name in graph.numbers}
    unlike = {name: pair for name, pair in pairs.items() if not _equal(*pair)}
    return mismatches + [Difference(n, math.inf, f"{got!r}, expected {want!r}") for n, (got, want) in unlike.items()]


def measure(name: str, outcome: Outcome, reference: Outcome) -> float:
    """Return the error of one value between two runs from nearly equal tensors."""
    got, want = outcome.value(name), reference.value(name)
    if got is None or want is None:
        return 0.0
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return _number_error(got, want)
    start, before = outcome.before.get(name), reference.before.get(name)
    if start is not None and before is not None and got.shape == want.shape and got.is_floating_point():
        got = got.double() - start.double() + before.double()  # without the difference before the run
    return relative_error(got, want, before=before, any_dtype=True)


def tolerance(value: torch.Tensor) -> float:
    """Return the largest relative error without a second look."""
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(value.dtype, value.dtype)
    return SUSPICIOUS.get(real, 0.0 if not value.is_floating_point() else 1e-2)


def first_difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """Return the element with the largest difference, as text."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{list(got.shape)} {got.dtype}, expected {list(want.shape)} {want.dtype}"
    values, wanted = as_double(got), as_double(want).to(got.device)
    index = int((values - wanted).abs().nan_to_num(nan=math.inf).reshape(-1).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(index, device="cpu"), values.shape)]
    number, expected = values.reshape(-1)[index].item(), wanted.reshape(-1)[index].item()
    return f"{number:.6g} at {place}, expected {expected:.6g}"


def _number_error(got: Any, want: Any) -> float:
    numbers = isinstance(got, int | float) and isinstance(want, int | float)
    if not numbers or isinstance(got, bool) or not math.isfinite(got) or not math.isfinite(want) or not want:
        return math.inf
    return float(abs(got - want) / abs(want))


def _equal(got: Any, want: Any) -> bool:
    if got is want or type(got) is not type(want):
        return got is want or (isinstance(got, int | float) and isinstance(want, int | float) and got == want)
    if isinstance(got, float):
        return got == want or (math.isnan(got) and math.isnan(want)) or _number_error(got, want) <= 2e-5
    if isinstance(got, tuple | list):
        return len(got) == len(want) and all(map(_equal, got, want))
    if isinstance(got, bool | int | str | complex | torch.dtype | torch.device):
        return bool(got == want)
    return True  # other objects are not compared


def perturbation(eps: float, seed: int) -> Transform:
    """Return a change of tensors by one rounding of the coarsest dtype, up or down."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        up = torch.randint(0, 2, tensor.shape, generator=generator, device="cpu").to(tensor.device, torch.float64)
        by = max(eps, torch.finfo(tensor.dtype).eps)
        return (tensor.double() * (1 + by * (2 * up - 1))).to(tensor.dtype)

    return change
