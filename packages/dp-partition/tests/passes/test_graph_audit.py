"""What a graph hands to a backend and to fused kernels, checked node by node without running it.

A collective works on memory behind the graph's back, and a fused kernel walks through lists of tensors by the first
one's sizes: a tensor that is used too early, is too small or lies otherwise would be a corrupted heap, not an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import dp_matrix_models as matrix
import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_partition._torch_compat import collectives, storage_key
from dp_partition.capture.inputs import read_arguments
from dp_partition.capture.state import find_step_state
from dp_partition.nodes import arguments, is_collective, is_op, is_wait, mutated_inputs, tensors_of
from dp_partition.pipeline import build_program
from dp_partition.plan.placements import fake_mesh
from dp_partition.plan.plan import CommConfig, Settings, TensorInfo, plan_placements
from dp_partition.sharding import rule_table
from dp_partition.sharding.rule_table import move_cost as weigh
from torch import fx, nn

STYLES = ("replicate", "zero1", "zero2", "fully_shard", "default")
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)
FOREACH = partial(torch.optim.AdamW, lr=1e-2, foreach=True, amsgrad=True)


class Odd(nn.Module):
    """Rows that do not divide, fewer rows than ranks, one row, no row, no dims, memory that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.seven, self.two = nn.Linear(8, 7), nn.Linear(7, 2)
        self.one, self.none = nn.Parameter(torch.ones(1, 2)), nn.Parameter(torch.zeros(0, 2))
        self.scale, self.turned = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.randn(2, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(torch.tanh(self.seven(x))) * self.one
        return torch.cat([y @ self.turned.t(), y @ self.none.t()], 1) * self.scale


def graphs(
    function: Callable[..., Any],
    make: Callable[[], nn.Module],
    optim: Any,
    batch: tuple[Any, ...],
    bucket_bytes: int,
    styles: tuple[str, ...] = STYLES,
    semantics: str = "local",
) -> Iterator[tuple[fx.Graph, int]]:
    """A step's graphs with local values, for the last rank, whose shards are partial or empty."""
    for number, style in enumerate(styles):
        world = 3 + number % 2
        model = models.seeded(make)
        args = (model, optim(model.parameters()), *batch)
        step_state = find_step_state(function, args, {})
        infos = [TensorInfo(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in step_state.params.items()]
        plan = plan_placements(infos, dp.DataParallelStyle[style.upper()], world, semantics=semantics)
        mesh, settings = fake_mesh(world, world - 1, "cpu"), Settings(plan.style, comm=CommConfig(bucket_bytes))
        program = build_program(function, read_arguments("step", args, {}), step_state, plan, mesh, settings)
        check_order(program.module.graph)
        yield program.with_local_values().graph, world


def check_order(graph: fx.Graph) -> None:
    """Generated code frees a value after its last use, which it finds by going backwards through the nodes."""
    assert list(graph.nodes) == list(reversed(graph.nodes))[::-1]


def check_collectives(graph: fx.Graph, world: int) -> int:
    """Every collective is awaited once; until then its memory is left alone; sizes are those of the group."""
    nodes = list(graph.nodes)
    place = {node: position for position, node in enumerate(nodes)}
    count = 0
    for node in filter(is_collective, nodes):
        (wait,) = [user for user in node.users if is_wait(user)]
        (sent,) = [t for source in node.all_input_nodes for t in tensors_of(source)]
        (result,) = tensors_of(node)
        assert set(node.users) == {wait}, f"{node} is read before it is awaited"
        # The all_reduce that is not in place works on a contiguous copy.
        assert sent.is_contiguous() or node.target is collectives.all_reduce.default, node
        assert sent.dtype == result.dtype, node
        kind = str(node.target)
        times = {"all_gather": world, "reduce_scatter": 1 / world}
        factor = next((by for name, by in times.items() if name in kind), 1)
        assert result.numel() == sent.numel() * factor, f"{node}: {sent.shape} -> {result.shape} on {world} ranks"
        keys = {storage_key(sent), storage_key(result)}
        for between in nodes[place[node] + 1 : place[wait]]:
            written = [t for source in mutated_inputs(between) for t in tensors_of(source)]
            assert not keys & {storage_key(t) for t in written}, f"{between} writes what {node} works on"
            if node.target is collectives.all_reduce_.default:
                used = [t for source in between.all_input_nodes for t in tensors_of(source)]
                assert not keys & {storage_key(t) for t in used}, f"{between} reads what {node} works on"
        count += 1
    return count


def check_lists(graph: fx.Graph) -> int:
    """Lists of a fused kernel are as long as one another, and tensor by tensor alike, without overlap."""
    count = 0
    for node in graph.nodes:
        if not is_op(node) or not ("_fused_" in str(node.target) or "_foreach_" in str(node.target)):
            continue
        lists = {
            argument.name: [n.meta["val"] for n in value]
            for argument, value in arguments(node)
            if isinstance(value, list | tuple) and value and isinstance(value[0], fx.Node)
        }
        assert len({len(one) for one in lists.values()}) == 1, (node, {k: len(v) for k, v in lists.items()})
        fused = "_fused_" in str(node.target)
        steps = lists.pop("state_steps", [])
        assert all(step.numel() == 1 for step in steps), node
        for row in zip(*lists.values(), strict=True):
            row = tuple(t for t in row if isinstance(t, torch.Tensor))
            if fused:
                assert len({(tuple(t.shape), t.dtype, t.device) for t in row}) == 1, (node, [t.shape for t in row])
                assert all(t.is_contiguous() for t in row), (node, [t.stride() for t in row])
            count += len(row)
        written = [t for source in mutated_inputs(node) for t in tensors_of(source) if t.numel()]
        places = sorted((storage_key(t), t.storage_offset(), t.storage_offset() + t.numel()) for t in written)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(places)), node
    return count


@pytest.mark.parametrize("bucket_bytes", [0, 300])
def test_of_parameters_of_odd_shapes(bucket_bytes: int) -> None:
    optim, styles = (FUSED, STYLES) if bucket_bytes else (FOREACH, STYLES[2:4])
    for graph, world in graphs(models.mean_step, Odd, optim, (torch.ones(3, 8),), bucket_bytes, styles):
        assert check_collectives(graph, world) >= 2
        assert check_lists(graph) >= 32


def test_of_models() -> None:
    tokens, rows = models.tokens(torch.Generator(), rows=2), (torch.ones(2, 8),)
    cases = [*graphs(models.token_step, models.GPT, FUSED, tokens, 1 << 11, ("zero2", "fully_shard"))]
    cases += graphs(matrix.value_step, matrix.Contrast, FUSED, rows, 1 << 11, ("fully_shard",), "global")
    for graph, world in cases:
        assert check_collectives(graph, world) > 4
        assert check_lists(graph) >= 16


def test_a_list_of_tensors_is_weighed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of twice the parameters takes twice the decisions: where each lies in a list is a matter of its own."""
    weighed: list[Any] = []

    def counting(*args: Any) -> float:
        weighed.append(args)
        return weigh(*args)

    monkeypatch.setattr(rule_table, "move_cost", counting)
    counts = []
    for layers in (3, 6, 12):
        weighed.clear()
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
        dp.estimate(models.mean_step, model, FOREACH(model.parameters()), torch.ones(2, 8), world=2, style="zero2")
        counts.append(len(weighed))
    assert counts[0] > 100
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])
