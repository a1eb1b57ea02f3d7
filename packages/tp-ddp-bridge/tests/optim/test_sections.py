"""Fused and kv-copied weights: one norm, and optimizer state through checkpoints to every other mesh."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranktest import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import Shard
from tp_ddp_bridge import clip_grad_norm_, optimizer_state_to_dtensor, optimizer_state_to_local
from tp_ddp_bridge._shared.sectioned_tensor import SectionedTensor
from tp_ddp_bridge._shared.sharding_info import Section, ShardingInfo
from tp_ddp_bridge.layout import layout_of

SECTIONS: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {  # dim, and size and unit of each section
    "key": (0, ((8, 4),)),  # 2 heads of 4 rows
    "fused": (0, ((16, 4), (8, 4), (8, 4))),  # 4 query heads, 2 key and 2 value heads
    "columns": (1, ((6, 1), (10, 1))),
}


class Heads(nn.Module):
    """Three weights, full or as this rank's sections; the gradients are given."""

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.infos: dict[str, Any] = {}
        for name, (dim, sections) in SECTIONS.items():
            shape = [5, 5]
            shape[dim] = sum(size for size, _ in sections)
            full = torch.randn(shape, generator=generator)
            if mesh is not None:
                size = mesh.size()
                parts = tuple(Section(rows, unit, max(1, size * unit // rows)) for rows, unit in sections)
                info = ShardingInfo(mesh, (Shard(dim),), full.shape, tuple(full.stride()), parts)
                self.infos[name] = info
                parameter = nn.Parameter(self.local(name, full).clone())
                parameter._sharding_info = info  # type: ignore[attr-defined]
            else:
                parameter = nn.Parameter(full)
            self.register_parameter(name, parameter)

    def local(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's sections of a full tensor."""
        if name not in self.infos:
            return full
        info = self.infos[name]
        _, dim = info.section_axis()
        rows = info.ranges(info.mesh.get_local_rank())
        return torch.cat([full.narrow(dim, start, stop - start) for start, stop in rows], dim)

    def steps(self, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        """Steps with gradients that are the same functions of the full weights everywhere; the norms."""
        norms = []
        for step in range(count):
            generator = torch.Generator().manual_seed(step)
            for name, parameter in self.named_parameters():
                dim, sections = SECTIONS[name]
                shape = [5, 5]
                shape[dim] = sum(size for size, _ in sections)
                parameter.grad = self.local(name, torch.randn(shape, generator=generator)).clone()
            norms.append(float(clip_grad_norm_(self.parameters(), 0.5)))
            optimizer.step()
        return norms


def quietly(act: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch's checkpointing says about its own future
        return act(*args, **kwargs)


def full(value: Any) -> torch.Tensor:
    result: torch.Tensor = value.full_tensor() if isinstance(value, SectionedTensor) else value
    return result


@pytest.mark.ranks(4)
def test_adam_goes_through_a_checkpoint_to_every_mesh(ranks: Ranks, tmp_path: Path) -> None:
    folder = ranks.gather(str(tmp_path))[0]
    reference = Heads()
    theirs = torch.optim.AdamW(reference.parameters(), 1e-2)
    wanted_norms = reference.steps(theirs, 5)
    expected = optimizer_state_to_dtensor(reference, theirs)["state"]
    compared = 0
    for source, target in ((4, 2), (2, 4), (4, 1), (1, 4)):
        shapes = {size: ranks.mesh((4 // size, size), ("dp", "tp"))["tp"] for size in (source, target)}
        model = Heads(shapes[source])
        mine = torch.optim.AdamW(model.parameters(), 1e-2)
        norms = model.steps(mine, 5)
        assert norms == pytest.approx(wanted_norms, rel=1e-5)  # copies count once
        state = optimizer_state_to_dtensor(model, mine)
        for name in SECTIONS:
            value = state["state"][name]["exp_avg"]
            assert isinstance(value, SectionedTensor) or source == 1
            torch.testing.assert_close(full(value), expected[name]["exp_avg"], rtol=1e-5, atol=1e-7)
        place = f"{folder}/{source}-{target}"
        quietly(save, {"optim": state}, checkpoint_id=place)
        other = Heads(shapes[target])
        fresh = torch.optim.AdamW(other.parameters(), 1e-2)
        loaded = {"optim": optimizer_state_to_dtensor(other, fresh, template=True)}
        quietly(load, loaded, checkpoint_id=place)
        optimizer_state_to_local(other, fresh, loaded["optim"])
        back = optimizer_state_to_dtensor(other, fresh)["state"]
        for name in SECTIONS:
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(full(back[name][key]), full(state["state"][name][key])), (source, target, name)
                compared += 1
    assert compared == 4 * 3 * 3

    # without a checkpoint between them, and from one process
    model = Heads(ranks.mesh((1, 4), ("dp", "tp"))["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    optimizer_state_to_local(model, optimizer, optimizer_state_to_dtensor(reference, theirs))
    local_optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    optimizer_state_to_local(model, local_optimizer, optimizer_state_to_dtensor(model, optimizer))
    back = optimizer_state_to_dtensor(model, local_optimizer)["state"]
    for name in SECTIONS:
        assert torch.equal(full(back[name]["exp_avg"]), expected[name]["exp_avg"])


@pytest.mark.ranks(2)
def test_a_sectioned_tensor_is_like_a_dtensor(ranks: Ranks) -> None:
    model = Heads(ranks.mesh((2,), ("tp",)))
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        assert layout is not None and layout.sections
        tensor = SectionedTensor.of(parameter, layout)
        expected = dict(Heads().named_parameters())[name].detach()
        assert tensor.shape == expected.shape == tensor.size() and tensor.size(0) == expected.shape[0]
        assert torch.equal(tensor.full_tensor(), expected)
        assert torch.equal(layout.shard(expected), parameter.detach())
        assert type(tensor + 1) is torch.Tensor and (tensor + 1).shape == parameter.shape
        assert tensor.plain().data_ptr() == parameter.data_ptr()
        copied = copy.deepcopy(tensor)
        assert torch.equal(copied.full_tensor(), expected) and copied.plain().data_ptr() != parameter.data_ptr()
        assert "sections" in str(layout)
        with pytest.raises(AssertionError):
            layout.wrap(parameter)  # a DTensor would misdescribe it
