"""Gloo's reduce_scatter sends a whole all_reduce; a step's reduce-scatters send what they mean, and give the same."""

from __future__ import annotations

import itertools
from collections import Counter

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition._torch_compat import collectives
from dp_partition.api import runner_of
from dp_partition.backends import gather_into_buffers, gathered, reduce_scatter_as_all_to_all
from dp_partition.passes.insert_collectives import REDUCTIONS
from ranktest import Ranks
from torch import fx

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.complex64)
ORDERED = ("max", "min")
SHAPES = ((4,), (2, 3), (0,), (2, 0))  # of one rank's rows


def scatter(op: str, world: int, group: str) -> fx.GraphModule:
    """A graph that doubles its input, scatters the sum, and doubles that."""
    graph = fx.Graph()
    twice = graph.call_function(torch.add, (graph.placeholder("x"),) * 2)
    work = graph.call_function(collectives.reduce_scatter_tensor.default, (twice, op, world, group))
    total = graph.call_function(collectives.wait_tensor.default, (work,))
    graph.output((graph.call_function(torch.add, (total, total)), total))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.ranks(2, 3)
def test_the_same_for_half_the_bytes(ranks: Ranks) -> None:
    """Every operation, dtype and shape against the sum on one rank: half precision is added in float32."""
    world, compared = ranks.world_size, 0
    group = ranks.mesh((world,), ("dp",)).get_group().group_name
    for op, dtype, shape in itertools.product(REDUCTIONS, DTYPES, SHAPES):
        if (op == "avg" and not (dtype.is_floating_point or dtype.is_complex)) or (op in ORDERED and dtype.is_complex):
            continue
        rows = (world * shape[0], *shape[1:])
        inputs = [torch.randn(rows, generator=torch.Generator().manual_seed(r)).mul(8).to(dtype) for r in range(world)]
        module = scatter(op, world, group)
        reduce_scatter_as_all_to_all(module.graph)
        module.recompile()
        own = inputs[ranks.rank].to(ranks.device)
        with ranks.record() as log:
            twice, reduced = module(own)
        wide = torch.stack([2 * one for one in inputs]).to(torch.float64 if dtype.is_floating_point else dtype)
        expected = REDUCTIONS[op](wide).to(dtype).chunk(world)[ranks.rank] if wide.numel() else wide[0, : shape[0]]
        torch.testing.assert_close(reduced.cpu(), expected.to(dtype), msg=f"{op} of {dtype} {shape}")
        assert torch.equal(twice, 2 * reduced)
        assert log.ops == ("all_to_all",)
        assert log.bytes_sent() == (world - 1) * reduced.numel() * dtype.itemsize
        compared += 1
    assert compared == (7 + 5 + 6 + 6) * 4


@pytest.mark.ranks(2)
def test_what_a_step_says_and_what_it_sends(ranks: Ranks) -> None:
    """The graph names reduce_scatter on any backend; on gloo an all_to_all travels, in the buckets' own bytes."""
    model = models.seeded(models.mlp).to(ranks.device)
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="zero2")
    x = torch.ones(4, 8, device=ranks.device)
    with ranks.record() as log:
        step(model, optim, x)
        step(model, optim, x)
    sent = "all_to_all" if ranks.backend == "gloo" else "reduce_scatter"
    assert [op for op in log.ops if op in ("all_to_all", "reduce_scatter")] == [sent] * 2
    assert log.bytes_sent(sent) == 2 * 4 * (8 * 16 + 16 + 4 * (16 + 1)) // 2
    assert "reduce_scatter_tensor" in str(step.graph.graph)
    assert "reduce_scatter" in step.explain("0.weight")


def test_an_operation_of_another_kind_stays() -> None:
    module = scatter("product", 2, "none")
    reduce_scatter_as_all_to_all(module.graph)
    assert [node.target for node in module.graph.nodes].count(collectives.reduce_scatter_tensor.default) == 1


@pytest.mark.ranks(2, 3)
def test_gathers_into_a_buffer_equal_torchs_own(ranks: Ranks) -> None:
    """Every dtype, also empty. Names of collectives in gloo's threads have at most 15 letters then."""
    world, compared = ranks.world_size, 0
    group = ranks.mesh((world,), ("dp",)).get_group().group_name
    for dtype, shape in itertools.product((*DTYPES, torch.bool, torch.uint8), SHAPES):
        own = torch.randn(shape, generator=torch.Generator().manual_seed(ranks.rank)).mul(8).to(dtype).to(ranks.device)
        graph = fx.Graph()
        work = graph.call_function(collectives.all_gather_into_tensor.default, (graph.placeholder("x"), world, group))
        graph.output(graph.call_function(collectives.wait_tensor.default, (work,)))
        module = fx.GraphModule(torch.nn.Module(), graph)
        gather_into_buffers(module.graph)
        module.recompile()
        with ranks.record() as log:
            rows = module(own)
        parts = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).mul(8).to(dtype) for r in range(world)]
        assert torch.equal(rows.cpu(), torch.cat(parts))
        assert log.ops == ("all_gather",) and log.bytes_sent() == (world - 1) * own.numel() * dtype.itemsize
        compared += rows.numel()
    assert compared == 9 * world * 10


@pytest.mark.ranks(2)
def test_no_graph_on_gloo_has_a_gather_with_a_long_name(ranks: Ranks) -> None:
    model = models.seeded(models.mlp)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    step(model, optim, torch.rand(4, 8))
    program = runner_of(step).traces.latest
    assert program is not None
    counts = Counter(node.target for node in program.for_backend().nodes)
    named = Counter(node.target for node in step.graph.graph.nodes)
    assert counts[gathered] == named[collectives.all_gather_into_tensor.default] > 0
    assert not counts[collectives.all_gather_into_tensor.default]
