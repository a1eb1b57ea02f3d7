"""The cells of the coverage matrix: models, optimizers and styles, and what one cell must prove.

A cell trains a model for five steps with `compile` and with its reference, and compares every loss, parameter and
buffer: under local semantics the reference is DistributedDataParallel, under global semantics one device on all rows.
It also asserts what a rank holds and what was sent, so that one style cannot pass for another.

Two ranks under local semantics run in float32, and most are equal bit for bit: a sum of two has one order. Where sums
have several, all run in float64: a gradient that is 0 but for rounding (a key's bias, a bias before a batch norm)
becomes, divided by its own root of squares + 1e-8, an update of noise as large as the learning rate in float32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import torch
from dp_held_and_sent import check_held, check_sent
from dp_matrix_models import MODELS, UNDER_GLOBAL
from dp_partition.plan.placements import parse_style
from ranktest import Ranks
from torch import nn
from torch.utils import _pytree as pytree

STYLES = ("replicate", "zero1", "zero2", "fully_shard", "default")
STEPS = 5
CLOSE = 1e-5  # float32 sums in another order, after five steps
CLOSE_IN_DOUBLE = 1e-7  # rounding of 1e-17 over 1e-8, or over Adagrad's 1e-10
UPDATE = 1e-2  # about what a step changes an element by


@dataclass(frozen=True)
class Cell:
    """One combination."""

    model: str
    style: str
    optimizer: str
    world: int


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "Adam amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD Nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
}

# How many tensors of a parameter's shape an optimizer keeps.
KEEPS = {"AdamW": 2, "AdamW foreach": 2, "AdamW fused": 2, "Adam amsgrad": 3, "SGD": 0, "SGD Nesterov": 1, "RMSprop": 2,
         "Adagrad": 1, "NAdam": 2, "Adadelta": 2}  # fmt: skip


def cells() -> list[Cell]:
    """Models by styles, under global semantics too; optimizers by styles; pairs at 3 and 4 ranks."""
    all_cells = [Cell(model, style, "AdamW", 2) for model in (*MODELS, *UNDER_GLOBAL) for style in STYLES]
    all_cells += [Cell("GPT, SDPA", style, optim, 2) for optim in OPTIMIZERS if optim != "AdamW" for style in STYLES]
    return all_cells + list(pairs())


def pairs() -> Iterator[Cell]:
    """Every pair of (model, style), (model, world), (style, world), (optimizer, style) and (optimizer, world)."""
    optims = list(OPTIMIZERS)
    for i, model in enumerate(MODELS):
        for j, style in enumerate(STYLES):
            yield Cell(model, style, optims[(3 * i + 7 * j) % len(optims)], 3 + (i + i // 10 + j) % 2)


# ---- what a cell proves ---------------------------------------------------------------------------------------------


def run_cell(ranks: Ranks, cell: Cell) -> str:
    """``bitwise``, ``close`` (how close) or ``refused`` (which error); anything else raises.

    Raises:
        AssertionError: When results, held bytes or messages are not what the style promises.
    """
    make, function, data, semantics = (MODELS | UNDER_GLOBAL)[cell.model]
    mesh = ranks.mesh((ranks.world_size,), ("dp",))
    double = semantics == "global" or cell.world > 2
    model = models.seeded(make).to(ranks.device, torch.float64 if double else torch.float32)
    reference = copy.deepcopy(model)
    own = optimizer(cell, model)
    settings: dict[str, Any] = {"semantics": semantics, "check": "first"}
    step = dp.compile(function, mesh=mesh, style=parse_style(cell.style), **settings)
    generator = torch.Generator().manual_seed(3)
    batches: list[Any] = [data(generator, 4 * ranks.world_size) for _ in range(STEPS)]
    if double:
        batches = pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batches)
    losses = []
    try:
        for number, batch in enumerate(batches[:-1]):
            torch.manual_seed(100 * number + ranks.rank)
            losses.append(step(model, own, *models.rows_of(ranks, batch)).detach().clone())
    except dp.PlanError as error:
        codes = sorted({problem.code for problem in error.problems})
        everywhere = set(map(tuple, ranks.gather(codes)))
        assert len(everywhere) == 1, f"ranks disagree about what is wrong: {everywhere}"
        return f"refused: {', '.join(codes)}"
    torch.manual_seed(100 * (STEPS - 1) + ranks.rank)
    with ranks.record() as log:
        losses.append(step(model, own, *models.rows_of(ranks, batches[-1])).detach().clone())
    check_held(step, ranks, model, own, KEEPS[cell.optimizer])
    check_sent(step, log, semantics)
    expected = train_reference(ranks, cell, reference, function, batches, semantics)
    assert step.num_traces <= 2  # an optimizer that makes its state in the first step has a graph for that
    step.release()
    return compare(ranks, losses, expected, model, reference, double, CLOSE_IN_DOUBLE if double else CLOSE)


def optimizer(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[cell.optimizer]([p for p in model.parameters() if p.requires_grad])


def train_reference(
    ranks: Ranks, cell: Cell, model: nn.Module, function: Any, batches: list[Any], semantics: str
) -> list[torch.Tensor]:
    """Losses of the reference, whose model is trained in place."""
    trained: nn.Module = model
    if semantics == "local":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the name that torch 2.13 wants is not in 2.11
            trained = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optim = optimizer(cell, model)
    losses = []
    for number, batch in enumerate(batches):
        torch.manual_seed(100 * number + ranks.rank)
        rows = models.rows_of(ranks, batch) if semantics == "local" else batch
        losses.append(function(trained, optim, *rows).detach().clone())
    return losses


def compare(
    ranks: Ranks,
    losses: list[torch.Tensor],
    expected: list[torch.Tensor],
    model: nn.Module,
    reference: nn.Module,
    double: bool,
    limit: float,
) -> str:
    """Every loss, parameter and buffer against the reference's."""
    buffers = dict(reference.named_buffers())
    ours = [*losses, *(p.detach() for p in model.parameters()), *(b for b in dict(model.named_buffers()).values())]
    theirs = [*expected, *(p.detach() for p in reference.parameters()), *buffers.values()]
    assert len(ours) == len(theirs) > STEPS
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape, f"{one.shape} is not {other.shape}"
        if not torch.equal(one, other):
            # What starts at 0 and has no gradient but rounding (a key's bias) is compared with the size of an update.
            scale = max(other.abs().max().double().item(), UPDATE if double else 0.0) or 1.0
            worst = max(worst, (one.double() - other.double()).abs().max().item() / scale)
            assert not one.isnan().any()
    worst = max(ranks.gather(worst))
    assert worst <= limit, f"differs from the reference by {worst:.1e}"
    return "bitwise" if worst == 0.0 else f"close: {worst:.0e}"
