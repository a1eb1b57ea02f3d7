"""A plain local parameter that knows of which global one it is a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tp_styles._shared.sharding_info import ATTRIBUTE, ShardingInfo, sharding_info_of
from tp_styles.problems import PlanError, Problem
from tp_styles.split import Section, Split


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
        mesh, split = info.mesh, split_of(info)
        if self.is_meta or split.dim is None or any(isinstance(x, torch.Tensor) for x in (*args, *kwargs.values())):
            getattr(torch.Tensor, name)(self, *args, **kwargs)
            return self
        whole = getattr(self.new_empty(info.shape), name)(*args, **kwargs)
        self.copy_(split.take(whole, mesh.get_local_rank(), mesh.size()))
        return self

    def uniform_(self, *args: Any, **kwargs: Any) -> ShardParameter:
        """As of a tensor."""
        return self._drawn("uniform_", *args, **kwargs)

    def normal_(self, *args: Any, **kwargs: Any) -> ShardParameter:
        """As of a tensor."""
        return self._drawn("normal_", *args, **kwargs)

    def bernoulli_(self, *args: Any, **kwargs: Any) -> ShardParameter:
        """As of a tensor."""
        return self._drawn("bernoulli_", *args, **kwargs)

    def exponential_(self, *args: Any, **kwargs: Any) -> ShardParameter:
        """As of a tensor."""
        return self._drawn("exponential_", *args, **kwargs)

    # Functions that go by the size or the values of the full parameter would compute something else from a shard.

    def size(self, dim: int | None = None) -> Any:
        """The local shape; of one dim the global size, as of a DTensor: `nn.init` takes its bounds from it."""
        return self.shape if dim is None else self._sharding_info.shape[dim]

    def ndimension(self) -> int:
        """As of a tensor; refused for a shard, because `nn.init` goes on with the full matrix."""
        self._refuse_partial("ndimension()")
        return self.dim()

    def __lt__(self, other: Any) -> Any:
        self._refuse_partial("a comparison")
        return torch.lt(self, other)

    def __gt__(self, other: Any) -> Any:
        self._refuse_partial("a comparison")
        return torch.gt(self, other)

    def _refuse_partial(self, found: str) -> None:
        if self._sharding_info.mesh.size() > 1 and self._sharding_info.placements[0].is_shard():
            hint = "initialise before the plan is applied; reset_parameters() of the module, normal_, uniform_, xavier_"
            hint += " and kaiming_ draw for the full weight; load_state_dict() takes full tensors; else use .detach()"
            raise PlanError(Problem("part-for-whole", found=f"{found} of one rank's shard of a parameter", hint=hint))


def _rebuild(data: torch.Tensor, requires_grad: bool, attributes: dict[str, Any]) -> ShardParameter:
    parameter = ShardParameter(data, requires_grad)
    parameter.__dict__.update(attributes)
    if (info := sharding_info_of(parameter)) is not None:  # a plain tuple after pickling
        setattr(parameter, ATTRIBUTE, info)
    return parameter


def split_of(info: ShardingInfo) -> Split:
    """The split that a `_sharding_info` over a 1-D mesh describes."""
    dim = getattr(info.placements[0], "dim", None)
    if dim is None:
        return Split.replicated()
    if info.sections:
        return Split(dim, tuple(Section(*section) for section in info.sections))
    return Split.along(dim, info.shape[dim])
