"""Which modules may draw random numbers in their forwards: in doubt, they may.

Switching generators costs host time and breaks graphs, so it is left out where it certainly changes nothing.
"""

from __future__ import annotations

import builtins
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

RANDOM = (
    *("drop", "rand", "bernoulli", "multinomial", "normal", "uniform", "poisson", "binomial", "cauchy", "geometric"),
    *("exponential", "gumbel", "rrelu", "fractional", "dirichlet", "gamma", "multi_head_attention", "lstm", "gru"),
)
"""Parts of names of what draws; some are in names of what does not, which is the safe side."""

NOT_RANDOM = "normalize", "layer_norm", "rms_norm", "group_norm", "batch_norm", "operand"
HARMLESS = {"len", "range", "enumerate", "zip", "isinstance", "int", "float", "bool", "str", "min", "max", "sum", "abs"}
HARMLESS |= {"tuple", "list", "dict", "all", "any", "slice", "round", "hasattr", "reversed", "None"}
VALUES = torch.Tensor | int | float | str | None | torch.dtype | torch.device | nn.Module


@dataclass(frozen=True)
class Draws:
    """What may draw below a module.

    Attributes:
        modules: Those that may while they train.
        rates: Module and attribute: those that do while they train and the attribute is not zero.
    """

    modules: tuple[nn.Module, ...] = ()
    rates: tuple[tuple[nn.Module, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.modules or self.rates)

    def now(self) -> bool:
        """True if a forward that starts now may draw."""
        if any(module.training for module in self.modules):
            return True
        return any(module.training and getattr(module, key) for module, key in self.rates)


def what_draws(module: nn.Module, apart: frozenset[nn.Module] = frozenset()) -> Draws:
    """What may draw in the forward of a module and of those below it, without those `apart` and below them.

    Classes are looked at, numbers in attributes called dropout, and the names that forwards use. The module may be
    parallel already.
    """
    modules, rates = [], []
    for child in _without(module, apart):
        keys = [key for key, value in vars(child).items() if "drop" in key and isinstance(value, int | float)]
        rates += [(child, key) for key in keys]
        if _draws_anyway(child, set(keys)):
            modules.append(child)
    return Draws(tuple(modules), tuple(rates))


def _without(module: nn.Module, apart: frozenset[nn.Module]) -> Iterator[nn.Module]:
    if module not in apart:
        yield module
        for child in module.children():
            yield from _without(child, apart)


def _draws_anyway(module: nn.Module, rates: set[str]) -> bool:
    kind, own = type(module), vars(module).get("forward")
    if own is not None and not type(own).__module__.startswith("tp_styles."):
        return True
    if kind.__module__.startswith("torch.nn.modules."):
        classes = nn.modules.dropout._DropoutNd | nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d
        return isinstance(module, classes)
    if kind.__module__.startswith("transformers.models.") and rates:
        # Its attention goes through a registry of functions, which take the module's number as `dropout=`.
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        return code is None or any(_sounds_random(name) for name in code.co_names if name not in rates)
    return isinstance(module, nn.modules.dropout._DropoutNd) or not _is_certain(kind.forward, module, rates, set())


def _is_certain(function: Any, module: nn.Module, rates: set[str], seen: set[Any]) -> bool:
    """True if a function draws at most by the numbers in `rates`: everything that it names is known not to."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    if function in seen:
        return True
    seen.add(function)
    for code in _codes(function.__code__):
        literal = any(isinstance(constant, float) and 0 < constant < 1 for constant in code.co_consts)
        if code.co_freevars and code is function.__code__:
            return False
        if "scaled_dot_product_attention" in code.co_names and (literal or not _says_its_rate(code, rates)):
            return False
        if not all(_is_known(name, function, module, rates, seen) for name in code.co_names):
            return False
    return True


def _says_its_rate(code: CodeType, rates: set[str]) -> bool:
    """A call with `dropout_p=` takes it from a number of the module, or there is none."""
    keywords = {name for constant in code.co_consts if isinstance(constant, tuple) for name in constant}
    return "dropout_p" not in keywords or bool(rates & set(code.co_names))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_known(name: str, function: FunctionType, module: nn.Module, rates: set[str], seen: set[Any]) -> bool:
    """True if nothing of this name may draw, be it a global, an attribute of the module, of a tensor, or of torch."""
    found = [function.__globals__[name]] if name in function.__globals__ else []
    found += [getattr(place, name) for place in (module, torch, F, math) if hasattr(place, name)]
    if name in rates:
        return True
    if hasattr(builtins, name) and not found:
        return name in HARMLESS
    on_tensor = hasattr(torch.Tensor, name)
    if not found and not on_tensor:
        return False
    return all(_is_harmless(value, name, module, rates, seen) for value in found) and (
        not on_tensor or not _sounds_random(name)
    )


def _is_harmless(value: Any, name: str, module: nn.Module, rates: set[str], seen: set[Any]) -> bool:
    places = (torch, F, math, nn, torch.Tensor)
    if any(value is place for place in places) or (isinstance(value, VALUES) and not callable(value)):
        return True
    if isinstance(value, nn.Module):  # those below are looked at on their own
        return any(value is child for child in module.modules())
    home = getattr(value, "__module__", None) or ""
    if isinstance(value, BuiltinFunctionType) or home in ("torch.nn.functional", "torch.functional"):
        return not _sounds_random(name) and getattr(value, "__name__", "") == name  # under its own name
    if home.startswith("torch"):  # the rest may wrap functions (checkpoint, compile); not torch.device and its like
        return isinstance(value, type) and home == "torch"
    return _is_certain(getattr(value, "__func__", value), module, rates, seen)


def _sounds_random(name: str) -> bool:
    for harmless in NOT_RANDOM:
        name = name.replace(harmless, "")
    return any(word in name.lower() for word in RANDOM)
