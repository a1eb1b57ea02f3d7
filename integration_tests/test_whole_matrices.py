"""An optimizer on full matrices over the bridge's leaves, with sharded, fused, replicated and frozen parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tp_ddp_bridge
import tp_styles
from ranktest import Ranks
from shard_reshard import WholeMatrices
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional


class Gated(nn.Module):
    """A fused layer (a local shard of two sections), leaves, a replicated layer, and a frozen leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(12, 8, bias=False)
        self.up, self.out, self.head = nn.Linear(8, 10), nn.Linear(10, 8), nn.Linear(8, 4)
        self.up.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        x = self.down(functional.silu(gate) * up)
        result: torch.Tensor = self.head(self.out(torch.tanh(self.up(x))))
        return result


STYLES: dict[str, Any] = {
    "gate_up": tp_styles.FusedColwiseParallel(sections=(12, 12)),
    "down": tp_styles.RowwiseParallel(),
    "up": tp_styles.ColwiseParallel(),
    "out": tp_styles.RowwiseParallel(),
}


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


@pytest.mark.ranks(4)
def test_leaves_train_as_one_process_and_send_the_bound(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model, alone = Gated().double(), Gated().double()
    alone.load_state_dict(model.state_dict())
    tp_styles.apply_plan(model, mesh["tp"], STYLES)
    ddp = tp_ddp_bridge.wrap_ddp(model, mesh=mesh)
    optimizer = WholeMatrices(ddp.named_parameters(), {"*.weight": muon}, in_shards=adamw)
    gate, up = (nn.Parameter(half.clone()) for half in alone.gate_up.weight.detach().chunk(2))
    its = [muon([gate, up, *(m.weight for m in (alone.down, alone.up, alone.out, alone.head))])]
    its.append(adamw([m.bias for m in (alone.up, alone.out, alone.head)]))
    random = torch.Generator().manual_seed(1)
    for _ in range(5):
        x = torch.randn(6, 8, dtype=torch.float64, generator=random)
        optimizer.zero_grad()
        ddp(x.chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
        norm = tp_ddp_bridge.clip_grad_norm_(ddp.parameters(), 0.1)
        with ranks.record() as log:
            optimizer.step()
        alone.zero_grad()
        alone(x).square().mean().backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.1), rtol=1e-10, atol=0)
        assert alone.gate_up.weight.grad is not None
        gate.grad, up.grad = alone.gate_up.weight.grad.chunk(2)
        for each in its:
            each.step()
        with torch.no_grad():
            alone.gate_up.weight.copy_(torch.cat([gate, up]))
    sent = sum(sum(event.bytes_sent) for event in log.events if event.op == "all_to_all")
    least = [sum(each) for each in optimizer.plan.sent or ()]
    frozen = [matrix.parameter for matrix in optimizer.plan.matrices].index("module.up.weight")
    assert sum(ranks.gather(sent)) == optimizer.plan.lower_bound - least[frozen] > 0
    assert {matrix.name for matrix in optimizer.plan.matrices} == {
        "module.gate_up.weight:0", "module.gate_up.weight:1", "module.down.weight", "module.up.weight",
        "module.out.weight", "module.head.weight",
    }  # fmt: skip
    with pytest.raises(tp_ddp_bridge.PlanError, match="local-shard-as-full"):
        dict(model.named_parameters())["down.weight"].norm()  # leaves are leaves again after the step
    compared = 0
    state: dict[str, Any] = dict(tp_styles.full_state_dict(model).items())
    for name, expected in alone.state_dict().items():
        value = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
        compared += value.numel()
    assert compared == sum(value.numel() for value in alone.state_dict().values()) > 400
    again = WholeMatrices(ddp.named_parameters(), {"*.weight": muon}, in_shards=adamw)
    again.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"not-elementwise.*WholeMatrices"):  # of either package that checks steps
        muon([p for p in ddp.parameters() if p.dim() == 2]).step()
