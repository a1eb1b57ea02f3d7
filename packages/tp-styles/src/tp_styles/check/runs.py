"""One run of a module on detached copies of its inputs, parameters and buffers.

The copies are swapped into the module itself during a forward or a backward, and taken out again: a forward may reach
a module by any way, also through a closure, and a copied module would miss this. Everything else in a module is
restored afterwards, with its `__dict__` and the entries of its tables of hooks and modules.

Weights of a check's runs: copies of one module's parameters and buffers, sharded or full.

A zero-initialised projection (LoRA's B, Fixup, adaLN-Zero, a gate of 0) makes every gradient behind it zero, in both
runs and whatever the mistake; norms of ones hide a wrong slice of them; a parameter frozen now may learn later. So the
copies have no such weights: a constant parameter, and every zero element of another, is drawn anew, and all floating
parameters take a gradient. Both runs and all ranks draw the same numbers.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tp_styles._shared.dtensor import as_dtensor
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles._torch_compat import local_of, without_dispatch_modes
from tp_styles.check.inputs import FSDP, PLAIN, SHARED, tensors_in, varied
from tp_styles.runtime.forwards import Forward
from tp_styles.runtime.install import TABLES, DisableFastPath
from tp_styles.runtime.parameters import ShardParameter, agreed_values, full_tensor, split_of
from tp_styles.runtime.redistribute import TPGroup

DRAWABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# A weight without a larger element hides what is behind it like one of zeros.
TINY = 1e-5


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Numbers in place of one parameter's constants.

    Attributes:
        index: The parameter's place in its module: weights of one shape get different numbers.
        shape: Its global shape.
        constant: Every element of it is about this; None if only its zeros are drawn.
    """

    index: int
    shape: torch.Size
    constant: float | None

    def full(self) -> torch.Tensor:
        """Return float64 numbers of the global shape, of the size of an ordinary initialisation."""
        value = varied(torch.empty(self.shape, dtype=torch.float64, device="cpu"), self.index)
        if self.constant is not None and abs(self.constant) > TINY:
            return self.constant * (1 + 0.25 * value)
        columns = self.shape.numel() // self.shape[0] if len(self.shape) > 1 else 4
        return value / math.sqrt(columns)

    def applied(self, value: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values, full or one rank's, with the drawn ones of the same rows."""
        drawn = drawn.to(value.device, value.dtype)
        return drawn if self.constant is not None else torch.where(value == 0, drawn, value)


class Weights:
    """Copies of a module's parameters for both runs of a comparison. Every rank makes one: it communicates.

    Args:
        module: The module, sharded.
        axis: Its ranks.
        dtype: Type of floating parameters and buffers in the copies; None leaves them.
        lively: Draw constants anew, and give every floating parameter a gradient.
    """

    def __init__(self, module: nn.Module, axis: TPGroup, dtype: torch.dtype | None, *, lively: bool) -> None:
        self.axis, self.dtype, self.lively = axis, dtype, lively
        with without_dispatch_modes():  # the check's mode would see each of these small operations
            self._drawings = _drawings(module, axis) if lively else {}

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """Copy, even in the same type. A forward may write to tensors it reads, like a teacher's weights."""
        return x.to(self.dtype if self.dtype is not None and x.is_floating_point() else x.dtype, copy=True)

    def learns(self, parameter: torch.Tensor) -> bool:
        """True if the copies of a parameter take a gradient."""
        return parameter.requires_grad or (self.lively and parameter.is_floating_point())

    def shard(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's shard as a new leaf."""
        drawing = self._drawings.get(id(parameter))
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            value = local_of(parameter).detach()
            if drawing is not None:
                full = drawing.full().to(value.device)
                value = drawing.applied(value, distribute_tensor(full, mesh, placements, src_data_rank=None).to_local())
            wrapped = as_dtensor(self.cast(value), mesh, placements, parameter.shape, parameter.stride())
            return nn.Parameter(wrapped, self.learns(parameter))
        value = parameter.detach().as_subclass(torch.Tensor)
        info = sharding_info_of(parameter)
        if info is None:  # a replica
            value = agreed_values(value, self.axis, 0)
        if drawing is not None:
            full = drawing.full()
            rows = full if info is None else split_of(info).take(full, self.axis.rank, self.axis.size)
            value = drawing.applied(value, rows)
        kind = ShardParameter if isinstance(parameter, ShardParameter) else nn.Parameter
        shard: Any = kind(self.cast(value), self.learns(parameter))
        if info is not None:  # also plain parameters of the bridge
            shard._sharding_info = info
        result: nn.Parameter = shard
        return result

    def full(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the full parameter as a new leaf, gathered from the shards."""
        value = parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        elif (info := sharding_info_of(parameter)) is not None:
            value = full_tensor(value.as_subclass(torch.Tensor), self.axis, split_of(info))
        else:
            # Replicas are compared elsewhere, and may differ by rounding: both runs take the first rank's.
            value = agreed_values(value.as_subclass(torch.Tensor), self.axis, 0)
        if (drawing := self._drawings.get(id(parameter))) is not None:
            value = drawing.applied(value, drawing.full())
        return nn.Parameter(self.cast(value), self.learns(parameter))


def _drawings(module: nn.Module, axis: TPGroup) -> dict[int, Drawing]:
    """Return a drawing for each parameter with constants; the same ones on every rank."""
    parameters = list({id(p): p for m in module.modules() for p in m._parameters.values() if p is not None}.values())
    candidates = [(index, p) for index, p in enumerate(parameters) if _is_drawable(p, axis)]
    if not candidates:
        return {}
    table = torch.stack([_extremes(p) for _, p in candidates]).to(axis.mesh.device_type)
    axis.communicate(dist.all_reduce, table, dist.ReduceOp.MAX)
    drawings = {}
    for (index, parameter), (largest, minus_smallest, has_zeros) in zip(candidates, table.tolist(), strict=True):
        size = max(abs(largest), abs(minus_smallest))
        if not math.isfinite(size):
            continue  # a mask of -inf has a meaning
        shape = parameter.shape if (info := sharding_info_of(parameter)) is None else info.shape
        is_constant = size <= TINY or largest + minus_smallest <= 1e-3 * size
        if is_constant and (shape.numel() > 1 or size <= TINY):  # a scale of one element hides nothing unless it is 0
            drawings[id(parameter)] = Drawing(index, shape, largest)
        elif has_zeros and not is_constant:
            drawings[id(parameter)] = Drawing(index, shape, None)
    return drawings


def _is_drawable(parameter: torch.Tensor, axis: TPGroup) -> bool:
    """True for an ordinary floating parameter, or a shard of one over the axis alone."""
    if parameter.dtype not in DRAWABLE:
        return False
    if isinstance(parameter, DTensor):
        return parameter.device_mesh == axis.mesh
    info = sharding_info_of(parameter)
    return info is None or info.mesh == axis.mesh


def _extremes(parameter: torch.Tensor) -> torch.Tensor:
    """Return the largest element of a rank's shard, minus the smallest one, and 1 if there are zeros."""
    local = local_of(parameter) if isinstance(parameter, DTensor) else parameter
    local = local.detach().as_subclass(torch.Tensor)
    if not local.numel():
        return torch.full((3,), -math.inf, dtype=torch.float64, device=local.device)
    smallest, largest = torch.aminmax(local)
    return torch.stack([x.double() for x in (largest, -smallest, (local == 0).any())])


# FQN of a module and name of its parameter or buffer.
Key = tuple[str, str]

INTERNAL = frozenset(vars(nn.Module()))
HOOK_TABLES = "_forward_hooks", "_forward_pre_hooks"
# Containers that modules hold in objects, by identity, with their contents.
Objects = dict[int, tuple[Any, list[Any]]]


@dataclass(eq=False)
class Original:
    """A plan's changes of one module, other than parameters and its own hooks.

    Attributes:
        module: The module.
        kind: Its class; another library may derive from it later (a view of local parameters as DTensors).
        attributes: Former attributes.
        foreign_hooks: Keys of hooks by a style of another library.
    """

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any] = field(default_factory=dict)
    foreign_hooks: set[int] = field(default_factory=set)


class Trace:
    """Modules with a forward in progress, and what the others returned.

    Args:
        names: FQN of every module.
        keeps: Keep the first output of every module.
    """

    def __init__(self, names: Mapping[nn.Module, str], *, keeps: bool) -> None:
        self.names, self.keeps = names, keeps
        self.entered: list[nn.Module] = []
        self.outputs: dict[str, list[Any]] = {}

    def enter(self, module: nn.Module, args: Any) -> None:
        """Run as the first pre-hook of a module: after an error the module stays listed."""
        self.entered.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Run as the last hook of a module."""
        while self.entered and self.entered.pop() is not module:
            pass  # the forward of a module inside has raised, and the module around it has caught the error
        if self.keeps:
            name = self.names.get(module) or type(module).__name__
            self.outputs.setdefault(name, []).append(next((x.detach().clone() for _, x in tensors_in(output)), None))

    def place(self) -> str:
        """Return the innermost module of an error, with global shapes of its parameters."""
        if not self.entered:
            return ""
        module = self.entered[-1]
        shapes = []
        for key, parameter in module._parameters.items():
            if parameter is not None:
                shapes.append(f"{key} {list((sharding_info_of(parameter) or parameter).shape)}")
        return " ".join([self.names.get(module, ""), f"({', '.join([type(module).__name__, *shapes])})"]).strip()


class Run:
    """Copies of a module's state, sharded or full, and the output computed with them.

    Args:
        module: The module.
        weights: Makes the copies.
        trace: Gets the modules that are entered, and names them.
        originals: Changes of the plan, for a run of the original; else None.
        opaque: Modules left sharded in a run of the original, with all below them.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: Weights,
        trace: Trace,
        *,
        originals: list[Original] | None = None,
        opaque: frozenset[nn.Module] = frozenset(),
    ) -> None:
        self.module = module
        self.trace = trace
        self.output: Any = None
        self.written: dict[str, torch.Tensor] = {}
        self._weights = weights
        self._listens = originals is None or trace.keeps  # hooks would keep an original from torch's fast paths
        self.parameters: dict[Key, nn.Parameter] = {}
        self.buffers: dict[Key, torch.Tensor] = {}
        self._kinds: dict[nn.Module, type[nn.Module]] = {}
        self._state: dict[nn.Module, dict[str, Any]] = {}
        self._objects: Objects = {}
        for value in contextvars.copy_context().values():  # hooks of transformers collect outputs there
            _remember(value, self._objects)
        self._restored_only = set(self._objects)
        stays = {below for entry in opaque for below in entry.modules()}
        before = {original.module: original for original in originals or ()}
        copies: dict[tuple[int, bool], nn.Parameter] = {}
        for current in module.modules():
            reverted = originals is not None and current not in stays
            self._state[current] = self._prepared(current, trace.names.get(current, ""), reverted, before, copies)

    # ------------------------------------------------------------------ state to swap in

    def _prepared(
        self,
        module: nn.Module,
        name: str,
        reverted: bool,
        before: dict[nn.Module, Original],
        copies: dict[tuple[int, bool], nn.Parameter],
    ) -> dict[str, Any]:
        state = _saved(module)
        replaced: dict[int, Any] = {}
        parameters: dict[str, nn.Parameter | None] = {}
        buffers: dict[str, torch.Tensor | None] = {}
        for key, parameter in module._parameters.items():
            if parameter is not None:
                parameter_key = (id(parameter), reverted)
                if parameter_key not in copies:  # a tied parameter: one copy
                    copies[parameter_key] = (
                        self._weights.full(parameter) if reverted else self._weights.shard(parameter)
                    )
                replaced[id(parameter)] = self.parameters[name, key] = copies[parameter_key]
            parameters[key] = None if parameter is None else copies[parameter_key]
        for key, buffer in module._buffers.items():
            buffers[key] = None
            if buffer is not None:
                copy = self._weights.cast(buffer.detach())
                buffers[key] = replaced[id(buffer)] = self.buffers[name, key] = copy
        state["_parameters"], state["_buffers"] = parameters, buffers
        state["_modules"] = dict(module._modules)
        for key, value in state.items():
            if key not in INTERNAL:
                state[key] = _copied(value, replaced, self._objects)
        original = before.get(module)
        foreign = original.foreign_hooks if original is not None else set()
        for table in HOOK_TABLES:
            hooks = vars(module)[table]
            left_out = {key for key, hook in hooks.items() if is_of_fsdp(hook)}
            if reverted:
                left_out |= foreign | {key for key, hook in hooks.items() if _is_ours(hook)}
            remaining = [item for item in hooks.items() if item[0] not in left_out]
            if self._listens:
                pre = "pre" in table
                remaining = [(-1, self.trace.enter), *remaining] if pre else [*remaining, (-1, self.trace.leave)]
            state[table] = remaining, []
            # Lists in a user's hook, for example. FSDP2's take no part, and reach torch's own modules.
            for hook in hooks.values():
                for cell in () if is_of_fsdp(hook) else getattr(hook, "__closure__", None) or ():
                    with suppress(ValueError):  # an empty cell
                        _remember(cell.cell_contents, self._objects)
        if reverted:
            if _is_ours(state.get("forward")):
                del state["forward"]
            if original is not None:
                for key, value in original.attributes.items():
                    if key in state["_buffers"]:
                        state["_buffers"][key] = self.buffers[name, key] = self._weights.cast(value.detach())
                    else:
                        state[key] = value
                if type(module).forward is original.kind.forward:  # else the user has changed the class
                    self._kinds[module] = original.kind
        return state

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Swap the copies into the module."""
        saved = {module: _saved(module) for module in self._state}
        kinds = {module: type(module) for module in self._kinds}
        try:
            for module, kind in self._kinds.items():
                object.__setattr__(module, "__class__", kind)
            for module, state in self._state.items():
                _put(module, state)
            yield
        finally:  # after an error too
            for module, kind in kinds.items():
                object.__setattr__(module, "__class__", kind)
            for module, state in saved.items():
                _put(module, state)
            _restore(self._objects)

    # ------------------------------------------------------------------ running

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the module; keep tensors written to modules, to lists in them, and to arguments."""
        with self.installed():
            before = {id(x): (x, _version(x)) for _, x in self._held(args, kwargs)}
            self.output = self.module(*args, **kwargs)
            results = {id(x) for _, x in tensors_in(self.output)}
            for name, x in self._held(args, kwargs):
                is_new = id(x) not in before or before[id(x)][1] != _version(x)
                if is_new and id(x) not in results:
                    self.written[name] = x

    def _held(self, args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors in plain attributes of modules, in lists of their hooks, and in arguments."""
        for module in self._state:
            name = self.trace.names.get(module, "")
            for key, value in vars(module).items():
                if key not in INTERNAL and not _is_ours(value):
                    yield from ((place.path, x) for place, x in tensors_in(value, f"{name}.{key}".lstrip(".")))
        for index, (identity, (value, _)) in enumerate(self._objects.items()):
            if isinstance(value, list) and identity not in self._restored_only:
                yield from ((place.path, x) for place, x in tensors_in(value, f"list {index}"))
        yield from ((place.path, x) for place, x in tensors_in((args, kwargs), "arguments"))

    def backward(self, outputs: list[torch.Tensor], gradients: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
        """Fill the gradients of the copies and of the inputs; return True.

        Leaves outside of all lists of parameters get none: they are no copies. A re-entrant checkpoint refuses this.

        Args:
            outputs: Start of the backward.
            gradients: One for each output.
            inputs: Leaves among the arguments.
        """
        leaves = {id(x): x for x in (*self.parameters.values(), *inputs) if x.requires_grad}
        with self.installed():  # a checkpoint inside runs forwards once more
            torch.autograd.backward(outputs, gradients, inputs=list(leaves.values()))
        return True


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _saved(module: nn.Module) -> dict[str, Any]:
    """Return a module's `__dict__`. Tables are items, counted by a compiler, and keys in the order of calls."""
    return vars(module) | {key: ([*dict.items(vars(module)[key])], [*vars(module)[key]]) for key in TABLES}


def _put(module: nn.Module, state: dict[str, Any]) -> None:
    """Swap entries of tables in place. Handles of hooks, also of new ones in a forward, hold the tables."""
    tables = {key: vars(module)[key] for key in TABLES}
    vars(module).clear()
    vars(module).update(state | tables)
    for key, table in tables.items():
        items, order = state[key]
        table.clear()
        table.update(items)
        for entry in order:
            table.move_to_end(entry)


def has_fsdp_below(module: nn.Module) -> bool:
    """True if modules below are units of FSDP2: these gather their parameters only when called."""
    below = (child for child in module.modules() if child is not module)
    return any(is_of_fsdp(hook) for child in below for hook in child._forward_pre_hooks.values())


def fsdp_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return units of FSDP2 with no other inside, by FQN: their hooks gather every parameter before a call."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(map(is_of_fsdp, module._forward_pre_hooks.values())) and not has_fsdp_below(module)
    }


def full_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of the global parameter."""
    info = sharding_info_of(parameter)
    return int(info.shape.numel()) if info is not None else parameter.numel()


def is_of_fsdp(hook: Any) -> bool:
    """True for a hook of FSDP2."""
    owner = getattr(hook, "__self__", None)
    return owner is not None and type(owner).__module__.startswith(FSDP)


def _is_ours(hook: Any) -> bool:
    owner = getattr(hook, "__self__", hook)
    is_known = isinstance(owner, Forward) or type(owner).__module__.startswith("tp_styles.")  # also others' forwards
    return is_known and not isinstance(owner, DisableFastPath)


def _copied(value: Any, replaced: dict[int, Any], objects: Objects) -> Any:
    """Copy a mutable value of a module's `__dict__`. Parameters and buffers in it become the run's."""
    if id(value) in replaced:
        return replaced[id(value)]
    if type(value) in (list, tuple, set):
        return type(value)([_copied(entry, replaced, objects) for entry in value])
    if type(value) is dict:
        return {key: _copied(entry, replaced, objects) for key, entry in value.items()}
    if type(value) is torch.Tensor:
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    library = type(value).__module__.partition(".")[0]
    if library in ("numpy", "random", "itertools") or (library == "builtins" and isinstance(value, Iterator)):
        with suppress(TypeError, RuntimeError), warnings.catch_warnings():  # a Python generator cannot be copied
            warnings.simplefilter("ignore", DeprecationWarning)  # itertools, from Python 3.12 on
            return copy.deepcopy(value)
    _remember(value, objects)
    return value


def _remember(value: Any, objects: Objects, depth: int = 4) -> None:
    """Add an object, and those in it, without a copy. Modules may share a cache, and its identity stays."""
    is_left = callable(value) or isinstance(value, (*PLAIN, *SHARED)) or _is_ours(value)
    if depth == 0 or id(value) in objects or is_left or type(value).__module__.startswith(FSDP):
        return  # FSDP2's state is left alone
    if type(value) is torch.Tensor:
        objects[id(value)] = value, [value.detach().clone()]
        return
    for container in (value, vars(value) if hasattr(value, "__dict__") else value):
        objects[id(container)] = container, _items(container)
        for inside in objects[id(container)][1]:
            _remember(inside, objects, depth - 1)


def _items(value: Any) -> list[Any]:
    """Return entries of a container, else names and values of `__slots__`. These are in no `__dict__`."""
    if isinstance(value, list | tuple | set | deque):
        return [*value]
    state = value if isinstance(value, dict) else object.__getstate__(value)
    table = state[1] if isinstance(state, tuple) else state if state is value else {}
    return [entry for item in table.items() for entry in item]


def _restore(objects: Objects) -> None:
    for value, items in objects.values():
        if type(value) is torch.Tensor:
            if not torch.equal(value, items[0]):
                value.data.copy_(items[0])  # autograd counts no write
        elif len(now := _items(value)) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
            if isinstance(value, list | set | deque):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(items)
                continue
            pairs = zip(items[::2], items[1::2], strict=True)
            if isinstance(value, dict):
                value.clear()
                value.update(pairs)
                continue
            for name in now[::2]:
                object.__delattr__(value, name)
            for name, entry in pairs:
                object.__setattr__(value, name, entry)
