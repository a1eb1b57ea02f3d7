"""State of a train step: the modules, optimizers and tensors among its arguments."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import pytree
from dp_partition.capture.fingerprint import ModuleReads
from dp_partition.capture.reach import Reach

_UNWRAPPED_HINT = (
    "pass the plain model, as it is before DDP, FSDP or tensor parallelism are applied to it; for one that a step of "
    "this package has placed: compile(share=that_step), or distribute([that, this])"
)


@dataclass
class StepState:
    """The stateful arguments of a train step."""

    modules: list[tuple[str, nn.Module]]  # ``(prefix, module)``; the prefix is empty for a single module
    optimizers: list[Optimizer]  # the optimizers, in argument order
    # unique parameters by FQN, in registration order; a tied parameter has its first name
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # unique buffers by FQN
    # every further name of a tied tensor -> the name it stands under
    aliases: dict[str, str] = field(default_factory=dict)
    is_reached: bool = False  # whether they are no arguments: the step's code reaches them elsewhere

    @functools.cached_property
    def reads(self) -> ModuleReads:
        """Values of the modules beside their parameters and buffers."""
        return ModuleReads(root for _, root in self.modules)

    def slots(self) -> Iterator[tuple[str, nn.Module, str, bool]]:
        """Yield every registration of a tensor: ``(fqn, owner module, attribute, is it a parameter)``."""
        for prefix, root in self.modules:
            for path, module in root.named_modules(remove_duplicate=True):
                base = ".".join(part for part in (prefix, path) if part)
                for is_param, table in ((True, module._parameters), (False, module._buffers)):
                    for attribute, tensor in table.items():
                        if tensor is not None:
                            yield (f"{base}.{attribute}" if base else attribute), module, attribute, is_param

    def states(self) -> Iterator[tuple[int, str, dict[Any, Any]]]:
        """Yield each parameter's state under the number of its optimizer and its name."""
        fqn_of = {id(param): fqn for fqn, param in self.params.items()}
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param in optimizer.state and id(param) in fqn_of:
                        yield number, fqn_of[id(param)], optimizer.state[param]


def find_step_state(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepState:
    """Find the modules and optimizers among the arguments, and their tensors.

    Where no argument is a module, the step's own are those that its code reaches: in ``self``, a closure, a global.

    Raises:
        PlanError: There is no module (code ``wrong-type``), or an optimizer steps a tensor outside of all modules
            (code ``parameter-not-in-module``).
    """
    modules: list[tuple[str, nn.Module]] = []
    optimizers: list[Optimizer] = []
    for name, leaf in named_leaves(function, args, kwargs):
        if isinstance(leaf, nn.Module) and all(leaf is not seen for _, seen in modules):
            modules.append((name, leaf))
        if isinstance(leaf, Optimizer) and all(leaf is not seen for seen in optimizers):
            optimizers.append(leaf)
    is_reached = not modules
    if is_reached:
        reach = Reach(function, args, kwargs)
        modules = [(f"{type(module).__name__}{number}", module) for number, module in enumerate(reach.modules)]
        optimizers += [item for item in reach.optimizers if all(item is not seen for seen in optimizers)]
    if not modules:
        name, hint = getattr(function, "__name__", "train_step"), "pass the model as an argument of the train step"
        raise PlanError(Problem("wrong-type", name, found="no nn.Module", hint=hint))
    for name, root in modules:
        if any(isinstance(module, torch.jit.ScriptModule) for module in root.modules()):
            raise PlanError(Problem("not-traceable", name, found="holds TorchScript", hint="pass the plain module"))
    if len(modules) == 1:
        modules = [("", modules[0][1])]
    step_state = StepState(modules, optimizers, is_reached=is_reached)
    index_tensors(step_state)
    in_models = {id(param) for param in step_state.params.values()}
    problems = keyless_state(step_state.optimizers)
    for number, optimizer in enumerate(step_state.optimizers):
        inner = [key for key, value in vars(optimizer).items() if isinstance(value, Optimizer)]
        if inner:
            # Its state would be rebound to no placed parameter, and start again in each call.
            problems.append(
                Problem(
                    "not-traceable",
                    f"optimizer {number}",
                    found=f"{type(optimizer).__name__} holds another optimizer, as {inner[0]}",
                    hint="pass the inner optimizer to the step, and write there what the outer one does around it",
                )
            )
        hint = "pass the module that holds it as an argument of the train step"
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if id(param) in in_models:
                    continue
                name = f"optimizer {number} group {group_index} parameter {index}"
                if param.grad is None:
                    # Of a layer that the caller has replaced: no gradient reaches it. A step that uses it is refused
                    # by the trace, which sees the tensor itself in the place of a fake.
                    step_state.params[name] = param
                    in_models.add(id(param))
                else:
                    problems.append(
                        Problem(
                            "parameter-not-in-module",
                            name,
                            found=f"tensor of shape {tuple(param.shape)} that no module argument holds",
                            hint=hint,
                        )
                    )
    if problems:
        raise PlanError(problems)
    return step_state


def named_leaves(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a call's arguments in order, named after its argument."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {str(index): value for index, value in enumerate(args)} | kwargs
    for name, value in bound.items():
        leaves = pytree.tree_leaves(value)
        for index, leaf in enumerate(leaves):
            yield (name if len(leaves) == 1 else f"{name}.{index}"), leaf


def index_tensors(step_state: StepState) -> None:
    first_name: dict[int, str] = {}
    for fqn, module, attribute, is_param in step_state.slots():
        tensor = (module._parameters if is_param else module._buffers)[attribute]
        assert tensor is not None
        if id(tensor) in first_name:
            step_state.aliases[fqn] = first_name[id(tensor)]
            continue
        first_name[id(tensor)] = fqn
        if isinstance(tensor, nn.Parameter):
            step_state.params[fqn] = tensor
        else:
            step_state.buffers[fqn] = tensor


def rename(step_state: StepState, names: Mapping[int, str]) -> None:
    """Give parameters, by ``id``, the names that another step has placed them under."""
    new = {name: names[id(param)] for name, param in step_state.params.items()}
    step_state.params = {new[name]: param for name, param in step_state.params.items()}
    step_state.aliases = {alias: new.get(name, name) for alias, name in step_state.aliases.items()}
    step_state.aliases |= {name: other for name, other in new.items() if name != other}


def choose_foreach(optimizer: Optimizer) -> None:
    """Update a group's parameters at once, unless the caller has chosen: half a loop's nodes."""
    for group in optimizer.param_groups:
        # A parameter thawed by the step gets its state inside the trace: its count is a constant there, and
        # multi-tensor updates leave it at zero.
        is_open = "foreach" in group and group["foreach"] is None and all(p.requires_grad for p in group["params"])
        if is_open and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def keyless_state(optimizers: list[Optimizer]) -> list[Problem]:
    """Return a problem for each optimizer with state under other keys than parameters. A graph would lose it."""
    hint = "keep it in the state of a parameter, self.state[p], or in a buffer of the model"
    return [
        Problem("python-state", f"optimizer {number}", found=f"{type(optimizer).__name__}.state[{key!r}]", hint=hint)
        for number, optimizer in enumerate(optimizers)
        for key in list[Any](optimizer.state)  # torch types keys as tensors; others use strings and indices
        if not isinstance(key, torch.Tensor)
    ]


def has_state(state: dict[Any, Any] | None) -> TypeGuard[dict[Any, Any]]:
    """Return True if a parameter's state holds anything. SGD keeps a None buffer until its first step."""
    return state is not None and any(value is not None for value in state.values())


def initial_state(optimizer: Optimizer, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return the state at the start of the first step, for a parameter or its shard, real or fake; a ``grad`` stays.

    It is empty if the optimizer makes it only from the first gradient; the first step then has its own graph.
    """
    if isinstance(optimizer, torch.optim.SGD):
        # Its first buffer is the gradient itself; without dampening zeros give the same.
        has_buffer = group["momentum"] != 0 and group["dampening"] == 0
        return {"momentum_buffer": torch.zeros_like(param, requires_grad=False)} if has_buffer else {}
    init = getattr(optimizer, "_init_group", None)
    if init is None:
        return {}
    saved_state, saved_grad = optimizer.state, param.grad
    optimizer.state = defaultdict(dict)  # `_init_group` writes into it
    param.grad = torch.zeros_like(param)  # without one `_init_group` skips it
    try:
        names = list(inspect.signature(init).parameters)[1:]  # lists to fill
        init({**group, "params": [param]}, *([] for _ in names))
        return dict(optimizer.state[param])
    finally:
        optimizer.state, param.grad = saved_state, saved_grad


def check_traceable(step_state: StepState) -> None:
    """Raise for tensors whose meaning a trace would lose.

    Raises:
        PlanError: For hooks on parameters (``parameter-hooks``), distributed parameters
            (``already-applied``) and tensors in one another's memory (``shared-memory``).
    """
    problems = wrapped(step_state.modules, step_state.params)
    problems += hooked_parameters(step_state.params)
    problems += shared_memory({**step_state.params, **step_state.buffers})
    if problems:
        raise PlanError(problems, "the model cannot be placed")


def wrapped(modules: Iterable[tuple[str, nn.Module]], params: Mapping[str, nn.Parameter]) -> list[Problem]:
    """Return problems of models that another library has distributed already."""
    problems = [
        Problem("already-applied", name, found="is wrapped in DistributedDataParallel", hint=_UNWRAPPED_HINT)
        for prefix, root in modules
        for name, module in root.named_modules(prefix=prefix)
        if isinstance(module, nn.parallel.DistributedDataParallel)
    ]
    are_placed = [name for name, param in params.items() if isinstance(param, DTensor)]
    return problems + [Problem("already-applied", n, found="is a DTensor", hint=_UNWRAPPED_HINT) for n in are_placed]


def without_data(params: Mapping[str, nn.Parameter]) -> list[Problem]:
    hint = "model.to_empty(device=...), then initialise or load it; run one forward of a lazy module"
    empty = [name for name, p in params.items() if p.is_meta or isinstance(p, nn.UninitializedParameter)]
    return [Problem("no-data", name, found="is on the meta device, or lazy", hint=hint) for name in empty]


def hooked_parameters(params: dict[str, nn.Parameter]) -> list[Problem]:
    hint = "remove the hook, and change p.grad in the step, between backward() and optim.step()"
    reason = "has a gradient hook, which no trace sees"
    return [
        Problem("parameter-hooks", name, found=reason, hint=hint)
        for name, param in params.items()
        if param._backward_hooks or param._post_accumulate_grad_hooks
    ]


def shared_memory(tensors: dict[str, Any]) -> list[Problem]:
    """Return problems of different tensors with overlapping memory: placing would separate them."""
    owners: dict[int, list[tuple[str, int, int]]] = {}
    problems = []
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) or tensor.layout != torch.strided or not tensor.numel():
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.element_size()
        end = start + (last + 1) * tensor.element_size()
        owners_of_storage = owners.setdefault(tensor.untyped_storage()._cdata, [])
        hint = "tie them by assigning the same Parameter, or give one of them a copy"
        shared = [other for other, from_, to in owners_of_storage if start < to and from_ < end]
        problems += [Problem("shared-memory", name, found=f"shares memory with {n}", hint=hint) for n in shared]
        owners_of_storage.append((name, start, end))
    return problems
