"""Tensors of one rank's shard: what would take a shard for the full tensor is refused, and so is what it computes.

`weight.abs().max()` and `torch.norm(weight)` of a shard are other numbers on each rank, without an error. So results of
functions of a shard are shards in turn (`ShardValue`): a penalty `(weight * weight).sum()` raises at its sum, whatever
functions stand before it. `weight.detach()` is the plain shard, and products with a batch, as
`functional.linear(x, weight)`, are plain.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn import functional

from ._torch_compat import UNSCALE, OpOverload, without_overrides
from .full_reads import FULL_READS, full_read, named
from .problems import PlanError, Problem
from .sharding_info import sharding_info_of


class Ways(NamedTuple):
    """Ways on in the refusals of a package.

    Attributes:
        read: Of a function that reads the full tensor; `{name}` is the function.
        initialise: Of a function that draws into it.
        element: Of one element as a number.
        infinities: Of torch's search for infinities in gradients.
        write: Of a write to some of its elements by index; `""` where it goes to the shard.
    """

    read: str
    initialise: str
    element: str
    infinities: str
    write: str = ""


class Refusing:
    """Mixin of the classes of tensors that hold one rank's shard."""

    __slots__ = ()
    _holds_one_shard = True  # also of another package's copy of this class: see `is_guarded`
    _ways: Ways
    # Of `any` and `all`: `bool(isnan(weight).any())` is a question about this rank's memory; debuggers ask each rank.
    _is_question = False
    _is_part = False  # a view of some elements, as `weight[0]`

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse functions that would take a shard for the full tensor; run all others on plain tensors."""
        return _run_on_shards(func, args, kwargs or {})

    def ndimension(self) -> Any:
        """Refuse: within torch only functions of `nn.init` call it, and write by index to the weight."""
        if _is_shard(self):
            hint = f"{self._ways.initialise}; parameter.dim() counts dims"
            refuse_full_read(self, "ndimension, which nn.init's orthogonal_, dirac_, eye_ and sparse_ call,", hint)
        return self.dim()  # type: ignore[attr-defined]  # of the tensor


class ShardValue(Refusing, torch.Tensor):
    """A sharded buffer, a gradient, or what was computed from a sharded parameter outside of the module."""

    _shard_dims: tuple[int, ...] | None = None  # None: sharded along dims that nothing records, as after view(-1)
    _full_shape: torch.Size | None = None  # of the parameter it was computed from

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save as a plain tensor: loading it needs no package of ours."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = self.as_subclass(torch.Tensor).__deepcopy__(memo)
        return copied

    def detach(self) -> torch.Tensor:
        """Return the plain shard, past the slow way through `__torch_function__`: clipping reads all gradients so."""
        with without_overrides():
            return super().detach()


def is_guarded(x: Any) -> bool:
    """True for a tensor of a class that refuses, of whichever package.

    Each package has this file under a name of its own: a leaf of tp-ddp-bridge is no `Refusing` of tp-styles.
    """
    return hasattr(type(x), "_holds_one_shard")


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return a shard as a plain tensor with its gradient, for code that knows it to be a shard."""
    if not is_guarded(x):
        return x
    with without_overrides():
        return x.view_as(x)


_PLACES = (torch, torch.Tensor, functional)
_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
_PLAIN = {_DATA.__get__, _GRAD.__get__, torch.autograd.grad}.union(
    named("detach as_subclass module_load zeros_like ones_like full_like empty_like", *_PLACES),
    named("rand_like randn_like randint_like", torch),
    named("new_empty new_zeros new_ones new_full new_tensor new_empty_strided", *_PLACES),
)
"""Functions whose caller asked for the plain shard, or for a tensor of its shape with other values."""
_ATTRIBUTES = (
    getattr(torch.Tensor, name) for name in ("grad", "data", "requires_grad", "is_leaf", "grad_fn", "dtype", "device")
)
_FACTS = {
    *named("dim size numel stride is_complex is_floating_point data_ptr", torch.Tensor),
    *(attribute.__get__ for attribute in _ATTRIBUTES),
}
"""Functions whose result is no tensor, or a plain one: DDP and an optimizer ask parameters for several in a step."""
_PRODUCTS = named(
    "linear matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv baddbmm einsum tensordot outer bilinear conv1d conv2d "
    "conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm rms_norm group_norm batch_norm",
    *_PLACES,
)
"""Functions of a weight and a batch: what a user computes with a shard by hand is the user's."""
_NUMBERS = named("item is_nonzero __float__ __int__ __index__ __bool__ __complex__", torch, torch.Tensor)
_READS_OF_ELEMENTS = named("tolist numpy __array__ __format__ backward", torch.Tensor)
"""Functions that take `weight[0, 0]` out of torch: another element on each rank."""
_IN_PLACE = re.compile(r"\w*[^_]_|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")
"""Names of functions that write: `weight[0].zero_()` would write to another row on each rank."""


def _run_on_shards(func: Any, args: Any, kwargs: Any) -> Any:
    with without_overrides():
        # A fact of a tensor; of a traced graph; or a layer's product with its batch, which runs in every step.
        if func in _FACTS or isinstance(func, OpOverload) or (func is functional.linear and not is_guarded(args[0])):
            return func(*args, **kwargs)
        operands = (each if isinstance(each, list | tuple) else [each] for each in (*args, *kwargs.values()))
        tensors = [each for several in operands for each in several if isinstance(each, torch.Tensor)]
        shards: list[Any] = [each for each in tensors if is_guarded(each) and _is_shard(each)]
        if shards and func is UNSCALE:  # each rank would skip a step by its own shards
            reason = "the search of torch.amp.GradScaler for infinities"
            refuse_full_read(shards[0], reason, shards[0]._ways.infinities)
        for shard in shards if func in FULL_READS else ():
            _refuse_if_full(func, args, kwargs, shard)
        if not shards or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        target: Any = args[0] if args else None
        if is_guarded(target) and target._is_part and target._ways.write and _IN_PLACE.fullmatch(func.__name__):
            refuse_full_read(target, f"{func.__name__} of some elements", target._ways.write)
        for shard in shards if func in _NUMBERS or func in _READS_OF_ELEMENTS else ():
            if (shard.dim() or _is_element(shard)) and (func in _NUMBERS or shard.numel() == 1):
                refuse_full_read(shard, func.__name__, shard._ways.element)
        result = func(*args, **kwargs)
        if func in _PLAIN and (func is not torch.Tensor.new_tensor or len(shards) == 1):  # else a copy of a shard
            return result
        is_product = func in _PRODUCTS and len(shards) < len(tensors)  # with a batch
        if isinstance(result, list | tuple):  # chunks of a shard; values and indices
            return type(result)([_as_shard_value(each, func, shards, is_product) for each in result])
        return _as_shard_value(result, func, shards, is_product)


def _as_shard_value(result: Any, func: Any, shards: list[Any], is_product: bool) -> Any:
    if type(result) is not torch.Tensor or (is_product and result.dim()):
        return result  # also the written one itself, of an in-place function
    memory = result.untyped_storage().data_ptr()
    is_view = memory != 0 and any(memory == shard.untyped_storage().data_ptr() for shard in shards)
    # A number of all elements, as `functional.mse_loss(weight, target)`, or of one: `weight[0, 0] * 2`.
    is_number = not result.dim() and not is_view
    if is_number and (result.dtype != torch.bool or any(map(_is_element, shards))):
        refuse_full_read(shards[0], func.__name__, shards[0]._ways.element if any(map(_is_element, shards)) else "")
    if is_product:
        return result
    value, dims = result.as_subclass(ShardValue), {_dims_of(shard) for shard in shards}
    # A square shard's transpose has its shape too, and other strides.
    is_turned = is_view and any(result.stride() != shard.stride() for shard in shards)
    is_alike = len(dims) == 1 and all(result.shape == shard.shape for shard in shards)
    value._shard_dims = dims.pop() if is_alike and not is_turned else None
    value._ways, value._full_shape = shards[0]._ways, _full_shape_of(shards[0])
    value._is_question = FULL_READS.get(func) in ("any", "all") or all(map(_is_question, shards))
    value._is_part = is_view and (result.numel() < shards[0].numel() or shards[0]._is_part)
    return value


def _is_question(shard: Any) -> bool:
    return not shard.dim() and bool(shard._is_question)


def _is_element(shard: Any) -> bool:
    return not shard.dim() and not shard._is_question


def _is_shard(tensor: Any) -> bool:
    """True for one rank's values: those of a replica, or on the meta device, are no shard's."""
    return not tensor.is_meta and _dims_of(tensor) != ()


def _dims_of(shard: Any) -> tuple[int, ...] | None:
    """Return the sharded dims of a parameter, or of a value computed from one."""
    info = sharding_info_of(shard)
    if info is None:
        return getattr(shard, "_shard_dims", None)
    axes = (axis for axis, each in enumerate(info.placements) if not each.is_replicate() and info.mesh.size(axis) > 1)
    return tuple({getattr(info.placements[axis], "dim", 0) for axis in axes})  # FSDP2's strided shards have dims too


def _full_shape_of(shard: Any) -> torch.Size | None:
    info = sharding_info_of(shard)
    return getattr(shard, "_full_shape", None) if info is None else info.shape


def _refuse_if_full(func: Any, args: Any, kwargs: Any, shard: Any) -> None:
    dims, ndim = _dims_of(shard), shard.dim()
    names = (full_read(func, args, kwargs, dim, ndim) for dim in (range(ndim) if dims is None else dims))
    name = next(filter(None, names), "")
    if func is torch.Tensor.__setitem__:
        name = name if shard._ways.write else ""
    if name and not (name in ("any", "all") and shard.dtype == torch.bool):
        refuse_full_read(shard, name, shard._ways.write if func is torch.Tensor.__setitem__ else "")


def refuse_full_read(shard: Any, name: str, hint: str = "") -> NoReturn:
    """Refuse a function of a shard.

    Raises:
        PlanError: Always; with the way on.
    """
    ways: Ways = shard._ways
    # A draw into a DTensor is no way on: on CPU meshes torch draws equal numbers for all shards.
    hint = hint or (ways.initialise if name.endswith("_") else ways.read.format(name=name))
    name, full = name if " " in name else f"{name}()", _full_shape_of(shard)
    reason = "of one rank's shard" + (f" of {list(full)}" if full is not None else "")
    raise PlanError(Problem("local-shard-as-full", name, found=reason, hint=hint))
