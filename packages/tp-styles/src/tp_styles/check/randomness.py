"""Constants in place of random numbers: shards and full tensors would otherwise draw different ones."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tp_styles._torch_compat import TorchDispatchMode, tree_map
from tp_styles.runtime.dropout import is_random
from tp_styles.runtime.rng import default_generator

CONSTANTS = {"bernoulli": 1.0, "rand": 0.5, "uniform": 0.5, "normal": 0.0, "randn": 0.0, "exponential": 1.0}


@contextmanager
def generators_restored(device_type: str) -> Iterator[list[torch.Generator]]:
    """Global generators of torch (those given), Python and NumPy are afterwards as they were before."""
    generators = [default_generator(torch.device(kind)) for kind in dict.fromkeys(("cpu", device_type))]
    states = [generator.get_state() for generator in generators]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = numpy.random.get_state(legacy=False) if numpy is not None else None
    try:
        yield generators
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        if numpy is not None and drawn is not None:
            numpy.random.set_state(drawn)


class Precision(TorchDispatchMode):
    """Sees in which precision operations compute, whatever type their inputs have: norms often run in float32.

    Attributes:
        epsilon: Machine epsilon of the coarsest type that an operation gave.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.epsilon = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation's result."""
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
                self.epsilon = max(self.epsilon, torch.finfo(x.dtype).eps)
        return result


class ConstantRandomness(Precision):
    """Every operation that torch tags as random gives a constant; dropout keeps every element.

    A mode instead of `.eval()`: the check compares what training computes.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation's result, or a constant of its shape."""
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            return super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "rrelu_with_noise":
            x, noise = args[:2]
            slope = sum(args[2:4] or (1 / 8, 1 / 3)) / 2
            noise.copy_(torch.where(x <= 0, slope, 1.0))  # backward multiplies by it
            return x * noise
        args, kwargs, has_rate = _without_rate(func, args, kwargs)
        if has_rate:
            return func(*args, **kwargs)
        if name == "multinomial":
            return args[0].topk(args[1], dim=-1).indices
        drawn = func(*args, **kwargs)
        if name.startswith("randperm"):
            return drawn.copy_(torch.arange(drawn.numel(), device=drawn.device))
        value = 0.0 if name.startswith(("randint", "random")) else CONSTANTS.get(name.strip("_").split("_")[0], 1.0)
        return tree_map(lambda x: x.fill_(value) if isinstance(x, torch.Tensor) else x, drawn)


def _without_rate(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """The arguments with dropout switched off, and whether there is such an argument."""
    args, kwargs, found = list(args), dict(kwargs), False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            found = True
            if place < len(args):
                args[place] = 0.0
            elif argument.name in kwargs:
                kwargs[argument.name] = 0.0
    return args, kwargs, found
