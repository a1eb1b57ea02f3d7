"""Fused weights and copied key-value heads move between tensor-parallel sizes: as files, exchanges and checkpoints."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranktest import Ranks
from shard_reshard import PlanError, load_safetensors, reshard_state_dict
from small_models import new_batches
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from tp_ddp_bridge import optimizer_state_to_dtensor, optimizer_state_to_local, wrap_ddp
from tp_styles import (
    FusedColwiseParallel,
    GQAParallel,
    ParallelStyle,
    RowwiseParallel,
    apply_plan,
    full_state_dict,
)

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 4, 2, 8
KV = KV_HEADS * HEAD_DIM


class Block(nn.Module):
    """A block of grouped-query attention, with q, k and v separate or fused, and a feed-forward with a fused gate."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, KV_HEADS
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        if fused:
            self.qkv = nn.Linear(DIM, DIM + 2 * KV)
        else:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, KV), nn.Linear(DIM, KV)
        self.o_proj = nn.Linear(DIM, DIM)
        self.gate_up, self.down = nn.Linear(DIM, 96), nn.Linear(48, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        if hasattr(self, "qkv"):
            sizes = [HEAD_DIM * n for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
            parts: Any = self.qkv(h).split(sizes, dim=-1)
        else:
            parts = self.q_proj(h), self.k_proj(h), self.v_proj(h)
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class GroupedGPT(nn.Module):
    """A model of two blocks: q, k and v are separate in block 0, fused in block 1. Returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(fused=fused) for fused in (False, True))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


PLAN: dict[str, ParallelStyle] = {
    "blocks.0": GQAParallel(kv_replicate=True),
    "blocks.1": GQAParallel(kv_replicate=True, qkv="qkv"),
    "blocks.*.gate_up": FusedColwiseParallel(2),
    "blocks.*.down": RowwiseParallel(),
    "tokens": RowwiseParallel(),
}
# Weights that no DTensor describes: k and v of block 0 on four ranks (copied heads), fused projections on any number.
SECTIONED = {2: 6, 4: 10}


def new_model(seed: int = 0, device: str = "cpu") -> GroupedGPT:
    torch.manual_seed(seed)
    with torch.device(device):
        return GroupedGPT().double()


def parallel(ranks: Ranks, tp_size: int, model: GroupedGPT) -> GroupedGPT:
    """Shard a model over `tp_size` neighbouring ranks; the next `tp_size` ranks hold the same shards, as replicas."""
    mesh = ranks.mesh((ranks.world_size // tp_size, tp_size), ("dp", "tp"))
    apply_plan(model, mesh["tp"] if tp_size < ranks.world_size else ranks.mesh((tp_size,), ("tp",)), PLAN)
    sectioned = [p for p in model.parameters() if getattr(p, "_sharding_info", None) is not None]
    assert len(sectioned) == SECTIONED[tp_size]
    return model


def assert_full(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    """Assert that every parameter is equal bit for bit."""
    state = full_state_dict(model)
    assert state.keys() == wanted.keys()
    assert len(state) == 30
    assert sum(state[name].numel() for name in wanted if torch.equal(state[name], wanted[name])) == sum(
        value.numel() for value in wanted.values()
    )


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("tp_size", [2, 4])
def test_from_safetensors_into_a_parallel_model(ranks: Ranks, tp_size: int, tmp_path: Path) -> None:
    """Four ranks with two shards are two replicas: both receive the weights."""
    tp_size = min(tp_size, ranks.world_size)
    from safetensors.torch import save_file

    folder = Path(ranks.gather(str(tmp_path))[0])
    expected = new_model().state_dict()
    if ranks.rank == 0:
        save_file(dict(expected), folder / "model.safetensors")
    ranks.gather(None)
    model = parallel(ranks, tp_size, new_model(device="meta"))
    loaded = load_safetensors(folder, out=model)
    assert len(loaded.materialized) == 30
    assert_full(model, expected)


@pytest.mark.ranks(2)
def test_weights_arrive_in_the_leaves_of_a_bridged_module(ranks: Ranks) -> None:
    """A bridged module's state dict wraps its leaves in DTensors; values are written into the leaves themselves."""
    mesh = ranks.mesh((1, 2), ("dp", "tp"))
    model = new_model()
    apply_plan(model, mesh["tp"], PLAN)
    ddp = wrap_ddp(model, mesh=mesh)
    expected = {f"module.{name}": value for name, value in new_model(seed=1).state_dict().items()}
    shapes = {name: tuple(value.shape) for name, value in expected.items()}
    with pytest.raises(PlanError, match=r"src_layouts.*give a layout for each name"):
        reshard_state_dict(expected, out=ddp, src_layouts="2: R")  # type: ignore[arg-type]
    reshard_state_dict(expected, out=ddp, src_layouts=dict.fromkeys(expected, "2: R"), shapes=shapes)
    arrived = reshard_state_dict(ddp, "2: R")
    assert arrived.keys() == expected.keys()
    assert len(arrived) == 30
    assert all(torch.equal(arrived[name], value) for name, value in expected.items())


@pytest.mark.ranks(4)
def test_between_two_sizes_and_back(ranks: Ranks) -> None:
    """Weights of four ranks move onto the first two of them, and back."""
    expected = new_model().state_dict()
    four, pair = parallel(ranks, 4, new_model()), DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    two = new_model(seed=1)
    has_two = ranks.rank < 2
    if has_two:
        apply_plan(two, pair, PLAN)
    reshard_state_dict(four.state_dict(), out=two if has_two else {})
    if has_two:
        assert_full(two, expected)
    with torch.no_grad():
        for parameter in four.parameters():
            parameter.zero_()
        for parameter in two.parameters():
            parameter.mul_(2)
    reshard_state_dict(two.state_dict() if has_two else {}, out=four)
    assert_full(four, {name: 2 * value for name, value in expected.items()})


@pytest.mark.ranks(4)
def test_onto_and_from_two_replicas_of_two_ranks(ranks: Ranks) -> None:
    expected = new_model().state_dict()
    four, two = parallel(ranks, 4, new_model()), parallel(ranks, 2, new_model(seed=1))
    reshard_state_dict(four.state_dict(), out=two)
    assert_full(two, expected)
    with torch.no_grad():
        for parameter in two.parameters():
            parameter.mul_(2)
    reshard_state_dict(two.state_dict(), out=four)
    assert_full(four, {name: 2 * value for name, value in expected.items()})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for ids, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", list(itertools.permutations([2, 4])), ids=str)
def test_adam_goes_on_with_another_size(ranks: Ranks, sizes: tuple[int, int], tmp_path: Path) -> None:
    """Five steps at one tensor-parallel size and five at the other equal ten on one device."""
    folder = ranks.gather(str(tmp_path))[0]
    batches = new_batches(10)
    alone = new_model()
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    expected = train(alone, reference, batches)

    before = parallel(ranks, sizes[0], new_model())
    optimizer = torch.optim.AdamW(before.parameters(), lr=1e-2)
    losses = train(before, optimizer, batches[:5])
    save({"model": before.state_dict(), "optim": optimizer_state_to_dtensor(before, optimizer)}, checkpoint_id=folder)
    after = parallel(ranks, sizes[1], new_model(seed=1))
    resumed = torch.optim.AdamW(after.parameters(), lr=1e-2)
    state = {"model": after.state_dict(), "optim": optimizer_state_to_dtensor(after, resumed, template=True)}
    load(state, checkpoint_id=folder)
    after.load_state_dict(state["model"])
    optimizer_state_to_local(after, resumed, state["optim"])
    assert_full(after, full_state_dict(before))
    losses += train(after, resumed, batches[5:])
    uninterrupted = train(before, optimizer, batches[5:])
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(losses[5:], uninterrupted, rtol=1e-10, atol=0)
    compared = 0
    other = full_state_dict(before)
    for name, value in full_state_dict(after).items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-8, atol=1e-10, msg=name)
        torch.testing.assert_close(value, other[name], rtol=1e-8, atol=1e-10, msg=name)
        compared += value.numel()
    assert compared == sum(p.numel() for p in alone.parameters())


@pytest.mark.ranks(4)
def test_replicas_of_sectioned_weights_under_ddp(ranks: Ranks) -> None:
    """DDP reduces local shards as they are: five wrapped steps with sectioned weights are those of one process."""
    batches = new_batches(5)
    alone = new_model()
    train(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), batches)

    model = parallel(ranks, 2, new_model())
    wrapped = wrap_ddp(model, mesh=ranks.mesh((2, 2), ("dp", "tp")))
    replica = ranks.mesh((2, 2), ("dp", "tp"))["dp"].get_local_rank()
    rows = [tuple(each.chunk(2)[replica] for each in batch) for batch in batches]
    train(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2), rows)  # type: ignore[arg-type]  # rows are pairs
    compared = 0
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-8, atol=1e-10, msg=name)
        compared += value.numel()
    assert compared == sum(p.numel() for p in alone.parameters())


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("reader", "sizes"), [("tp_ddp_bridge", (2, 4)), ("tp_ddp_bridge", (4, 2)), ("torch", (4, 4))], ids=str
)
def test_moments_of_one_package_are_read_by_another(ranks: Ranks, reader: str, sizes: tuple[int, int]) -> None:
    """Each package has its own class for entries with sections; every one of them reads those of the others."""
    batches = new_batches(8)
    before, after = (parallel(ranks, size, new_model()) for size in sizes)
    optimizer, resumed = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (before, after))
    train(before, optimizer, batches[:3])
    if reader == "tp_ddp_bridge":  # entries of tp-styles, in torch's form
        state: dict[str, Any] = dict(get_optimizer_state_dict(before, optimizer))
        optimizer_state_to_local(after, resumed, state)
    else:  # entries of tp-ddp-bridge, which torch passes to tp-styles' optimizer; torch moves no DTensor to other ranks
        state = copy.deepcopy(optimizer_state_to_dtensor(before, optimizer))  # torch loads without a copy
        for group in state["param_groups"]:
            group.pop("has_state")
        train(after, resumed, batches[3:4])  # torch loads into state that exists
        set_optimizer_state_dict(after, resumed, state)
    sectioned = [name for name, values in state["state"].items() if hasattr(values["exp_avg"], "_sharding_info")]
    assert len(sectioned) == SECTIONED[sizes[0]]
    after.load_state_dict(full_state_dict(before))
    losses, expected = (train(*pair, batches[3:]) for pair in ((after, resumed), (before, optimizer)))
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    compared, wanted = 0, full_state_dict(before)
    for name, value in full_state_dict(after).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-8, atol=1e-10, msg=name)
        compared += value.numel()
    assert compared == sum(p.numel() for p in new_model().parameters())
