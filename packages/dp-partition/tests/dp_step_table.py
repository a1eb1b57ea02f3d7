"""Train steps off the beaten track: each is right in every style, or refused with the code that stands beside it.

A step gets a list of models (one, or a generator and a critic), an optimizer for each, and a rank's rows. The reference
is DistributedDataParallel around each model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import dp_partition as dp
import torch
from dp_gradient_steps import (
    clip,
    grads_by_hand,
    grads_centred,
    grads_decayed,
    grads_none,
    grads_sign,
    hooked,
    penalty_on_input,
    penalty_on_weights,
    two_losses,
    with_closure,
    zeros_instead_of_none,
)
from dp_model_steps import (
    Buffers,
    Complex,
    Counts,
    Recomputed,
    Rounded,
    SharedMemory,
    Small,
    Sparse,
    Strided,
    Unused,
    parametrized,
)
from dp_plain_step import STEPS, WIDTH, adamw, layer_twice, mlp, plain
from dp_update_steps import (
    adversarial,
    autocast,
    averaged,
    clamped,
    data_assigned,
    data_dependent,
    muon,
    no_bias,
    noisy_input,
    normalised,
    parts_of_gradients,
    parts_of_weights,
    rank_value_into_weight,
    scaled,
    sharpness_aware,
    some_groups,
    twice,
    views_from_before,
    writes_argument,
)
from ranktest import Ranks
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class StepRow:
    """One step.

    Attributes:
        function: The step.
        make: Makes its model.
        optim: Makes its optimizer.
        refused: The problem's code where it cannot be run.
        count: How many models it trains.
        unused: Whether some parameters get no gradient.
        reference: What DistributedDataParallel can run in its stead.
        close: How far it may be from its reference: sums in another order.
        every: Whether the tests run it in every style, because what it does depends on where parameters lie.
    """

    function: Callable[..., Any]
    make: Callable[[], nn.Module] = mlp
    optim: Callable[[Any], torch.optim.Optimizer] = adamw
    refused: str = ""
    count: int = 1
    unused: bool = False
    reference: Callable[..., Any] | None = None
    close: float = 1e-6
    every: bool = False


clip_norm = nn.utils.clip_grad_norm_
STEP_ROWS: dict[str, StepRow] = {
    "norm clipped": StepRow(partial(clip, partial(clip_norm, max_norm=0.1))),
    "norm clipped, p = 1": StepRow(partial(clip, partial(clip_norm, max_norm=0.1, norm_type=1.0))),
    "norm clipped, p = inf": StepRow(partial(clip, partial(clip_norm, max_norm=0.1, norm_type=float("inf")))),
    "norm clipped, foreach": StepRow(partial(clip, partial(clip_norm, max_norm=0.1, foreach=True))),
    "value clipped": StepRow(partial(clip, partial(nn.utils.clip_grad_value_, clip_value=0.01))),
    "signs of gradients": StepRow(partial(clip, grads_sign)),
    "gradients replaced": StepRow(partial(clip, grads_decayed)),
    "gradients centred": StepRow(partial(clip, grads_centred)),
    "a gradient left out": StepRow(partial(clip, grads_none)),
    "two losses, a dict": StepRow(two_losses),
    "penalty on the input's gradient": StepRow(penalty_on_input),
    "penalty on the weights' gradient": StepRow(penalty_on_weights, refused="not-differentiable"),
    "gradients by hand": StepRow(grads_by_hand, reference=plain),
    "closure": StepRow(with_closure),
    "zeros instead of None": StepRow(zeros_instead_of_none),
    "hook on a parameter": StepRow(plain, partial(hooked, "register_hook"), refused="parameter-hooks"),
    "hook after accumulation": StepRow(plain, partial(hooked, "post"), refused="parameter-hooks"),
    "unused parameters": StepRow(plain, Unused, unused=True),
    "buffers": StepRow(plain, Buffers, partial(torch.optim.SGD, lr=0.1)),
    "a Python counter": StepRow(plain, Counts, refused="python-state"),
    "a buffer in a parameter's memory": StepRow(plain, SharedMemory, refused="shared-memory"),
    "strided parameters": StepRow(plain, Strided),
    "few rows, none, no dims": StepRow(plain, Small, partial(torch.optim.SGD, lr=0.1)),
    "several dtypes": StepRow(plain, Rounded, partial(torch.optim.SGD, lr=0.1)),
    "complex": StepRow(plain, Complex, partial(torch.optim.SGD, lr=0.1)),
    "checkpointed": StepRow(plain, partial(Recomputed, False)),
    "checkpointed, reentrant": StepRow(plain, partial(Recomputed, True)),
    "weight norm": StepRow(plain, partial(parametrized, "weight_norm")),
    "spectral norm": StepRow(plain, partial(parametrized, "spectral_norm")),
    "orthogonal": StepRow(plain, partial(parametrized, "orthogonal")),
    "sparse gradients": StepRow(plain, Sparse, partial(torch.optim.SGD, lr=0.1), refused="sparse-gradient"),
    "autocast bfloat16": StepRow(partial(autocast, torch.bfloat16)),
    "autocast float16": StepRow(partial(autocast, torch.float16)),
    # Without a cache of casts the two gradients of the weight are added in float32, with one in bfloat16.
    "autocast, a layer twice": StepRow(partial(autocast, torch.bfloat16), layer_twice, close=2e-2),
    "gradient scaler, overflow": StepRow(scaled),
    "gradient scaler of values": StepRow(scaled, optim=partial(torch.optim.SGD, lr=0.1), refused="not-traceable"),
    "weights clamped": StepRow(clamped),
    "weights normalised": StepRow(normalised),
    "a second model follows": StepRow(averaged, count=2),
    "adversarial": StepRow(adversarial, count=2),
    "two updates": StepRow(twice),
    "noise": StepRow(noisy_input),
    "an argument is written": StepRow(writes_argument),
    "a branch on the loss": StepRow(data_dependent, refused="not-traceable"),
    "a rank's value in a weight": StepRow(rank_value_into_weight, refused="ranks-diverge", every=True),
    "parts of weights written": StepRow(parts_of_weights, every=True),
    "parts of gradients and moments written": StepRow(parts_of_gradients, close=1e-5, every=True),
    "`weight.data =`": StepRow(data_assigned, refused="parameter-replaced"),
    "sharpness-aware minimisation": StepRow(sharpness_aware, close=1e-5),
    "views from before the update": StepRow(views_from_before, every=True),
    "RAdam": StepRow(plain, optim=torch.optim.RAdam, refused="not-traceable"),
    "ASGD": StepRow(plain, optim=torch.optim.ASGD, refused="not-traceable"),
    "Adafactor": StepRow(plain, optim=torch.optim.Adafactor, refused="not-traceable"),
    "Rprop": StepRow(plain, optim=torch.optim.Rprop),
    "Adamax": StepRow(plain, optim=torch.optim.Adamax),
    "SparseAdam": StepRow(plain, Sparse, torch.optim.SparseAdam, refused="sparse-gradient"),
    "LBFGS": StepRow(with_closure, optim=torch.optim.LBFGS, refused="not-traceable"),
    "groups, maximize": StepRow(plain, optim=some_groups),
    "Muon": StepRow(plain, no_bias, muon),
}


ALSO_REFUSED = {("two updates", style): "no-sharding-strategy" for style in ("zero1", "zero2")}


def run_row(ranks: Ranks, row: StepRow, style: Any, **settings: Any) -> str:
    """``bitwise``, ``close: ...`` or ``refused: code``; anything else raises."""
    mesh = ranks.mesh((ranks.world_size,), ("dp",))
    ours, theirs = ([model.to(ranks.device) for model in _made(row)] for _ in range(2))
    step = dp.compile(row.function, mesh=mesh, style=style, **settings)
    try:
        found = _train(ranks, row, ours, ours, step)
    except dp.PlanError as error:
        codes = sorted({problem.code for problem in error.problems})
        assert len(set(map(tuple, ranks.gather(codes)))) == 1, "all ranks refuse alike"
        return f"refused: {', '.join(codes)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        parallel = partial(
            nn.parallel.DistributedDataParallel, broadcast_buffers=False, find_unused_parameters=row.unused
        )
        wrapped: list[nn.Module] = [parallel(model) for model in theirs]
    expected = _train(ranks, row, theirs, wrapped, row.reference or row.function)
    worst = max(ranks.gather(_difference(found, expected)))
    assert worst <= row.close, f"differs from DistributedDataParallel by {worst:.0e}"
    return "bitwise" if worst == 0 else f"close: {worst:.0e}"


def _made(row: StepRow) -> list[nn.Module]:
    """The models; a copy of them would lose hooks and shared memory."""
    torch.manual_seed(0)
    return [row.make() for _ in range(row.count)]


def _difference(results: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The greatest one, relative to the greatest value of its tensor."""
    assert len(results) == len(expected) > STEPS
    worst = 0.0
    for one, other in zip(results, expected, strict=True):
        assert one.shape == other.shape
        if not torch.equal(one, other):
            wide = torch.complex128 if one.is_complex() else torch.float64
            scale = other.to(wide).abs().max().item() or 1.0
            off = (one.to(wide) - other.to(wide)).abs().max().item() / scale
            assert off == off, "not a number, where the reference has one"
            worst = max(worst, off)
    return worst


def _train(
    ranks: Ranks, row: StepRow, bare: list[nn.Module], used: list[nn.Module], function: Any
) -> list[torch.Tensor]:
    """All results and arguments, then all parameters and buffers."""
    optims = [row.optim(model.parameters()) for model in bare]
    results: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(3 + ranks.rank)
    for number in range(STEPS):
        torch.manual_seed(10 * number + ranks.rank)
        x, y = (torch.randn(4, WIDTH, generator=generator).to(ranks.device) for _ in range(2))
        args = (used[0], optims[0]) if row.count == 1 else (used, optims)
        out = function(*args, x, y)
        results += [leaf.detach().clone() for leaf in pytree.tree_leaves(out)] + [x]
    if isinstance(function, dp.CompiledStep):
        function.release()
    return results + [t.detach() for model in bare for t in (*model.parameters(), *model.buffers())]


# Two markers cannot stand for parameters that one call updates twice; the error says which style can.
