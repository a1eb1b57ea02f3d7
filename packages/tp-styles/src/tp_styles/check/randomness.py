"""Constants in place of random numbers: shards and full tensors would otherwise draw different ones."""

from __future__ import annotations

from typing import Any

import torch

from tp_styles._shared.execution_check import Precision, is_random
from tp_styles._torch_compat import tree_map

CONSTANTS = {"bernoulli": 1.0, "rand": 0.5, "uniform": 0.5, "normal": 0.0, "randn": 0.0, "exponential": 1.0}


class ConstantRandomness(Precision):
    """Mode with constants as results of operations tagged as random; dropout keeps every element.

    A mode instead of `.eval()`: the check compares the computation of training.

    Attributes:
        has_drawn: An operation would have drawn.
    """

    has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the operation's result, or a constant of its shape."""
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.has_drawn = True
        name = func._schema.name.partition("::")[2]
        if name == "native_dropout":  # the output and its mask
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "rrelu_with_noise":
            x, noise = args[:2]
            slope = sum(args[2:4] or (1 / 8, 1 / 3)) / 2
            noise.copy_(torch.where(x <= 0, slope, 1.0))  # backward multiplies by it
            return x * noise
        args, kwargs, has_rate = _without_rate(func, args, kwargs)
        if has_rate:
            return func(*args, **kwargs)  # without dropout it draws nothing
        if name == "multinomial":
            return args[0].topk(args[1], dim=-1).indices  # distinct indices
        drawn = func(*args, **kwargs)
        if name.startswith("randperm"):
            return drawn.copy_(torch.arange(drawn.numel(), device=drawn.device))
        value = 0.0 if name.startswith(("randint", "random")) else CONSTANTS.get(name.strip("_").split("_")[0], 1.0)
        return tree_map(lambda x: x.fill_(value) if isinstance(x, torch.Tensor) else x, drawn)


def _without_rate(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """Return the arguments with dropout switched off, and True if there is such an argument."""
    args, kwargs, has_rate = list(args), dict(kwargs), False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            has_rate = True
            if place < len(args):
                args[place] = 0.0
            elif argument.name in kwargs:
                kwargs[argument.name] = 0.0
    return args, kwargs, has_rate
