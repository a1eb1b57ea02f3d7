"""Sharder: a user's own way to shard a whole module."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class Sharder(abc.ABC):
    """Sharding of a full module by its own code: takes a module, returns its replacement.

    In a plan its key is the FQN of a submodule. ``shard_module`` calls ``shard`` on every rank, in the order of the
    FQNs, and puts what it returns where the submodule was.
    """

    @abc.abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the sharded version of ``module``: a new module, or ``module`` itself after changing it.

        May communicate; every rank calls it.
        """
