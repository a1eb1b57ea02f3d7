"""Plans that know hosts: values are right, and between hosts travel the fewest bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from layout_pairs import as_listed, local_tensors, random_layout, random_shape
from ranktest import Ranks
from shard_reshard import PlanError, Resharder, ReshardPlan, plan_reshard, simulate
from shard_reshard.cli import main


def between(plan: ReshardPlan, hosts: tuple[int, ...]) -> int:
    """Count the bytes between hosts in the plan's matrix."""
    pairs = ((a, b) for a in range(plan.world_size) for b in range(plan.world_size) if hosts[a] != hosts[b])
    return sum(plan.bytes_matrix[a][b] for a, b in pairs)


def test_drawn_layouts_send_one_copy_to_a_host() -> None:
    rng, compared, fewer, relayed = random.Random(11), 0, 0, 0
    for _ in range(150):
        world, shape = rng.randint(2, 8), random_shape(rng)
        src, dst = random_layout(rng, shape, world), random_layout(rng, shape, world)
        hosts: Any = rng.choice([1, 2, 3, [f"host {rng.randrange(3)}" for _ in range(world)]])
        plan, plain = (plan_reshard(shape, torch.int16, src, dst, hosts=known) for known in (hosts, None))
        full = torch.randint(-1000, 1000, shape, dtype=torch.int16)
        moved = simulate(plan, [local_tensors(src, rank, full) for rank in range(world)])
        for rank in range(world):
            for tensor, wanted in zip(as_listed(moved[rank]), local_tensors(dst, rank, full), strict=True):
                assert torch.equal(tensor, wanted), (src, dst, hosts)
                compared += tensor.numel()
        assert plan.wire_bytes == plan.lower_bound == plain.lower_bound
        assert plan.host_bytes == plan.host_lower_bound, (src, dst, hosts)
        if plan.hosts is not None:
            assert plan.host_bytes == between(plan, plan.hosts) <= between(plain, plan.hosts)
            fewer += between(plain, plan.hosts) > plan.host_bytes
        relayed += plan.uses_scatter_allgather
    assert compared > 3000
    assert fewer >= 12
    assert relayed >= 3


def test_sums_are_right_and_not_below_the_bound() -> None:
    layouts = [
        "8: P",
        "2x4: P, S(0)",
        "2x4: S(0), P",
        "4x2: P, R",
        "2x4: R, P",
        "2x4: P, P",
        "8: R",
        "8: S(1)",
        "2x4: S(1), R",
    ]
    checked = 0
    for source in layouts[:6]:
        for target in layouts[6:]:
            for hosts in (2, 4, [0, 1, 0, 1, 0, 1, 0, 1]):
                plan = plan_reshard((64, 48), torch.int64, source, target, hosts=hosts)
                assert 0 < plan.host_lower_bound <= plan.host_bytes or plan.host_lower_bound == 0
                shards = [torch.ones(shape, dtype=torch.int64) for r in range(8) for shape in plan.src.local_shapes(r)]
                moved = simulate(plan, shards)
                for tensor in moved:
                    assert isinstance(tensor, torch.Tensor)
                    assert torch.equal(tensor, torch.full_like(tensor, plan.src.num_partials))
                checked += 1
    assert checked == 54


@pytest.mark.ranks(4)
def test_real_groups_run_plans_that_know_hosts(ranks: Ranks) -> None:
    full = torch.randn(256, 96, generator=torch.Generator().manual_seed(2)).to(ranks.device)
    for source, shard in (("2: S(0)", full.chunk(2)), ("rank 3", [None, None, None, full])):
        plan = plan_reshard(full.shape, torch.float32, source, "4: R", hosts=2)
        assert plan.uses_scatter_allgather
        local = shard[ranks.rank] if ranks.rank < len(shard) else None
        resharder = Resharder(plan)
        for _ in range(3):
            with ranks.record() as log, ranks.delayed():
                moved = resharder(local)
            assert torch.equal(moved, full)
        sent = ranks.gather([event.bytes_sent for event in log.events if event.op == "all_to_all"])
        crossed = sum(
            size
            for rank, events in enumerate(sent)
            for event in events
            for to, size in enumerate(event)
            if to // 2 != rank // 2
        )
        assert crossed == plan.host_bytes == full.nbytes  # one copy to the other host
    plan = plan_reshard(full.shape, torch.float32, "2x2: S(0), R", "4: S(1)", hosts=2)
    local = full.chunk(2)[ranks.rank // 2].clone().requires_grad_()
    moved = Resharder(plan)(local)
    assert torch.equal(moved, full.chunk(4, 1)[ranks.rank])
    (2 * moved).sum().backward()
    assert local.grad is not None
    grads = ranks.gather(local.grad.cpu())  # a replica has the gradient of what it sent
    for half in (grads[:2], grads[2:]):
        assert torch.equal(half[0] + half[1], torch.full((128, 96), 2.0))


def test_hosts_are_in_the_digest_and_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    plan: Any = plan_reshard((64, 64), "float32", "2: S(0)", "8: R", hosts=4)
    plain = plan_reshard((64, 64), "float32", "2: S(0)", "8: R")
    assert plan.digest != plain.digest
    assert plan_reshard((64, 64), "float32", "2: S(0)", "8: R", hosts=8) == plain  # one host
    assert plan == plan_reshard((64, 64), "float32", "2: S(0)", "8: R", hosts=list("aaaabbbb"))
    assert plan.transpose().transpose() == plan
    assert plan.transpose().host_lower_bound == plan.host_lower_bound == 64 * 64 * 4
    assert plan.peak_bytes(0) > 0
    assert "hosts 16 KiB between 2 hosts, 1.00 x the lower bound of 16 KiB" in plan.explain()
    assert "hosts" not in plain.explain()
    assert main(["explain", "--shape", "64,64", "--src", "2: S(0)", "--dst", "8: R", "--hosts", "4"]) == 0
    assert "hosts 16 KiB between 2 hosts" in capsys.readouterr().out
    wrong: list[Any] = [0, -1, "ab", [0, 1], 2.5]
    for hosts in wrong:
        with pytest.raises(PlanError, match=r"invalid-argument.*hosts"):
            plan_reshard((64, 64), "float32", "2: S(0)", "8: R", hosts=hosts)
