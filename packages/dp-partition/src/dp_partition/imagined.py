"""Ranks that do not exist: a mesh of any size without a process group, and tensors without memory.

Planning, tracing and partitioning ask a mesh only for its size, the rank and the name of its group; a mesh that knows
these is all that an estimate needs. Nothing is registered with ``torch.distributed``.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dp_partition._torch_compat import FakeTensorMode, pytree
from dp_partition.capture.retired import retired
from dp_partition.capture.subject import Subject


@dataclass(frozen=True)
class _Group:
    group_name: str


@dataclass(frozen=True)
class _Ranks:
    """What the pipeline asks a mesh for."""

    sizes: tuple[int, ...]
    rank: int
    device_type: str

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def size(self, axis: int | None = None) -> int:
        return math.prod(self.sizes) if axis is None else self.sizes[axis]

    def get_local_rank(self, axis: int | None = None) -> int:
        below = math.prod(self.sizes[(axis or 0) + 1 :])
        return self.rank // below % self.sizes[axis or 0]

    def get_group(self, axis: int | None = None) -> _Group:
        return _Group(f"imagined{axis or ''}")


def imagined_mesh(world: int | tuple[int, ...], rank: int, device: str) -> DeviceMesh:
    """A mesh of ``world`` ranks, or of as many along each axis, as rank ``rank`` sees it. It cannot communicate."""
    return cast(DeviceMesh, _Ranks((world,) if isinstance(world, int) else world, rank, device))


class Stand:
    """Fake stand-ins for tensors: shapes, strides and dtypes on a device, without memory.

    Args:
        device: Where the stand-ins seem to be; None: where the tensors are, and on the CPU for meta tensors.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor; always the same one."""
        if id(tensor) not in self.known:
            self.known[id(tensor)] = (tensor, self.make(tensor))
        return self.known[id(tensor)][1]

    def make(self, tensor: torch.Tensor) -> torch.Tensor:
        own = "cpu" if tensor.device.type == "meta" else str(tensor.device)
        device = torch.device(self.device or own)
        with self.mode:
            data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(data, tensor.requires_grad)
        return data.requires_grad_(tensor.requires_grad)

    def device_type(self, args: tuple[Any, ...]) -> str:
        """The kind of device that the stand-ins are on."""
        modules = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, nn.Module)]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        return self.make(tensors[0].detach()).device.type if tensors else "cpu"


def stand_in_arguments(stand: Stand, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with their tensors replaced."""
    return cast("tuple[Any, ...]", pytree.tree_map_only(torch.Tensor, stand.fake, args))


@contextlib.contextmanager
def standing_in(stand: Stand, subject: Subject) -> Iterator[None]:
    """Within the block the modules and optimizers hold stand-ins; everything is put back afterwards."""
    with contextlib.ExitStack() as stack:
        for _, module, attribute, is_param in list(subject.slots()):
            table: dict[str, Any] = module._parameters if is_param else module._buffers
            stack.callback(table.__setitem__, attribute, table[attribute])
            table[attribute] = stand.fake(table[attribute])
        for optimizer in subject.optimizers:
            stack.callback(setattr, optimizer, "state", optimizer.state)
            state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
            for param, entries in optimizer.state.items():
                state[stand.fake(param)] = {key: _stand_in_state(stand, value) for key, value in entries.items()}
            optimizer.state = state
            for group in optimizer.param_groups:
                stack.callback(group.__setitem__, "params", group["params"])
                group["params"] = [stand.fake(param) for param in group["params"]]
        stack.enter_context(retired(subject.params.items()))
        yield


def _stand_in_state(stand: Stand, value: Any) -> Any:
    """Counters stay on the CPU, where optimizers keep them."""
    return stand.fake(value) if isinstance(value, torch.Tensor) and value.ndim else value


__all__ = ["Stand", "imagined_mesh", "stand_in_arguments", "standing_in"]
