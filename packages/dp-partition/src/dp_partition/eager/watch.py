"""Watch one call of a step for parameters unfit for FSDP2, and users of others.

FSDP2 gathers a module's parameters for its forward and frees them after it. Code that reads a parameter elsewhere,
writes it in a forward, or takes second derivatives would see a shard, or be lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from dp_partition._torch_compat import has_gradient_hooks, pytree


class Watch(TorchFunctionMode):
    """Mode to note parameters that have to stay full, while the block runs.

    Args:
        parameters: Name -> parameter.
        roots: The modules around them.
        states: Tensors of optimizers; they move into shards with the parameters.

    Attributes:
        reasons: Name -> reason to keep the parameter full.
        users: Name -> modules running at every use of the parameter.
        ran: Numbers of the modules that ran, in order; ranks compare them.
        combined: Parameters used by one operation outside of forwards: all are sharded, or none.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], roots: Iterable[nn.Module], states: Iterable[torch.Tensor]
    ) -> None:
        super().__init__()
        # Tensors that would be DTensors on shards -> parameters in their computation.
        self.origins = WeakTensorKeyDictionary(dict.fromkeys(states, frozenset[str]()))
        self.origins.update({parameter: frozenset([name]) for name, parameter in parameters.items()})
        self.combined: set[frozenset[str]] = set()
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        inside = {id(p) for module in self.modules for p in module._parameters.values()}
        self.reasons = {name: "is in no module" for name, p in parameters.items() if id(p) not in inside}
        self.reasons |= {name: "has no dimension" for name, p in parameters.items() if p.ndim == 0}
        self.reasons |= {name: "has a gradient hook" for name, p in parameters.items() if has_gradient_hooks(p)}
        self.users: dict[str, set[nn.Module]] = {}
        self.ran: list[int] = []
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
        self._stack.append(module)
        self.ran.append(number)

    def _leave(self, module: nn.Module) -> None:
        while self._stack and self._stack.pop() is not module:  # a forward inside raised, and was caught
            continue

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
        writes = name.endswith("_") and not name.endswith("__") and id(args[0]) in self.names
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)] if read else []
        for fqn, parameter in read.items():
            if self._stack:
                if writes and args[0] is parameter:
                    self.reasons.setdefault(fqn, f"a forward writes it ({name})")
                running = set(self._stack)
                self.users[fqn] = self.users.get(fqn, running) & running  # at every use
            elif torch.is_grad_enabled() and any(x.requires_grad and x is not parameter for x in outputs):
                self.reasons.setdefault(fqn, f"is read outside of any module's forward ({name})")
        return result

    def _note_outside(self, name: str, tensors: list[torch.Tensor], result: Any) -> None:
        """Follow values computed from parameters: combined with a plain tensor, they would fail on shards."""
        origins = [self.origins[x] for x in tensors if x in self.origins]
        if not origins:
            return
        names = frozenset[str]().union(*origins)
        if name in ("numpy", "__array__") or any(x not in self.origins and x.numel() > 1 for x in tensors):
            reason = f"is combined with a plain tensor ({name})" if len(tensors) > 1 else "is read as an array"
            self.reasons = dict.fromkeys(names, reason) | self.reasons
        elif len(names) > 1:
            self.combined.add(names)
        base = tensors[0]._base  # a shard's view may be a copy, and the write is lost
        if is_written(name) and (name == "__setitem__" or (base is not None and base.shape != tensors[0].shape)):
            self.reasons = dict.fromkeys(names, f"is written through a view ({name})") | self.reasons
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.origins.setdefault(x, names)


def is_written(name: str) -> bool:
    """Return True if a function of torch of this name writes its first argument."""
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
