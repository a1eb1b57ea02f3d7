"""Outputs of column-wise layers that are watched in the first forward: who cuts them, computes something else.

`gate, up = layer(x).chunk(2, dim=-1)` takes, on one of two ranks, two halves of `gate`. The shapes are right, and every
rank trains. Nothing in a plan tells whether a forward does so; in the first forward the activation itself sees it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from tp_styles._torch_compat import is_compiling, without_torch_function
from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.channels import Channels, Cut, index, reduced, split, unbind

SAME = {
    *("relu", "relu_", "relu6", "gelu", "silu", "silu_", "mish", "tanh", "sigmoid", "hardswish", "softplus", "elu"),
    *("leaky_relu", "hardtanh", "logsigmoid", "dropout", "mul", "mul_", "add", "add_", "sub", "sub_", "div", "div_"),
    *("__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__rsub__", "__truediv__", "__neg__", "__pow__"),
    *("__iadd__", "__imul__", "true_divide", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "log", "abs", "erf"),
    *("clamp", "clamp_", "clip", "clone", "contiguous", "to", "type", "type_as", "float", "half", "bfloat16", "double"),
    *("masked_fill", "masked_fill_", "where", "nan_to_num", "sin", "cos", "reciprocal", "detach", "lerp", "addcmul"),
}
"""Element by element: the channels stay where they are."""

VIEWS = {"view", "reshape", "unflatten", "flatten"}

ALONG: dict[str, tuple[int, str, Any, bool]] = {
    **dict.fromkeys(("mean", "prod", "var", "std", "logsumexp", "amax", "amin"), (1, "dim", None, True)),
    **dict.fromkeys(("max", "min", "argmax", "argmin", "median"), (1, "dim", None, True)),
    **dict.fromkeys(("sum", "softmax", "log_softmax", "softmin", "cumsum", "cumprod"), (1, "dim", None, False)),
    **dict.fromkeys(("sort", "argsort", "glu"), (1, "dim", -1, False)),
    "norm": (2, "dim", None, True),
    "topk": (2, "dim", -1, False),
    "normalize": (2, "dim", 1, False),
    "flip": (1, "dims", None, False),
    "roll": (2, "dims", None, False),
}
"""Name -> the argument that says along which dims (place, name, default), and whether None, all of them, is wrong: the
sum of a part, as a loss, gives a part's gradient."""


SHARED = {"max", "min", "amax", "amin", "argmax", "argmin", "topk", "sum", "prod", "logsumexp"}
"""What ranks do on their parts before they share the results."""


class Watched(torch.Tensor):
    """An activation of the first forward that knows which dim this rank has a part of.

    What is computed from it is watched as long as the channels can be followed, and an ordinary tensor after that.
    """

    channels: Channels | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result, or the error that a part of the channels is not enough for it."""
        kwargs = {} if kwargs is None else kwargs
        with without_torch_function():
            if is_compiling():  # its tracer asks functions in Python whether they are overridden, blocked or not
                found = func(*[_plain(x) for x in args], **{key: _plain(x) for key, x in kwargs.items()})
            else:
                found = func(*args, **kwargs)
            name = getattr(func, "__name__", "")
            if name not in RULES:
                return found
            source = _first(args, kwargs)
            if source is None:
                return found
            channels = source.channels
            if channels is None:
                return found
            shape = tuple(source.shape)
            try:
                after = RULES[name](name, args, kwargs, channels, shape, found)
            except Cut as error:
                cut = error.args[0]  # str() is not known to every compiler
            else:
                return _rewrapped(found, after)
        if is_compiling():  # the compiler knows strings, but not how ours are made
            raise RuntimeError(f"channels-cut: {channels.name}: `{name}` of its output: {cut}; see eager's message")
        raise StyleInputError(_problem(channels, name, cut))

    # Methods that torch writes in Python are not traced on a subclass: these say the same as functions.

    def split(self, split_size: Any, dim: int = 0) -> Any:
        """As of a tensor."""
        if is_compiling():
            return torch.split(self, split_size, dim)
        return super().split(split_size, dim)  # type: ignore[no-untyped-call]  # torch's

    def unflatten(self, dim: Any, sizes: Any) -> torch.Tensor:
        """As of a tensor."""
        return torch.unflatten(self, dim, sizes)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(unwatched(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unwatched(self).__reduce_ex__(protocol)


def watch(output: torch.Tensor, name: str, cuts: tuple[int, ...], inside: bool = True) -> torch.Tensor:
    """The output of a layer whose last dim is this rank's part, watched.

    Args:
        output: The output; it is not changed.
        name: FQN of the layer, for the error.
        cuts: Where this rank's part of each section ends, but for the last.
        inside: A row-wise layer takes it in; it does not leave the model.
    """
    size = output.shape[-1]
    return output if size < 2 else _watched(output, Channels(name, output.dim() - 1, size, cuts, inside))


def unwatched(x: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor, for those that know that they have a part."""
    if isinstance(x, Watched):
        with without_torch_function():
            return x.view_as(x)
    return x


def _watched(x: torch.Tensor, channels: Channels) -> torch.Tensor:
    found = x.as_subclass(Watched)
    found.channels = channels
    return found


def _rewrapped(found: Any, after: Any) -> Any:
    if isinstance(after, list):
        pieces = [one if mark is None else _watched(one, mark) for one, mark in zip(found, after, strict=True)]
        return tuple(pieces)
    return found if after is None else _watched(found, after)


def _plain(x: Any) -> Any:
    if isinstance(x, Watched):
        return x.view_as(x)
    if isinstance(x, tuple | list):
        return type(x)([_plain(one) for one in x])
    return x


def _first(args: Any, kwargs: Any) -> Watched | None:
    for found in args:
        if isinstance(found, Watched):
            return found
    for found in kwargs.values():
        if isinstance(found, Watched):
            return found
    return None


def _problem(channels: Channels, name: str, what: str) -> Problem:
    return Problem(
        "channels-cut",
        channels.name,
        dim=channels.dim,
        found=f"`{name}` of its output: {what}",
        hint="each rank has its own channels only. FusedColwiseParallel(sections) where the weight holds several things"
        " one after the other; ColwiseParallel(output_layouts=Replicate()) for whole outputs;"
        ' apply_plan(check="never") if the forward knows that it has a part',
    )


# ---------------------------------------------------------------------------------------------- rules
# (name, args, kwargs, channels, shape of the watched tensor, result) -> the channels of the result, or of each result


def _same(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    if not isinstance(found, torch.Tensor):  # x.type()
        return None
    more = found.dim() - len(shape)
    dim = channels.dim + more
    return channels.at(dim) if more >= 0 and found.shape[dim] == channels.size else None


def _view(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    return channels.reshaped(shape, tuple(found.shape))


def _transpose(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    one, other = (_argument(args, kwargs, place, f"dim{place - 1}", 0) % len(shape) for place in (1, 2))
    return channels.at({one: other, other: one}.get(channels.dim, channels.dim))


def _permute(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    given = kwargs.get("dims", args[1:])
    order = list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)
    return channels.at([dim % len(shape) for dim in order].index(channels.dim))


def _unsqueeze(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    dim = _argument(args, kwargs, 1, "dim", 0) % (len(shape) + 1)
    return channels.at(channels.dim + (dim <= channels.dim))


def _pieces(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    dim = _argument(args, kwargs, 2, "dim", 0)
    return split(channels, len(shape), dim, [piece.shape[dim] for piece in found])


def _unbind(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    dim = _argument(args, kwargs, 1, "dim", 0)
    return unbind(channels, len(shape), dim, shape[dim])


def _iterate(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    unbind(channels, len(shape), 0, shape[0])
    return None


def _index(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    return index(channels, shape, args[1])


def _select(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    dim = _argument(args, kwargs, 1, "dim", 0) % len(shape)
    return index(channels, shape, (*(slice(None),) * dim, _argument(args, kwargs, 2, "index", 0)))


def _narrow(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    dim, start, length = (_argument(args, kwargs, i + 1, key, 0) for i, key in enumerate(("dim", "start", "length")))
    return index(channels, shape, (*(slice(None),) * (dim % len(shape)), slice(start, start + length)))


def _along(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    place, key, default, whole = ALONG[name]
    dims = _argument(args, kwargs, place, key, default)
    if isinstance(dims, torch.Tensor):  # the greater one of two
        return _same(name, args, kwargs, channels, shape, found)
    if name in SHARED and not channels.inside:
        return None
    first = found[0] if isinstance(found, tuple) else found
    reduced(channels, len(shape), dims, whole=whole and first.requires_grad)
    return None


def _normalized(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    count = len(_argument(args, kwargs, 1, "normalized_shape", ()))
    reduced(channels, len(shape), list(range(len(shape) - count, len(shape))), whole=False)
    return channels


def _classes(name: str, args: Any, kwargs: Any, channels: Channels, shape: tuple[int, ...], found: Any) -> Any:
    reduced(channels, len(shape), 1 if len(shape) > 1 else 0, whole=False)
    return None


def _argument(args: Any, kwargs: Any, place: int, name: str, default: Any) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[place] if place < len(args) else default


RULES: dict[str, Any] = {
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(VIEWS, _view),
    "transpose": _transpose,
    "swapaxes": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split"), _pieces),
    "unbind": _unbind,
    "__iter__": _iterate,
    "__getitem__": _index,
    "select": _select,
    "narrow": _narrow,
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalized),
    **dict.fromkeys(("cross_entropy", "nll_loss"), _classes),
}
