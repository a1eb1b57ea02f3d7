"""A step that runs eagerly: its own Python, with gradients averaged or FSDP2's shards.

Replicated, nothing is replaced: any optimizer, hook, branch or Python state works as on one device. Sharded, call 1
runs on full parameters and is watched; then FSDP2 shards all it can, the rest stays full and is reported. A step may
write a rank's own values into parameters, as under DDP: full ones are compared in calls 1, 2, 4, 8, ...
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dp_partition._shared.consensus import all_gather_objects, assert_consistent, tensor_hashes
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._shared.stale_parameters import mark_stale
from dp_partition._torch_compat import (
    flat_group,
    hooks_after_accumulation,
    is_backward_unfinished,
    parameter_like,
    pytree,
    remove_fsdp,
    reset_fsdp,
    without_fsdp_in,
)
from dp_partition.capture.reach import Reach
from dp_partition.capture.state import without_data, wrapped
from dp_partition.eager import shards
from dp_partition.eager.reducer import CAUGHT, HOOK_HINT, LOCAL_HOOK, GradientReducer
from dp_partition.eager.shards import (
    ClosedTraps,
    Units,
    Watch,
    optimizer_reason,
    placement_of,
    plan_units,
    repoint,
    shard,
)
from dp_partition.runtime import state
from dp_partition.runtime.consensus import broadcast_from_first, distinct


@dataclass
class EagerStep:
    """One step between calls."""

    function: Callable[..., Any]  # the train step
    mesh: DeviceMesh  # the ranks
    name: str  # the step, for messages
    bucket_bytes: int  # largest size of a bucket of gradients
    reason: str  # why the step runs eagerly
    is_sharded: bool = False  # parameters are in FSDP2's shards after the first call
    full: str = "keep"  # ``"keep"``: parameters beyond FSDP2 stay full; ``"refuse"``: they raise
    observes: bool = True  # the first call runs on full parameters, and is watched
    roots: tuple[Any, ...] = ()  # models and optimizers of earlier calls: the first eager call may lack them
    units: Units = Units((), {})  # noqa: RUF009  # frozen; none before the end of the first call
    is_placed: bool = False
    num_calls: int = 0
    num_compared: int = 0  # number of comparisons of parameters between ranks
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)  # name -> parameter
    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    holders: list[Any] = field(default_factory=list)  # arguments of the last call, but tensors: release() gets none
    checked: list[int] = field(default_factory=list)  # elements compared with the step on a full copy, by call
    unchecked: str = ""  # why a call was not
    adopted: WeakSet[nn.Module] = field(default_factory=WeakSet)  # modules with rank 0's buffers, once
    reducer: GradientReducer | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step on this rank's batch; every rank calls it."""
        # A module may have new parameters, and a call may bring another module; mostly all are the same.
        passed = [one for one in (*args, *kwargs.values()) if isinstance(one, nn.Module)]
        if self.reducer is None or self.new_parameters(dict.fromkeys([*self.modules, *passed])):
            if self.units.modules:
                self.release(args, kwargs)  # another model, or a grown one: all are full before they are placed
            self.start(args, kwargs)
        assert self.reducer is not None
        self.holders = [one for one in (*args, *kwargs.values()) if not isinstance(one, torch.Tensor)]
        self.num_calls += 1
        if self.is_sharded and not self.is_placed:
            # A compiled module would hide its parameters' uses; it is compiled again from the next call on.
            watch = Watch(self.parameters, self.modules, Reach(self.function, args, kwargs, self.roots).states)
            if not self.observes:
                self.place(args, kwargs, watch)  # it has seen nothing: what is in a module is sharded
                return self.run_placed(args, kwargs)
            with self.reducer.call(), torch.compiler.set_stance("force_eager"), watch:
                result = self.call(args, kwargs)
            self.compare_ranks()
            self.place(args, kwargs, watch)
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        return self.run_placed(args, kwargs)

    def new_parameters(self, roots: Iterable[nn.Module]) -> list[Any]:
        """Return parameters that were not there at the start; this runs in every call."""
        ids, modules, new = {id(None), *map(id, self.parameters.values())}, list(roots), list[Any]()
        for module in modules:  # grows
            if not ids.issuperset(map(id, module._parameters.values())):
                new += [parameter for parameter in module._parameters.values() if id(parameter) not in ids]
            modules += [child for child in module._modules.values() if child is not None]
        return new

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step's own code.

        Raises:
            PlanError: ``model-changed`` if it has made a parameter: the gradients of that are this rank's own.
        """
        result = self.function(*args, **kwargs)
        if any(parameter.requires_grad for parameter in self.new_parameters(self.modules)):
            reason, hint = "the call has made a parameter, whose gradients nobody averages", "make it between two calls"
            raise PlanError(Problem("model-changed", self.name, found=reason, hint=hint))
        return result

    def run_placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step on placed parameters."""
        assert self.reducer is not None
        with self.reducer.call(), self._traps():
            result = self.call(args, kwargs)
        if not self.num_calls & (self.num_calls - 1):  # a power of two
            self.compare_ranks()
        return pytree.tree_map_only(DTensor, DTensor.full_tensor, result)

    @contextmanager
    def _traps(self) -> Iterator[None]:
        """Close the traps of shards; leave FSDP2 ready for another call after an error."""
        if not self.units.modules:
            yield
            return
        try:
            with ClosedTraps():
                yield
            if is_backward_unfinished(self.units.modules):
                raise PlanError(Problem("backward-failed", self.name, found=CAUGHT))
        except BaseException as error:
            reset_fsdp(self.units.modules)
            if "mixed torch.Tensor and DTensor" in str(error):
                way = 'what an observed call 1 does keeps parameters full: do it there too, or use style="replicate"'
                error.add_note(f"parameters lie in shards, and meet a plain tensor for the first time; {way}")
            raise

    def place(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch) -> None:
        """Shard all that FSDP2 supports, the same on all ranks.

        Raises:
            PlanError: On every rank: ``full-parameters`` if something stays full and ``full="refuse"``.
        """
        reach = Reach(self.function, args, kwargs, self.roots)
        reach.modules = self.modules  # a module that the first call has made stays as it is
        layout = placement_of(self.mesh)
        reasons = dict(watch.reasons)
        names = {id(p): name for name, p in self.parameters.items()}
        self.optimizers = reach.optimizers  # release() is given no arguments
        held = reach.identities(self.parameters.values(), (frozenset,))  # sets are filled again
        assert self.reducer is not None
        sparse = {self.reducer.names[index] for one in self.reducer.passes for index in one.sparse}
        reasons |= dict.fromkeys(sorted(sparse), "has a sparse gradient")
        reasons |= {names[one]: "a container looks it up by identity" for one in sorted(held)}
        for optimizer in reach.optimizers:
            if why := optimizer_reason(optimizer, layout):
                listed = [p for group in optimizer.param_groups for p in group["params"]]
                reasons = {names[id(p)]: why for p in listed if id(p) in names} | reasons
        numbers = {module: number for number, module in enumerate(watch.modules)}
        running = [{name: {numbers[m] for m in used} for name, used in t.items()} for t in (watch.users, watch.writers)]
        mine = (reasons, watch.combined, watch.ran, *running)
        rows = all_gather_objects(self.mesh, mine, f"the placement of {self.name}")
        if any(ran != watch.ran for _, _, ran, *_ in rows):
            reasons = dict.fromkeys(self.parameters, "ranks run different modules")
        else:
            reasons = {name: why for row, *_ in reversed(rows) for name, why in row.items()}
        # A unit has to run at every use of its parameters on every rank, or ranks would plan different units.
        watch.combined = set.union(*(combined for _, combined, *_ in rows))
        modules = watch.modules
        for name in self.parameters:
            used = [users[name] for *_, users, _ in rows if name in users]
            if used:
                watch.users[name] = {modules[n] for n in set.intersection(*used) if n < len(modules)}
            watch.writers[name] = {modules[n] for *_, w in rows for n in w.get(name, ()) if n < len(modules)}
        self.units = plan_units(reach, self.parameters, watch, reasons)
        rows = [*self.units.full.items()]
        if rows and self.full == "refuse":
            hint = 'full="keep" trains with them full'
            raise PlanError([Problem("full-parameters", name, found=why, hint=hint) for name, why in rows[:8]])
        if rows:
            text = f"{len(rows)} of {len(self.parameters)} parameters stay full on every rank"
            warnings.warn(f"{self.name}: {text}: {' '.join(rows[0])}", stacklevel=4)
        self.reducer.remove()  # shards are reduced by FSDP2
        self.parameters = shard(reach, self.parameters, self.units, self.mesh)
        full = {name: p for name, p in self.parameters.items() if name in self.units.full}
        self.reducer = GradientReducer(full, flat_group(self.mesh), self.bucket_bytes, self.name)
        take = partial(shards.place_loaded_state, layout)  # full state of a checkpoint
        # A wrapper that leaves out torch's own initialisation has no tables of hooks; the optimizer in it has them.
        hooked = [one for one in self.optimizers if hasattr(one, "_optimizer_load_state_dict_post_hooks")]
        self.handles = [one.register_load_state_dict_post_hook(take) for one in hooked]
        self.is_placed = True

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adopt the models within reach: rank 0's values everywhere, hooks on every parameter.

        Raises:
            PlanError: On every rank, before any change: ``wrong-type`` without a parameter,
                ``already-applied`` for models in another wrapper, ``parameter-hooks``,
                ``ranks-disagree`` for other parameters on other ranks.
        """
        reach = Reach(self.function, args, kwargs, self.roots)
        parameters = reach.parameters
        problems = wrapped([(type(root).__name__, root) for root in reach.modules], parameters)
        problems += without_data(parameters)
        if not parameters:
            reason, hint = "no model in its arguments, closure or globals", "pass the model to the step"
            problems.append(Problem("wrong-type", self.name, found=reason, hint=hint))
        for fqn, parameter in parameters.items():
            if self.reducer is None and hooks_after_accumulation(parameter):
                problems.append(Problem("parameter-hooks", fqn, found=LOCAL_HOOK, hint=HOOK_HINT))
        lines = [] if problems else [f"{name}: {list(p.shape)} {p.dtype}" for name, p in parameters.items()]
        # Buffers of modules that have run are each rank's own.
        fresh = [m for root in reach.modules for m in root.modules() if m not in self.adopted]
        buffers = [] if problems else [b for m in fresh for b in m._buffers.values() if b is not None]
        for sparse in (buffer.to_sparse().coalesce() for buffer in buffers if buffer.layout != torch.strided):
            hashes = tensor_hashes({"indices": sparse.indices(), "values": sparse.values()})
            lines.append(f"sparse buffer: {hashes}")  # stays as it is
        error = PlanError(problems) if problems else None
        assert_consistent(self.mesh, self.name, lines, error, hint="run the same step and model on every rank")
        if self.reducer is not None:
            self.reducer.remove()
        else:
            text = "in FSDP2's shards after this call" if self.is_sharded else "parameters replicated"
            warnings.warn(f"{self.name} runs eagerly, {text}: {self.reason}", stacklevel=7)  # the call of the step
        ids = {id(p) for p in self.parameters.values()}
        new = {str(n): distinct(t.detach()) for n, t in enumerate([*parameters.values(), *buffers]) if id(t) not in ids}
        if self.mesh.size() > 1:
            for name, value in broadcast_from_first(new, self.mesh).items():
                new[name].copy_(value)
        self.parameters, self.modules = parameters, reach.modules
        self.adopted.update(fresh)
        self.reducer = GradientReducer(parameters, flat_group(self.mesh), self.bucket_bytes, self.name)

    def compare_ranks(self) -> None:
        """Raise on every rank unless all parameters are equal on all of them.

        Raises:
            PlanError: ``ranks-diverge``, with names.
        """
        if self.mesh.size() == 1:
            return
        full = {name: p for name, p in self.parameters.items() if not isinstance(p, DTensor)}
        sums = tensor_hashes(full)
        rows = all_gather_objects(self.mesh, sums, f"the comparison of parameters in call {self.num_calls}")
        self.num_compared += 1
        names = [name for name in sums if any(row.get(name) != sums[name] for row in rows)]
        if names:
            reason = f"{len(names)} of {len(sums)} parameters differ between ranks after call {self.num_calls}"
            hint = "write the same values on every rank: reduce what a rank computes from its own batch first"
            raise PlanError([Problem("ranks-diverge", name, found=reason, hint=hint) for name in names[:8]])

    @contextmanager
    def unsharded(self, *, writeback: bool = True) -> Iterator[None]:
        """Hold every parameter full and plain in the block; every rank enters it.

        Args:
            writeback: Keep values written to parameters in the block; otherwise they are dropped.
        """
        for unit in self.units.modules:
            unit.reshard()  # type: ignore[operator]  # an FSDPModule's
        with ExitStack() as stack:
            for root in self.modules:  # FSDP2 would shard again for a state dict, gather for a forward, refuse a copy
                stack.enter_context(without_fsdp_in(root))
            stack.enter_context(state.full_parameters(self.modules, writeback))
            yield

    def release(self, *others: Any) -> None:
        """Remove the hooks, and make every parameter, gradient and optimizer state full and plain again."""
        if self.units.modules:
            reach = Reach(self.function, self.modules, self.optimizers, self.roots, self.holders, others)
            swap: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
            parameter: Any
            for unit in self.units.modules:
                remove_fsdp(unit)
            for module in (inner for root in self.modules for inner in root.modules()):
                for key, parameter in module._parameters.items():
                    if isinstance(parameter, DTensor):
                        if id(parameter) not in swap:
                            plain = parameter_like(state.full_tensor(parameter), parameter)
                            plain.grad = None if parameter.grad is None else state.full_tensor(parameter.grad)
                            swap[id(parameter)] = parameter, plain  # tied parameters stay one
                        module._parameters[key] = swap[id(parameter)][1]
            repoint(reach, swap, state.full_tensor)
            reason = "was this rank's shard before release()"
            hint = "rebuild lists of parameters, and optimizers that no call was given, from model.parameters()"
            for old, _ in swap.values():
                mark_stale(old, Problem("parameter-replaced", found=reason, hint=hint))
        for handle in self.handles:
            handle.remove()
        if self.reducer is not None:
            self.reducer.remove()
        self.reducer, self.parameters, self.modules, self.units = None, {}, [], Units((), {})
        self.is_placed, self.holders = False, []

    def explain(self) -> str:
        """Return lines about the way of running and the comparisons."""
        count = len(self.parameters)
        full = [p for p in self.parameters.values() if not isinstance(p, DTensor)]
        compared = f"{len(full)} full parameters, {sum(p.numel() for p in full):,} elements, equal on all ranks"
        return "\n".join([
            f"{self.name} runs eagerly: {self.reason}",
            f"sharded: {count - len(full)} of {count} parameters, in {len(self.units.modules)} units of FSDP2",
            *(f"full: {name}: {why}" for name, why in self.units.full.items()),
            f"{self.num_calls} calls; {compared} in {self.num_compared} comparisons",
            f"{len(self.checked)} calls checked against the step on a full copy, {sum(self.checked):,} elements"
            + (f"; unchecked: {self.unchecked}" if self.unchecked else ""),
        ])  # fmt: skip
