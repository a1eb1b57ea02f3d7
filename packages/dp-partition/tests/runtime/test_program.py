"""A graph runs on a group that delivers at `wait`, and on a fake CUDA rank."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_matrix_models import Contrast, value_step
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.capture.inputs import read_arguments
from dp_partition.capture.state import find_step_state
from dp_partition.pipeline import build_program
from dp_partition.plan.placements import fake_mesh
from dp_partition.plan.plan import Settings, TensorInfo, plan_placements
from ranktest import Ranks, fake_cuda
from torch import fx, nn
from torch.utils import _pytree as pytree

STYLES = ("replicate", "zero1", "zero2", "fully_shard", "default")
SMALL = 1 / 1024  # several buckets are on their way at once


@pytest.mark.ranks(2)
@pytest.mark.parametrize("semantics", ["local", "global"])
def test_the_same_on_a_delayed_group(ranks: Ranks, semantics: str) -> None:
    """A missing wait, an early read or a buffer that is used again too soon would change a result or be told."""
    mesh = ranks.mesh((2,), ("dp",))
    make: Any = partial(models.mlp, 8, 7) if semantics == "local" else Contrast
    function: Any = models.mean_step if semantics == "local" else value_step
    for style in ("zero1", "default", "fully_shard") if semantics == "local" else ("zero1", "fully_shard"):
        results = []
        for block in (nullcontext, ranks.delayed):
            model = models.seeded(make, ranks.rank).to(ranks.device)
            optim = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            settings: dict[str, Any] = {"bucket_mb": SMALL, "reshard_after_forward": True, "semantics": semantics}
            step = dp.compile(function, mesh=mesh, style=style, **settings)
            generator = torch.Generator().manual_seed(ranks.rank)
            with block():
                batches = [torch.randn(4, 8, generator=generator).to(ranks.device) for _ in range(5)]
                values = [step(model, optim, batch) for batch in batches]
                with step.unsharded():
                    values += [p.detach().clone() for p in model.parameters()]
                step.release()
            results.append([*values, *(p.detach() for p in model.parameters())])
        pairs = list(zip(*results, strict=True))
        assert [torch.equal(a, b) for a, b in pairs] == [True] * (5 + 4 + 4), style


def on(device: torch.device, graph: fx.Graph) -> None:
    """The graph as a trace on that device would have it."""
    for node in graph.nodes:
        node.args, node.kwargs = pytree.tree_map_only(torch.device, lambda d: device, (node.args, node.kwargs))


class Devices(fx.Interpreter):
    """Collects the devices of all tensors that a graph makes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[torch.device, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and n.op != "placeholder":
                self.found[leaf.device] = self.found.get(leaf.device, 0) + 1
        return value


@pytest.mark.parametrize("style", STYLES)
def test_on_a_cuda_rank_that_does_not_exist(style: str) -> None:
    """A step after the first: all on the rank's device, nothing asked back, nothing copied from pageable memory."""
    model = models.seeded(models.GPT)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    args = (model, optim, *models.tokens(torch.Generator(), rows=2))
    step_state = find_step_state(models.token_step, args, {})
    infos = [TensorInfo(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in step_state.params.items()]
    plan = plan_placements(infos, dp.DataParallelStyle[style.upper()], 2)
    mesh, call = fake_mesh(2, 1, "cpu"), read_arguments("step", args, {})
    program = build_program(models.token_step, call, step_state, plan, mesh, Settings(plan.style))
    assert program.local_fakes is not None
    shapes = [
        (tuple(fake.shape), fake.dtype, entry.key == "step") if isinstance(fake, torch.Tensor) else None
        for fake, entry in zip(program.local_fakes, program.inputs, strict=True)
    ]
    with fake_cuda(rank=1, world_size=2, strict=True) as device:
        group = torch.distributed.group.WORLD
        assert group is not None
        on(device, program.module.graph)
        for node in program.module.graph.nodes:
            node.args = tuple(group.group_name if arg == "fake" else arg for arg in node.args)
        inputs = [0.5 if one is None else torch.zeros(one[0], dtype=one[1], device=device) for one in shapes]
        run = Devices(program.module)
        run.run(*inputs)
    assert set(run.found) == {device}
    assert run.found[device] > 100


def test_evaluation_is_traced_for_a_cuda_rank_that_does_not_exist() -> None:
    """Where no backward is needed the trace itself runs there: constants are made on the rank's device."""
    args = (models.GPT(), torch.zeros(2, 8, dtype=torch.long))
    step_state = find_step_state(evaluate, args, {})
    infos = [TensorInfo(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in step_state.params.items()]
    plan = plan_placements(infos, dp.DataParallelStyle.FULLY_SHARD, 2)
    mesh, call = fake_mesh(2, 1, "cuda"), read_arguments("step", args, {})
    program = build_program(evaluate, call, step_state, plan, mesh, Settings(plan.style, reshard=False), "cuda:1")
    module = program.with_local_values()
    tensors = [t for n in module.graph.nodes for t in pytree.tree_leaves(n.meta.get("val")) if torch.is_tensor(t)]
    assert {t.device for t in tensors} == {torch.device("cuda:1")}
    assert len(tensors) > 50


def evaluate(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(ids).argmax(-1))
