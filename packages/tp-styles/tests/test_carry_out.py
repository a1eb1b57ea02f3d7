"""A plan of each kind that planners hand out, carried out by one call: five steps equal those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import hf_models
import pytest
import torch
import tp_models as models
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor
from tp_styles import PlanError, apply_sharding_plan

if TYPE_CHECKING:
    from shard_spec import MeshSpec

pytestmark = pytest.mark.extra("shard-spec")
STEPS = 5


class Block(nn.Module):
    """A feed-forward block of odd sizes beside a norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 36), nn.Linear(36, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Token ids in, logits out; the table is tied to the head, or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(15, 10)
        self.blocks = nn.ModuleList(Block(10) for _ in range(2))
        self.head = nn.Linear(10, 15, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def model(*, tied: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(tied=tied).double()


def megatron(mesh: MeshSpec) -> Any:
    from shard_spec import MegatronPlanner

    return MegatronPlanner(mesh)


def fsdp(mesh: MeshSpec) -> Any:
    from shard_spec import FullyShardPlanner

    return FullyShardPlanner(mesh, "fsdp")


def both(mesh: MeshSpec) -> Any:
    from shard_spec import compose

    return compose(megatron(mesh), fsdp(mesh))


CASES: dict[str, tuple[dict[str, int], Callable[[Any], Any] | None]] = {
    "data parallel": ({"dp": 4}, None),
    "fully sharded": ({"fsdp": 4}, fsdp),
    "hybrid sharded": ({"dp": 2, "fsdp": 2}, fsdp),
    "tensor parallel": ({"tp": 4}, megatron),
    "data and tensor parallel": ({"dp": 2, "tp": 2}, megatron),
    "fully sharded and tensor parallel": ({"fsdp": 2, "tp": 2}, both),
}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.ranks(4)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_five_steps_equal_those_of_one_process(ranks: Ranks, case: str, tied: bool) -> None:
    from shard_spec import MeshSpec, ShardingPlan

    axes, planner = CASES[case]
    net, reference = model(tied=tied), model(tied=tied)
    plan = ShardingPlan({}, mesh=axes) if planner is None else planner(MeshSpec(axes)).build_plan(net)
    mesh = ranks.mesh(tuple(axes.values()), tuple(axes))
    data = [axis for axis in axes if axis != "tp"]
    count, mine = 1, 0
    for axis in data:
        count, mine = count * axes[axis], mine * axes[axis] + mesh.get_local_rank(axis)
    assert apply_sharding_plan(net, mesh, plan) is net
    sharded = sum(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in net.parameters())
    assert (sharded > 0) == (case != "data parallel")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2, momentum=0.9, foreach=False) for each in (net, reference)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, 15, (2 * count, 3), generator=generator)
        for each, optimizer, rows in zip((net, reference), optimizers, (ids.chunk(count)[mine], ids), strict=True):
            optimizer.zero_grad()
            logits = each(rows)
            nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten()).backward()
            optimizer.step()
    compared = 0
    for (name, got), expected in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(full(got), expected, rtol=1e-9, atol=1e-11), name
        compared += expected.numel()
    assert compared == sum(p.numel() for p in model(tied=tied).parameters())


@pytest.mark.ranks(4)
def test_what_has_no_counterpart_is_refused_before_anything_changes(ranks: Ranks) -> None:
    from shard_spec import ShardingPlan

    net, before = model(), model().state_dict()
    two = {"blocks.0.up.weight": "tp:S(0)", "blocks.1.up.weight": "ep:S(0)"}
    refused: dict[str, tuple[dict[str, int], dict[str, str], str]] = {
        "kept whole": ({"fsdp": 2, "tp": 2}, {"blocks.*.up.weight": "fsdp:S(0)"}, "plan-not-executable"),
        "two model axes": ({"ep": 2, "tp": 2}, two, "plan-not-executable"),
        "other axes": ({"tp": 4}, {"blocks.*.up.weight": "tp:S(0)"}, "mesh-mismatch"),
        "norm": ({"tp": 4}, {"blocks.*.norm.weight": "tp:S(0)"}, ""),
    }
    for name, (axes, rules, code) in refused.items():
        mesh = ranks.mesh((4,), ("x",)) if name == "other axes" else ranks.mesh(tuple(axes.values()), tuple(axes))
        with pytest.raises(PlanError) as caught:
            apply_sharding_plan(net, mesh, ShardingPlan(rules, mesh=axes))
        assert code in ("", caught.value.problems[0].code), (name, str(caught.value))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.ranks(4)
def test_a_plan_that_one_rank_cannot_carry_out_raises_on_all(ranks: Ranks) -> None:
    from shard_spec import ShardingPlan

    net, odd = model(), ranks.rank == 3
    rules = {"blocks.*.up.weight": "fsdp:S(0)"} if odd else {}
    other = {"head.weight": "tp:S(0)"} if odd else {"table.weight": "tp:S(0)"}
    refused = {
        "plan-not-executable": ShardingPlan(rules, mesh={"fsdp": 2, "tp": 2}),
        "ranks-disagree": ShardingPlan(other, mesh={"tp": 4}),
    }
    for code, plan in refused.items():
        where = ranks.mesh((2, 2), ("fsdp", "tp")) if code == "plan-not-executable" else ranks.mesh((4,), ("tp",))
        with pytest.raises(PlanError) as caught:
            apply_sharding_plan(net, where, plan)
        assert code in {problem.code for problem in caught.value.problems}
    assert len(refused) == 2
    assert not any(isinstance(p, DTensor) for p in net.parameters())


before_ranks = partial(models.preload, "shard_spec.planners", *hf_models.code_of("olmoe"))


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(4)
def test_a_mixture_of_experts_beside_data_parallel(ranks: Ranks) -> None:
    """Gate and up of all experts in one fused weight, which no DTensor describes: its gradient is averaged apart."""
    from shard_spec import MegatronPlanner, MeshSpec
    from transformers import OlmoeConfig, OlmoeForCausalLM

    axes = {"dp": 2, "tp": 2}
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_experts": 4}
    config = OlmoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # grouped kernels take no float64
    net = OlmoeForCausalLM(config).double().eval()
    reference = copy.deepcopy(net)
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    apply_sharding_plan(net, mesh, MegatronPlanner(MeshSpec(axes)).build_plan(net))
    fused = [name for name, p in net.named_parameters() if hasattr(p, "_sharding_info")]
    assert fused == ["model.layers.0.mlp.experts.gate_up_proj"]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2, foreach=False) for each in (net, reference)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, 16, (4, 5), generator=generator)
        for each, optimizer, rows in zip(
            (net, reference), optimizers, (ids.chunk(2)[mesh.get_local_rank("dp")], ids), strict=True
        ):
            optimizer.zero_grad()
            logits = each(input_ids=rows, use_cache=False).logits
            nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten()).backward()
            optimizer.step()
    local = dict(net.named_parameters())
    compared = 0
    for name, expected in reference.named_parameters():
        got = full(local[name])
        if name in fused:
            rank, half = mesh.get_local_rank("tp"), expected.shape[1] // 2
            gate, up = expected.split(half, dim=1)
            expected = torch.cat([part.chunk(2, dim=1)[rank] for part in (gate, up)], dim=1)
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-8), name
        compared += expected.numel()
    assert compared > 2000
