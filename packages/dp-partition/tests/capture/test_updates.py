"""An update that is traced once and repeated gives the graph of torch's loop over parameters."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_partition.capture import phases
from ranktest import Ranks
from torch import fx, nn

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"weight_decay": 0.1}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "maximize": ("AdamW", {"maximize": True}),
    "SGD": ("SGD", {"momentum": 0.9}),
    "RMSprop": ("RMSprop", {"momentum": 0.5, "centered": True}),
    "Adagrad": ("Adagrad", {}),
    "Adadelta": ("Adadelta", {}),
    "Adamax": ("Adamax", {}),
    "NAdam": ("NAdam", {}),
    "Rprop": ("Rprop", {}),
}


def rows_of(ranks: Ranks, name: str, schedule: bool) -> list[Any]:
    """The graph without names that number nodes."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))).to(ranks.device)
    params = list(model.parameters())
    kind, settings = OPTIMIZERS[name]
    groups = [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "lr": 0.2}]
    optim = getattr(torch.optim, kind)(groups, foreach=False, **settings)
    if schedule:
        torch.optim.lr_scheduler.StepLR(optim, 1)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((1,), ("dp",)), style="fully_shard", check="never")
    step(model, optim, torch.ones(2, 4, device=ranks.device))
    names: dict[fx.Node, str] = {}
    rows = []
    for node in step.graph.graph.nodes:
        names[node] = node.name if node.op == "placeholder" else f"node{len(names)}"
        arguments = fx.map_arg((node.args, node.kwargs), lambda one: names[one])
        rows.append((str(node.target) if node.op == "call_function" else "", arguments, node.meta.get("phase")))
    return rows


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_graph_is_that_of_the_loop(ranks: Ranks, name: str) -> None:
    with patch.object(phases, "shared_updates", lambda optimizer: optimizer.step):
        wanted = rows_of(ranks, name, schedule=False)
    assert rows_of(ranks, name, schedule=name == "AdamW") == wanted
    assert len(wanted) > 100
