"""What experts and attention exchange along ``ep`` and ``cp`` axes, by formula: bytes, counts, both passes."""

from typing import Any

import pytest
import torch
from shard_spec import FullyShardPlanner, MeshSpec, PlanError, ShardingPlan, compose
from shard_spec.planners import ExpertParallelPlanner
from torch import nn
from torch.nn import functional

HIDDEN, EXPERTS, CHOICES, LAYERS = 16, 8, 2, 3
BATCH, LENGTH = 8, 32


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, 32))
        self.down = nn.Parameter(torch.zeros(EXPERTS, 32, HIDDEN))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = x.repeat_interleave(CHOICES, 0).view(EXPERTS, -1, HIDDEN)  # even routing
        out = torch.relu(rows @ self.up) @ self.down
        result: torch.Tensor = (out.view(-1, CHOICES, HIDDEN) * weights[..., None]).sum(1)
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.experts = nn.Linear(HIDDEN, EXPERTS, bias=False), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, HIDDEN // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(CHOICES, -1)
        mixed: torch.Tensor = self.experts(tokens, chosen, weights).view_as(x)
        return x + mixed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def exchanged(plan: ShardingPlan, axis: str, op: str, **options: Any) -> tuple[int, float]:
    """Number of collectives and bytes sent for activations along ``axis``."""
    moved = plan.communication(Model(), (BATCH, LENGTH), **options).transfers
    own = [each for each in moved if each.axis == axis and each.op == op and each.what == "activations"]
    return sum(each.count for each in own), sum(each.sent_bytes for each in own)


@pytest.mark.parametrize("ep", [2, 4, 8])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_travel_to_experts_and_back_in_both_passes(ep: int, checkpointing: bool) -> None:
    plan = ExpertParallelPlanner({"ep": ep}).build_plan(Model())
    count, sent = exchanged(plan, "ep", "all_to_all", checkpointing=checkpointing)
    tokens, passes = BATCH // ep * LENGTH, 3 if checkpointing else 2  # recomputation sends again
    assert count == LAYERS * passes * 2  # dispatch and combine
    assert sent == pytest.approx(count * tokens * CHOICES * HIDDEN * 4 * (1 - 1 / ep))
    assert "not counted" not in str(plan.memory(Model(), (BATCH, LENGTH), checkpointing=checkpointing))


def test_blocks_of_experts_are_sharded_and_the_rest_is_data_parallel() -> None:
    mesh = MeshSpec({"dp": 2, "ep": 4})
    plan = compose(ExpertParallelPlanner(mesh), FullyShardPlanner(mesh, ("dp", "ep"))).build_plan(Model())
    assert dict(plan.axis_roles) == {"dp": "data", "ep": "expert"}
    layouts = plan.resolve(Model())
    shapes = {name: layouts[name].local_shape(0, tuple(each.shape)) for name, each in Model().named_parameters()}
    assert shapes["layers.0.experts.up"] == (1, HIDDEN, 32)
    assert shapes["layers.0.qkv.weight"] == (3 * HIDDEN // 8, HIDDEN)
    alone = ExpertParallelPlanner({"ep": 4}).build_plan(Model())
    transfers = alone.communication(Model(), (BATCH, LENGTH)).transfers
    reduced = {each.name: each.full_bytes for each in transfers if each.what == "gradients"}
    experts = EXPERTS * 2 * HIDDEN * 32 * 4
    full = sum(each.nbytes for each in Model().parameters())
    assert sum(reduced.values()) == full - LAYERS * experts  # an expert's gradient stays on its ranks
    lines = alone.communication(Model(), (BATCH, LENGTH)).assumptions
    assert any("routing counts as even" in line for line in lines)
    assert not any("not counted" in line for line in lines)


@pytest.mark.parametrize(("model", "size", "message"), [(nn.Linear(4, 4), 2, "no experts"), (Model(), 3, "8 experts")])
def test_wrong_expert_axes_are_refused(model: nn.Module, size: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ExpertParallelPlanner({"ep": size}).build_plan(model)


@pytest.mark.parametrize("cp", [2, 4])
def test_attention_gathers_keys_and_values_along_a_context_axis(cp: int) -> None:
    plan = ShardingPlan({}, mesh={"cp": cp})
    local = BATCH * (LENGTH // cp) * HIDDEN * 4
    for op in ("all_gather", "reduce_scatter"):
        count, sent = exchanged(plan, "cp", op)
        assert count == LAYERS * 2
        assert sent == pytest.approx(count * local * (cp - 1))
    assert exchanged(plan, "cp", "all_to_all") == (0, 0)
    full = ShardingPlan({}, mesh={"cp": 1})
    flops = [each.communication(Model(), (BATCH, LENGTH)).flops for each in (full, plan)]
    assert flops[1] * cp == flops[0]  # a rank's queries meet all keys
    saved = [each.activations(Model(), (BATCH, LENGTH)).local_bytes for each in (full, plan)]
    gathered = LAYERS * 2 * local * cp  # all keys and values stay until backward; this rank's lie with its queries
    assert saved[1] == pytest.approx(saved[0] / cp + gathered, rel=0.02)


@pytest.mark.parametrize("cp", [2, 4])
def test_ulysses_exchanges_heads_for_tokens(cp: int) -> None:
    plan = ShardingPlan({}, mesh={"cp": cp})
    count, sent = exchanged(plan, "cp", "all_to_all", context="ulysses")
    local = BATCH * (LENGTH // cp) * HIDDEN * 4
    assert count == LAYERS * 2 * 4  # queries, keys, values, results; both passes
    assert sent == pytest.approx(count * local * (1 - 1 / cp))
    assert exchanged(plan, "cp", "all_gather", context="ulysses") == (0, 0)
    full = ShardingPlan({}, mesh={"cp": 1})
    estimates = [each.activations(Model(), (BATCH, LENGTH), context="ulysses") for each in (full, plan)]
    # Attention saves its results by heads, and the layer behind it the same by tokens.
    expected = estimates[0].local_bytes / cp + LAYERS * local
    assert estimates[1].local_bytes == pytest.approx(expected, rel=0.02)
    flops = [each.communication(Model(), (BATCH, LENGTH), context="ulysses").flops for each in (full, plan)]
    assert flops[1] * cp == flops[0]
    with pytest.raises(PlanError, match="context"):
        plan.communication(Model(), (BATCH, LENGTH), context="ring")
    with pytest.raises(PlanError, match="4 heads over 8 ranks"):
        ShardingPlan({}, mesh={"cp": 8}).communication(Model(), (BATCH, LENGTH), context="ulysses")


def test_gradients_of_experts_on_other_ranks_are_not_on_this_one() -> None:
    mesh = MeshSpec({"dp": 2, "ep": 4})
    plan = compose(ExpertParallelPlanner(mesh), FullyShardPlanner(mesh, ("dp", "ep"))).build_plan(Model())
    transfers = plan.communication(Model(), (BATCH, LENGTH)).transfers
    gathered = dict.fromkeys(("layers.0", ""), 0)
    for each in transfers:
        if each.op == "all_gather" and each.name in gathered:  # along dp and ep: the larger is the full buffer
            gathered[each.name] = max(gathered[each.name], each.full_bytes)
    experts = EXPERTS * 2 * HIDDEN * 32 * 4
    estimate = plan.activations(Model(), (BATCH, LENGTH))
    # Full weights, those of the next layer, gradients, and those on their way; beside the root's.
    assert 2 * gathered["layers.0"] < estimate.gathered_bytes <= 4 * gathered["layers.0"] + 2 * gathered[""]
    assert experts > 2 * gathered["layers.0"]
