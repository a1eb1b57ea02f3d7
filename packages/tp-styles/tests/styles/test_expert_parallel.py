"""`ExpertParallel`: whole experts on each rank train as one process does, and send what the formula says."""

from __future__ import annotations

import copy
import datetime
import re
from typing import Any

import moe_models as moe
import pytest
import torch
import torch.distributed as dist
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from tp_styles.problems import StyleInputError
from tp_styles.runtime.experts import AllToAllDispatcher, RoutedTokens, exchange_counts

# float64: sums in another order than one process has them.
ATOL = 1e-12


def train_beside(
    model: nn.Module, alone: nn.Module, mesh: Any, ids: list[torch.Tensor], *, sharded: bool, router: float = 0.0
) -> int:
    """Train both by SGD with momentum and compare losses, then all parameters. Returns how many numbers were compared.

    Args:
        model: The parallel model.
        alone: The same on one process.
        mesh: The ranks of the experts.
        ids: A batch for each step; sharded ones are dealt to the ranks unevenly.
        sharded: Each rank has its own rows of the batch. Losses then are sums, so that ranks may have unequal rows.
        router: Factor of the router's losses, which need all tokens.
    """
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (model, alone)]
    size, rank, compared = mesh.size(), mesh.get_local_rank(), 0
    for batch in ids:
        mine = batch.tensor_split(size)[rank] if sharded else batch
        ours = moe.loss_of(model(mine), mine, router=router) * len(mine)
        wanted = moe.loss_of(alone(batch), batch, router=router) * len(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        ours.backward()
        wanted.backward()
        value = ours.detach().clone()
        if sharded:
            dist.all_reduce(value)
            for name, parameter in model.named_parameters():
                if ".experts." not in name and parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        torch.testing.assert_close(value, wanted.detach(), atol=ATOL, rtol=ATOL)
        for optimizer in optimizers:
            optimizer.step()
        compared += 1
    state = moe.full_values(model, mesh)
    return compared + models.assert_close(state, {n: p.detach() for n, p in alone.named_parameters()}, ATOL)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", list(moe.STYLES), ids=lambda kind: kind.__name__)
def test_training_equals_one_process(ranks: Ranks, kind: type[nn.Module]) -> None:
    """Five experts over 2, 3 and 4 ranks, five steps, batches that do not divide."""
    mesh = ranks.mesh((ranks.world_size,), ("ep",))
    for tokens in ("replicated", "sharded"):
        model, alone = (moe.language_model(5, kind) for _ in range(2))
        if tokens == "sharded":  # the root has no declared inputs, so the layers' experts alone are checked
            for layer in model.layers:
                tp.apply_plan(layer.moe.experts, mesh, tp.ExpertParallel("sharded", **moe.STYLES[kind]))
        else:
            tp.apply_plan(model, mesh, moe.experts_plan(kind, tokens))
        ids = [*moe.batches(3, 4), *moe.batches(1, 5), *moe.batches(1, 7)]
        if tokens == "replicated":
            ids[3] = ids[3][:1, :3]
        assert train_beside(model, alone, mesh, ids, sharded=tokens == "sharded") > 3000


@pytest.mark.ranks(2)
def test_experts_and_ranks_without_tokens(ranks: Ranks) -> None:
    """All tokens select the same two experts, of rank 0; then a batch has one token, and then rank 1 has none."""
    mesh = ranks.mesh((2,), ("ep",))
    model, alone = (moe.language_model(6, skewed=True) for _ in range(2))
    tp.apply_plan(model, mesh, moe.experts_plan(moe.Stacked, "replicated"))
    one = [ids[:1, :2] for ids in moe.batches(2, 1)]
    assert train_beside(model, alone, mesh, [*moe.batches(2, 3), *one], sharded=False) > 3000
    gradient: Any = model.layers[0].moe.experts.down.grad
    held = gradient.to_local()
    assert bool(held.any()) == (ranks.rank == 0)  # a gradient of zeros on rank 1, not none
    layer, reference = (moe.language_model(6).layers[0].moe.experts for _ in range(2))
    tp.apply_plan(layer, mesh, tp.ExpertParallel("sharded"))
    hidden = torch.randn(3, moe.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids, weights = torch.tensor([[0, 5], [1, 6], [6, 6]]), torch.rand(3, 2, dtype=torch.float64) + 0.5
    rows = slice(0, 3) if ranks.rank == 0 else slice(3, 3)  # 6 selects no expert
    (layer(hidden[rows], ids[rows], weights[rows]) ** 2).sum().backward()
    (reference(hidden, ids, weights) ** 2).sum().backward()
    gradients = moe.full_values(layer, mesh, gradients=True)
    assert models.assert_close(gradients, {n: p.grad for n, p in reference.named_parameters()}, ATOL) > 1000


@pytest.mark.ranks(4)
def test_bytes_are_those_of_the_formula(ranks: Ranks) -> None:
    """Each selected expert of another rank costs a row each way in both passes, with a routing weight beside it."""
    mesh = ranks.mesh((4,), ("ep",))
    num_tokens, k, experts = 64, 3, moe.Stacked(8).double()
    random = torch.Generator().manual_seed(ranks.rank)
    hidden = torch.randn(num_tokens, moe.WIDTH, dtype=torch.float64, generator=random, requires_grad=True)
    # Every rank sends the same number of rows to each rank: the mean of the formula is met exactly.
    ids = torch.arange(num_tokens * k).view(num_tokens, k) % 8
    weights = torch.rand(num_tokens, k, dtype=torch.float64, generator=random).requires_grad_()
    handle = tp.apply_plan(experts, mesh, tp.ExpertParallel("sharded"), check="never")
    with ranks.record() as log:
        experts(hidden, ids, weights).sum().backward()
    rows = num_tokens * k * (1 - 1 / 4)
    exchanges = [event for event in log.events if event.op == "all_to_all"]
    sent = [sum(event.bytes_sent) for event in exchanges]
    counts = 3 * (2 + 1) * 8  # to each other rank: numbers of its two experts' rows, and one flag
    forward = [rows * (moe.WIDTH + 1) * 8, rows * moe.WIDTH * 8]
    assert sent == [counts, *forward, *forward[::-1]]
    text = handle.plan.explain(num_tokens=4 * num_tokens)
    assert text.count("tokens to their experts") == text.count("tokens from their experts") == 2
    assert log.count("all_to_all") == 5
    assert log.count("all_reduce") == 1  # of the norm behind the experts


class AllGatherDispatcher:
    """Another way to the same: every rank gathers all tokens, and outputs are summed by a reduction."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def dispatch(self, hidden: Any, experts: Any, weights: Any, *, num_experts: int, group: Any) -> RoutedTokens:
        self.calls.append("dispatch")
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        x, ids, w = (_AllGathered.apply(value, group) for value in (hidden, experts, weights))  # type: ignore[no-untyped-call]
        step = -(-num_experts // size)
        token, place = torch.where((ids >= rank * step) & (ids < min(rank * step + step, num_experts)))
        return RoutedTokens(x[token], ids[token, place] - rank * step, w[token, place], (token, len(x), group))

    def combine(self, outputs: torch.Tensor, state: Any) -> torch.Tensor:
        self.calls.append("combine")
        token, count, group = state
        total = outputs.new_zeros(count, outputs.shape[-1]).index_add(0, token, outputs)
        return _ScatteredSum.apply(total, group)  # type: ignore[no-untyped-call, no-any-return]


class _AllGathered(torch.autograd.Function):
    """All ranks' rows; the gradients of this rank's are summed."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own_rows_of_sum(gradient, ctx.group), None


class _ScatteredSum(torch.autograd.Function):
    """This rank's rows of the sum; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _own_rows_of_sum(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllGathered.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


def _own_rows_of_sum(value: torch.Tensor, group: Any) -> torch.Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


@pytest.mark.ranks(2)
def test_another_dispatcher_takes_the_place_of_the_exchanges(ranks: Ranks) -> None:
    mesh, double = ranks.mesh((2,), ("ep",)), AllGatherDispatcher()
    model, alone = (moe.language_model(4) for _ in range(2))
    tp.apply_plan(model, mesh, moe.experts_plan(moe.Stacked, "replicated", dispatcher=double))
    assert train_beside(model, alone, mesh, moe.batches(5, 4, 4), sharded=False) > 3000
    before = len(double.calls)
    with ranks.record() as log:
        model(moe.batches(1, 4, 4)[0])
    assert double.calls[before:] == ["dispatch", "combine"] * 2
    assert log.count("all_to_all") == 0


@pytest.mark.ranks(2)
def test_weights_of_another_type_travel_with_the_rows(ranks: Ranks) -> None:
    """A router in float32 beside tokens in bfloat16: both keep their bits, and their gradients their types."""
    mesh = ranks.mesh((2,), ("ep",))
    for rows in (7, 1, 0):
        random = torch.Generator().manual_seed(ranks.rank)
        hidden = torch.randn(rows, 6, generator=random).bfloat16().requires_grad_()
        weights = torch.rand(rows, 2, generator=random).requires_grad_()
        ids = torch.randint(0, 4, (rows, 2), generator=random)
        routed = AllToAllDispatcher().dispatch(hidden, ids, weights, num_experts=4, group=mesh.get_group())
        assert routed.weights is not None
        assert routed.hidden.dtype == torch.bfloat16
        assert routed.weights.dtype == torch.float32
        back = AllToAllDispatcher().combine(routed.hidden * 1, routed.state)
        torch.testing.assert_close(back, 2 * hidden, rtol=0, atol=0)  # twice the token: exact
        (back.float().sum() + routed.weights.square().sum()).backward()
        torch.testing.assert_close(weights.grad, 2 * weights, rtol=0, atol=0)
        assert hidden.grad is not None
        assert hidden.grad.dtype == torch.bfloat16
        assert hidden.grad.tolist() == [[2.0] * 6] * rows


class Widening(nn.Module):
    """Experts whose results are wider than the tokens, and of another type."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts, self.up = count, nn.Parameter(torch.randn(count, 10, 4))

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = x.new_zeros(len(x), 10)
        for index in range(self.num_experts):
            token, place = torch.where(experts == index)
            output = output.index_add(0, token, x[token] @ self.up[index].T * weights[token, place, None])
        return output.float()


@pytest.mark.ranks(3)
def test_a_rank_without_rows_knows_the_results_of_the_others(ranks: Ranks) -> None:
    """Three ranks share two experts, and all tokens select the first: ranks 1 and 2 get none, and rank 2 has none."""
    mesh = ranks.mesh((3,), ("ep",))
    torch.manual_seed(0)
    alone = Widening(2).double()
    for check in ("first", "never"):
        model = copy.deepcopy(alone)
        tp.apply_plan(model, mesh, tp.ExpertParallel(), check=check)  # both are known
        x, weights = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 1, dtype=torch.float64)
        ids, gradients = torch.zeros(5, 1, dtype=torch.int64), []
        for module in (model, alone):
            module.zero_grad()
            inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
            output = module(inputs[0], ids, inputs[1])
            assert output.dtype == torch.float32
            assert output.shape == (5, 10)
            output.square().sum().backward()
            gradients.append(
                [output.detach(), *(one.grad for one in inputs), moe.full_value(module.up, mesh, gradient=True)]
            )
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.ranks(2)
def test_an_index_outside_is_refused_on_every_rank(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("ep",))
    ids = torch.tensor([0, 1, 4]) if ranks.rank == 0 else torch.tensor([0, -1, 9])
    with pytest.raises(StyleInputError, match=r"\[invalid-argument\] experts: an index on rank 1"):
        exchange_counts(ids, 4, mesh.get_group())


class Fragile(moe.Stacked):
    """Experts whose code fails on one rank."""

    is_broken = False

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.is_broken:
            raise KeyError("only here")
        return super().forward(hidden, experts, weights)


@pytest.mark.ranks(2)
def test_an_error_of_one_rank_in_a_steady_step(ranks: Ranks) -> None:
    """Before the exchange it is raised on all ranks; behind it the others end by the group's timeout, with its name."""
    group, _ = dist.new_subgroups_by_enumeration([[0, 1]], timeout=datetime.timedelta(seconds=2))
    mesh = DeviceMesh.from_group(group, ranks.device.type, mesh_dim_names=("ep",))
    model: Any = models.seeded(lambda: Fragile(4)).double()
    tp.apply_plan(model, mesh, tp.ExpertParallel())
    x, ids, weights = torch.ones(6, moe.WIDTH).double(), torch.arange(12).view(6, 2) % 4, torch.ones(6, 2).double()
    model(x, ids, weights)  # checked
    wrong = ids.double() if ranks.rank == 1 else ids
    text = r"wrong-type\].*float64" if ranks.rank == 1 else r"rank-failed\] experts: an error on rank 1"
    with pytest.raises(StyleInputError, match=text):
        model(x, wrong, weights)
    model(x, ids, weights).sum().backward()  # nothing is left behind
    model.is_broken = ranks.rank == 1
    with pytest.raises(KeyError if ranks.rank == 1 else RuntimeError) as error:
        model(x, ids, weights)
    if ranks.rank == 0:
        named = r"the exchange of tokens with their experts, call \d+, failed on rank 0: another rank died, or made no"
        assert re.search(named, str(error.value)), error.value


@pytest.mark.ranks(2)
def test_state_dicts_hold_whole_experts_and_load_elsewhere(ranks: Ranks, tmp_path: Any) -> None:
    """Saved by DCP from two ranks: read on one process, and by a model without the plan; undo gives full weights."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    mesh = ranks.mesh((2,), ("ep",))
    compared = 0
    for kind in moe.STYLES:
        model, alone = (moe.language_model(5, kind) for _ in range(2))
        handle = tp.apply_plan(model, mesh, moe.experts_plan(kind, "replicated"))
        train_beside(model, alone, mesh, moe.batches(1, 3), sharded=False)
        state = model.state_dict()
        if kind is moe.Stacked:
            held = state["layers.0.moe.experts.down"]
            assert isinstance(held, DTensor)
            assert held.placements == (Shard(0),)
            assert held.to_local().shape[0] == (3, 2)[ranks.rank]
        save(state, checkpoint_id=str(tmp_path / kind.__name__))
        twin = moe.language_model(5, kind)
        full = twin.state_dict()
        for value in full.values():
            value.zero_()
        load(full, checkpoint_id=str(tmp_path / kind.__name__))
        twin.load_state_dict(full)
        expected = {name: p.detach() for name, p in alone.named_parameters()}
        compared += models.assert_close({n: p.detach() for n, p in twin.named_parameters()}, expected, ATOL)
        model.load_state_dict(copy.deepcopy(full))  # full tensors become shards again
        compared += models.assert_close(moe.full_values(model, mesh), expected, ATOL)
        handle.undo()
        compared += models.assert_close({n: p.detach() for n, p in model.named_parameters()}, expected, ATOL)
    assert compared > 25000
