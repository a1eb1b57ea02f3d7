"""Context of the recognisers: what is known of the model, and what they decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import nn

from shard_spec.planners.megatron.linear import LinearView

FusedOrder = Literal["sections", "heads", "groups", "pairs"]


@dataclass(frozen=True)
class Options:
    """The planner's settings that recognisers read (see `MegatronPlanner`)."""

    tp_size: int
    kv_replicate: bool = False
    fused: FusedOrder | None = None
    probe: bool = True


@dataclass
class Context:
    """One model under analysis. `claimed` holds the modules that some recogniser has dealt with."""

    root: nn.Module
    options: Options
    claimed: set[int] = field(default_factory=set)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Every module by FQN; shared modules once, under their first name."""
        return dict(self.root.named_modules())

    def chain(self, name: str) -> Iterator[nn.Module]:
        """The module called `name`, then the modules around it up to the root."""
        while True:
            yield self.modules[name]
            if not name:
                return
            name = parent(name)

    def claim(self, *views: LinearView) -> None:
        """Marks linears as dealt with."""
        self.claimed.update(id(view.module) for view in views)

    def free(self, views: dict[str, LinearView]) -> dict[str, LinearView]:
        """Those that nobody has dealt with."""
        return {name: view for name, view in views.items() if id(view.module) not in self.claimed}


def parent(name: str) -> str:
    """FQN of the module around `name`."""
    return name.rpartition(".")[0]


def leaf(name: str) -> str:
    """Last part of an FQN."""
    return name.rpartition(".")[2]


def from_library(module: nn.Module) -> bool:
    """Return whether the module's class comes from torch or transformers, whose arrangements are known and tested."""
    return type(module).__module__.split(".")[0] in ("torch", "transformers")
