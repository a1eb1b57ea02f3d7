"""State moves onto other numbers of ranks, and the training goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranktest import Ranks
from shard_reshard import PlanError, WholeMatrices
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from whole_models import SIZES, Twin, add_experts, mesh_of, of_mesh, of_sections

MAKE: dict[str, Any] = {
    "Muon": lambda params: torch.optim.Muon(params, lr=0.02),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.02),  # has no state at all
}


def _twin(mesh: DeviceMesh) -> Twin:
    """Return parameters on some ranks; on all other ranks call this too."""
    twin = of_mesh(mesh, [Shard(0)], SIZES)
    of_sections(mesh, [(16, 4, 1), (8, 4, 1), (8, 4, 1)], 12)(twin, "qkv")
    add_experts(twin, "experts", mesh, Shard(0))
    return twin


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", MAKE)
def test_four_two_and_three_ranks(ranks: Ranks, name: str, tmp_path: Path) -> None:
    make, step, compared = MAKE[name], 0, 0
    reference: dict[str, torch.Tensor] = {}
    one_state: dict[str, Any] = {}
    for phase, world in enumerate((4, 2, 3)):
        group = dist.new_group(list(range(world)))
        mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("axis0",))
        if ranks.rank < world:
            twin = _twin(mesh)
            with torch.no_grad():  # the model's own checkpoint
                for key, value in reference.items():
                    twin.reference[key].copy_(value)
                for key, parameter in twin.named.items():
                    full = twin.join[key]([twin.reference[part].detach() for part in twin.matrices[key]])
                    shard = twin.shard[key](full)
                    parameter.copy_(shard.as_subclass(torch.Tensor) if key == "qkv" else shard)
            optimizer = WholeMatrices(twin.named, make, group, bucket_bytes=300)
            one = make(list(twin.reference.values()))
            if phase:
                optimizer.param_groups[0]["lr"] = 123.0  # the file's counts
                template = optimizer.state_dict(allocate=True)
                files = tmp_path / str(phase - 1)
                dcp.state_dict_loader.load({"optimizer": template}, checkpoint_id=files, process_group=group)
                optimizer.load_state_dict(template)
                one.load_state_dict(one_state)
                assert optimizer.param_groups[0]["lr"] == one.param_groups[0]["lr"]
            for _ in range(3):
                twin.backward(step)
                optimizer.step()
                one.step()
                step += 1
                compared += twin.compared()
            state = optimizer.state_dict()
            assert state["steps"] == step
            owned = {name for name, rank in optimizer.plan.owner.items() if rank == ranks.rank}
            assert state["state"].keys() == owned  # each rank has its own part alone
            files = tmp_path / str(phase)
            dcp.state_dict_saver.save({"optimizer": state}, checkpoint_id=files, process_group=group)
            reference = {key: value.detach().clone() for key, value in twin.reference.items()}
            one_state = one.state_dict()
        step, reference, one_state = ranks.gather((step, reference, one_state))[0]
    assert compared > 0


@pytest.mark.ranks(3)
def test_parts_of_other_ranks_are_sent_to_their_owners(ranks: Ranks, tmp_path: Path) -> None:
    make = MAKE["Adafactor"]
    twin = of_mesh(mesh_of((3,)), [Shard(0)], SIZES)
    optimizer, one = WholeMatrices(twin.named, make), make(list(twin.reference.values()))
    for step in range(3):
        twin.backward(step)
        optimizer.step()
        one.step()
    torch.save(optimizer.state_dict(), tmp_path / f"{ranks.rank}.pt")
    dist.barrier()
    # Other owners: each rank still passes the part that it saved.
    saved = torch.load(tmp_path / f"{ranks.rank}.pt")
    owners = {name: (rank + 1) % 3 for name, rank in optimizer.plan.owner.items()}
    again = WholeMatrices(twin.named, make, owners=owners)
    assert again.plan.owner == owners
    with pytest.raises(PlanError, match=r"missing-source.*no rank passes its state"):
        again.load_state_dict(torch.load(tmp_path / "0.pt"))  # every rank the first rank's part
    with pytest.raises(PlanError, match=r"ranks-disagree.*another number of steps"):
        again.load_state_dict({**saved, "steps": 4 - ranks.rank})
    with pytest.raises(PlanError, match=r"invalid-argument\] param_groups"):
        again.load_state_dict({**saved, "param_groups": []})
    with pytest.raises(PlanError, match=r"wrong-type\] state_dict"):
        again.load_state_dict({})
    again.load_state_dict(saved)
    for step in range(3, 8):
        twin.backward(step)
        again.step()
        one.step()
        assert twin.compared() > 0
    # A fresh optimizer's dict says that it has no steps; a checkpoint's that it has, so it does not start anew.
    fresh = WholeMatrices(twin.named, make).state_dict()
    assert (fresh["steps"], fresh["state"], fresh["stepped"]) == (0, {}, [])
    with pytest.raises(PlanError, match="missing-source"):
        again.load_state_dict({**again.state_dict(), "state": {}})


@pytest.mark.ranks(2)
def test_a_state_dict_of_one_process(ranks: Ranks) -> None:
    for name, make in MAKE.items():
        twin = of_mesh(mesh_of((2,)), [Shard(0)], SIZES)
        if name in ("Muon", "AdamW"):  # their state has the parameter's shape, so it is cut as the parameter is
            of_sections(mesh_of((2,)), [(16, 1, 1), (8, 1, 1)], 12)(twin, "qkv")
            add_experts(twin, "experts", mesh_of((2,)), Shard(0))
        first = {part: twin.reference[part] for part in twin.reference}
        joined = {
            key: nn.Parameter(twin.join[key]([first[p].detach() for p in twin.matrices[key]])) for key in twin.named
        }
        one, parts = MAKE[name](list(first.values())), None
        for step in range(2):
            twin.backward(step)
            one.step()
        # The same state by whole parameters, as a job without this class has it.
        if name == "AdamW":
            parts = MAKE[name](list(joined.values()))
            for step in range(2):
                twin.backward(step)
                for key, parameter in joined.items():
                    gradients = [first[part].grad for part in twin.matrices[key]]
                    parameter.grad = twin.join[key]([g for g in gradients if g is not None])
                parts.step()
        elif name == "Muon":
            continue
        with torch.no_grad():
            for key, parameter in twin.named.items():
                full = twin.join[key]([first[part].detach() for part in twin.matrices[key]])
                shard = twin.shard[key](full)
                parameter.copy_(shard.as_subclass(torch.Tensor) if key == "qkv" else shard)
        optimizer = WholeMatrices(twin.named, make)
        optimizer.load_state_dict((parts or one).state_dict())
        for step in range(2, 7):
            twin.backward(step)
            optimizer.step()
            one.step()
            assert twin.compared() > 0
    twin = of_mesh(mesh_of((2,)), [Shard(0)], {"w": (4, 4)})
    optimizer = WholeMatrices(twin.named, MAKE["AdamW"])
    with pytest.raises(PlanError, match=r"argument-count\] state_dict"):
        optimizer.load_state_dict(
            torch.optim.AdamW([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]).state_dict()
        )


@pytest.mark.ranks(2)
def test_state_of_parameters_in_shards(ranks: Ranks, tmp_path: Path) -> None:
    sizes = {"w": (9, 8), "head.weight": (7, 4), "head.bias": (5,)}
    reference: dict[str, torch.Tensor] = {}
    states: list[dict[str, Any]] = []
    step = 0
    for world in (2, 1):
        group = dist.new_group(list(range(world)))
        mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("axis0",))
        if ranks.rank >= world:
            continue
        twin = of_mesh(mesh, [Shard(0)], sizes)
        with torch.no_grad():
            for key, value in reference.items():
                twin.reference[key].copy_(value)
                twin.named[key].copy_(twin.shard[key](value.clone()))
        optimizer = WholeMatrices(twin.named, {"w": MAKE["Muon"]}, group, in_shards=MAKE["AdamW"])
        ones = [MAKE["Muon"]([twin.reference["w"]]), MAKE["AdamW"]([twin.reference[n] for n in list(sizes)[1:]])]
        if states:
            template = optimizer.state_dict(allocate=True)
            dcp.state_dict_loader.load({"optimizer": template}, checkpoint_id=tmp_path / "2", process_group=group)
            optimizer.load_state_dict(template)
            for each, state in zip(ones, states, strict=True):
                each.load_state_dict(state)
        for _ in range(5):
            twin.backward(step)
            optimizer.step()
            for each in ones:
                each.step()
            step += 1
            assert twin.compared() > 0
        dcp.state_dict_saver.save(
            {"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / str(world), process_group=group
        )
        reference = {key: value.detach().clone() for key, value in twin.reference.items()}
        states = [each.state_dict() for each in ones]
