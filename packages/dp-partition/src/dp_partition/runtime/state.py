"""Bind: place a model's parameters and its optimizers' state by the plan, and restore them.

Parameters become DTensors, in the module and in the optimizers' ``param_groups``; state of a parameter's shape
becomes a DTensor as well. The graph works on the local tensors behind them, in place.

A `Snapshot` holds all values of a placed model for rollback: shards, optimizer state, buffers, arguments.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.optim import Optimizer

from dp_partition._shared.dtensor import as_dtensor
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._shared.stale_parameters import current_parameter, is_stale, mark_stale
from dp_partition._torch_compat import (
    parameter_like,
    pytree,
    refuse_before,
    storage_keys,
    without_fsdp,
    without_fsdp_in,
    wrap_operator,
)
from dp_partition.capture.reach import Reach
from dp_partition.capture.state import StepState, hooked_parameters, initial_state
from dp_partition.capture.tracer import user_line
from dp_partition.plan.placements import chunk_bounds, local_shape, on_mesh, shard_rank, shard_world
from dp_partition.plan.plan import PartitionPlan
from dp_partition.runtime.consensus import copy_from_first, full_copies
from dp_partition.runtime.gathered import VIEWS, view_of
from dp_partition.runtime.saving import COPY, PICKLE, mark_parameters, mark_states, place_loaded, running

ASSIGNED = "p.data = ..., or a method such as model.to(), assigned other values, which a DTensor ignores"
ASSIGN_HINT = "write in place under torch.no_grad(), as p.copy_(values) does, or within unsharded(); then call again"
NO_GRADIENT = "another parameter has replaced it in the model: no gradient reaches this one"
REBUILD = "rebuild lists of parameters, and other optimizers, from model.parameters(), or pass them to the step"
REPLACED = "the step's next call takes it over if all ranks have it; or call release() before the change"


def local_shard(
    tensor: torch.Tensor, placement: Placement, world: int, rank: int, *, is_view: bool = False
) -> torch.Tensor:
    if not isinstance(placement, Shard):
        return tensor
    start, end = chunk_bounds(tensor.shape[placement.dim], world, rank)
    rows = tensor.narrow(placement.dim, start, end - start)
    return rows if is_view else rows.clone()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class HeldMemory:
    """The memory of placed parameters, to find an assignment to ``.data``: a DTensor keeps its shard, in torch too."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = parameters
        self.hold()

    def hold(self) -> None:
        self.storages = [p.untyped_storage() for p in self.parameters.values()]  # held: no key is used again
        self.keys = storage_keys(self.parameters.values())

    def moved(self) -> list[Problem]:
        """Return a problem for each parameter with other memory since the last call of this; a second one has none."""
        keys, before = storage_keys(self.parameters.values()), self.keys
        if keys == before:
            return []
        self.hold()
        names = [name for name, key, old in zip(self.parameters, keys, before, strict=True) if key != old]
        return [Problem("parameter-replaced", name, found=ASSIGNED, hint=ASSIGN_HINT) for name in names]


class ModelChangedError(PlanError):
    """The caller has put other parameters, modules or optimizers in place between two calls."""


class Binding:
    """A model and its optimizers while placed on a mesh; the parameters of `step_state` are the placed ones."""

    def __init__(self, step_state: StepState, plan: PartitionPlan, mesh: DeviceMesh) -> None:
        self.step_state, self.plan, self.mesh = step_state, plan, mesh
        self.names = {id(param): fqn for fqn, param in step_state.params.items()}  # of the placed parameters
        self.memory = HeldMemory({})
        self.index_slots()
        self.built = step_state.reads.structure  # structure of the modules when their tensors were last indexed
        # state of each parameter when last found in its planned layout, by optimizer and name
        self.seen: dict[tuple[int, str], tuple[Any, ...]] = {}
        self.state_shapes: dict[tuple[int, str], dict[Any, torch.Size]] = {}  # its global shapes
        self.is_unsharded = False  # whether the modules hold full plain parameters for a while, within `unsharded`
        self.hints: list[Any] = []  # handles of hooks on modules and optimizers

    @cached_property
    def world(self) -> int:
        return shard_world(self.mesh)

    @cached_property
    def rank(self) -> int:
        return shard_rank(self.mesh)

    @cached_property
    def owner_ids(self) -> set[int]:
        """The modules and optimizers by ``id``."""
        return {id(owner) for owner in (*(m for _, m in self.step_state.modules), *self.step_state.optimizers)}

    def index_slots(self) -> None:
        aliases, slots = self.step_state.aliases, list(self.step_state.slots())
        self.param_slots = [(fqn, m, attribute, aliases.get(fqn, fqn)) for fqn, m, attribute, p in slots if p]
        self.buffer_slots = [(fqn, m, attribute, aliases.get(fqn, fqn)) for fqn, m, attribute, p in slots if not p]

    def place(self) -> None:
        """Make every rank's tensors equal to rank 0's, and place the parameters; `reconcile` places optimizer state."""
        step_state = self.step_state
        states = [x for *_, own in step_state.states() for x in own.values() if isinstance(x, torch.Tensor)]
        values = {fqn: param.detach().clone() for fqn, param in step_state.params.items()}  # old ones keep their own
        copy_from_first([*values.values(), *step_state.buffers.values(), *states], self.mesh)
        swap: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
        for fqn, param in step_state.params.items():
            placement = self.plan[fqn].param
            local = local_shard(values.pop(fqn), placement, self.world, self.rank)  # frees the full copy
            shard = as_dtensor(local, self.mesh, on_mesh(placement, self.mesh), param.shape, param.stride())
            swap[id(param)] = param, parameter_like(shard, param)

        def stale(old: torch.Tensor) -> Problem:
            return Problem("parameter-replaced", self.names[id(old)], found=NO_GRADIENT, hint=REBUILD)

        roots = [root for _, root in step_state.modules]
        install(roots, swap, Reach(*step_state.optimizers), lambda state: state, stale)
        step_state.params = {fqn: swap[id(param)][1] for fqn, param in step_state.params.items()}
        self.names = {id(param): fqn for fqn, param in step_state.params.items()}
        self.memory = HeldMemory(step_state.params)
        self.hints = [root.register_forward_hook(hint_eager_use, always_call=True) for root in roots]
        self.hints += hook_placed(roots, step_state.optimizers)

    def fresh_state(self, optimizer: Optimizer, group: dict[str, Any], fqn: str, param: nn.Parameter) -> dict[Any, Any]:
        """Return the state at the start of the optimizer's first step, for a placed parameter."""
        plan, local = self.plan[fqn], local_tensor(param.data)
        like = local if plan.state == plan.param else local_shard(local, plan.state, self.world, self.rank)
        fresh = initial_state(optimizer, group, nn.Parameter(like, True))
        return {key: self.place_state(fqn, value, full=False) for key, value in fresh.items()}

    def place_state(self, fqn: str, value: Any, *, full: bool) -> Any:
        """Return a state entry: in its parameter's state placement if it has the parameter's shape."""
        if not isinstance(value, torch.Tensor):
            return value
        plan, like = self.plan[fqn], self.step_state.params[fqn]
        expected = tuple(like.shape) if full else self.local_state_shape(fqn)
        if value.ndim == 0 or tuple(value.shape) != expected:
            return value  # a counter, or not elementwise
        local = local_shard(value, plan.state, self.world, self.rank) if full else value
        return as_dtensor(local, self.mesh, on_mesh(plan.state, self.mesh), like.shape, like.stride())

    def local_state_shape(self, fqn: str) -> tuple[int, ...]:
        plan = self.plan[fqn]
        return local_shape(plan.info.shape, plan.state, self.world, self.rank)

    def replicated(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters that other ranks have as well: all, or a shard that each replica has."""
        is_hybrid = self.mesh.ndim > 1
        shards = f" of rank {self.rank} of the shards" if is_hybrid else ""
        params = self.step_state.params
        placed = [name for name in params if is_hybrid or self.plan[name].param.is_replicate()]
        return {name + shards: local_tensor(params[name].detach()) for name in placed}

    def check_in_place(self) -> None:
        """Raise for replaced parameters of the module, and for new hooks or memory.

        Raises:
            ModelChangedError: Parameters are replaced, and nothing else is to be said.
            PlanError: ``parameter-hooks``, or ``parameter-replaced`` for ``p.data = ...``.
        """
        problems: list[Problem] = []
        params = self.step_state.params
        for fqn, module, attribute, name in self.param_slots:
            param: Any = params[name]
            if param._backward_hooks or param._post_accumulate_grad_hooks:
                problems += hooked_parameters({name: param})
            if module._parameters.get(attribute) is not param:
                problems.append(Problem("parameter-replaced", fqn, found="is not the placed parameter", hint=REPLACED))
        is_changed = bool(problems) and all(problem.code == "parameter-replaced" for problem in problems)
        moved = self.memory.moved()  # values that a release would lose
        if is_changed and not moved:
            raise ModelChangedError(problems)
        if problems := [*problems, *moved]:
            raise PlanError(problems)


@contextmanager
def full_parameters(roots: Iterable[nn.Module], writeback: bool) -> Iterator[None]:
    """Hold full plain parameters in plain modules within the block. With ``writeback`` keep their new values.

    Afterwards these parameters are stale: reading a gradient of them (by an optimizer from within the block) raises.

    Raises:
        PlanError: ``shape-mismatch`` for a written value of another shape.
    """
    roots = list(roots)
    places = [
        (f"{path}.{key}" if path else key, module, key, parameter)
        for root in roots
        for path, module in root.named_modules()
        for key, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    plain = [] if writeback else [p for root in roots for p in root.parameters() if not isinstance(p, DTensor)]
    before = [p.detach().clone() for p in plain]
    unique = list({id(parameter): parameter for *_, parameter in places}.values())  # tied parameters stay one
    copies = full_copies(unique, unique[0].device_mesh) if unique else []
    full = {id(p): parameter_like(copy, p) for p, copy in zip(unique, copies, strict=True)}
    for _, module, key, parameter in places:
        module._parameters[key] = full[id(parameter)]
    try:
        with ExitStack() as stack:
            for root in roots:  # FSDP2 would shard again for a state dict, gather for a forward, refuse a copy
                stack.enter_context(without_fsdp_in(root))
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(plain, before, strict=True):
                tensor.copy_(value)
        values = dict(full)
        for _, module, key, parameter in reversed(places):  # of a tied parameter the first name counts
            if (present := module._parameters.get(key)) is not None:  # load_state_dict(assign=True) installs others
                values[id(parameter)] = present
        reason = "stood in the model within unsharded(), which is over"
        hint = "rebuild lists of parameters, and other optimizers, from model.parameters()"
        for name, module, key, parameter in places:
            if module._parameters.get(key) is not None:  # a parameter that the block has removed stays so
                module._parameters[key] = parameter
            mark_stale(full[id(parameter)], Problem("parameter-replaced", name, found=reason, hint=hint))
        if writeback:  # after an error, too: on one device what was written stays
            _write_back({name: (parameter, values[id(parameter)]) for name, _, _, parameter in places})


def _write_back(values: Mapping[str, tuple[Any, torch.Tensor]]) -> None:
    """Write full values into shards, without communication: each rank takes its rows."""
    if problems := [
        Problem("shape-mismatch", name, found=f"{tuple(value.shape)} in place of {tuple(shard.shape)}")
        for name, (shard, value) in values.items()
        if value.shape != shard.shape
    ]:
        raise PlanError(problems)
    with torch.no_grad():
        for shard, value in values.values():
            layout = shard.device_mesh, shard.placements
            shard.copy_(distribute_tensor(value.data.to(shard.device), *layout, src_data_rank=None))


@contextmanager
def unsharded(binding: Binding, writeback: bool) -> Iterator[None]:
    """Hold full plain parameters in the modules within the block. A nested block uses those of the outer one."""
    if binding.is_unsharded:
        yield
        return
    binding.check_in_place()
    binding.is_unsharded = True
    try:
        with full_parameters([root for _, root in binding.step_state.modules], writeback):
            yield
    finally:
        binding.is_unsharded = False


def release(binding: Binding, others: Collection[Optimizer] = ()) -> None:
    """Install full plain parameters and state in module and optimizers, for good.

    Parameters that the caller has put in the place of placed ones stay; shards among them (`load_state_dict` with
    ``assign=True`` makes them of full values) become full.

    Args:
        binding: The placed model and optimizers.
        others: Optimizers of steps that share the parameters.

    Raises:
        PlanError: ``unsharded-now`` within a block of `unsharded`: its end would place parameters again.
    """
    if binding.is_unsharded:
        raise PlanError(Problem("unsharded-now", found="release() within unsharded()", hint="leave the block first"))
    names, others = binding.names, [*binding.step_state.optimizers, *others]

    def problem(old: torch.Tensor) -> Problem:
        if id(old) in names:
            return Problem("parameter-replaced", names[id(old)], found=NO_GRADIENT, hint=REBUILD)
        reason = "was this rank's shard before the model was placed anew"  # an optimizer may have been made of it
        return Problem("parameter-replaced", found=reason, hint="pass the optimizer to the step")

    roots = [root for _, root in binding.step_state.modules]
    install_full(roots, binding.step_state.params.values(), Reach(others), problem)
    for handle in binding.hints:
        handle.remove()


def install_full(
    roots: Iterable[nn.Module], placed: Iterable[torch.Tensor], reach: Reach, stale: Callable[[torch.Tensor], Problem]
) -> None:
    """Put full plain parameters, gradients and state in the place of DTensors, in modules and in what a walk has met.

    Args:
        roots: The modules.
        placed: Their DTensors, and others: behind ``load_state_dict(assign=True)`` an optimizer alone has some.
        reach: The walk, over optimizers, lists and dicts.
        stale: Problem to raise when an old parameter is used.
    """
    roots = list(roots)
    every = [*placed, *(p for root in roots for m in root.modules() for p in m._parameters.values())]
    old = list({id(p): p for p in every if isinstance(p, DTensor)}.values())  # tied parameters stay one
    swap: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
    for parameter, copy in zip(old, full_copies(old, old[0].device_mesh) if old else (), strict=True):
        plain = parameter_like(copy, parameter)
        plain.grad = None if parameter.grad is None else full_tensor(parameter.grad)
        swap[id(parameter)] = parameter, plain
    install(roots, swap, reach, full_tensor, stale)


def install(
    roots: Iterable[nn.Module],
    swap: Mapping[int, tuple[torch.Tensor, nn.Parameter]],
    reach: Reach,
    convert: Callable[[torch.Tensor], torch.Tensor],
    stale: Callable[[torch.Tensor], Problem],
) -> None:
    """Put new parameters in the place of old ones, under each of their names and in what a walk has met.

    Args:
        roots: The modules.
        swap: Old and new parameter, by the old one's ``id``.
        reach: The walk, over optimizers, lists and dicts.
        convert: Takes optimizer state of an old parameter's shape to the layout of the new one.
        stale: Problem to raise when an old parameter is used.
    """
    for table in [module._parameters for root in roots for module in root.modules()]:
        if new := {key: swap[id(p)][1] for key, p in table.items() if id(p) in swap}:
            table.update(new)  # tables of TorchScript cannot be updated, and hold no such parameter
    reach.repoint(swap, convert)
    for before, after in swap.values():
        mark_stale(before, stale(before), after)


def with_current_parameters(optimizers: Iterable[Optimizer]) -> None:
    """Put the present parameters into optimizers that hold the ones from before a placement, or its end."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(map(is_stale, group["params"])):
                group["params"] = [current_parameter(param) for param in group["params"]]
        for param in [param for param in optimizer.state if is_stale(param)]:
            optimizer.state[current_parameter(param)] = optimizer.state.pop(param)


def hint_eager_use(module: nn.Module, args: Any, output: Any) -> None:
    """Add advice to torch's error in a placed model's forward; a hook, run after errors too."""
    error = sys.exc_info()[1]
    if error is not None and "mixed torch.Tensor and DTensor" in str(error):
        error.add_note(
            "dp_partition has placed this model's parameters: call the compiled step; for eager code on full "
            "parameters enter `with step.unsharded():`; to evaluate compile another step with share=step; "
            "step.release() gives the plain model back"
        )


class _Guard:
    """Refuses copies and pickles of a placed module by name, until it is removed. FSDP2 names no way on for a copy."""

    def __init__(self, module: nn.Module) -> None:
        self.own = vars(module)
        refuse = partial(
            _refuse_copy, without_fsdp(module)[0].__name__
        )  # not of the module: no circle keeps its memory
        self.own.update({PICKLE: refuse, COPY: refuse})

    def remove(self) -> None:
        for key in (PICKLE, COPY):
            self.own.pop(key, None)


def _refuse_copy(name: str, *_: Any) -> NoReturn:
    raise PlanError(
        Problem(
            "already-applied",
            f"a copy of {name}",
            found="its parameters are placed on the ranks, and a copy does not gather them",
            hint="with step.unsharded(): copy.deepcopy(model), or torch.save(model, path), on every rank: both are "
            "plain",
        )
    )


aten = torch.ops.aten
_LIKE = aten.rand_like.default, aten.randn_like.default, aten.bernoulli.default, aten.native_dropout.default
_WHOLE = "within `with step.unsharded():`, which every rank enters"


def _refuse_part(operator: Any, args: Any) -> None:
    """Refuse a number that is one rank's part of a placed tensor's, such as ``weight.sum().item()``."""
    value: DTensor = args[0]
    if PICKLE in vars(value.device_mesh) and any(place.is_partial() for place in value.placements):
        raise PlanError(
            Problem(
                "local-shard-as-full",
                found="the number that is read is this rank's part of a reduction over shards",
                hint=f"read it {_WHOLE}, or call full_tensor() on every rank",
            )
        )


def _refuse_mixture(operator: Any, args: Any) -> None:
    """Refuse a plain tensor beside placed ones between calls, as in ``AveragedModel.update_parameters``."""
    if threading.get_ident() in running:
        return  # the call's own error has a way on that fits
    tensors = [x for x in pytree.tree_leaves(args[:2]) if isinstance(x, torch.Tensor)]
    plain = [x for x in tensors if not isinstance(x, DTensor) and x.numel() != 1]
    if plain and any(isinstance(x, DTensor) and PICKLE in vars(x.device_mesh) for x in tensors):
        reason = f"a plain tensor and a parameter in shards meet in {operator}{user_line()}"
        raise PlanError(Problem("local-shard-as-full", found=reason, hint=f"do it {_WHOLE}: parameters are full there"))


def _refuse_draw(operator: Any, args: Any) -> None:
    """Refuse a draw on shards between calls, as in ``nn.init.normal_(weight)``: a CPU has no generator by shards."""
    value: DTensor = args[0]
    is_placed = PICKLE in vars(value.device_mesh) and any(place.is_shard() for place in value.placements)
    if is_placed and value.device.type == "cpu" and threading.get_ident() not in running:
        reason = f"ranks with one seed draw the same rows of a tensor in shards ({operator}){user_line()}"
        raise PlanError(Problem("local-shard-as-full", found=reason, hint=f"draw {_WHOLE}: parameters are full there"))


@functools.cache
def refuse_reads() -> None:
    """Refuse parts of placed tensors in the place of full ones, once for the process: where a model is placed."""
    refuse_before(aten._local_scalar_dense.default, _refuse_part)
    of_averages = aten.copy_.default, aten.sub.Tensor, aten._foreach_lerp_.Scalar
    for operator in (*of_averages, aten.index_put_.default, aten.masked_fill_.Scalar):
        refuse_before(operator, _refuse_mixture)
    for operator in (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, *_LIKE):
        refuse_before(operator, _refuse_draw)
    for operator in VIEWS:
        wrap_operator(operator, view_of)


def hook_placed(
    roots: Iterable[nn.Module], optimizers: Iterable[Optimizer], place_state: Callable[[Optimizer], None] | None = None
) -> list[Any]:
    """Hook placed models and their optimizers for loading and saving; return the handles.

    From now on reads of parts of placed tensors are refused, in the whole process.

    ``place_state`` shards what was loaded into an optimizer; None: something else does.
    """
    refuse_reads()
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    placed = [module for module in modules if any(isinstance(p, DTensor) for p in module.parameters())]
    handles: list[Any] = [_Guard(module) for module in placed]
    handles += [module.register_load_state_dict_pre_hook(place_loaded) for module in placed]
    handles += [module.register_state_dict_post_hook(mark_parameters) for module in placed]
    # A wrapper that leaves out torch's own initialisation has no tables of hooks; the optimizer in it has them.
    hooked = [optimizer for optimizer in optimizers if hasattr(optimizer, "_optimizer_state_dict_post_hooks")]
    handles += [optimizer.register_state_dict_post_hook(mark_states) for optimizer in hooked]
    if place_state is not None:
        handles += [optimizer.register_load_state_dict_post_hook(place_state) for optimizer in hooked]
    return handles


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor on every rank; a copy if it was sharded."""
    return full_tensors([tensor])[0]


def full_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return full tensors on every rank, copies of those that were sharded, by few large messages."""
    tensors = list(tensors)
    placed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    copies = iter(full_copies(placed, placed[0].device_mesh) if placed else ())
    return [next(copies) if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]


class Snapshot:
    """Copies of all tensors written by a step, and of the tables around them.

    Args:
        binding: The placed model and optimizers.
        arguments: The step's arguments and keyword arguments; tensors among them may be written.
    """

    def __init__(self, binding: Binding, arguments: Any) -> None:
        self.entries: list[tuple[Any, Any, torch.Tensor, torch.Tensor]] = []
        self.states: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        for _, container, key, tensor in live_tensors(binding.step_state, arguments):
            self.entries.append((container, key, tensor, local_tensor(tensor).detach().clone()))
        for optimizer in binding.step_state.optimizers:
            self.states += [(state, dict(state)) for state in optimizer.state.values()]
        groups = [group for optimizer in binding.step_state.optimizers for group in optimizer.param_groups]
        self.states += [(group, dict(group)) for group in groups]
        self.modes = [(part, part.training) for _, root in binding.step_state.modules for part in root.modules()]
        self.trained = [(param, param.requires_grad) for param in binding.step_state.params.values()]
        leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
        self.gradients = [(leaf, leaf.requires_grad, leaf.grad) for leaf in leaves]
        self.buffers = (binding.step_state.buffers, dict(binding.step_state.buffers))

    def restore(self) -> None:
        for table, before in (*self.states, self.buffers):
            table.clear()
            table.update(before)  # the same dict: others hold it
        for module, mode in self.modes:
            module.training = mode
        for param, trained in self.trained:
            param.requires_grad_(trained)
        for leaf, trained, gradient in self.gradients:
            leaf.requires_grad_(trained).grad = gradient
        with torch.no_grad():
            for container, key, tensor, value in self.entries:
                if container is not None:
                    container[key] = tensor  # the same object, then its values
                local_tensor(tensor).detach().copy_(value)


def live_tensors(step_state: StepState, arguments: Any = ()) -> Iterator[tuple[str, Any, Any, torch.Tensor]]:
    """Yield name, containing dict, key and tensor of all that a step may write. Parameters stay in their dicts."""
    for fqn, param in step_state.params.items():
        yield fqn, None, None, param
    for fqn, module, attribute, is_param in step_state.slots():
        tensor = None if is_param else module._buffers.get(attribute)
        if tensor is not None:
            yield step_state.aliases.get(fqn, fqn), module._buffers, attribute, tensor
    for number, fqn, state in step_state.states():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield state_name(number, fqn, key), None, None, value
    for index, leaf in enumerate(pytree.tree_leaves(arguments)):
        if isinstance(leaf, torch.Tensor):
            yield f"argument {index}", None, None, leaf


def state_name(optimizer: int, fqn: str, key: Any) -> str:
    return f"{fqn} {key}" if optimizer == 0 else f"{fqn} {key} of optimizer {optimizer}"


class StepInterrupted(RuntimeError):
    """A step failed after its first write to parameters or optimizer state.

    Attributes:
        written: Names of the written tensors.
    """

    def __init__(self, written: list[str], subject: str = "the step") -> None:
        self.written = written
        self._subject = subject
        shown = ", ".join(written[:4]) + (", ..." if len(written) > 4 else "")
        super().__init__(
            f"{subject} failed after it had begun the update: {len(written)} tensors are written ({shown}); "
            "parameters and optimizer state are partially updated, load a checkpoint"
        )

    def __reduce__(self) -> tuple[type[StepInterrupted], tuple[list[str], str]]:
        return type(self), (self.written, self._subject)


@contextmanager
def guarded(subject: str, kept: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> Iterator[None]:
    """Run a step; if it fails, restore buffers, which are small, and report writes to parameters and state.

    The subject is call and rank, for errors: a dead peer's collective names neither.
    """
    versions = {name: tensor._version for name, tensor in kept.items()}  # counts writes in place
    copies = {name: tensor.clone() for name, tensor in restored.items()}
    try:
        yield
    except Exception as error:
        for name, tensor in restored.items():
            tensor.copy_(copies[name])
        written = [name for name, tensor in kept.items() if tensor._version != versions[name]]
        if written:
            raise StepInterrupted(written, subject) from error
        error.add_note(f"{subject}: parameters, buffers and optimizer state are as they were before the step")
        raise
