"""A plain local parameter that knows of which global one it is a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement

from tp_styles.runtime.askers import refuse_init, refuse_norm, refuse_truncated, wants_fans
from tp_styles.split import Section, Split

ShardingInfo = tuple[Any, ...]
"""`(device_mesh, placements, global_shape, global_stride)`, and for sections a fifth element:
`((size, unit, copies), ...)` along the sharded dim. This is how a local parameter says what it is a shard of."""


_GRAD: Any = torch.Tensor.grad


class ShardParameter(nn.Parameter):
    """A plain local parameter that is one rank's part of a global one, and remembers of which.

    Copies and pickles keep `_sharding_info`, which an ordinary parameter would lose.
    """

    _sharding_info: ShardingInfo

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardParameter:
        if id(self) in memo:
            found: ShardParameter = memo[id(self)]
            return found
        copied = ShardParameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        copied.__dict__.update(self.__dict__)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.detach(), self.requires_grad, dict(self.__dict__))

    def module_load(self, other: torch.Tensor, assign: bool = False) -> ShardParameter:
        """What `load_state_dict` swaps in, where torch is set to swap."""
        value = other.detach() if assign else self.detach().copy_(other.detach())
        return _rebuild(value, self.requires_grad, dict(self.__dict__))

    def _drawn(self, name: str, *args: Any, **kwargs: Any) -> ShardParameter:
        """This rank's part of what is drawn for the whole: the same numbers that the whole parameter would get.

        Each rank's generator would otherwise draw the same numbers for another part, or others for the same.
        """
        info = self._sharding_info
        mesh, split = info[0], split_of(info)
        if self.is_meta or split.dim is None or any(isinstance(x, torch.Tensor) for x in (*args, *kwargs.values())):
            getattr(torch.Tensor, name)(self, *args, **kwargs)
            return self
        whole = getattr(self.new_empty(info[2]), name)(*args, **kwargs)
        self.copy_(split.take(whole, mesh.get_local_rank(), mesh.size()))
        return self

    def uniform_(self, *args: Any, **kwargs: Any) -> ShardParameter:
        """As of a tensor."""
        return self._drawn("uniform_", *args, **kwargs)

    def normal_(self, *args: Any, **kwargs: Any) -> ShardParameter:
        """As of a tensor."""
        refuse_truncated(self)
        return self._drawn("normal_", *args, **kwargs)

    def bernoulli_(self, *args: Any, **kwargs: Any) -> ShardParameter:
        """As of a tensor."""
        return self._drawn("bernoulli_", *args, **kwargs)

    def exponential_(self, *args: Any, **kwargs: Any) -> ShardParameter:
        """As of a tensor."""
        return self._drawn("exponential_", *args, **kwargs)

    # What asks for these may take the part for the whole.

    @property
    def grad(self) -> torch.Tensor | None:
        """As of a tensor; not for those who take its norm."""
        refuse_norm(self)
        found: torch.Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def ndimension(self) -> int:
        """As of a tensor."""
        refuse_init(self)
        return self.dim()

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor; `nn.init` gets the whole's, for its bounds."""
        shape = self._sharding_info[2] if wants_fans(self) else self.shape
        return shape if dim is None else shape[dim]


def _rebuild(data: torch.Tensor, requires_grad: bool, attributes: dict[str, Any]) -> ShardParameter:
    parameter = ShardParameter(data, requires_grad)
    parameter.__dict__.update(attributes)
    return parameter


def split_of(info: ShardingInfo) -> Split:
    """The split that a `_sharding_info` over a 1-D mesh describes."""
    placement: Placement = info[1][0]
    dim = getattr(placement, "dim", None)
    if dim is None:
        return Split.replicated()
    if len(info) > 4:
        return Split(dim, tuple(Section(*section) for section in info[4]))
    return Split.along(dim, info[2][dim])
