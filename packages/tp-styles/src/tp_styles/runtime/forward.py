"""What runs in place of a module's forward: local compute between explicit collectives.

Each class stands as the instance attribute `forward` of its module. They are picklable and copy with the module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tp_styles.runtime.axis import Axis
from tp_styles.runtime.moves import Move, as_dtensor
from tp_styles.runtime.parameters import computing_parameter, local_parameter, local_weight_and_bias
from tp_styles.runtime.part_sizes import PartSizes
from tp_styles.spec import Flow, StyleSpec
from tp_styles.transfer import normalized


class Forward:
    """Base of all: moves inputs, computes locally, moves outputs.

    Args:
        module: Whose forward it stands for.
        spec: What to do.
        axis: Over which ranks.
        name: The module's FQN, for errors.
    """

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: Axis, name: str) -> None:
        self.module = module
        self.spec = spec
        self.axis = axis
        self.name = name
        self.moves = {key: Move(flow, axis, f"{name}({key})") for key, flow in spec.inputs}
        self.sums = {key: parameter for key, parameter in spec.parameters if parameter.sum_gradient}
        self.parts = PartSizes(spec, axis, name)
        self.leaves: list[Output | None] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        raise AssertionError("subclasses compute")

    def parameter(self, name: str) -> torch.Tensor | None:
        """A parameter to compute with."""
        return self.parameter_of(self.module, name, name)

    def weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The parameters of a linear layer to compute with."""
        if self.sums:
            weight, bias = self.parameter("weight"), self.parameter("bias")
        else:
            weight, bias = local_weight_and_bias(self.module)
            self.parts.check("weight", weight)
            if bias is not None:
                self.parts.check("bias", bias)
        assert weight is not None
        return weight, bias

    def parameter_of(self, owner: nn.Module, attribute: str, name: str) -> torch.Tensor | None:
        """A parameter of a module below, under its name from here."""
        found = self.sums.get(name)
        if found is None:
            parameter = local_parameter(owner, attribute)
        else:
            parameter = computing_parameter(owner, attribute, self.axis, found)
        self.parts.check(name, parameter)
        return parameter


class Output:
    """Brings one local output to the layout and form that was asked for."""

    def __init__(self, flow: Flow, axis: Axis, name: str, *, local: bool, fresh: bool) -> None:
        self.flow = flow
        self.axis = axis
        self.name = name
        self.local = local
        self.move = Move(flow, axis, name, fresh=fresh, uneven=not local)

    def __call__(self, produced: torch.Tensor, known: dict[int, int] | None = None) -> torch.Tensor:
        """The output; `known` has global sizes of dims that are shards, where the inputs have told them."""
        return self.given(self.move(produced), produced.shape, known)

    def given(self, moved: torch.Tensor, produced: torch.Size, known: dict[int, int] | None = None) -> torch.Tensor:
        """The moved output in its form; `produced` is the local shape before the move."""
        return moved if self.local else self.wrapped(moved, produced, known)

    def wrapped(self, moved: torch.Tensor, produced: torch.Size, known: dict[int, int] | None = None) -> DTensor:
        """A DTensor around the moved output; `produced` is the local shape before the move."""
        source = normalized(self.flow.source, len(produced))
        whole = list(produced)
        if isinstance(source, Shard):
            if source.dim == len(produced) - 1 and self.flow.width:
                whole[source.dim] = self.flow.width
            elif known and source.dim in known:
                whole[source.dim] = known[source.dim]
            else:
                self.move.even(produced[source.dim], source.dim)
                whole[source.dim] = produced[source.dim] * self.axis.size
        return as_dtensor(moved, self.flow.wanted, self.axis, torch.Size(whole))


def only(spec: StyleSpec) -> Flow:
    """The flow of the first output."""
    flow, *_ = spec.outputs
    assert flow is not None
    return flow
