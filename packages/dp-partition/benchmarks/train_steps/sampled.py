"""Steps whose loss, scheduler or layer was drawn from torch's own lists, with optimizers that the table lacked.

`random.Random(2026)` drew 9 of torch.nn's 23 losses, 6 of 14 schedulers and 26 of 138 layers, in this order. Those that
other rows train already (MSELoss, CTCLoss, MaxPool2d, PixelShuffle, EmbeddingBag, ReLU) and an abstract class are left
out. Of torch.optim every class is in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, lr_scheduler
from train_steps.row import Draw, Script, mlp, row


def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    """Train one step of a classifier."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


# ---- losses ---------------------------------------------------------------------------------------------------------


def signs(d: Draw, *shape: int) -> torch.Tensor:
    return d.ints(2, *shape).double() * 2 - 1


LOSSES: dict[str, tuple[Callable[..., Any], Callable[[Draw], Any]]] = {
    "L1Loss": (lambda loss, out, y: loss(out, y), lambda d: d.x(4)),
    "MultiMarginLoss": (lambda loss, out, y: loss(out, y), lambda d: d.ints(4)),
    "SoftMarginLoss": (lambda loss, out, y: loss(out, y), lambda d: signs(d, 4)),
    "TripletMarginWithDistanceLoss": (lambda loss, out, y: loss(out, out.flip(0), out + y), lambda d: d.x(4)),
    "HingeEmbeddingLoss": (lambda loss, out, y: loss(out.square(), y), lambda d: signs(d, 4)),
    "MarginRankingLoss": (lambda loss, out, y: loss(out[:, 0], out[:, 1], y), lambda d: signs(d)),
    "MultiLabelSoftMarginLoss": (lambda loss, out, y: loss(out, y), lambda d: d.ints(2, 4).double()),
}


def add_loss(name: str) -> None:
    def build() -> Script:
        model, criterion = mlp(), getattr(nn, name)()
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)

        def train(model: Any, criterion: Any, optimizer: Any, x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = LOSSES[name][0](criterion, model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script(train, (model, criterion, optimizer), lambda d: (d.x(8), LOSSES[name][1](d)), [model])

    build.__name__ = f"loss_{name}"
    # The second operand of a triplet is a row of the same rank: one process has others.
    row(f"torch.nn: {name}", independent=not name.startswith("Triplet"), is_late=True)(build)


for _name in LOSSES:
    add_loss(_name)

# ---- schedulers that the step steps ---------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 4),
}


def add_scheduler(name: str) -> None:
    def build() -> Script:
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)

        def train(model: Any, optimizer: Any, scheduler: Any, x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.detach(), scheduler.get_last_lr()[0]

        return Script(train, (model, optimizer, scheduler), lambda d: (d.x(8), d.ints(4)), [model])

    build.__name__ = f"scheduler_{name}"
    row(f"torch.optim.lr_scheduler: {name}", is_late=True)(build)


for _name in SCHEDULERS:
    add_scheduler(_name)

# ---- optimizers -----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 1.0}, "Adagrad": {"lr": 0.05}, "Adamax": {"lr": 0.02}, "RAdam": {"lr": 0.02},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True}, "Rprop": {"lr": 0.01}, "Muon": {"lr": 0.02},
}  # fmt: skip


def add_optimizer(name: str) -> None:
    def build() -> Script:
        net = mlp()
        if name == "Muon":  # matrices alone
            net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))
        optimizer = getattr(torch.optim, name)(net.parameters(), **OPTIMIZERS[name])

        def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        return Script(train, (net, optimizer), lambda d: (d.x(8), d.ints(4)), [net])

    build.__name__ = f"optimizer_{name}"
    # Muon rounds in bfloat16, and its iteration makes percents of the movement of one rounding of the rows' sum.
    row(f"torch.optim: {name}", independent=name != "Muon", is_late=True)(build)


for _name in OPTIMIZERS:
    add_optimizer(_name)


@row("torch.optim: SparseAdam", is_late=True)
def optimizer_SparseAdam() -> Script:
    table, head = nn.Embedding(12, 8, sparse=True), nn.Linear(8, 4)
    sparse, dense = torch.optim.SparseAdam(table.parameters(), lr=0.02), SGD(head.parameters(), lr=0.1)

    def train(table: Any, head: Any, sparse: Any, dense: Any, ids: Any, y: Any) -> Any:
        sparse.zero_grad()
        dense.zero_grad()
        loss = F.cross_entropy(head(table(ids).mean(1)), y)
        loss.backward()
        sparse.step()
        dense.step()
        return loss.detach()

    return Script(train, (table, head, sparse, dense), lambda d: (d.ints(12, 5), d.ints(4)), [table, head])


@row("shard-reshard: WholeMatrices(Muon)", independent=False, is_late=True)
def whole_matrices_of_muon() -> Script:
    from shard_reshard import WholeMatrices

    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    named = list(net.named_parameters())
    optimizer = WholeMatrices(named, {"*weight": lambda p: torch.optim.Muon(p, lr=0.02)}, in_shards=adamw)

    return Script(train, (net, optimizer), lambda d: (d.x(8), d.ints(4)), [net])


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.01)


# ---- layers ---------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Compare two projections of the rows."""

    def __init__(self, compare: nn.Module) -> None:
        super().__init__()
        self.left, self.right, self.compare, self.head = nn.Linear(8, 6), nn.Linear(8, 6), compare, nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.compare(self.left(x), self.right(x))[:, None])


class Attending(nn.Module):
    """A layer of attention on sequences of 5 vectors."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner, self.layer, self.head = nn.Linear(8, 8), layer, nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        out = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x, x.flip(1))
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


class Recurring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


def around(first: nn.Module, layer: nn.Module, size: int) -> nn.Module:
    return nn.Sequential(first, layer, nn.Flatten(), nn.Linear(size, 4))


def lines() -> nn.Module:
    return nn.Conv1d(3, 4, 3, padding=1)


def volumes() -> nn.Module:
    return nn.Conv3d(2, 4, 1)


_LINE, _VOLUME, _SEQUENCE = (3, 6), (2, 4, 4, 4), (5, 8)
# They average statistics of each batch into buffers, which one process on all rows has otherwise.
RUNNING = ("BatchNorm", "LazyBatchNorm", "LazyInstanceNorm")

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "CosineSimilarity": (lambda: Pair(nn.CosineSimilarity()), (8,)),
    "LazyInstanceNorm3d": (lambda: around(volumes(), nn.LazyInstanceNorm3d(affine=True), 256), _VOLUME),
    "ConvTranspose1d": (lambda: around(lines(), nn.ConvTranspose1d(4, 4, 3), 32), _LINE),
    "Softmax": (lambda: around(nn.Linear(8, 8), nn.Softmax(-1), 8), (8,)),
    "AdaptiveAvgPool3d": (lambda: around(volumes(), nn.AdaptiveAvgPool3d(2), 32), _VOLUME),
    "Transformer": (
        lambda: Attending(nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)),
        _SEQUENCE,
    ),
    "MaxPool1d": (lambda: around(lines(), nn.MaxPool1d(2), 12), _LINE),
    "InstanceNorm1d": (lambda: around(lines(), nn.InstanceNorm1d(4, affine=True), 24), _LINE),
    "LazyBatchNorm3d": (lambda: around(volumes(), nn.LazyBatchNorm3d(), 256), _VOLUME),
    "MultiheadAttention": (lambda: Attending(nn.MultiheadAttention(8, 2, batch_first=True)), _SEQUENCE),
    "Upsample": (lambda: around(nn.Conv2d(1, 2, 3), nn.Upsample(scale_factor=2, mode="bilinear"), 288), (1, 8, 8)),
    "Softplus": (lambda: around(nn.Linear(8, 8), nn.Softplus(), 8), (8,)),
    "GRU": (Recurring, _SEQUENCE),
    "Hardshrink": (lambda: around(nn.Linear(8, 8), nn.Hardshrink(0.1), 8), (8,)),
    "LazyConv1d": (lambda: around(lines(), nn.LazyConv1d(5, 3), 20), _LINE),
    "AvgPool3d": (lambda: around(volumes(), nn.AvgPool3d(2), 32), _VOLUME),
    "PairwiseDistance": (lambda: Pair(nn.PairwiseDistance()), (8,)),
    "GELU": (lambda: around(nn.Linear(8, 8), nn.GELU(), 8), (8,)),
    "BatchNorm2d": (lambda: around(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), 72), (1, 8, 8)),
    "LazyInstanceNorm1d": (lambda: around(lines(), nn.LazyInstanceNorm1d(affine=True), 24), _LINE),
    "LazyConvTranspose1d": (lambda: around(lines(), nn.LazyConvTranspose1d(4, 3), 32), _LINE),
}


def add_layer(name: str) -> None:
    make, shape = LAYERS[name]

    def build() -> Script:
        net = make()
        if name.startswith("Lazy"):
            with torch.no_grad():
                net(torch.randn(4, *shape))
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)

        return Script(train, (net, optimizer), lambda d: (d.x(*shape), d.ints(4)), [net])

    build.__name__ = f"layer_{name}"
    row(f"torch.nn: {name}", independent=not name.startswith(RUNNING), is_late=True)(build)


for _name in LAYERS:
    add_layer(_name)
