"""torch's `nn.Transformer`, planned by MegatronPlanner and sharded by tp-styles, trains as one device does."""

from __future__ import annotations

import pytest
import shard_spec
import torch
import tp_styles
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

NUM_STEPS = 5
WIDTH, HEADS, HIDDEN = 32, 4, 48


def new_model(batch_first: bool) -> nn.Transformer:
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 2, 2, HIDDEN, dropout=0.0, batch_first=batch_first).double()
    with torch.no_grad():
        for parameter in model.parameters():  # biases of 0 and norms of 1 would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def losses_of(model: nn.Module, batch_first: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    shape = (3, 6, WIDTH) if batch_first else (6, 3, WIDTH)
    losses = []
    for _ in range(NUM_STEPS):
        source, target, target_output = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3))
        loss = (model(source, target) - target_output).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch warns that it does not use nested tensors
def test_a_planned_transformer_trains_as_on_one_device(ranks: Ranks, batch_first: bool) -> None:
    size = ranks.world_size
    mesh = ranks.mesh((size,), ("tp",))
    model, single = new_model(batch_first), new_model(batch_first)
    plan = shard_spec.MegatronPlanner(mesh=shard_spec.MeshSpec({"tp": size})).build_plan(model)
    assert plan.validate(model, world_size=size) == ()
    tp_styles.apply_plan(model, mesh, tp_styles.from_sharding_plan(plan, model))
    expected = losses_of(single, batch_first)
    # In float64 only the order of sums differs.
    torch.testing.assert_close(losses_of(model, batch_first), expected, rtol=1e-10, atol=0)

    state, reference = tp_styles.full_state_dict(model), single.state_dict()
    assert state.keys() == reference.keys()
    for name, tensor in state.items():
        # AdamW divides by the root of the squared gradient: where that is near 0, another order of sums shows most.
        torch.testing.assert_close(tensor, reference[name], rtol=1e-7, atol=1e-9, msg=f"{name} differs")
    cut = [name for name, piece in model.named_parameters() if local_numel(piece) < reference[name].numel()]
    # 6 attentions shard the fused qkv weight, its bias and the output weight; 4 feed-forwards two weights and a bias.
    assert len(cut) == 3 * 6 + 3 * 4, cut


def local_numel(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
