"""Collectives under the strict mode of spmd-types, and mistakes that both refuse: `nox -s "hosts(spmd_types)"`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import spmd_types as spmd
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from spmd_types import I, P, R, V, checker, rules
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from tp_styles.runtime import parameters, redistribute
from tp_styles.values import Step, Transfer

NOTHING = Step("none")
SUM = Step("all_reduce")
TYPES = {
    ("none", "all_reduce"): (I, R),
    ("all_reduce", "none"): (P, I),
    ("all_reduce", "all_reduce"): (P, R),
    ("all_gather", "slice"): (V, I),
    ("all_gather", "reduce_scatter"): (V, R),
    ("slice", "all_gather"): (I, V),
    ("slice", "none"): (R, V),
    ("reduce_scatter", "all_gather"): (P, V),
}
"""Forward and backward step -> type of the input and of the output."""


def moved(outputs: Any, *, x: Any, transfer: Any, move: Any) -> None:
    """Type of a change of layout: what its two steps say."""
    before, after = TYPES[transfer.forward.op, transfer.backward.op]
    group = move.axis.group
    spmd.assert_type(x, {group: before})  # a product of two shards is a partial sum because the style declares it
    if outputs is x:  # summed in place
        spmd.mutate_type(x, group, src=before, dst=after)
        return
    spmd.assert_type(outputs, {group: after})


def taken(outputs: Any, *, parameters: Any) -> None:
    """Types of the local tensors of DTensor parameters, as a forward takes them."""
    for local, parameter in zip(outputs, parameters, strict=True):
        rules.ignore(parameter)  # a DTensor, which has its own metadata
        spmd.assert_type(local, {parameter.device_mesh.get_group(): V if parameter.placements[0].is_shard() else I})


parameters._Local.spmd_typecheck = staticmethod(taken)  # type: ignore[attr-defined]  # where spmd-types looks
redistribute._Moved.spmd_typecheck = staticmethod(moved)  # type: ignore[attr-defined]  # where spmd-types looks


class Block(nn.Module):
    """Gated linear layers with a learned scale of the hidden channels' values between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate = nn.Linear(16, 32)
        self.up = nn.Linear(16, 32)
        self.scale = Scale()
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        result: torch.Tensor = x + self.down(self.scale(F.silu(self.gate(normed)) * self.up(normed)))
        return result


class Scale(nn.Module):
    """One number for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


PLAN = {
    "blocks.*.gate": tp.ColwiseParallel(),
    "blocks.*.up": tp.ColwiseParallel(),
    "blocks.*.scale": tp.NoParallel(sum_gradient=True),
    "blocks.*.down": tp.RowwiseParallel(),
    "head": tp.ColwiseParallel(output_layouts=Replicate()),
}


def typed(model: nn.Module, mesh: DeviceMesh, x: torch.Tensor) -> None:
    """A forward in strict mode, from a replicated input to a replicated output."""
    group = mesh.get_group()
    with spmd.set_current_mesh(mesh), checker.typecheck(strict_mode="strict"):
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor):  # those in no style
                spmd.assert_type(parameter, {group: I})
        spmd.assert_type(x, {group: I})
        spmd.assert_type(model(x), {group: I})


ON_SEQUENCE_SHARDS = {
    **PLAN,
    "first": tp.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
    "blocks.*.norm": tp.SequenceParallel(use_local_output=True),
    "blocks.*.gate": tp.ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.up": tp.ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": tp.RowwiseParallel(output_layouts=Shard(1)),
    "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", [PLAN, ON_SEQUENCE_SHARDS], ids=["full", "sequence-shards"])
def test_styles_pass_strict_mode(ranks: Ranks, plan: dict[str, Any]) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(Net)
    tp.apply_plan(model, mesh, plan)
    x = torch.randn(2, 4, 16)
    model(x)  # equal to the original
    unchecked = models.seeded(Net)
    tp.apply_plan(unchecked, mesh, plan, check="never")
    typed(unchecked, mesh, x)


def planted(place: str, transfer: Transfer) -> Callable[[Any], None]:
    """Another transfer in one layer, for activations of three dims."""

    def plant(model: Any) -> None:
        name, _, move = place.rpartition(".")
        forward: Any = model.get_submodule(name).forward
        (forward.enter if move == "enter" else forward.leave.move)._transfers[3] = transfer

    return plant


def bias_on_every_rank(name: str) -> Callable[[Any], None]:
    """The bias of a row-wise layer, added before the sum."""

    def plant(model: Any) -> None:
        forward = model.get_submodule(name).forward
        forward.finish = lambda produced, bias: forward.leave(produced + bias)

    return plant


MISTAKES: dict[str, Callable[[Any], None] | dict[str, Any]] = {
    "head: gradient not summed": planted("head.enter", Transfer(NOTHING, NOTHING)),
    "head: gathered, and gradients summed": planted(
        "head.leave", Transfer(Step("all_gather", 2), Step("reduce_scatter", 2))
    ),
}
for block in range(3):
    prefix = f"blocks.{block}"
    for column in ("gate", "up"):
        MISTAKES[f"{prefix}.{column}: gradient not summed"] = planted(
            f"{prefix}.{column}.enter", Transfer(NOTHING, NOTHING)
        )
    MISTAKES[f"{prefix}.down: not summed"] = planted(f"{prefix}.down.leave", Transfer(NOTHING, NOTHING))
    MISTAKES[f"{prefix}.down: summed in both directions"] = planted(f"{prefix}.down.leave", Transfer(SUM, SUM))
    MISTAKES[f"{prefix}.down: bias on every rank"] = bias_on_every_rank(f"{prefix}.down")
    MISTAKES[f"{prefix}.scale: gradient not summed"] = {f"{prefix}.scale": tp.NoParallel()}


@pytest.mark.ranks(2)
def test_twenty_mistakes_are_refused_by_both(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    assert len(MISTAKES) == 20
    x = torch.randn(2, 4, 16)
    for name, mistake in MISTAKES.items():
        for by_types in (True, False):
            model = models.seeded(Net)
            more = mistake if isinstance(mistake, dict) else {}
            tp.apply_plan(model, mesh, {**PLAN, **more}, check="never" if by_types else "first")
            if not isinstance(mistake, dict):
                mistake(model)
            kind: type[Exception] = spmd.types.SpmdTypeError if by_types else tp.PlanError
            with pytest.raises(kind) as refused:
                typed(model, mesh, x) if by_types else model(x)
            assert by_types or "check-mismatch" in str(refused.value), name
