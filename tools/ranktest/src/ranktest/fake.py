"""A CUDA rank that does not exist, on which the CPU build of torch shows mistakes that only a GPU would show.

`fake_cuda(rank=1, world_size=2)` runs a block under FakeTensorMode with a fake process group, on the device `cuda:1`.
Nothing is computed and nothing is sent, but every operation checks devices, so the block raises where a program

- asks a device tensor for its value (`.item()`, `.tolist()`, `bool(tensor)`, `nonzero`, copies to the CPU),
- mixes devices,
- says bare "cuda", or another rank's device.

Rank 1, not 0, because index-less devices mean `cuda:0` and would pass there. Gradients are off: the autograd engine of
the CPU build has no CUDA device to run on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranktest import _torch_compat as compat


@contextmanager
def fake_cuda(rank: int = 1, world_size: int = 2, *, strict: bool = False) -> Iterator[torch.device]:
    """Be rank `rank` of `world_size` CUDA ranks that do not exist.

    Args:
        rank: this rank; also the index of its device.
        world_size: size of the fake default group.
        strict: also refuse blocking copies from CPU memory and CPU index tensors, which a program may use on its
            first call only.

    Yields:
        The device `cuda:<rank>` that tensors have to be made on.

    Raises:
        RuntimeError: a default process group exists already; or, from inside the block, one of the faults above
            (torch's own exception for values and mixed devices, `FakeCudaError` for the rest).
    """
    if dist.is_initialized():
        raise RuntimeError("fake_cuda() makes a default process group of its own: use it outside @ranks tests")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    device = torch.device("cuda", rank)
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        with torch.no_grad(), compat.fake_tensor_mode(), _bindings(device), _Watch(device, strict):
            yield device
    finally:
        dist.destroy_process_group()


def fake_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A DeviceMesh of CUDA devices for use inside `fake_cuda`; its own table of ranks is real."""
    with compat.real_tensors():
        return init_device_mesh("cuda", shape, mesh_dim_names=names)


class FakeCudaError(RuntimeError):
    """A program did something wrong or slow for a real device, a copy to the CPU for example."""


def _check_device(what: Any, named: torch.device, device: torch.device) -> None:
    if named.type == "cuda" and named != device:
        name = 'bare "cuda"' if str(named) == "cuda" else f'"{named}"'
        raise FakeCudaError(f"{what}: {name} on a rank whose device is {device}; take the device from a tensor")


class _Watch(compat.TorchDispatchMode):
    """Looks at every operation before FakeTensorMode does."""

    def __init__(self, device: torch.device, strict: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.device, self.strict = device, strict

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            _check_device(func, kwargs["device"], self.device)
        self._copies(func, args, kwargs)
        return func(*args, **kwargs)

    def _copies(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            self._copy(func, args[0].device, kwargs["device"], bool(kwargs.get("non_blocking")))
        elif func is torch.ops.aten.copy_.default:
            self._copy(func, args[1].device, args[0].device, bool(args[2] if len(args) > 2 else False))
        elif self.strict and func in _INDEXING and args[0].device.type == "cuda" and _on_cpu(args[1]):
            raise FakeCudaError(f"{func}: a CPU index tensor is copied to {args[0].device} on every call")

    def _copy(self, func: Any, source: torch.device, target: torch.device, non_blocking: bool) -> None:
        if source.type == "cuda" and target.type == "cpu":
            raise FakeCudaError(f"{func}: copying from {source} to the CPU waits for the device")
        if self.strict and source.type == "cpu" and target.type == "cuda" and not non_blocking:
            raise FakeCudaError(f"{func}: copying from pageable CPU memory to {target} waits for the device")


def _on_cpu(indices: list[torch.Tensor | None]) -> bool:
    return any(index is not None and index.device.type == "cpu" for index in indices)


_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)


@contextmanager
def _bindings(device: torch.device) -> Iterator[None]:
    """Replace tensor methods that set the current CUDA device by their operators."""
    originals = {name: getattr(torch.Tensor, name) for name in _METHODS}
    for name, operator in _METHODS.items():
        setattr(torch.Tensor, name, _rerouted(originals[name], operator))
    originals["cuda"], originals["to"] = torch.Tensor.cuda, torch.Tensor.to
    torch.Tensor.cuda = _refuse_cuda  # type: ignore[method-assign, assignment]
    torch.Tensor.to = _checked_to(originals["to"], device)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, method in originals.items():
            setattr(torch.Tensor, name, method)


def _rerouted(method: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (operator if self.device.type == "cuda" else method)(self, *args, **kwargs)

    return call


def _refuse_cuda(self: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    if device is None:
        raise FakeCudaError("Tensor.cuda() means cuda:0, on every rank; use .to(device)")
    return self.to(torch.device("cuda", device) if isinstance(device, int) else device, *args, **kwargs)


def _checked_to(method: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for target in (*args[:1], kwargs.get("device")):
            if isinstance(target, str | torch.device):
                _check_device("Tensor.to", torch.device(target), device)
        return method(self, *args, **kwargs)

    return call


def _getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    view, indices = _basic(tensor, index)
    return torch.ops.aten.index(view, indices) if indices else view


def _setitem(tensor: torch.Tensor, index: Any, value: Any) -> None:
    view, indices = _basic(tensor, index)
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if indices:
        torch.ops.aten.index_put_(view, indices, value)
    else:
        torch.ops.aten.copy_(view, value)


def _basic(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[Any]]:
    """Apply ints, slices, None and Ellipsis of an index; return the view and the index tensors that are left."""
    aten = torch.ops.aten
    parts = list(index) if isinstance(index, tuple) else [index]
    num_dims = sum(part is not None and part is not Ellipsis and not isinstance(part, bool) for part in parts)
    view, dim, indices = tensor, 0, {}
    for part in parts:
        if part is Ellipsis:
            dim += tensor.dim() - num_dims
        elif part is None:
            view, dim = aten.unsqueeze(view, dim), dim + 1
        elif isinstance(part, slice):
            view, dim = aten.slice(view, dim, part.start, part.stop, part.step or 1), dim + 1
        elif isinstance(part, int):
            view = aten.select(view, dim, part)
        else:
            indices[dim] = part if isinstance(part, torch.Tensor) else torch.tensor(part)
            dim += 1
    return view, [indices.get(d) for d in range(max(indices) + 1)] if indices else []


_METHODS: dict[str, Callable[..., Any]] = {
    "copy_": torch.ops.aten.copy_,
    "contiguous": torch.ops.aten.contiguous,
    "nonzero": torch.ops.aten.nonzero,
    "__getitem__": _getitem,
    "__setitem__": _setitem,
}
