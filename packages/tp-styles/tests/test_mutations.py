"""Mistakes made by a script in plans and in the steps that move activations: the check has to find them.

Each mutation changes one field of one module's plan, or one kind of step wherever it is carried out. One that no call
carries out, and one that changes nothing (a gradient of an input that asks for none), is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from tp_styles.runtime import redistribute
from tp_styles.runtime.redistribute import Redistribute
from tp_styles.values import Step

Mutant = tuple[str, Callable[[], Any], tp.TPPlan]


class SequenceBlock(nn.Module):
    """A norm on a sequence shard, then a gated pair between sequence shards, after a layer that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.inner = nn.Linear(16, 16), nn.LayerNorm(16), models.Gated(16)
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.inner(self.norm(self.first(x))))
        return result


def grouped() -> nn.Module:
    return models.roughen(models.Grouped(vocab=18, dropout=0.1, layers=1))


def vectors() -> torch.Tensor:
    return torch.randn(2, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ids() -> torch.Tensor:
    return torch.arange(8).view(2, 4) * 2


ATTENTION = tp.GQAParallel(q="q", k="k", v="v", o="o", norms=("q_norm", "k_norm"))
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, tp.ParallelStyle], Callable[[], torch.Tensor]]] = {
    "sequence": (
        SequenceBlock,
        {
            "first": tp.ColwiseParallel(output_layouts=Replicate()),
            "norm": tp.SequenceParallel(use_local_output=True),
            "inner.both": tp.FusedColwiseParallel(2, input_layouts=Shard(1)),
            "inner.down": tp.RowwiseParallel(output_layouts=Shard(1)),
            "last": tp.RowwiseParallel(input_layouts=Shard(1)),
        },
        vectors,
    ),
    "language model": (
        grouped,
        {
            "embed": tp.RowwiseParallel(),
            "layers.*.attn": ATTENTION,
            "layers.*.mlp.{gate,up}_proj": tp.ColwiseParallel(),
            "layers.*.mlp.act": tp.NoParallel(sum_gradient=True),
            "layers.*.mlp.down_proj": tp.RowwiseParallel(),
            "head": tp.ColwiseParallel(output_layouts=Replicate()),
        },
        ids,
    ),
}
# The norm takes whole positions: `first` gives them all, `norm` wants this rank's.
MODELS["sequence"][1]["first"] = tp.ColwiseParallel(output_layouts=Shard(1))


def plan_mutants(name: str) -> Iterator[Mutant]:
    """Every module of the plan with one field changed."""
    make, styles, _ = MODELS[name]
    plan = tp.plan_styles(make(), styles, 2)
    assert not plan.problems
    for index, planned in enumerate(plan.modules):
        spec = planned.spec
        changed: dict[str, Any] = {}
        for at, (key, parameter) in enumerate(spec.parameters):
            if not parameter.split.is_replicated and parameter.split.sections[0].copies == 1:
                continue  # one rank holds each shard: there is nothing to sum
            others = replace(parameter, sum_gradient=not parameter.sum_gradient)
            changed[f"sum_gradient of {key}"] = {"parameters": _with(spec.parameters, at, (key, others))}
        for at, (key, flow) in enumerate(spec.inputs):
            for text, gradient in (("replicated", Replicate()), ("partial", Partial())):
                if flow.width and flow.gradient != gradient and isinstance(flow.dst, Replicate):  # ids have none
                    one = (key, replace(flow, gradient=gradient))
                    changed[f"gradient of {key} {text}"] = {"inputs": _with(spec.inputs, at, one)}
        for at, output in enumerate(spec.outputs):
            if output is not None and isinstance(output.src, Partial):
                other_output = replace(output, src=Replicate())
                changed["the sum of its output"] = {"outputs": _with(spec.outputs, at, other_output)}
        for text, fields in changed.items():
            other = replace(planned, spec=replace(spec, **fields))
            yield f"{planned.name}: {text}", make, replace(plan, modules=_with(plan.modules, index, other))


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def skipped(move: Redistribute, step: Step, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result in its shape, of this rank's numbers alone."""
    if step.op in ("all_reduce", "all_to_all"):
        return x.clone().view(result.shape)
    if step.op == "all_gather":
        assert step.dim is not None
        return torch.cat([x] * move.axis.size, step.dim)[tuple(slice(0, size) for size in result.shape)]
    return x[tuple(slice(0, size) for size in result.shape)].clone()


STEPS: dict[str, Callable[[Redistribute, Step, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "skipped": skipped,
    "scaled": lambda move, step, x, result: result * 1.001,
    "one rank's": lambda move, step, x, result: result * (move.axis.rank == 0),
    "rolled": lambda move, step, x, result: result.roll(1, -1),
    "negated": lambda move, step, x, result: -result,
}


Kind = tuple[str, bool]
"""An operation, and True for a backward pass."""


@contextmanager
def mutated(kind: Kind | None = None, change: Callable[..., torch.Tensor] = skipped) -> Iterator[set[Kind]]:
    """Within, steps of one kind give something else; yields the kinds of all steps that were carried out."""
    run, pull = Redistribute.run, redistribute._Moved.backward
    kinds: set[Kind] = set()
    inside: list[int] = []

    def other(self: Redistribute, step: Step, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = x.clone()
        result = run(self, step, x, *args, **kwargs)
        kinds.add((step.op, bool(inside)))
        if (step.op, bool(inside)) == kind:
            result = change(self, step, before, result)
        return result

    def pulled(ctx: Any, gradient: torch.Tensor) -> Any:
        inside.append(1)
        try:
            return pull(ctx, gradient)
        finally:
            inside.pop()

    Redistribute.run, redistribute._Moved.backward = other, staticmethod(pulled)  # type: ignore[method-assign]
    try:
        yield kinds
    finally:
        Redistribute.run, redistribute._Moved.backward = run, staticmethod(pull)  # type: ignore[method-assign]


def is_found(make: Callable[[], Any], plan: Any, batch: torch.Tensor, mesh: Any) -> bool:
    model: Any = models.seeded(make).double()
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(plan, tp.TPPlan):  # a mutant is planned already
            patch.setattr("tp_styles.apply.plan_module", lambda *_, **__: plan)
        tp.apply_plan(model, mesh, plan)
    try:
        out = model(batch.requires_grad_() if batch.is_floating_point() else batch)
        out.square().sum().backward()
    except tp.PlanError as error:
        return "check-" in str(error) or "wrong" in str(error)
    return False


@pytest.mark.ranks(2, timeout=240)
def test_mutations(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    outcomes: dict[str, bool] = {}
    for name, (make, styles, batch) in MODELS.items():
        with mutated() as kinds:
            assert not is_found(make, styles, batch(), mesh), name
        for text, build, plan in plan_mutants(name):
            outcomes[f"{name}, {text}"] = is_found(build, plan, batch(), mesh)
        for op, backward in sorted(kinds - {("none", False), ("none", True)}):
            for how, change in STEPS.items():
                with mutated((op, backward), change):
                    caught = is_found(make, styles, batch(), mesh)
                outcomes[f"{name}, {op} {'backward' if backward else 'forward'} {how}"] = caught
    missed = [text for text, caught in outcomes.items() if not caught]
    assert len(outcomes) >= 60, len(outcomes)
    assert missed == [], "\n".join([str(len(outcomes)), *missed])
