"""Which tensors a parameter consists of, and kinds of parameters that are not one sharded matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, WholeMatrices
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from whole_models import Twin, add_experts, local, mesh_of, of_mesh, of_sections


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02)


def _train(twin: Twin, optimizer: WholeMatrices, one: torch.optim.Optimizer, steps: int = 5, **options: Any) -> int:
    compared = 0
    for step in range(steps):
        twin.backward(step, **options)
        optimizer.step()
        one.step()
        compared += twin.compared()
    return compared


@pytest.mark.ranks(2, 4)
def test_sections_experts_and_copies(ranks: Ranks) -> None:
    world, mesh, twin = ranks.world_size, mesh_of((ranks.world_size,)), Twin()
    of_sections(mesh, [(16, 4, 1), (8, 4, world // 2), (8, 4, world // 2)], 12)(twin, "qkv")
    of_sections(mesh, [(10, 1, 1), (10, 1, 1)], 6)(twin, "gate_up")  # uneven on four ranks
    of_sections(mesh, [(8, 1, 1), (8, 1, 1)], 6, experts=3)(twin, "experts.gate_up")
    add_experts(twin, "experts.down", mesh, Shard(0))
    add_experts(twin, "experts.tp", mesh, Shard(2), 3)
    optimizer = WholeMatrices(twin.named, _muon, bucket_bytes=500)
    one = _muon(list(twin.reference.values()))
    assert _train(twin, optimizer, one) > 0
    plan = optimizer.plan
    assert {matrix.name for matrix in plan.matrices} == twin.reference.keys()
    assert all(matrix.shape == twin.reference[matrix.name].shape for matrix in plan.matrices)
    # An expert that lies in full on a rank stays there.
    sent = dict(zip((m.name for m in plan.matrices), plan.sent or (), strict=True))
    assert [sent[f"experts.down[{e}]"] for e in range(4)] == [(0, 0)] * 4
    assert [plan.owner[f"experts.down[{e}]"] for e in range(4)] == [e * world // 4 for e in range(4)]


@pytest.mark.ranks(2)
def test_one_matrix_if_asked(ranks: Ranks) -> None:
    mesh, twin = mesh_of((2,)), Twin()
    of_sections(mesh, [(16, 1, 1), (8, 1, 1)], 12, together=True)(twin, "qkv")
    full = torch.randn((4, 6, 10), generator=torch.Generator().manual_seed(4))
    twin.add("experts", full, lambda value: distribute_tensor(value, mesh, [Shard(0)]))

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(params, lr=0.02)

    optimizer = WholeMatrices(twin.named, make, together=["qkv", "exp*"])
    assert _train(twin, optimizer, make(list(twin.reference.values()))) > 0
    assert [matrix.shape for matrix in optimizer.plan.matrices] == [(24, 12), (4, 6, 10)]


@pytest.mark.ranks(2, 3)
def test_plain_frozen_missing_empty_half_and_strided(ranks: Ranks) -> None:
    world, mesh = ranks.world_size, mesh_of((ranks.world_size,))
    twin = of_mesh(mesh, [Shard(0)], {"w": (9, 8), "v": (1, 8), "nothing": (0, 4)})
    generator = torch.Generator().manual_seed(1)
    twin.add(
        "half", torch.randn((12, 6), generator=generator).bfloat16(), lambda t: distribute_tensor(t, mesh, [Shard(1)])
    )
    twin.add("plain", torch.randn((6, 5), generator=generator), lambda t: t)
    twin.add("strided", torch.randn((6, 8), generator=generator), lambda t: t.t().contiguous().t())
    twin.add("bias", torch.randn(7, generator=generator), lambda t: distribute_tensor(t, mesh, [Shard(0)]))
    twin.add("scalar", torch.randn((), generator=generator), lambda t: t)
    twin.add("frozen", torch.randn((4, 4), generator=generator), lambda t: distribute_tensor(t, mesh, [Shard(0)]))
    twin.named["frozen"].requires_grad_(False)

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01)

    # A parameter under two names is one parameter.
    pairs = [*twin.named.items(), ("w again", twin.named["w"])]
    optimizer, one = WholeMatrices(pairs, make, bucket_bytes=200), make(list(twin.reference.values()))
    compared = 0
    for step, without in enumerate((["frozen"], ["frozen", "w"], ["frozen", "plain", "bias"], [], ["half"], [])):
        if step == 3:
            twin.named["frozen"].requires_grad_(True)  # as in one process it counts from now on
        twin.backward(step, without)
        optimizer.step()
        one.step()
        compared += twin.compared()
    assert compared > 0
    for parameter in (*twin.named.values(), *twin.reference.values()):
        parameter.grad = None
    before = [local(p.detach()).clone() for p in twin.named.values()]
    optimizer.step()  # without gradients nothing happens
    assert all(torch.equal(a, local(p.detach())) for a, p in zip(before, twin.named.values(), strict=True))
    assert world == len(optimizer.plan.work)


@pytest.mark.ranks(3)
def test_partial_gradients_are_added_up_on_the_way(ranks: Ranks) -> None:
    mesh = mesh_of((3,))
    full = torch.arange(12.0).view(4, 3)
    parameter = nn.Parameter(distribute_tensor(full.clone(), mesh, [Replicate()]))
    optimizer = WholeMatrices({"w": parameter}, lambda params: torch.optim.SGD(params, lr=1.0))
    for step in range(5):
        own = torch.full((4, 3), float(ranks.rank + step))
        parameter.grad = DTensor.from_local(own, mesh, [Partial()])
        optimizer.step()
        full = full - (3.0 + 3 * step)
        assert torch.equal(local(parameter.detach()), full)


@pytest.mark.ranks(2)
def test_undeclared_shards_have_a_layout_of_the_caller(ranks: Ranks) -> None:
    full, gradient = torch.randn(6, 8), torch.randn(6, 8)
    rows = slice(3 * ranks.rank, 3 * ranks.rank + 3)
    parameter = nn.Parameter(full[rows].clone())
    with pytest.raises(PlanError, match="plain tensors that differ between ranks"):
        WholeMatrices({"w": parameter}, _muon)
    options: dict[str, Any] = {"layouts": {"w": "2: S(0)"}, "shapes": {"w": (6, 8)}}
    with pytest.raises(PlanError, match=r"unknown-name\] layouts: 'x'"):
        WholeMatrices({"w": parameter}, _muon, layouts={"x": "2: S(0)", "w": "2: S(0)"}, shapes={"w": (6, 8)})
    with pytest.raises(PlanError, match=r"unmatched-pattern\] together: 'x\*'"):
        WholeMatrices({"w": parameter}, _muon, together=["x*"], **options)
    optimizer = WholeMatrices({"w": parameter}, _muon, **options)
    reference = nn.Parameter(full.clone())
    one = _muon([reference])
    for _ in range(5):
        parameter.grad, reference.grad = gradient[rows].clone(), gradient.clone()
        optimizer.step()
        one.step()
        assert torch.equal(parameter, reference[rows])


@pytest.mark.ranks(2)
def test_writes_between_steps_count(ranks: Ranks) -> None:
    twin = of_mesh(mesh_of((2,)), [Shard(0)], {"w": (6, 8), "v": (5, 4)})
    optimizer, one = WholeMatrices(twin.named, _muon), _muon(list(twin.reference.values()))
    for step in range(7):
        if step == 2:  # a weight that is clipped, on both sides
            with torch.no_grad():
                twin.named["w"].clamp_(-0.5, 0.5)
                twin.reference["w"].clamp_(-0.5, 0.5)
        if step == 4:  # and one that is written on one rank's shard only
            with torch.no_grad():
                twin.named["v"].to_local().mul_(2.0 if ranks.rank == 1 else 1.0)
                twin.reference["v"][3:].mul_(2.0)
        if step == 5:  # through .data, which torch does not count: rows of one rank change places
            if ranks.rank == 0:
                data = local(twin.named["w"].data)
                data.data.copy_(data[[1, 0, 2]])
            reference = twin.reference["w"].data
            reference.copy_(reference[[1, 0, 2, 3, 4, 5]])
        twin.backward(step)
        with ranks.record() as log:
            optimizer.step()
        one.step()
        assert twin.compared() > 0
        assert log.count("all_to_all") == (3 if step in (0, 2, 4, 5) else 2)


@pytest.mark.ranks(1)
def test_every_write_through_data_counts(ranks: Ranks) -> None:
    # Signs of float64 are the highest bit of a word: an even number of them vanishes in a sum modulo 2**64.
    def rows(data: torch.Tensor) -> torch.Tensor:
        return data[[1, 0, *range(2, len(data))]]

    def columns(data: torch.Tensor) -> torch.Tensor:
        return torch.cat([data[:, :1], -data[:, 1::2], data[:, 2::2]], 1)[:, : data.shape[1]]

    def element(data: torch.Tensor) -> torch.Tensor:
        data = data.clone()
        data[-1, -1] += 1
        return data

    writes: list[Any] = [torch.neg, rows, columns, element, lambda data: data.flip(1), lambda data: data.roll(1, 0)]
    seen = 0
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for shape in ((3, 5), (64, 128), (300, 1000)):  # the last one is several blocks
            parameter = nn.Parameter(torch.randn(shape).to(dtype))
            optimizer = WholeMatrices({"w": parameter}, lambda ps: torch.optim.SGD(ps, lr=0.0))
            for write in writes:
                parameter.grad = torch.zeros_like(parameter)
                optimizer.step()  # with a rate of zero, new values are those of the master
                written = write(parameter.data)
                parameter.data.copy_(written)
                optimizer.step()
                assert torch.equal(parameter, written), (dtype, shape, write)
                seen += 1
    assert seen == 54
