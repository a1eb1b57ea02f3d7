"""The plan of every planner is carried out: shards lie as planned, and five steps are those of one process.

`docs/howto/choose-a-planner.md` has the table that these outcomes are compared with.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import shard_spec
import torch
import tp_styles
from ranktest import Ranks
from shard_spec.optimal import OptimalPlanner, Workload
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "choose-a-planner.md"
BEGIN, END = "<!-- planners: begin -->\n", "<!-- planners: end -->"
HEADER = "| planner | mesh | `plan.apply` | `tp_styles.apply_sharding_plan` |\n|---|---|---|---|\n"
TINY = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(TINY).double()


def optimal(mesh: shard_spec.MeshSpec, **settings: Any) -> OptimalPlanner:
    return OptimalPlanner(mesh=mesh, workload=Workload(batch=4, sequence=16), **settings)


CASES: dict[str, tuple[dict[str, int], Any]] = {
    "`MegatronPlanner`": ({"dp": 2, "tp": 2}, shard_spec.MegatronPlanner),
    "`FullyShardPlanner`": ({"dp": 2, "fsdp": 2}, lambda mesh: shard_spec.FullyShardPlanner(mesh, "fsdp")),
    "`compose` of both": (
        {"fsdp": 2, "tp": 2},
        lambda mesh: shard_spec.compose(shard_spec.MegatronPlanner(mesh), shard_spec.FullyShardPlanner(mesh, "fsdp")),
    ),
    "`OptimalPlanner`, all memory": ({"dp": 2, "tp": 2}, optimal),
    "`OptimalPlanner`, little memory": ({"fsdp": 2, "tp": 2}, lambda mesh: optimal(mesh, memory_limit=150_000)),
}


def laid_out(ranks: Ranks, mesh: DeviceMesh, plan: shard_spec.ShardingPlan) -> str:
    """Return the outcome of `plan.apply`; right means that each rank holds the planned box of every parameter."""
    model, full = new_model(), dict(new_model().named_parameters())
    layouts = plan.resolve(model)
    try:
        plan.apply(model, mesh)
    except shard_spec.PlanError as error:
        return f"refused: `{error.problems[0].code}`"
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        boxes = layouts[name].boxes(ranks.rank, tuple(full[name].shape))
        expected = torch.cat([local.new_empty(0), *(full[name][box.slices()].flatten() for box in boxes)])
        assert torch.equal(local.flatten(), expected), name
    return "right"


def trained(mesh: DeviceMesh, plan: shard_spec.ShardingPlan) -> str:
    """Return the outcome of `apply_sharding_plan`; right means that five losses are those of one process."""
    model = new_model()
    try:
        tp_styles.apply_sharding_plan(model, mesh, plan)
    except tp_styles.PlanError as error:
        return f"refused: `{error.problems[0].code}`"
    losses_here, expected = losses(model), losses(new_model())
    torch.testing.assert_close(
        losses_here, expected, rtol=1e-6, atol=0
    )  # Llama's norms compute in float32 for float64 input too
    return "right"


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    values = []
    for _ in range(5):
        ids = torch.randint(64, (2, 8), generator=generator)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


@pytest.mark.ranks(4)
def test_the_table_of_planners_is_true(ranks: Ranks) -> None:
    rows = ""
    for name, (axes, planner) in CASES.items():
        mesh = ranks.mesh(tuple(axes.values()), tuple(axes))
        plan = planner(shard_spec.MeshSpec(axes)).build_plan(new_model())
        rows += f"| {name} | `{' x '.join(axes)}` | {laid_out(ranks, mesh, plan)} | {trained(mesh, plan)} |\n"
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    if os.environ.get("UPDATE_README"):
        if ranks.rank == 0:
            PAGE.write_text(before + BEGIN + HEADER + rows + END + rest.partition(END)[2], encoding="utf-8")
    else:
        assert rest.partition(END)[0] == HEADER + rows, "run this test with UPDATE_README=1"


def test_every_planner_has_a_row() -> None:
    public = [getattr(shard_spec, name) for name in shard_spec.__all__]
    planners = {
        each.__name__
        for each in public
        if isinstance(each, type)
        and issubclass(each, shard_spec.ShardingPlanner)
        and not getattr(each, "__abstractmethods__", None)
    }
    assert planners == {"MegatronPlanner", "FullyShardPlanner", "OptimalPlanner"}
    assert all(f"`{name}`" in "".join(CASES) for name in (*planners, "compose"))
