"""Whole state dicts: from a trainer's mesh to serving layouts and to one rank, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from shard_reshard import Part, PlanError, StateDictResharder, reshard_state_dict
from shard_reshard._torch_compat import register_group
from shard_reshard.execution.mover import Mover
from shard_spec import InterleavedShard, Layout, MeshSpec
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.out = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.embed.weight


def _model() -> Block:
    torch.manual_seed(7)
    return Block()


def _placements(name: str) -> tuple[Placement, ...]:
    """A 2-D layout: data parallel rows over tensor parallel columns."""
    if "norm" in name:
        return Replicate(), Replicate()
    if name.endswith("bias"):
        return Replicate(), Shard(0)
    return Shard(0), Shard(1 if name.startswith("out") else 0)


def _sharded(ranks: Ranks) -> dict[str, DTensor]:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    state = {k: v.to(ranks.device) for k, v in _model().state_dict().items()}
    return {name: distribute_tensor(tensor, mesh, _placements(name)) for name, tensor in state.items()}


def _whole(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in state.items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.ranks(4)
def test_to_a_serving_mesh_and_to_one_rank(ranks: Ranks) -> None:
    reference = {k: v.to(ranks.device) for k, v in _model().state_dict().items()}
    state = _sharded(ranks)
    mesh = ranks.mesh((4,), ("tp",))
    layouts = {name: (mesh, (Replicate() if tensor.dim() < 2 else Shard(1),)) for name, tensor in reference.items()}
    with ranks.record() as log, ranks.delayed():
        moved = reshard_state_dict(state, layouts)
    assert log.count("all_to_all") == 1
    assert list(moved) == sorted(reference)
    compared = 0
    for name, tensor in _whole(moved):
        assert torch.equal(tensor, reference[name]), name
        compared += tensor.numel()
    assert compared == sum(tensor.numel() for tensor in reference.values())
    assert "norm.weight" in moved.plan.explain()

    single = reshard_state_dict(state, dict.fromkeys(reference, "rank 0"))
    assert sorted(single) == (sorted(reference) if ranks.rank == 0 else [])
    assert all(torch.equal(single[name], reference[name]) for name in single)
    if ranks.rank == 0:
        model = _model()
        nn.init.zeros_(model.embed.weight)
        model.load_state_dict(single)
        assert torch.equal(model.embed.weight, reference["embed.weight"])


@pytest.mark.ranks(4)
def test_replica_groups_fill_a_live_module(ranks: Ranks) -> None:
    # Each data-parallel row has DTensors of its own on its own tensor-parallel sub-mesh; the norm is plain.
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    reference = {k: v.to(ranks.device) for k, v in _model().state_dict().items()}
    state: dict[str, torch.Tensor] = {
        name: tensor if "norm" in name else distribute_tensor(tensor, mesh["tp"], (Shard(0),))
        for name, tensor in reference.items()
    }
    serving = _model().to(ranks.device)
    everyone = ranks.mesh((4,), ("tp",))
    for module in (serving.q, serving.k, serving.v, serving.out):
        assert isinstance(module, nn.Linear)
        module.weight = nn.Parameter(distribute_tensor(torch.zeros_like(module.weight), everyone, (Shard(1),)))
    with torch.no_grad():
        serving.embed.weight.zero_()
        serving.norm.weight.zero_()
    with pytest.raises(PlanError, match=r"\[invalid-out\] head\.weight: .*memory of embed\.weight"):
        reshard_state_dict(state, out=serving)  # tied here alone: two tensors for one memory
    reshard_state_dict(state, out=serving, key_map={"head.weight": None})
    compared = 0
    for name, tensor in _whole(dict(serving.state_dict())):
        assert torch.equal(tensor, reference[name]), name
        compared += 1
    assert compared == len(reference)


@pytest.mark.ranks(4)
def test_qkv_into_one_fused_weight_on_other_ranks(ranks: Ranks) -> None:
    reference = {k: v.to(ranks.device) for k, v in _model().state_dict().items()}
    names = ["q.weight", "k.weight", "v.weight"]
    trainer = Layout(MeshSpec({"fsdp": 2}, ranks=[2, 0]), "S(0)")
    mesh = MeshSpec({"tp": 2}, ranks=[1, 3])
    fused = Layout(mesh, [InterleavedShard(0, (8, 4, 4))])
    local = {name: reference[name].chunk(2)[0 if ranks.rank == 2 else 1] for name in names}
    moved = reshard_state_dict(
        local if ranks.rank in (0, 2) else {},
        {"qkv.weight": fused},
        src_layouts=dict.fromkeys(names, trainer),
        shapes={name: reference[name].shape for name in names},
        key_map={"q.weight": Part("qkv.weight"), "k.weight": Part("qkv.weight", 8), "v.weight": Part("qkv.weight", 12)},
    )
    if ranks.rank in (1, 3):
        at = 0 if ranks.rank == 1 else 1
        expected = torch.cat([reference[name].chunk(2)[at] for name in names])
        assert torch.equal(moved["qkv.weight"], expected)
    else:
        assert moved == {}
    # And taken apart again, to two other ranks.
    parts = reshard_state_dict(
        dict(moved),
        dict.fromkeys(names, "2: S(1) on ranks 0..1"),
        src_layouts={"qkv.weight": fused},
        shapes={"qkv.weight": (16, 8)},
        key_map={
            "qkv.weight": [
                Part("q.weight", size=8),
                Part("k.weight", source_start=8, size=4),
                Part("v.weight", source_start=12, size=4),
            ]
        },
    )
    for name in names if ranks.rank < 2 else ():
        assert torch.equal(parts[name], reference[name].chunk(2, 1)[ranks.rank])


@pytest.mark.ranks(2)
def test_problems_of_all_tensors_and_ranks_come_in_one_error(ranks: Ranks) -> None:
    state = {"a": torch.zeros(4, 4), "b": torch.full((3,), float(ranks.rank)), "c": torch.zeros(2 + ranks.rank)}
    with ranks.record() as log, pytest.raises(PlanError) as caught:
        reshard_state_dict(state, {"a": "2: S(7)", "b": "2: R", "c": "2: R"})
    assert log.count("all_to_all") == 0
    codes = {problem.code for problem in caught.value.problems}
    # b: each rank has other values under one name, so these are shards that nobody described.
    assert codes >= {"missing-argument", "ranks-disagree"}
    messages = ranks.gather(str(caught.value))
    assert messages[0] == messages[1]
    with pytest.raises(PlanError, match="missing-argument"):
        reshard_state_dict({"a": torch.zeros(4)}, {})
    out = {"a": torch.zeros(4), "b": torch.ones(3)}
    with pytest.raises(PlanError, match="missing-source") as caught:
        reshard_state_dict({"a": torch.arange(4.0)}, out=out)
    assert "b" in str(caught.value)
    assert torch.equal(out["a"], torch.zeros(4))
    reshard_state_dict({"a": torch.arange(4.0)}, out=out, strict=False)
    assert torch.equal(out["a"], torch.arange(4.0))
    assert torch.equal(out["b"], torch.ones(3))
    odd: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
        # Equal values of all ranks were taken as the full tensor.
        "shape-mismatch": (torch.zeros(2, 3), {}),
        "unsupported-tensor": (torch.zeros(4, 3).to_sparse(), {}),
        "no-data": (FakeTensorMode().from_tensor(torch.zeros(2, 3)), {"src_layouts": {"odd": "2: S(0)"}}),
    }
    for code, (tensor, more) in odd.items():
        sources = {"odd": tensor if ranks.rank or not more else torch.zeros(2, 3)}
        with pytest.raises(PlanError, match=rf"{code}\] .*odd") as caught:
            reshard_state_dict(sources, "2: R", shapes={"odd": (4, 3)}, **more)
        assert len({*ranks.gather(str(caught.value))}) == 1
    misspelled = {"layer.weight": "2: R", "layer.wieght": "2: S(0)", "left out": "2: R"}
    for strict, hint in ((True, "did you mean 'layer.weight'"), (False, "")):
        sources = {"layer.weight": torch.arange(4.0), "left out": torch.zeros(2)}
        arguments: Any = {"key_map": {"left out": None}, "strict": strict}
        if hint:
            with pytest.raises(PlanError, match=hint) as caught:
                reshard_state_dict(sources, misspelled, **arguments)
            assert [problem.code for problem in caught.value.problems] == ["unknown-name"]
        else:
            assert list(reshard_state_dict(sources, misspelled, **arguments)) == ["layer.weight"]


@pytest.mark.ranks(2)
def test_out_in_another_dtype_and_a_loop(ranks: Ranks) -> None:
    # The receiver's dtype is known on the receiver only; five rounds with changing values, plans agreed on once.
    out = {"w": torch.zeros(6, 4, dtype=torch.bfloat16, device=ranks.device)} if ranks.rank == 1 else {}
    for step in range(5):
        full = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(ranks.device)
        state = {"w": full} if ranks.rank == 0 else {}
        with ranks.record() as log:
            reshard_state_dict(state, {"w": "rank 1"}, out=out)
        if step:
            assert list(log.ops) == ["all_gather", "all_to_all"]  # one row of 64 bytes, and the data
        if ranks.rank == 1:
            assert torch.equal(out["w"], full.to(torch.bfloat16))


@pytest.mark.ranks(2)
def test_a_kept_resharder(ranks: Ranks) -> None:
    # Rows to columns, step after step: fresh tensors, the same ones changed in place, and both ways to fill `out`.
    def rows(step: int) -> dict[str, torch.Tensor]:
        full = {f"w{at}": torch.arange(48.0).view(8, 6) + 100 * step + at for at in range(3)}
        return {name: tensor.chunk(2)[ranks.rank].to(ranks.device) for name, tensor in full.items()}

    layouts = {f"w{at}": "2: S(0)" for at in range(3)}
    shapes = dict.fromkeys(layouts, (8, 6))
    out = {name: torch.zeros(8, 3, device=ranks.device) for name in layouts}
    state = rows(0)
    resharder = StateDictResharder(
        state, dict.fromkeys(layouts, "2: S(1)"), src_layouts=layouts, shapes=shapes, out=out, bucket_bytes=256
    )
    assert len(resharder.plan.buckets) > 1
    for step in range(12):
        for name, tensor in rows(step).items():
            if step % 4 == 3:
                state[name] = tensor  # other memory
            else:
                state[name].copy_(tensor)
        with ranks.record() as log, ranks.delayed():
            moved = resharder(state, out=out, atomic=step % 3 == 0)
        assert log.count("all_to_all") == len(resharder.plan.buckets)
        for at, name in enumerate(layouts):
            expected = (torch.arange(48.0).view(8, 6) + 100 * step + at).chunk(2, 1)[ranks.rank].to(ranks.device)
            assert torch.equal(out[name], expected), step
            assert moved[name] is out[name]
    before = {name: out[name].clone() for name in layouts}
    for name, tensor in rows(20).items():
        state[name].copy_(tensor)
    for atomic in (True, False):
        with pytest.raises(PlanError, match="unknown-name"):
            resharder(state | ({"strange": state["w0"]} if ranks.rank else {}), out=out, atomic=atomic)
        assert all(torch.equal(out[name], before[name]) for name in layouts)
    resharder(state, out=out)  # and goes on
    assert torch.equal(out["w0"], (torch.arange(48.0).view(8, 6) + 2000).chunk(2, 1)[ranks.rank].to(ranks.device))
    plain = StateDictResharder(
        state, dict.fromkeys(layouts, "2: S(1)"), src_layouts=layouts, shapes=shapes, check="first"
    )
    for step in range(4):  # what a call allocates is never kept, also where everything else is
        for name, tensor in rows(step).items():
            state[name].copy_(tensor)
        with ranks.record() as log, ranks.delayed():
            moved = plain(state)
        assert list(log.ops) == (["all_to_all"] if step else ["all_gather", "all_to_all"])
        for at, name in enumerate(layouts):
            expected = (torch.arange(48.0).view(8, 6) + 100 * step + at).chunk(2, 1)[ranks.rank].to(ranks.device)
            assert torch.equal(moved[name], expected), step


@pytest.mark.ranks(2)
def test_tied_tensors_move_once(ranks: Ranks) -> None:
    tied = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(ranks.device)
    local = tied.chunk(2)[ranks.rank]
    state = {"embed": local, "head": local, "other": local.clone()}
    layouts = dict.fromkeys(state, "2: S(0)")
    shapes = dict.fromkeys(state, tied.shape)
    moved = reshard_state_dict(state, dict.fromkeys(state, "2: S(1)"), src_layouts=layouts, shapes=shapes)
    assert moved.plan.aliases == {"head": "embed"}
    assert moved["head"] is moved["embed"]
    assert moved["other"].data_ptr() != moved["embed"].data_ptr()
    assert all(torch.equal(tensor, tied.chunk(2, 1)[ranks.rank]) for tensor in moved.values())
    # Tied at the source, two memories at the destination: both are filled.
    out = {name: torch.zeros(8, 2, device=ranks.device) for name in state}
    reshard_state_dict(state, dict.fromkeys(state, "2: S(1)"), src_layouts=layouts, shapes=shapes, out=out)
    assert all(torch.equal(out[name], tied.chunk(2, 1)[ranks.rank]) for name in state)


@pytest.mark.ranks(2)
def test_shards_that_remember_what_they_are_shards_of(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    full = torch.arange(96.0, device=ranks.device).view(12, 8)
    model = nn.Linear(8, 6, bias=False).to(ranks.device)
    with torch.no_grad():  # sections of 4, 4 and 4 rows, each cut in two
        model.weight.copy_(torch.cat([part.chunk(2)[ranks.rank] for part in full.chunk(3)]))
    model.weight._sharding_info = (mesh, (Shard(0),), full.shape, full.stride(), (4, 4, 4))  # type: ignore[attr-defined]
    moved = reshard_state_dict(model, {"weight": (mesh, (Shard(1),))})
    assert torch.equal(moved["weight"].full_tensor(), full)


@pytest.mark.filterwarnings("ignore:This process")
def test_a_receiver_whose_sender_dies_keeps_its_values(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    workers = [context.Process(target=_sync_until_death, args=(rank, str(tmp_path / "s"), queue)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert not queue.empty()
    kind, values = queue.get()
    assert (kind, values) == ("RuntimeError", [1.0] * 4)


def _sync_until_death(rank: int, path: str, queue: Any) -> None:
    try:
        store = dist.FileStore(path, 2)  # type: ignore[attr-defined]  # public, though not declared so
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        names = ["a", "b", "c", "d"]
        out = {name: torch.zeros(64) for name in names} if rank else None

        def sync(value: float) -> None:
            state = {} if rank else {name: torch.full((64,), value) for name in names}
            reshard_state_dict(state, dict.fromkeys(names, "rank 1"), out=out, bucket_bytes=512)

        sync(1.0)
        start, calls = Mover.start, iter(range(2))

        def die_at_the_second(*args: Any, **options: Any) -> Any:
            if rank == 0 and next(calls) == 1:
                os._exit(0)
            return start(*args, **options)

        Mover.start = die_at_the_second  # type: ignore[method-assign]
        try:
            sync(2.0)
        except RuntimeError as error:
            assert out is not None
            queue.put((type(error).__name__, [float(out[name].mean()) for name in names]))
    finally:
        os._exit(0)


@pytest.mark.ranks(2)
def test_a_group_of_several_jobs(ranks: Ranks, tmp_path: Path) -> None:
    # Each process counts its ranks from the default group of a job of its own; here the other way round.
    size, own = 2, 1 - ranks.rank
    store = dist.FileStore(ranks.gather(f"{tmp_path}/store")[0], size)  # type: ignore[attr-defined]  # public
    group = dist.ProcessGroup(store, own, size)
    gloo: Any = dist.ProcessGroupGloo
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo(store, own, size, timedelta(seconds=60))
    )
    register_group(group, "jobs", "cpu:gloo")
    full = torch.arange(24.0).view(6, 4)
    sync = StateDictResharder({"w": full.chunk(2)[own]}, "2: S(1)", src_layouts={"w": "2: S(0)"}, shapes={"w": (6, 4)},
                              group=group)  # fmt: skip
    for step in range(5):
        moved = sync({"w": full.chunk(2)[own] + step})
        assert torch.equal(moved["w"], full.chunk(2, 1)[own] + step)
    with pytest.raises(PlanError, match="shape-mismatch"):
        sync({"w": torch.zeros(1, 1) if own else full.chunk(2)[own]})
    moved = reshard_state_dict({"w": full} if own else {}, "rank 0", group=group)
    assert ("w" in moved) is (own == 0)


class _ScaledLinear(nn.Linear):
    """A layer whose state dict has a tensor that is neither a parameter nor a buffer, as 4-bit layers do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.full((4,), 2.0)


class _TransposedLinear(nn.Linear):
    """A layer that saves its weight transposed, as GPT-2's files have it."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].T


class _StatefulLinear(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"scale": 3}


@pytest.mark.ranks(2)
def test_a_module_is_what_its_state_dict_says(ranks: Ranks) -> None:
    # Users import it from here: torch has no public name for it.
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(nn.Linear(4, 2)))  # its prefix is in no state dict
    moved = reshard_state_dict(model, "2: S(0)")
    assert set(moved) == set(model.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for name, value in model.state_dict().items():
        assert torch.equal(moved[name], value.chunk(2)[ranks.rank]), name
    values = {name: torch.full_like(value, at) for at, (name, value) in enumerate(model.state_dict().items())}
    reshard_state_dict(values, out=model)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    scaled = nn.Sequential(_ScaledLinear(4, 4))
    assert "0.weight.absmax" in reshard_state_dict(scaled, "2: R")
    with pytest.raises(PlanError, match=r"0\.weight\.absmax.*what is written to it is lost"):
        reshard_state_dict(scaled.state_dict(), out=scaled)
    transposed = nn.Sequential(_TransposedLinear(4, 4))
    assert torch.equal(reshard_state_dict(transposed, "2: R")["0.weight"], transposed.get_parameter("0.weight").T)
    with pytest.raises(PlanError, match=r"0\.weight.*what is written to it is lost"):
        reshard_state_dict(transposed.state_dict(), out=transposed)
    with pytest.raises(PlanError, match=r"0\._extra_state: a dict"):
        reshard_state_dict(nn.Sequential(_StatefulLinear(4, 4)), "2: R")
