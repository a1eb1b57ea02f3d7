"""Shard the parameters of a step by FSDP2, after it watched one call; what FSDP2 cannot hold stays full.

FSDP2 gathers a module's parameters for its forward and frees them after it. Code that reads a parameter elsewhere,
writes it in a forward, or takes second derivatives would see a shard, or be lost: `Watch` finds it.

Plan first, on values equal on all ranks (`plan_units`), then act (`shard`). What stays full leaves the rest in shards:
a norm over both kinds gathers numbers, a multi-tensor update of both runs once for each (`of_each_kind`).
"""

from __future__ import annotations

import collections
import copy
import functools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from dp_partition._shared.consensus import all_gather_objects
from dp_partition._shared.elementwise import is_elementwise
from dp_partition._shared.execution_check import random_state_restored, relative_error
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import (
    SHARDS_INTEGERS,
    TorchDispatchMode,
    become,
    has_gradient_hooks,
    hook_views_quietly,
    is_backward_unfinished,
    is_in_backward,
    parameter_like,
    pytree,
)
from dp_partition.capture.fingerprint import fingerprint
from dp_partition.capture.reach import Reach
from dp_partition.capture.tracer import user_line
from dp_partition.eager.reducer import CAUGHT
from dp_partition.plan.placements import shard_world
from dp_partition.plan.plan import Settings
from dp_partition.runtime.gathered import (
    Gathered,
    copies,
    is_written,
    marked,
    note_write,
    refuse_write,
    storage_of,
)
from dp_partition.runtime.saving import reduced_in_step, running
from dp_partition.runtime.state import full_tensors

Place = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Units:
    """Modules to shard by FSDP2, innermost first, and parameters that stay full."""

    modules: tuple[nn.Module, ...]  # each gathers its parameters for its forward
    full: Mapping[str, str]  # name -> reason to keep the parameter full


def together(reasons: dict[str, str], combined: Iterable[Iterable[str]]) -> dict[str, str]:
    """Extend the reasons to parameters that an operation outside of forwards combines, as a weight and its average."""
    full, grows = dict(reasons), True
    families = sorted(map(sorted, combined))
    while grows:  # a parameter may be in several families
        grows = False
        for family in families:
            first = next((name for name in family if name in full), None)
            new = [name for name in family if name not in full] if first is not None else []
            full |= dict.fromkeys(new, f"shares an operation with {first}")
            grows = grows or bool(new)
    return full


def run_unlike(runs: Sequence[Sequence[int]], watch: Watch, parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """Return reasons of parameters in modules that ranks run differently, or not at all: experts without tokens, say.

    FSDP2 gathers where a module runs, so all ranks have to run it alike. Repeated modules of one container count as
    one: an expert that has run in the first call may get no token in the next one.
    """
    counts = [collections.Counter(run) for run in runs]
    number = {module: at for at, module in enumerate(watch.modules)}
    unlike = {at for at in number.values() if len({count[at] for count in counts}) > 1}
    for container in watch.modules:
        is_list = isinstance(container, nn.ModuleList | nn.ModuleDict)  # a `Sequential` may leave out its last layers
        children = [child for child in container.children() if child in number] if is_list else []
        for kind in set(map(type, children)):
            family = {number[child] for child in children if type(child) is kind}
            ran = [at for at in family if any(count[at] for count in counts)]
            if not family.isdisjoint(unlike) or 0 < len(ran) < len(family):
                unlike |= family
    inside = {number[m] for at in unlike for m in watch.modules[at].modules() if m in number}
    if len({tuple(at for at in run if at not in inside) for run in runs}) > 1:
        return dict.fromkeys(parameters, "ranks run different modules")
    held = {id(p) for at in unlike for p in watch.modules[at].parameters()}
    why = "is in a module that not every rank or call runs"
    return {name: why for name, p in parameters.items() if id(p) in held}


def plan_units(reach: Reach, parameters: dict[str, nn.Parameter], watch: Watch, reasons: dict[str, str]) -> Units:
    """Plan units, repeated blocks and modules around the rest, with all uses of their parameters."""
    full = together(reasons, watch.combined)
    names = {id(p): name for name, p in parameters.items()}
    units: list[nn.Module] = []
    for root in reach.modules:
        order = {module: number for number, module in enumerate(root.modules())}
        own = [p for p in root.parameters() if names[id(p)] not in full]
        if not own:
            continue
        candidates = {root}
        for module in order:
            if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
                kinds = collections.Counter(map(type, module.children()))
                candidates |= {child for child in module.children() if kinds[type(child)] > 1}
        # If the root does not run (`model.encode(x)`): the outermost module that runs at each use of a parameter.
        for parameter in own:
            users = watch.users.get(names[id(parameter)], set())
            if users and root not in users:
                candidates.add(min(users & order.keys(), key=order.__getitem__, default=root))
        while True:
            closed = [m for m in order if m in candidates and _is_closed(m, root, own, names, watch)]
            gathers = {id(p): m for m in closed for p in m.parameters()}  # the innermost one
            trained = {(gathers[id(p)], p.dtype) for p in own if p.requires_grad and id(p) in gathers}
            mixed = {m for m, count in collections.Counter(m for m, _ in trained).items() if count > 1}
            if candidates.issuperset(inner := [child for module in mixed for child in module.modules()]):
                break
            candidates.update(inner)  # FSDP2 gathers trained parameters of one dtype
        missing = [names[id(p)] for p in own if id(p) not in gathers]
        written = [names[id(p)] for p in own if gathers.get(id(p)) in watch.writers.get(names[id(p)], ())]
        others = [names[id(p)] for p in own if gathers.get(id(p)) in mixed]
        if missing or written or others:  # they stay full, and so does all that shares with them
            more = dict.fromkeys(missing, "no module runs at every use of it")
            more |= dict.fromkeys(written, "a forward writes it or puts other memory in its place")
            more |= dict.fromkeys(others, "its module holds parameters of several dtypes")
            return plan_units(reach, parameters, watch, {**reasons, **more})
        units += reversed(closed)
    return Units(tuple(units), full)


def _is_closed(
    module: nn.Module, root: nn.Module, sharded: list[nn.Parameter], names: dict[int, str], watch: Watch
) -> bool:
    """Return True if a module runs at every use of its parameters among the ``sharded``, all its own."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is nn.Module.forward:
        return False
    inner = set(map(id, module.parameters()))
    own = [p for p in sharded if id(p) in inner]
    if not own or any(module not in watch.users.get(names[id(p)], {module}) for p in own):
        return False
    is_used = any(names[id(p)] in watch.users for p in own)  # an average of weights may be in no forward
    runs = module is not root or not is_used or any(watch.modules[number] is root for number in watch.ran)
    roots = (module, root)
    inside, every = (collections.Counter(id(p) for m in r.modules() for p in m._parameters.values()) for r in roots)
    return runs and all(inside[id(p)] == every[id(p)] for p in own)


def optimizer_reason(optimizer: Optimizer, mesh: DeviceMesh, full: Collection[int]) -> str:
    """Return why an optimizer needs full parameters, by comparing two copies on all ranks; empty if it does not.

    Torch's elementwise optimizers do the same on matrices of any size, so small ones show whether their operators run
    on shards: ``fused`` SGD and Rprop raise, and Adam moves no complex vector of odd length on two ranks. Any other
    optimizer is compared at the real sizes, whatever it says of itself: on a small matrix a preconditioner of blocks of
    8 rows, or an Adafactor that factors sides from 128 on, updates as an elementwise one does. Operators on shards mean
    the full tensor: LAMB, with norms, is right on shards.

    Parameters whose ``id`` is in ``full`` stay full beside the shards.
    """
    updates: list[list[torch.Tensor]] = []
    kind = type(optimizer).__name__
    is_known = getattr(optimizer, "is_elementwise", None) is None and is_elementwise(optimizer)
    for place in (None, placement_of(mesh)):
        trial, values, reason = _Trial(mesh, kind), list[tuple[torch.Tensor, torch.Tensor]](), ""
        try:
            with trial:
                pairs = _stepped(optimizer, place, full, shard_world(mesh) if is_known else 0, trial)
                values = list(zip(full_tensors([new for new, _ in pairs]), [old for _, old in pairs], strict=True))
        except _StoppedError as stopped:
            reason = str(stopped)
        except Exception as error:  # of any optimizer's own code, or of the copies of what it holds
            text = f"({type(error).__name__}: {error!s:.80})"
            reason = f"{kind} fails {'on shards' if place else 'outside of the step'} {text}"
        if why := trial.stopped or trial.meet(reason):
            return why
        updates.append([new - old for new, old in values])
    for want, got in zip(*updates, strict=True):
        difference = relative_error(got, want)
        # One rounding at most: an elementwise update of shards is equal bit for bit. Muon's products of shards in
        # bfloat16 round in another order, and its iteration makes 10 % and more of the movement of that.
        if difference > max(1e-4, torch.finfo(want.dtype).eps):
            return f"{kind} updates shards differently from full tensors, by {difference:.1e}"
    return ""


class _StoppedError(BaseException):
    """A trial stops on this rank before a message. No `Exception`: an optimizer's handlers must not catch it."""


class _Trial(TorchDispatchMode):
    """Ranks exchange their state before each message of an optimizer's trial, and at its end.

    An optimizer may fail on one rank alone: its update of that rank's rows, or the copy of an object that this rank
    alone holds. The others stop before their next gather of a shard or reduction of a norm, which it will not enter.
    """

    def __init__(self, mesh: DeviceMesh, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mesh, self.kind = mesh, kind
        self.is_silent = False  # whether a message stops the trial: WholeMatrices has planned its messages
        self.stopped = ""  # the first reason of any rank against going on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on shards, and their messages, come here next
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor") and "wait_tensor" not in func.__name__:
            if self.is_silent:
                raise _StoppedError(f"{self.kind} communicates by itself, of parameters as they are on each rank")
            if self.meet(ended=False):
                raise _StoppedError
        return func(*args, **(kwargs or {}))

    def meet(self, reason: str = "", *, ended: bool = True) -> str:
        """Return the first reason of any rank against going on, the same on all ranks; empty without one."""
        rows = all_gather_objects(self.mesh, (ended, reason), f"the comparison of {self.kind}")
        apart = f"{self.kind} communicates on some ranks alone" if len({end for end, _ in rows}) > 1 else ""
        self.stopped = next((text for _, text in rows if text), apart)
        return self.stopped


def _one_of_each_kind(
    optimizer: Optimizer, full: Collection[int], ranks: int
) -> tuple[Any, list[nn.Parameter], set[int]]:
    """Copy an optimizer with one parameter of each kind: of 12 equal layers one is updated in the comparison.

    Args:
        optimizer: The optimizer; its parameters of one group, shape, dtype and marks are of one kind.
        full: Parameters by ``id`` that stay full.
        ranks: Cut copies and their state to few elements that divide by this number with the same remainder; 0: do not.

    Returns:
        The copy, its parameters, and those that stay full by ``id``.
    """
    chosen: dict[Any, tuple[nn.Parameter, Any]] = {}  # kind -> its first parameter, and the elements to keep of that
    kind_of: dict[int, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            index = tuple([slice(ranks + size % ranks if not dim else 4) for dim, size in enumerate(p.shape) if ranks])
            shape = torch.empty(p.shape, device="meta")[index].shape
            marks = fingerprint([vars(p)])  # a step may read `p.use_muon`
            kind_of[id(p)] = (number, shape, p.dtype, p.device, p.requires_grad, id(p) in full, marks)
            chosen.setdefault(kind_of[id(p)], (p, index))
    entries = {kind: {"": p.detach(), **optimizer.state.get(p, {})} for kind, (p, _) in chosen.items()}
    shaped = {
        (kind, key): x
        for kind, (p, _) in chosen.items()
        for key, x in entries[kind].items()
        if isinstance(x, torch.Tensor) and x.shape == p.shape
    }
    full_ones = dict(zip(shaped, full_tensors(shaped.values()), strict=True))  # by few messages: they may lie in shards
    kinds: dict[Any, nn.Parameter] = {}
    state = collections.defaultdict[Any, Any](dict)
    for kind, (p, index) in chosen.items():
        # Fused kernels go by memory: a cut that kept its strides would be updated in other places.
        own = {
            key: full_ones[kind, key][index].clone() if (kind, key) in full_ones else copy.deepcopy(x)
            for key, x in entries[kind].items()
        }
        kinds[kind] = parameter_like(own.pop(""), p)
        state[kinds[kind]] = own
    stay = {id(kinds[kind]) for kind, (p, _) in chosen.items() if id(p) in full}
    memo: dict[int, Any] = {id(optimizer.state): state}  # a wrapper's state may be that of the optimizer in it
    memo |= {key: kinds[kind] for key, kind in kind_of.items()}
    beside: dict[Any, Any] = {k: x for k, x in list[Any](optimizer.state.items()) if not isinstance(k, torch.Tensor)}
    state.update(copy.deepcopy(beside, memo))
    copied = object.__new__(type(optimizer))
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    own = {k: v for k, v in vars(optimizer).items() if k not in ("step", *hooks)}  # a scheduler's steps the live one
    vars(copied).update(copy.deepcopy(own, memo))
    vars(copied).update({name: collections.OrderedDict() for name in hooks})
    for group in copied.param_groups:
        group["params"] = list(dict.fromkeys(group["params"]))
    return copied, list(kinds.values()), stay


def _stepped(
    optimizer: Optimizer, place: Place | None, full: Collection[int], ranks: int, trial: _Trial
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return one parameter of each kind after steps of a copy, from random gradients, and its full values before."""
    copied, parameters, stay = _one_of_each_kind(optimizer, full, ranks)
    generator = torch.Generator("cpu").manual_seed(0)
    swap: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu").to(parameter)
        if place is not None and id(parameter) not in stay:
            swap[id(parameter)] = parameter, parameter_like(place(parameter.detach()), parameter)
            swap[id(parameter)][1].grad = place(gradient)
        parameter.grad = gradient
    before = [parameter.detach().clone() for parameter in parameters]
    trial.is_silent = place is None
    if place is not None:
        Reach(copied).repoint(swap, place)
    with random_state_restored(), ClosedTraps():
        torch.manual_seed(0)  # equal draws for both copies
        for _ in range(6):  # some do more in every fifth or sixth
            type(copied).step(copied)
    trial.is_silent = False
    after = [swap[id(p)][1] if id(p) in swap else p for p in parameters]
    return [(new.detach(), old) for new, old in zip(after, before, strict=True)]


def shard(
    reach: Reach, parameters: dict[str, nn.Parameter], units: Units, mesh: DeviceMesh, settings: Settings, watch: Watch
) -> dict[str, nn.Parameter]:
    """Shard the units; return the new parameter of each name. Gradients and optimizer state move along.

    So do tensors of a parameter's shape in lists, dicts and attributes that the watched calls have computed of it, such
    as an average of its gradients: later calls compute with shards.
    """
    keep = {parameters[name] for name in units.full}
    place = placement_of(mesh)
    before = [(root, dict(root.named_parameters())) for root in reach.modules]
    for module in units.modules:
        # The root too: torch's default keeps its gathered values after a forward without backward, stale after a step.
        policy = MixedPrecisionPolicy(reduce_dtype=settings.comm.reduce_dtype)
        unit: Any = fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=keep, mp_policy=policy)
        if mesh.device_type == "cpu":  # gloo has no average in reduce-scatter
            unit.set_force_sum_reduction_for_comms(True)
        _refuse_writes(unit, keep)
        hook_views_quietly(unit)
    swap: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
    for root, named in before:
        now = dict(root.named_parameters())
        swap |= {id(old): (old, now[name]) for name, old in named.items() if now[name] is not old}
    for old, successor in swap.values():
        vars(successor).update({key: own for key, own in vars(old).items() if key not in vars(successor)})
        if old.grad is not None:
            successor.grad = place(old.grad)
    moved: dict[int, tuple[torch.Tensor, Any]] = dict(swap)
    for x in reach.tensors:
        names = watch.origins.get(x, frozenset())
        is_result = x.ndim and not x.requires_grad and id(x) not in swap and names.isdisjoint(units.full)
        if names and is_result and all(parameters[name].shape == x.shape for name in names):
            moved[id(x)] = x, place(x)
    reach.repoint(moved, place)
    for name, parameter in parameters.items():
        if id(parameter) in swap:  # freed; one missed by the walk raises when used, in a backward pass as well
            parameter.grad = None
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(True).register_post_accumulate_grad_hook(partial(_raise_retired, name))
            parameter.data = parameter.new_empty(0)
            vars(parameter)["_name"] = name
            parameter.__class__ = _Retired
    return {name: swap[id(p)][1] if id(p) in swap else p for name, p in parameters.items()}


class _Retired(nn.Parameter):
    """Class of a parameter replaced by shards: any use of it raises its name."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _Retired))
        _raise_retired(vars(first)["_name"])


def retired(
    tensors: Iterable[torch.Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[int, tuple[torch.Tensor, nn.Parameter]]:
    """Return those of some tensors that shards have replaced, and the shards, by the old one's ``id``."""
    names = {id(x): (x, vars(x)["_name"]) for x in tensors if isinstance(x, _Retired)}
    return {key: (x, parameters[name]) for key, (x, name) in names.items() if name in parameters}


def _raise_retired(name: str, *_: Any) -> NoReturn:
    raise PlanError(
        Problem(
            "parameter-replaced",
            name,
            found="a shard has replaced it; an object outside of the step's arguments and globals holds the old one",
            hint="pass that object, such as an optimizer that steps outside of the step, among the step's arguments; "
            'keep parameters in the model, its optimizers, lists and dicts alone; or use style="replicate"',
        )
    )


def placement_of(mesh: DeviceMesh) -> Place:
    """Return a function from full tensors, equal on all ranks, to FSDP2's layout."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return lambda x: distribute_tensor(x.detach(), mesh, placements, src_data_rank=None) if x.ndim else x


def _refuse_writes(unit: nn.Module, full: Iterable[nn.Parameter]) -> None:
    """Raise if a forward writes or moves a parameter, but a ``full`` one, or follows a failed backward pass."""
    inner = {
        m for child in unit.modules() if child is not unit and isinstance(child, FSDPModule) for m in child.modules()
    }
    own = [module for module in unit.modules() if module not in inner]  # those gather their own
    seen: list[tuple[int, str, int, int]] = []
    ids = set(map(id, full))

    def before(module: nn.Module, args: Any) -> None:
        if is_backward_unfinished([unit]) and not is_in_backward():
            raise PlanError(Problem("backward-failed", type(module).__name__, found=CAUGHT))
        for layer in own:  # else it moves what is gathered to memory for cuDNN, which is stale in the next call
            if isinstance(layer, nn.RNNBase):
                layer._flat_weight_refs = [weakref.ref(cast(Any, weight)) for weight in layer._flat_weights]
        seen[:] = _memory(own)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for changed, name, *_ in set(_memory(own)).difference(seen):
            if changed in ids:
                continue
            raise PlanError(
                Problem(
                    "parameter-replaced",
                    name,
                    found="a forward writes or moves a gathered parameter",
                    hint='use style="replicate", or write the parameter outside of forward',
                )
            )

    unit.register_forward_pre_hook(torch.compiler.disable(before))
    unit.register_forward_hook(torch.compiler.disable(after), prepend=True)  # before FSDP2 frees it


def _memory(modules: Iterable[nn.Module]) -> list[tuple[int, str, int, int]]:
    """Return id, name, version and address of the modules' own parameters."""
    with torch._C.DisableTorchFunction():  # out of sight of modes, and faster
        held = [(name, p) for m in modules for name, p in m._parameters.items() if isinstance(p, nn.Parameter)]
        return [(id(p), name, p._version, p.data_ptr()) for name, p in held]


def place_loaded_state(place: Place, optimizer: Optimizer) -> None:
    """Shard full plain state loaded into an optimizer, as its parameters are."""
    states: dict[Any, dict[Any, Any]] = optimizer.state
    for parameter, state in states.items():
        for key, value in state.items():
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if isinstance(parameter, DTensor) and is_plain and value.shape == parameter.shape:
                state[key] = place(value)


class ClosedTraps:
    """Block against silently wrong reads, writes and hooks on DTensors, in this thread and in backward passes.

    ``item()`` and its like read one rank's summand of a partial sum, ``.data =`` changes nothing, a write through a
    view may reach a copy, and a gradient hook never runs, since FSDP2 writes ``.grad`` itself. DTensor's own hook for
    functions is set meanwhile: a `TorchFunctionMode` would be called for every plain tensor too, three times as often.
    So is `torch.autograd.backward`, which is called with a plain loss. One thread at a time runs calls.
    """

    _READS = frozenset(
        getattr(torch.Tensor, name)
        for name in ("item", "tolist", "__float__", "__int__", "__bool__", "__format__", "is_nonzero")
    ) | {torch.is_nonzero}
    _SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
    _open = staticmethod(DTensor.__torch_function__)
    _backward: Callable[..., None]  # as it was: the check may have wrapped it

    def __init__(
        self, meet: Callable[[], Any] = lambda: None, compare: Callable[[Optimizer], None] = lambda optimizer: None
    ) -> None:
        self.meet, self.compare = meet, compare  # `compare` raises for an optimizer that needs full parameters

    def __enter__(self) -> None:
        if not running:
            ClosedTraps._backward = staticmethod(torch.autograd.backward)
            torch.autograd.backward = without_shards(torch.autograd.backward)
        running.setdefault(threading.get_ident(), []).append(self)
        DTensor.__torch_function__ = self._closed  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        running[threading.get_ident()].pop()
        if not running[threading.get_ident()]:
            del running[threading.get_ident()]
            DTensor.__torch_function__ = self._open  # type: ignore[method-assign]
            torch.autograd.backward = self._backward

    @classmethod
    def _closed(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not args or not (threading.get_ident() in running or is_in_backward()):  # it may have threads of its own
                return func(*args, **kwargs)
            if not copies:  # as a rule a step takes no views
                return cls._trapped(func, name, args, kwargs)
            if is_written(name) or func == cls._SET_DATA:
                refuse_write(name, args[0])
                note_write(args[0])
            used = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Gathered)]
            return marked(cls._trapped(func, name, args, kwargs), used)

    @classmethod
    def _trapped(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__get__":
            return func(*args, **kwargs)
        if func is GRAD:
            refuse_gradients("grad()", (args[1:2], kwargs.get("inputs")))
        if torch.is_grad_enabled():
            refuse_in_loss(args)
        if isinstance(args[0], list | tuple):
            if is_extreme(name, args, kwargs):  # torch's clipping by the greatest element
                short = [isinstance(x, DTensor) and has_empty_shard(x) for x in args[0]]
                args = ([x.full_tensor() if each else x for x, each in zip(args[0], short, strict=True)], *args[1:])
            return of_each_kind(func, args, kwargs)
        if isinstance(args[0], torch.Tensor) and not (isinstance(args[0], DTensor) and args[0].ndim):
            args = with_numbers(args)
        if not isinstance(args[0], DTensor):
            return func(*args, **kwargs)
        if func in cls._READS or (is_extreme(name, args, kwargs) and has_empty_shard(args[0])):
            args = (args[0].full_tensor(), *args[1:])  # a collective: all ranks read
        elif func == torch.Tensor.__reduce_ex__:
            return reduced_in_step(args[0], *args[1:])
        elif func == cls._SET_DATA:
            if not isinstance(args[1], DTensor):
                raise PlanError(
                    Problem(
                        "parameter-replaced",
                        found="`.data =` with a plain tensor, where the parameter lies in shards",
                        hint='write in place under torch.no_grad(), or use style="replicate"',
                    )
                )
            with torch.no_grad():
                args[0].detach().copy_(args[1])
            return None
        elif name == "register_hook" and isinstance(args[0], nn.Parameter):
            raise PlanError(
                Problem(
                    "parameter-hooks",
                    found="a gradient hook on a parameter in shards would never run",
                    hint='use register_post_accumulate_grad_hook, or style="replicate"',
                )
            )
        if name == "__setitem__":
            raise PlanError(
                Problem(
                    "parameter-replaced",
                    found=f"a view of shards is written ({name})",
                    hint='write full tensors, or use style="replicate"',
                )
            )
        return reduced_first(func, args, kwargs)


def aliased(
    parameters: Mapping[str, nn.Parameter], reach: Reach, watch: Watch, results: Iterable[torch.Tensor]
) -> dict[str, str]:
    """Return reasons of parameters with tensors in their memory, or in that of their state, that outlive the call.

    Once the parameter is in shards, such as a row that the step returns, or an entry of a list of ``p.data``, keeps the
    values of call 1.
    """
    names = {id(p): name for name, p in parameters.items()}
    held: list[tuple[torch.Tensor, str]] = [(p, name) for name, p in parameters.items()]
    for optimizer in reach.optimizers:
        for p, state in optimizer.state.items():
            held += [(x, names[id(p)]) for x in state.values() if id(p) in names and isinstance(x, torch.Tensor)]
    own = {storage_of(x): name for x, name in held if x.layout == torch.strided and x.ndim}
    held_ids = {id(x) for x, _ in held}
    others = [x for x in watch.origins if id(x) not in held_ids] + [x for x in reach.tensors if id(x) not in names]
    others = [x for x in (*others, *results) if x.layout == torch.strided and storage_of(x) in own]
    return {own[storage_of(x)]: "a view of it, or of its state, outlives the call" for x in others}


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A compiled step is traced through this hook: it has to see nothing that changes from call to call.
    if running and COMPARED not in vars(optimizer):
        _compare_in_call(optimizer)


_REASON = "an optimizer is compared before its first step of shards: make that one step without fullgraph"


@torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator]
def _compare_in_call(optimizer: Optimizer) -> None:
    for traps in running.get(threading.get_ident(), [])[-1:]:
        traps.compare(optimizer)


COMPARED = "_dp_partition_compared"  # attribute of optimizers that need no comparison at their steps
# From now on optimizers are compared at their first step of shards; installed once for the process.
compare_optimizers = functools.cache(partial(register_optimizer_step_pre_hook, _before_step))


GRAD = torch.autograd.grad
# Of no elements torch knows no extreme: a rank without rows of a short parameter would raise alone.
_EXTREMES = frozenset(["max", "min", "amax", "amin", "aminmax", "argmax", "argmin"])


_NORMS = frozenset(["norm", "vector_norm", "linalg_vector_norm", "_foreach_norm"])


def is_extreme(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a function of torch that takes the greatest or least element, as a norm of infinite order."""
    orders = [abs(x) for x in (*args[1:], *kwargs.values()) if isinstance(x, int | float)] if name in _NORMS else []
    return name in _EXTREMES or math.inf in orders


def has_empty_shard(tensor: DTensor) -> bool:
    """Return True if some rank holds no element of a placed tensor; all ranks know."""
    worlds = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    dims = [(tensor.shape[place.dim], world) for place, world in worlds if isinstance(place, Shard)]
    return any((world - 1) * -(-size // world) >= size for size, world in dims)


def refuse_gradients(call: str, tensors: Any) -> None:
    """Refuse gradients of shards past their units: FSDP2's graph holds gathered copies, and it alone averages them."""
    if any(isinstance(x, DTensor) for x in pytree.tree_leaves(tensors)):
        hint = 'take them in call 1, too, which keeps parameters full; or use style="replicate"'
        reason = f"{call} takes gradients of parameters since they are in shards{user_line()}"
        raise PlanError(Problem("full-parameters", found=reason, hint=hint))


def without_shards(backward: Callable[..., None]) -> Callable[..., None]:
    """Return `torch.autograd.backward`, which refuses shards in a loss or ``inputs=`` in the thread of a call."""

    def checked(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() in running:
            refuse_gradients("backward()", (args[:1], args[5:6], kwargs.get("inputs")))
        backward(*args, **kwargs)

    return checked


def of_each_kind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of lists that may hold DTensors beside plain tensors, which torch refuses.

    Multi-tensor functions run once for each kind: ``_foreach_mul_([shard, full], 0.5)``. Of numbers, such as the norms
    that clipping stacks, the partial ones are reduced first.
    """
    is_shard = [isinstance(x, DTensor) for x in args[0]]
    if all(is_shard) or not any(is_shard):
        return func(*args, **kwargs)
    if not getattr(func, "__name__", "").startswith(("_foreach_", "_fused_")):
        is_number = all(x.ndim == 0 for x in args[0])
        first = [x.full_tensor() if is_number and isinstance(x, DTensor) else x for x in args[0]]
        return func(first, *args[1:], **kwargs)
    results: dict[int, Any] = {}
    for kind in (True, False):
        places = [at for at, shard in enumerate(is_shard) if shard is kind]

        def chosen(value: Any, places: list[int] = places) -> Any:
            is_list = isinstance(value, list | tuple) and len(value) == len(is_shard)
            return [value[at] for at in places] if is_list else value

        part = func(*map(chosen, args), **{key: chosen(value) for key, value in kwargs.items()})
        results.update(zip(places, part or (), strict=False))
    return [results[at] for at in range(len(is_shard))] if results else None


def refuse_in_loss(args: tuple[Any, ...]) -> None:
    """Refuse a penalty over shards in a plain loss: each rank's loss may weigh it otherwise, and nobody averages."""
    trained = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not all(isinstance(x, DTensor) for x in trained):
        refuse_gradients("a loss", trained)


def with_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gather the numbers among arguments where a plain tensor is beside them: DTensors and plain tensors do not mix."""
    plain = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]
    if not any(x.ndim or x.requires_grad for x in plain):
        return args
    return pytree.tree_map_only(DTensor, lambda x: x if x.ndim else x.full_tensor(), args)  # type: ignore[no-any-return]


def reduced_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on DTensors; where it writes to a partial norm, which torch refuses, reduce the norm first.

    For example ``gradient.norm().clamp_(min=1e-3)``: on one device the norm is a number.
    """
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        target = args[0]
        is_partial = isinstance(target, DTensor) and any(kind.is_partial() for kind in target.placements)
        if not is_partial or "in-place operations that require placement changes" not in str(error):
            raise
        become(target, target.redistribute(placements=[Replicate()] * target.device_mesh.ndim))
        return func(*args, **kwargs)


class Watch(TorchFunctionMode):
    """Mode to note parameters that have to stay full, while the block runs.

    ``states`` are tensors of optimizers: they move into shards with the parameters.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], roots: Iterable[nn.Module], states: Iterable[torch.Tensor]
    ) -> None:
        super().__init__()
        # Tensors that would be DTensors on shards -> parameters in their computation.
        self.origins = WeakTensorKeyDictionary(dict.fromkeys(states, frozenset[str]()))
        self.origins.update({parameter: frozenset([name]) for name, parameter in parameters.items()})
        self.combined: set[frozenset[str]] = set()  # used by one operation outside of forwards: all sharded, or none
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        scripts = [module for module in modules if isinstance(module, torch.jit.ScriptModule)]  # they take no hooks
        scripted = {id(p) for module in scripts for p in module.parameters()}
        self.modules = [module for module in modules if module not in scripts]
        inside = {id(p) for module in self.modules for p in module._parameters.values()}
        # name -> reason to keep the parameter full
        self.reasons = {name: "is in no module" for name, p in parameters.items() if id(p) not in inside}
        self.reasons |= {name: "is in TorchScript" for name, p in parameters.items() if id(p) in scripted}
        self.reasons |= {name: "has no dimension" for name, p in parameters.items() if p.ndim == 0}
        self.reasons |= {name: "has no element" for name, p in parameters.items() if p.numel() == 0}
        integers = {n: p for n, p in parameters.items() if not (p.is_floating_point() or p.is_complex())}
        self.reasons |= {} if SHARDS_INTEGERS else dict.fromkeys(integers, "is of integers")
        self.reasons |= {name: "is not contiguous" for name, p in parameters.items() if not p.is_contiguous()}
        self.reasons |= {name: "has a gradient hook" for name, p in parameters.items() if has_gradient_hooks(p)}
        self.users: dict[str, set[nn.Module]] = {}  # name -> modules running at every use of the parameter
        self.writers: dict[str, set[nn.Module]] = {}  # name -> modules running when it is written or moved
        self._before: dict[nn.Module, list[tuple[int, str, int, int]]] = {}
        self.ran: list[int] = []  # numbers of the modules that ran, in order; ranks compare them
        self._stack: list[nn.Module] = []

    def __enter__(self) -> Watch:
        self._handles = []
        for number, module in enumerate(self.modules):
            self._handles += [
                module.register_forward_pre_hook(lambda m, a, n=number: self._enter(m, n)),
                module.register_forward_hook(lambda m, a, o: self._leave(m), always_call=True),
            ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _enter(self, module: nn.Module, number: int) -> None:
        self._before[module] = _memory(module.modules())
        self._stack.append(module)
        self.ran.append(number)

    def _leave(self, module: nn.Module) -> None:
        while self._stack and self._stack.pop() is not module:  # a forward inside raised, and was caught
            continue
        # A module inside itself counts as written: FSDP2 frees its parameters after the inner run.
        for changed, *_ in set(_memory(module.modules())).difference(self._before.pop(module, ())):
            if changed in self.names:
                self.writers.setdefault(self.names[changed], set()).add(module)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func is torch.autograd.grad or name == "backward":
            place = 4 if func is torch.autograd.grad else 3  # torch.Tensor.backward(tensor, gradient, retain, create)
            if kwargs.get("create_graph") or (len(args) > place and args[place]):
                self.reasons = dict.fromkeys(self.names.values(), "second derivatives are taken") | self.reasons
            # FSDP2's graph holds gathered copies: gradients of the shards themselves are none.
            for x in pytree.tree_leaves((args[1:2] if place == 4 else args[4:5], kwargs.get("inputs"))):
                if id(x) in self.names:
                    self.reasons.setdefault(self.names[id(x)], f"is an input of {func.__name__}()")
            return result
        leaves = pytree.tree_leaves((args, kwargs))
        if not self._stack:
            self._note_outside(name, [x for x in leaves if isinstance(x, torch.Tensor)], result)
        if name in ("__get__", "__set__"):  # shapes, .grad, .data
            return result
        read = {self.names[id(x)]: x for x in leaves if id(x) in self.names}
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)] if read else []
        for fqn, parameter in read.items():
            if self._stack:
                running = set(self._stack)
                self.users[fqn] = self.users.get(fqn, running) & running  # at every use
            elif torch.is_grad_enabled() and any(x.requires_grad and x is not parameter for x in outputs):
                self.reasons.setdefault(fqn, f"is read outside of any module's forward ({name})")
        return result

    def _note_outside(self, name: str, tensors: list[torch.Tensor], result: Any) -> None:
        """Follow values computed from parameters: combined with a plain tensor, they would fail on shards."""
        followed = [x for x in tensors if x in self.origins]
        if not followed:
            return
        # A number, such as the coefficient of clipping, goes with shards and with full tensors.
        shaped = [x for x in followed if x.ndim] or followed
        names = frozenset[str]().union(*(self.origins[x] for x in shaped))
        is_mixed = shaped[0].ndim and any(x not in self.origins and x.numel() > 1 for x in tensors)
        if name in ("numpy", "__array__") or is_mixed:
            reason = f"is combined with a plain tensor ({name})" if len(tensors) > 1 else "is read as an array"
            self.reasons = dict.fromkeys(names, reason) | self.reasons
        elif len(shaped) > 1 < len(names) and shaped[0].ndim and not name.startswith(("_foreach_", "_fused_")):
            self.combined.add(names)  # lists may hold shards and full tensors: `of_each_kind`
        base = tensors[0]._base  # a shard's view may be a copy, and the write is lost
        if is_written(name) and (name == "__setitem__" or (base is not None and base.shape != tensors[0].shape)):
            self.reasons = dict.fromkeys(names, f"is written through a view ({name})") | self.reasons
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.origins.setdefault(x, names)
