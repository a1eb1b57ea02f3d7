"""On fake CUDA nothing asks for values, mixes devices or names a bare "cuda"."""

from __future__ import annotations

from typing import Any

import torch
from ranktest import fake_cuda, fake_mesh
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from tp_ddp_bridge import clip_grad_norm_, pre_dp_module_transform, undo_dp_transform
from tp_ddp_bridge.module.transform import survey


def test_bridging_reading_clipping_and_state() -> None:
    with fake_cuda(rank=1, world_size=2) as device:
        mesh = fake_mesh((2,), ("tp",))
        model: Any = nn.Sequential(nn.Linear(16, 16, device=device), nn.LayerNorm(32, device=device))
        for name, parameter in list(model[0].named_parameters()):  # this rank's halves
            model[0].register_parameter(name, nn.Parameter(DTensor.from_local(parameter.detach(), mesh, [Shard(0)])))
        pre_dp_module_transform(model)
        assert all(parameter.device == device for parameter in model.parameters())
        assert model[0].weight.device == device and model[0].weight.shape == (32, 16)
        x = DTensor.from_local(torch.ones(2, 16, device=device), mesh, [Replicate()])
        assert model[0](x).to_local().device == device
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        assert norm.device == device and norm.dim() == 0
        state = model.state_dict()
        assert isinstance(state["0.weight"], DTensor) and state["0.weight"].device == device
        assert len(survey(model).bridgeable) == 2
        undo_dp_transform(model)
