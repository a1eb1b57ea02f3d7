"""Sizes and checks of layers for column-wise and row-wise styles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Placement

from tp_styles.problems import Problem, StyleTypeError
from tp_styles.values.spec import ModuleInfo, ParameterSpec, Redistribution
from tp_styles.values.split import Split
from tp_styles.values.transfer import NoTransfer


@dataclass(frozen=True)
class LinearShape:
    """Sizes of a linear layer and dims of its weight (transposed in GPT-2's `Conv1D`)."""

    in_features: int
    out_features: int
    in_dim: int = 1
    out_dim: int = 0


def is_conv1d(kind: type[nn.Module]) -> bool:
    """True for transformers' `Conv1D`, a linear layer with a transposed weight."""
    # By name: transformers need not be installed.
    return any(base.__name__ == "Conv1D" and base.__module__.startswith("transformers.") for base in kind.__mro__)


def linear_shape(info: ModuleInfo) -> LinearShape | None:
    """Return the layer's global sizes, None for other modules."""
    if issubclass(info.kind, nn.Linear):
        in_features, out_features = info.size("in_features"), info.size("out_features")
        assert isinstance(in_features, int)
        assert isinstance(out_features, int)
        return LinearShape(in_features, out_features)
    weight = info.parameter("weight")
    if is_conv1d(info.kind) and weight is not None:
        in_features, out_features = weight.shape
        return LinearShape(in_features, out_features, in_dim=0, out_dim=1)  # transposed
    return None


def linear_problems(info: ModuleInfo, shape: LinearShape, known: tuple[str, ...] = ("weight", "bias")) -> list[Problem]:
    """List reasons not to shard this linear layer."""
    problems = []
    weight = info.parameter("weight")
    expected = [0, 0]
    expected[shape.in_dim], expected[shape.out_dim] = shape.in_features, shape.out_features
    if weight is None or list(weight.shape) != expected:
        reason = "no weight" if weight is None else f"a weight of shape {weight.shape}"
        problems.append(
            Problem("shape-mismatch", info.where("weight"), found=reason, hint=f"its features need {tuple(expected)}")
        )
    others = [p.name for p in info.parameters if p.name not in known]
    if others:
        hint = "a linear layer's style handles weight and bias; write a style with spec() for this class"
        problems.append(Problem("unknown-name", info.where(), found=", ".join(others), hint=hint))
    return problems


def embedding_problems(info: ModuleInfo, *, by_rows: bool) -> list[Problem]:
    """List reasons not to shard this embedding."""
    problems = []
    if info.size("max_norm") is not None:
        hint = "renormalising in place needs full rows that are equal on every rank; set max_norm=None"
        problems.append(
            Problem("unsupported-option", info.where(), found=f"max_norm={info.size('max_norm')}", hint=hint)
        )
    if info.size("sparse"):
        problems.append(
            Problem("sparse-gradient", info.where(), found="sparse=True", hint="use dense gradients: sparse=False")
        )
    if by_rows and info.size("scale_grad_by_freq"):
        hint = "a rank that holds some of the rows cannot count the others; use ColwiseParallel"
        problems.append(Problem("unsupported-option", info.where(), found="scale_grad_by_freq=True", hint=hint))
    return problems


def wrong_kind(info: ModuleInfo, style: str) -> Problem:
    """Return the problem of a style on an unsupported kind of module."""
    what = "name the layers inside, use a style for this class, or leave it out of the plan"
    hint = f"{style} is for nn.Linear and nn.Embedding; {what}"
    return Problem("module-kind", info.where(), found=info.kind.__name__, hint=hint)


def single(placement: Placement | tuple[Placement, ...] | None, default: Placement, argument: str) -> Placement:
    """Return the single placement of an argument.

    Raises:
        StyleTypeError: It holds something else, `input_layouts=(Shard(0),)` with two of them for example.
    """
    if placement is None:
        return default
    if isinstance(placement, tuple) and len(placement) == 1:
        placement = placement[0]
    if not isinstance(placement, Placement):
        raise StyleTypeError(
            Problem("wrong-type", argument, found=repr(placement), hint="pass one placement, for example Shard(1)")
        )
    return placement


def specs(splits: Sequence[tuple[str, Split]]) -> tuple[tuple[str, ParameterSpec], ...]:
    """Return parameter specs by name; gradients of copied shards are summed."""
    copied = {name: any(section.copies > 1 for section in split.sections) for name, split in splits}
    return tuple((name, ParameterSpec(split, sum_gradient=copied[name])) for name, split in splits)


def flow_problems(info: ModuleInfo, flows: Iterable[tuple[str, Redistribution]]) -> list[Problem]:
    """List flows without a possible transfer, as problems."""
    problems = []
    for name, flow in flows:
        try:
            # With this many dims `Shard(-1)` differs from a dim counted from the front.
            transfer = flow.transfer(PROBE_DIMS)
        except NoTransfer as error:
            problems.append(
                Problem(
                    "invalid-argument", info.where(name), found=str(error), hint="ask for Replicate() or Shard(dim)"
                )
            )
            continue
        steps = (transfer.forward, transfer.backward)
        if (
            flow.split is not None
            and not flow.split.is_single  # they shard contiguous rows
            and any(step.op in ("reduce_scatter", "all_to_all") for step in steps)
        ):
            problems.append(
                Problem(
                    "invalid-sections",
                    info.where(name),
                    found=f"{flow.src} to {flow.dst} of a last dim {flow.split}",
                    hint="a last dim in sections stays a shard of them, or is gathered: Shard(-1) or Replicate()",
                )
            )
    return problems


PROBE_DIMS = 8
