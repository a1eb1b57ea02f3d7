"""Steps that run as they are written, with gradients averaged or in FSDP2's shards.

Replicated, nothing is replaced: any optimizer, hook, branch or Python state works as on one device. Sharded, call 1
runs on full parameters and is watched; then FSDP2 shards all it can, the rest stays full and is reported. A step may
write a rank's own values into parameters, as under DDP: full ones are compared in calls 1, 2, 4, 8, ...

Several steps over one model (those of a GAN) have one placement: each of them runs once on full parameters before it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dp_partition._shared.consensus import all_gather_objects, assert_consistent, ranks_of, tensor_hashes
from dp_partition._shared.page import human_bytes
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import (
    flat_group,
    hook_outputs,
    hooks_after_accumulation,
    is_backward_unfinished,
    pytree,
    remove_fsdp,
    reset_fsdp,
)
from dp_partition.capture.inputs import close_arguments, open_result
from dp_partition.capture.reach import Reach
from dp_partition.capture.state import without_data, wrapped
from dp_partition.capture.tracer import user_line
from dp_partition.eager.reducer import (
    CAUGHT,
    GATHERING,
    HOOK_HINT,
    LOCAL_HOOK,
    PICKLING,
    GradientReducer,
    PlacedShards,
)
from dp_partition.eager.shards import (
    COMPARED,
    ClosedTraps,
    Units,
    Watch,
    aliased,
    compare_optimizers,
    optimizer_reason,
    place_loaded_state,
    placement_of,
    plan_units,
    retired,
    run_unlike,
    shard,
    together,
)
from dp_partition.plan.placements import DataParallelStyle, warn_on_first
from dp_partition.plan.plan import Settings
from dp_partition.runtime import state
from dp_partition.runtime.consensus import compare_values, copy_from_first
from dp_partition.runtime.gathered import Gathered, copies, refresh, returned, storage_of

# Parts of torch's errors about an operation that a DTensor has not, or not beside a plain tensor.
_OF_DTENSORS = (
    *("mixed torch.Tensor and DTensor", "a sharding strategy registered", "Sharding propagation failed"),
    *("not supported with DTensor", "placement changes are not supported", "sharded dimension"),
    "not supported for tensor subclasses",
)


@dataclass
class TrainStep:
    """One of several train steps over the same parameters, between its calls."""

    function: Callable[..., Any]
    count: int = 0  # number of its calls
    is_watched: bool = False  # whether it has run under the watch
    # Arguments of its last call, but tensors: release() gets none, and a call of one step not those of another.
    holder: list[Any] = field(default_factory=list)


@dataclass
class Placed:
    """Results of placing parameters in shards."""

    units: Units
    optimizers: list[torch.optim.Optimizer]
    handles: list[Any]  # of hooks on modules and optimizers
    shards: PlacedShards


class EagerStep:
    """Steps between calls, with the parameters that they share.

    Args:
        functions: The train steps.
        mesh: The ranks.
        name: The steps, for messages.
        settings: Style, communication, and what is to be done about parameters beyond FSDP2.
    """

    def __init__(
        self, functions: Iterable[Callable[..., Any]], mesh: DeviceMesh, name: str, settings: Settings
    ) -> None:
        self.steps = list(map(TrainStep, functions))
        self.mesh, self.name, self.settings = mesh, name, settings
        self.token = ""  # unique to these steps on these ranks, for notes in the store; empty before the first call
        self.num_compared = 0  # number of comparisons of parameters between ranks
        self.parameters: dict[str, nn.Parameter] = {}
        self.modules: list[nn.Module] = []
        self.adopted = WeakSet[nn.Module]()  # modules with rank 0's buffers, once
        self.reducer: GradientReducer | None = None
        self.watch: Watch | None = None  # of the calls on full parameters
        self.placed: Placed | None = None  # once parameters are in shards

    @cached_property
    def is_sharded(self) -> bool:
        """True if parameters are in FSDP2's shards once each step has run."""
        return self.settings.style is not DataParallelStyle.REPLICATE

    @property
    def num_calls(self) -> int:
        """Number of calls of all steps."""
        return sum([step.count for step in self.steps])

    @property
    def units(self) -> Units:
        """The units of FSDP2, and the parameters that stay full; none before the placement."""
        return Units((), {}) if self.placed is None else self.placed.units

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], number: int = 0) -> Any:
        """Run one step on this rank's batch; every rank calls it."""
        # A module may have new parameters, or none in the place of a shard, and a call may bring another module.
        passed = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        placed, step = self.placed, self.steps[number]
        if placed is not None:
            placed.shards.check_assigned()
        held = held_by([*self.modules, *passed])
        # FSDP2 would put back a parameter that the caller has removed.
        is_gone = placed is not None and not held.keys() >= {id(p) for p in placed.shards.parameters.values()}
        is_changed = is_gone or not held.keys() <= set(map(id, self.parameters.values()))
        if self.reducer is None or is_changed:
            if placed is not None:
                self.release(args, kwargs)  # another model, or a grown one: all are full before they are placed
            self.start(args, kwargs, number)
        assert self.reducer is not None
        self.hold(args, kwargs, number)
        step.count += 1
        if not self.is_sharded or self.placed is not None:
            return self.run_placed(number, args, kwargs)
        reach = self.reach(args, kwargs)
        # A compiled module would hide its parameters' uses; it is compiled again from the next call on.
        self.watch = self.watch or Watch(self.parameters, self.modules, reach.states)
        if not self.settings.observe or step.is_watched:  # what no call has shown: modules' parameters are sharded
            self.place(reach, self.watch, ())
            return self.run_placed(number, args, kwargs)
        with self.reducer.call(number), torch.compiler.set_stance("force_eager"), self.watch:
            result = self.call(number, args, kwargs)
        self.compare_ranks()
        step.is_watched = True
        if all(other.is_watched for other in self.steps):
            self.place(self.reach(args, kwargs), self.watch, tensors_in(result, torch.Tensor))
        return converted(result, torch.Tensor, torch.Tensor.detach)

    def take_over(self, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> None:
        """Put shards in the place of what they have replaced, where a step runs first, or an optimizer is new to it.

        For example a generator's optimizer, made before the critic's calls, in which the generator was sharded.
        """
        values = [*args, *kwargs.values()]
        is_new = [isinstance(x, torch.optim.Optimizer) and COMPARED not in vars(x) for x in values]
        if self.placed is not None and (not self.steps[number].count or any(is_new)):
            reach, place = Reach(self.steps[number].function, values), placement_of(self.mesh)
            reach.repoint(retired(reach.tensors, self.parameters), place)

    def reach(self, *others: Any) -> Reach:
        """Return the objects within reach of the steps and their last calls."""
        return Reach(*(step.function for step in self.steps), *others, *(step.holder for step in self.steps))

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> None:
        """Keep the arguments of a step's call in the place of its last one's."""
        values = (*args, *kwargs.values())
        self.steps[number].holder = [value for value in values if not isinstance(value, torch.Tensor)]

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step's own code.

        Raises:
            PlanError: ``model-changed`` if it has made a parameter: the gradients of that are this rank's own.
        """
        result = self.steps[number].function(*args, **kwargs)
        held, known = held_by(self.modules), set(map(id, self.parameters.values()))
        if any(parameter.requires_grad for key, parameter in held.items() if key not in known):
            raise PlanError(
                Problem(
                    "model-changed",
                    self.name,
                    found="the call has made a parameter, whose gradients nobody averages",
                    hint="make it between two calls",
                )
            )
        return result

    def run_placed(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step on placed parameters."""
        assert self.reducer is not None
        calls = self.num_calls
        is_compared = not calls & (calls - 1)  # a power of two
        shards = None if self.placed is None else self.placed.shards
        with nullcontext() if shards is None else shards.call(calls), self.reducer.call(number), self._traps():
            result = self.call(number, args, kwargs)
            for x in tensors_in(result, Gathered) if copies else ():
                refresh(x)
        if shards is not None:
            shards.end_call(tensors_in(result, DTensor), always=is_compared)
        if is_compared:
            self.compare_ranks()
        return converted(result, DTensor, self.full_result)

    def full_result(self, tensor: DTensor) -> torch.Tensor:
        """Return the full values of a result; of a view of what is placed, a copy that knows it."""
        assert self.placed is not None
        shards = self.placed.shards.parameters.values()
        states = [x for o in self.placed.optimizers for state in o.state.values() for x in state.values()]
        held = [x for x in (*shards, *(p.grad for p in shards), *states) if isinstance(x, DTensor)]
        is_view = tensor in copies or storage_of(tensor) in map(storage_of, held)
        return returned(tensor) if is_view else tensor.full_tensor()

    @contextmanager
    def _traps(self) -> Iterator[None]:
        """Close the traps of shards; leave FSDP2 ready for another call after an error."""
        if self.placed is None or not self.placed.units.modules:
            yield
            return
        units = self.placed.units.modules
        try:
            meet = partial(self.placed.shards.meet, PICKLING, "a pickle of a shard in")
            with ClosedTraps(meet, self._compare_new):
                yield
            if is_backward_unfinished(units):
                raise PlanError(Problem("backward-failed", self.name, found=CAUGHT))
        except BaseException as error:
            reset_fsdp(units)
            if isinstance(error, NotImplementedError) and "c10d" in str(error):
                operator = str(error).partition("Operator ")[2].partition(" ")[0]
                raise PlanError(
                    Problem(
                        "unsupported-argument",
                        self.name,
                        found=f"torch.distributed runs {operator} on a shard{user_line(error)}",
                        hint='gradients are averaged already: leave it out; or use style="replicate", which runs it',
                    )
                ) from error
            if any(text in str(error) for text in _OF_DTENSORS):
                way = 'most of what call 1 does keeps parameters full: do it there too, or use style="replicate"'
                error.add_note(f"parameters lie in shards, on which torch cannot do this{user_line(error)}; {way}")
            raise

    def _compare_new(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare an optimizer of shards that has come after the placement, as `place` compares those before it.

        Raises:
            PlanError: On every rank, before its first step: ``not-elementwise`` if it needs full parameters.
        """
        assert self.placed is not None
        placed, ids = self.placed, {id(p) for p in self.placed.shards.parameters.values()}
        listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if ids.isdisjoint(listed) or any(optimizer is known for known in placed.optimizers):
            return
        if why := optimizer_reason(optimizer, self.mesh, set(listed) - ids):
            hint = "call release() before the first call with it: the next one keeps its parameters full"
            raise PlanError(Problem("not-elementwise", self.name, found=f"since it is in shards, {why}", hint=hint))
        placed.optimizers.append(optimizer)
        vars(optimizer)[COMPARED] = True
        placed.handles += state.hook_placed((), [optimizer], partial(place_loaded_state, placement_of(self.mesh)))

    def place(self, reach: Reach, watch: Watch, results: Iterable[torch.Tensor]) -> None:
        """Shard all that FSDP2 supports, the same on all ranks.

        Args:
            reach: What the steps reach.
            watch: Of the calls on full parameters.
            results: Tensors that the last of these returns.

        Raises:
            PlanError: On every rank: ``full-parameters`` if something stays full and ``full="refuse"``.
        """
        reach.modules = self.modules  # a module that the first call has made stays as it is
        layout = placement_of(self.mesh)
        reasons = dict(watch.reasons)
        names = {id(p): name for name, p in self.parameters.items()}
        held = reach.identities(self.parameters.values(), (frozenset,))  # sets are filled again
        assert self.reducer is not None
        sparse = self.reducer.sparse_names()
        reasons |= dict.fromkeys(sorted(sparse), "has a sparse gradient")
        reasons |= aliased(self.parameters, reach, watch, results)
        reasons |= {names[held_id]: "a container looks it up by identity" for held_id in sorted(held)}
        numbers = {module: number for number, module in enumerate(watch.modules)}
        running = [{name: {numbers[m] for m in used} for name, used in t.items()} for t in (watch.users, watch.writers)]
        mine = (reasons, watch.combined, watch.ran, *running)
        rows = all_gather_objects(self.mesh, mine, f"the placement of {self.name}")
        reasons = run_unlike([ran for _, _, ran, *_ in rows], watch, self.parameters)
        reasons |= {name: why for row, *_ in reversed(rows) for name, why in row.items()}
        # A unit has to run at every use of its parameters on every rank, or ranks would plan different units.
        watch.combined = set.union(*(combined for _, combined, *_ in rows))
        modules = watch.modules
        for name in self.parameters:
            used = [users[name] for *_, users, _ in rows if name in users]
            if used:
                watch.users[name] = {modules[n] for n in set.intersection(*used) if n < len(modules)}
            watch.writers[name] = {modules[n] for *_, w in rows for n in w.get(name, ()) if n < len(modules)}
        reasons = self.optimizer_reasons(reach, together(reasons, watch.combined)) | reasons
        units = plan_units(reach, self.parameters, watch, reasons)
        rows = [*units.full.items()]
        if rows and self.settings.full == "refuse":
            hint = 'full="keep" trains with them full'
            raise PlanError([Problem("full-parameters", name, found=why, hint=hint) for name, why in rows[:8]])
        if rows:
            text = f"{len(rows)} of {len(self.parameters)} parameters stay full on every rank"
            warn_on_first(self.mesh, f"{self.name}: {text}: {' '.join(rows[0])}", stacklevel=4)
        self.reducer.remove()  # shards are reduced by FSDP2
        self.parameters = shard(reach, self.parameters, units, self.mesh, self.settings, watch)
        full = {name: p for name, p in self.parameters.items() if name in units.full}
        # In a group of its own: ranks that reach other experts mix these messages otherwise with those of FSDP2.
        is_mixed = bool(full and units.modules) and self.mesh.size() > 1
        group = (
            dist.new_group(ranks_of(self.mesh), use_local_synchronization=True) if is_mixed else flat_group(self.mesh)
        )
        shards = PlacedShards(self.parameters, self.mesh, self.name, units.modules)
        meet = shards.enter_pass if shards.meets else None
        self.reducer = GradientReducer(full, group, self.settings.comm, self.name, meet)
        for unit in units.modules:
            hook_outputs(unit, shards.enter_pass)
            if is_mixed:
                hook_outputs(unit, self.reducer.enter)  # where the rank may reach no full parameter
        take = partial(place_loaded_state, layout)  # full state of a checkpoint
        handles = state.hook_placed(reach.modules, reach.optimizers, take)
        compare_optimizers()
        for optimizer in reach.optimizers:
            vars(optimizer)[COMPARED] = True
        self.watch = None
        self.placed = Placed(units, reach.optimizers, [*handles, *shards.handles], shards)

    def optimizer_reasons(self, reach: Reach, full: Mapping[str, str]) -> dict[str, str]:
        """Return why optimizers need full parameters, by name: each is tried with the ``full`` ones beside shards."""
        names = {id(p): name for name, p in self.parameters.items()}
        ids, reasons = {id(self.parameters[name]) for name in full}, dict[str, str]()
        for optimizer in reach.optimizers:
            listed = [id(p) for group in optimizer.param_groups for p in group["params"] if id(p) in names]
            if not ids.issuperset(listed) and (why := optimizer_reason(optimizer, self.mesh, ids)):
                reasons |= {names[key]: why for key in listed}
        rows = all_gather_objects(self.mesh, reasons, f"the placement of {self.name}")
        return {name: why for row in reversed(rows) for name, why in row.items()}

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> None:
        """Adopt the models within reach: rank 0's values everywhere, hooks on every parameter.

        Raises:
            PlanError: On every rank, before any change: ``wrong-type`` without a parameter,
                ``already-applied`` for models in another wrapper, ``parameter-hooks``,
                ``ranks-disagree`` for other parameters on other ranks.
        """
        self.hold(args, kwargs, number)
        reach = self.reach(args, kwargs)
        parameters = reach.parameters
        problems = wrapped([(type(root).__name__, root) for root in reach.modules], parameters)
        problems += without_data(parameters)
        if not parameters:
            problems.append(
                Problem(
                    "wrong-type",
                    self.name,
                    found="no model in its arguments, closure or globals",
                    hint="pass the model to the step",
                )
            )
        hooked = [fqn for fqn, p in parameters.items() if self.reducer is None and hooks_after_accumulation(p)]
        problems += [Problem("parameter-hooks", fqn, found=LOCAL_HOOK, hint=HOOK_HINT) for fqn in hooked]
        lines = [] if problems else [f"{name}: {list(p.shape)} {p.dtype}" for name, p in parameters.items()]
        # Buffers of modules that have run are each rank's own.
        fresh = [m for root in reach.modules for m in root.modules() if m not in self.adopted]
        buffers = [] if problems else [b for m in fresh for b in m._buffers.values() if b is not None]
        for sparse in (buffer.to_sparse().coalesce() for buffer in buffers if buffer.layout != torch.strided):
            hashes = tensor_hashes({"indices": sparse.indices(), "values": sparse.values()})
            lines.append(f"sparse buffer: {hashes}")  # stays as it is
        error = PlanError(problems) if problems else None
        assert_consistent(self.mesh, self.name, lines, error, hint="run the same step and model on every rank")
        if not self.token and self.mesh.size() > 1:
            self.token = all_gather_objects(self.mesh, secrets.token_hex(8), self.name)[0]
        if self.reducer is not None:
            self.reducer.remove()
        ids = {id(p) for p in self.parameters.values()}
        copy_from_first([t for t in [*parameters.values(), *buffers] if id(t) not in ids], self.mesh)
        self.parameters, self.modules = parameters, reach.modules
        self.adopted.update(fresh)
        self.watch = None
        for step in self.steps:  # other modules have other names: each step is watched once more
            step.is_watched = False
        self.reducer = GradientReducer(parameters, flat_group(self.mesh), self.settings.comm, self.name)

    def compare_ranks(self) -> None:
        """Raise on every rank unless all full parameters are equal on all of them."""
        if self.mesh.size() > 1:
            full: dict[str, torch.Tensor] = {n: p for n, p in self.parameters.items() if not isinstance(p, DTensor)}
            compare_values(self.mesh, full, self.num_calls)
            self.num_compared += 1

    @contextmanager
    def unsharded(self, *, writeback: bool = True) -> Iterator[None]:
        """Hold every parameter full and plain in the block; every rank enters it.

        Args:
            writeback: Keep values written to parameters in the block; otherwise they are dropped.
        """
        if self.placed is not None:
            self.placed.shards.meet(GATHERING, "full parameters since")
            for unit in self.placed.units.modules:
                unit.reshard()  # type: ignore[operator]  # an FSDPModule's
        with state.full_parameters(self.modules, writeback):
            yield

    def release(self, *others: Any) -> None:
        """Remove the hooks, and make every parameter, gradient and optimizer state full and plain again."""
        if self.placed is not None:
            self.placed.shards.meet(GATHERING, "full parameters since")
            reach = self.reach(others, self.modules, self.placed.optimizers)
            for unit in self.placed.units.modules:
                remove_fsdp(unit)
            problem = Problem(
                "parameter-replaced",
                found="was this rank's shard before release()",
                hint="rebuild lists of parameters, and optimizers that no call was given, from model.parameters()",
            )
            state.install_full(self.modules, self.parameters.values(), reach, lambda _: problem)
            for handle in self.placed.handles:
                handle.remove()
            for optimizer in self.placed.optimizers:
                vars(optimizer).pop(COMPARED, None)
        if self.reducer is not None:
            self.reducer.remove()
        self.reducer, self.parameters, self.modules, self.placed = None, {}, [], None
        for step in self.steps:
            step.holder.clear()

    def explain(self) -> str:
        """Return lines about the placement and the comparisons of ranks."""
        count, units = len(self.parameters), self.units
        full = [p for p in self.parameters.values() if not isinstance(p, DTensor)]
        compared = f"{len(full)} full parameters, {sum(p.numel() for p in full):,} elements, equal on all ranks"
        left = [f"full: {name}: {why}" for name, why in units.full.items()]
        if left:
            size = sum(self.parameters[name].nbytes for name in units.full)
            left.insert(0, f"full on every rank: {len(left)} parameters, {size:,} bytes ({human_bytes(size)})")
        return "\n".join([
            f"{self.name} runs as written",
            f"sharded: {count - len(full)} of {count} parameters, in {len(units.modules)} units of FSDP2",
            *left,
            f"{self.num_calls} calls; {compared} in {self.num_compared} comparisons",
        ])  # fmt: skip


def held_by(roots: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """Return the parameters of modules by ``id``; this runs in every call."""
    modules, held = list(dict.fromkeys(roots)), dict[int, nn.Parameter]()
    for module in modules:  # grows
        held.update({id(p): p for p in module._parameters.values() if p is not None})
        modules += [child for child in module._modules.values() if child is not None]
    return held


def tensors_in(result: Any, kind: type) -> list[Any]:
    """Return a step's results of a class of tensors, in containers of any class."""
    if type(result) in (kind, torch.Tensor, float, type(None)):
        return [result] if type(result) is kind else []
    return [leaf for leaf in pytree.tree_leaves(open_result(result)) if isinstance(leaf, kind)]


def converted(result: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a step's result with its tensors of a class changed, in containers of any class.

    The result itself is returned if it has none: the step may return an object that the caller holds.
    """
    if not tensors_in(result, kind):
        return result
    return close_arguments(pytree.tree_map_only(kind, change, open_result(result)))
