"""A step of many alike blocks: figures equal to the byte to those of a step in which every block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from shard_spec import ShardingPlan, topology_preset
from shard_spec.planners import FullyShardPlanner, MegatronPlanner, compose
from torch import nn
from torch.nn import functional

WIDTH, VOCAB = 16, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.get_submodule(f"{name}_proj")(x).unflatten(-1, (4, -1)).transpose(1, 2) for name in "qkv")
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.get_submodule("o_proj")(out)  # type: ignore[no-any-return]  # Any from a module


class Block(nn.Module):
    """A block that knows its number."""

    calls = 0

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        Block.calls += 1
        x = x + self.attention(self.norm(x)) * scale
        return x + self.down_proj(self.activated(self.up_proj(x)))  # type: ignore[no-any-return]  # Any from a module

    def activated(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.gelu(hidden)


class Periodic(Block):
    """Its forward reads the number: of 14 blocks the fifth and the eleventh are others, which are in the middle."""

    def activated(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.gelu(hidden).sin() if self.number % 6 == 4 else functional.gelu(hidden)


class Listed(Block):
    """Its forward looks the number up."""

    kinds = ("plain",) * 6 + ("other",) * 3 + ("plain",) * 5

    def activated(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.gelu(hidden).sin() if self.kinds[self.number] == "other" else functional.gelu(hidden)


class Deep(nn.Module):
    """``way`` is how the blocks are called."""

    def __init__(self, layers: int = 12, kind: type[Block] = Block, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(kind(number) for number in range(layers))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        scale, seen = torch.ones((), device=x.device), []
        for number, layer in enumerate(self.layers):
            own = torch.ones((), device=x.device) if self.way == "own argument" else scale
            wide = torch.ones(number + 1, 1, 1, WIDTH, device=x.device) if self.way == "growing argument" else own
            x = layer(x, wide.mean(0) if self.way == "growing argument" else own)
            if self.way == "kept" or (self.way == "some kept" and number in (2, 6)):
                seen.append(x)
        if self.way == "twice":
            x = self.layers[5](x, scale)
        for each in reversed(seen):
            x = x + each
        return self.lm_head(x)  # type: ignore[no-any-return]  # Any from a module


@contextmanager
def unlike(model: Deep) -> Iterator[None]:
    """Within this context no two blocks are alike: each has an attribute of its own."""
    for layer in model.layers:
        layer.own = object()  # type: ignore[assignment]  # no tensor and no module
    try:
        yield
    finally:
        for layer in model.layers:
            del layer.own


def figures(plan: ShardingPlan, model: Deep, options: dict[str, Any]) -> tuple[tuple[str, ...], int]:
    """Everything that is said of a step, and the number of blocks that ran in forward and recomputation."""
    Block.calls = 0
    memory, moved = plan.cost(model, (8, 16), topology=topology_preset("h100-sxm"), **options)
    return (memory.to_json(), str(memory), moved.to_json(), str(moved)), Block.calls


def planned(kind: str, model: Deep) -> ShardingPlan:
    if kind == "whole":
        return ShardingPlan({}, mesh="dp=4")
    if kind == "fsdp":
        return FullyShardPlanner("dp=4").build_plan(model)
    tensors = MegatronPlanner("tp=4" if kind == "tp" else "dp=2, tp=2")
    return (tensors if kind == "tp" else compose(tensors, FullyShardPlanner(tensors.mesh))).build_plan(model)


def compared(model: Deep, kind: str, options: dict[str, Any]) -> int:
    """Assert that the figures are those of a step of all blocks; return how many blocks ran."""
    plan = planned(kind, model)
    with unlike(model):
        expected, every = figures(plan, model, options)
    actual, calls = figures(plan, model, options)
    assert every >= len(model.layers)
    assert actual == expected
    return calls


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("whole", {}),
        ("whole", {"ddp": "buckets", "optimizer": "sgd"}),
        ("whole", {"autocast": "bfloat16"}),
        ("fsdp", {}),
        ("fsdp", {"checkpointing": True}),
        ("tp", {"loss": "vocab-parallel"}),
        ("both", {"checkpointing": True}),
    ],
)
def test_six_blocks_run_and_the_figures_are_those_of_all(kind: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Deep(9)
    calls = compared(model, kind, options)
    plan, options = planned(kind, model), {name: value for name, value in options.items() if name != "optimizer"}
    estimate = plan.activations(model, (8, 16), **options)
    with unlike(model):
        assert plan.activations(model, (8, 16), **options) == estimate
    assert calls == (12 if "checkpointing" in options else 6)  # each of the six once more in backward
    assert not any(
        "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers
    )


def test_two_blocks_in_turn_are_one_group() -> None:
    with torch.device("meta"):
        model = Deep(16)
        for layer in list(model.layers)[1::2]:
            layer.up_proj, layer.down_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    assert compared(model, "fsdp", {}) == 12


@pytest.mark.parametrize("way", ["own argument", "growing argument", "kept", "some kept", "twice"])
def test_blocks_that_are_called_otherwise_all_run(way: str) -> None:
    with torch.device("meta"):
        model = Deep(8, way=way)
    assert compared(model, "fsdp" if way == "kept" else "whole", {}) >= 8


@pytest.mark.parametrize("kind", [Periodic, Listed])
def test_blocks_whose_forward_reads_their_number_all_run(kind: type[Block]) -> None:
    with torch.device("meta"):
        model = Deep(14, kind)
    assert compared(model, "whole", {}) == 14


def test_a_tied_a_frozen_and_a_replaced_block_are_not_like_the_others() -> None:
    with torch.device("meta"):
        model = Deep(24)
    layers = list(model.layers)
    layers[3].down_proj.weight = layers[4].down_proj.weight  # type: ignore[union-attr]  # of a block
    layers[12].requires_grad_(False)
    layers[13].__dict__["forward"] = layers[13].forward
    assert 12 < compared(model, "whole", {}) < 24  # 14 to 23 alone are ten alike ones; 5 to 11 too few
