"""`--experts N`: a mixture of experts with Muon.

Whole experts and attention by heads lie on the ranks of `tp`, DDP runs over `dp`.
"""

from __future__ import annotations

from dataclasses import replace

import shard_reshard
import torch
import tp_ddp_bridge
import tp_styles
from model import GPT, new_model
from setting import Setting, printer
from torch import Tensor, nn
from training import Batch, Run, axis_group, repeat, train_step

STYLES = {
    "blocks.*.attn.{wq,wk,wv}": tp_styles.ColwiseParallel(),
    "blocks.*.attn.wo": tp_styles.RowwiseParallel(),
    "blocks.*.mlp.experts": tp_styles.ExpertParallel(),
}


def muon(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.01)  # type: ignore[arg-type]


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)  # type: ignore[arg-type]


def train_experts(setting: Setting, count: int) -> None:
    """Train the mixture on all ranks and on one device; losses and weights have to be equal."""
    config = replace(setting.config, experts=count)
    mesh = setting.world.mesh(dp=setting.dp, tp=setting.tp)
    model = new_model(config, dtype=torch.float64).to(setting.world.device)
    handle = tp_styles.apply_plan(model, mesh["tp"], STYLES)
    ddp = tp_ddp_bridge.wrap_ddp(model, mesh=mesh)
    optimizer = shard_reshard.WholeMatrices(ddp.named_parameters(), {"*.experts.*": muon}, in_shards=adamw)
    run = repeat(
        "experts, TP x DDP",
        lambda batch: train_step(ddp, optimizer, batch),
        setting.batches_of(mesh.get_local_rank("dp"), setting.dp),
        setting.num_compared,
        mean_over=axis_group(mesh, "dp"),
        progress=printer(setting, f"{count} experts, TP x DDP, float64", setting.num_compared),
    )
    alone = new_model(config, dtype=torch.float64).to(setting.world.device)
    reference = _on_one_device(setting, alone)
    setting.compare_losses(run, reference, torch.float64)
    state = tp_styles.full_state_dict(model)
    if setting.world.rank == 0:
        before = new_model(config, dtype=torch.float64).to(setting.world.device).state_dict()
        expected = alone.state_dict()
        assert all(not torch.equal(before[name], value) for name, value in expected.items()), "a weight did not train"
        flat, ours = (torch.cat([each[name].flatten() for name in expected]) for each in (expected, state))
        setting.comparisons.absolute(
            f"weights with {count} experts after {setting.num_compared} steps", ours, flat, 1e-9
        )
    setting.pages["experts"] = {
        "The mixture: what the first call compared": handle.report(),
        "The mixture: which rank owns which matrix": optimizer.plan.explain(),
    }


def _on_one_device(setting: Setting, model: GPT) -> Run:
    """The same steps of one device: each expert's matrix is a view of its stack, and takes its part of the gradient."""
    stacks = [p for p in model.parameters() if p.dim() == 3]
    matrices = [[nn.Parameter(matrix) for matrix in stack.detach()] for stack in stacks]
    others = [p for p in model.parameters() if p.dim() != 3]
    optimizers = muon([m for each in matrices for m in each]), adamw(others)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        for stack, each in zip(stacks, matrices, strict=True):
            assert stack.grad is not None
            for matrix, gradient in zip(each, stack.grad, strict=True):
                matrix.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        return loss.detach()

    return repeat("one device, experts", step, setting.batches(), setting.num_compared)
