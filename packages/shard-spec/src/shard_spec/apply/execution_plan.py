"""ExecutionPlan: the actions of ``shard_module`` on one module, decided without communication."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from shard_spec.apply.tensors import TensorAction
from shard_spec.layout.layout import Layout
from shard_spec.specs import ShardingSpec


@dataclass(frozen=True)
class ExecutionPlan:
    """Actions on each tensor and module.

    Attributes:
        tensors: One entry for each tensor that is scattered or broadcast; a tied one stands there once.
        forwards: Module FQN to the names of its sharded tensors, for modules that get a sharded forward.
        options: For these modules, how they were made, as text: options decide what their forwards communicate.
        sharders: Module FQN to Sharder.
        outputs: Module FQN to its target in ``output_plan``.
        locals: Module FQNs of ``return_local_tensor``.
        everything: Whether tensors that the plan does not mention are decided about too.
        src_rank: Rank of the group whose values count.
        source: Where the values come from, as text.
        values: Checksums of the values that every rank has, where they have to be equal.
        device: Device that this rank's shards lie on.
    """

    tensors: tuple[TensorAction, ...] = ()
    forwards: dict[str, tuple[str, ...]] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    sharders: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, ShardingSpec | Layout] = field(default_factory=dict)
    locals: tuple[str, ...] = ()
    everything: bool = True
    src_rank: int = 0
    source: str = ""
    values: tuple[str, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each action; they have to be equal on all ranks."""
        return (
            f"source: {self.source or f'rank {self.src_rank} of the group'}, shards on {self.device.type}",
            *(action.line for action in self.tensors),
            *(f"module {path or '(root)'}: sharded forward of {self.options[path]}" for path in self.forwards),
            *(f"module {path}: {type(sharder).__qualname__}" for path, sharder in self.sharders.items()),
            *(f"output of {path or '(root)'}: {_wanted_text(wanted)}" for path, wanted in self.outputs.items()),
            *(f"output of {path or '(root)'}: this rank's rows" for path in self.locals),
            *(f"values of {text}" for text in self.values),
        )

    @property
    def digest(self) -> str:
        """Hash of the actions, equal on all ranks with equal actions."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def explain(self, name: str | None = None) -> str:
        """Return the lines as text; with ``name`` those that mention it."""
        return "\n".join(line for line in self.lines if name is None or name in line)

    def to_json(self) -> str:
        """The lines as JSON."""
        return json.dumps({"actions": self.lines, "digest": self.digest}, indent=1)


def _wanted_text(wanted: ShardingSpec | Layout) -> str:
    if not isinstance(wanted, Layout):
        return repr(wanted)
    return f"{wanted} on ranks {list(wanted.mesh.ranks)} as {' x '.join(map(str, wanted.mesh.shape))}"
