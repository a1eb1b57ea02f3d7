"""Options of a training step and its batch, in one place for memory, activations and communication.

A plan fixes layouts, not their use. Roles of axes say it (:mod:`shard_spec.plan.axis_roles`); here a layout becomes the
role of one weight along a model axis.

A batch is given as a shape of token ids, or the arguments of forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias, TypedDict

import torch
from torch import nn

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import StageShard
from shard_spec.plan.axis_roles import AxisRoles
from shard_spec.plan.metadata import TensorMetadata, require_floating

Loss: TypeAlias = "str | Callable[[Any, Any], torch.Tensor] | None"
LOSSES = ("causal-lm", "vocab-parallel")
POLICY = ("param_dtype", "reduce_dtype", "output_dtype")


class StepOptions(TypedDict, total=False):
    """Options of a training step: ``accumulate`` forwards and backwards, then the optimizer's step.

    Attributes:
        data_axes: Axes along which ranks see different samples; ranks along the others see the same. Default: the
            roles of the plan (planners know theirs), then those of conventional names (dp, fsdp, tp, ...), which the
            result repeats as an assumption. An axis of neither is refused.
        dtype: Dtype of all floating tensors after a conversion, as by ``module.to(dtype)``.
        loss: For logits of token ids: ``"causal-lm"`` (default), the cross entropy of the next token, on gathered
            logits; ``"vocab-parallel"``, the same on logits that stay sharded along the vocabulary. Or a function
            ``loss(output, batch)``; or None: the loss is not counted. A loss returned by forward itself (labels in
            ``batch``) is counted as it is.
        checkpointing: True counts as if each block, a child of a `ModuleList`, were recomputed in backward. Blocks
            checkpointed by the model itself are counted so anyway.
        units: FQNs or patterns of the modules that ``fully_shard`` wraps beside the root. Default: each block.
        accumulate: Number of batches before the optimizer's step, 1 by default; ``batch`` is one of them.
        sync: ``"each"`` (default): gradients are reduced after each backward; ``"last"``: after the last one alone
            (``set_requires_gradient_sync``, ``no_sync``), and full gradients are held until then.
        reshard_after_forward: False: units of ``fully_shard`` stay gathered between forward and backward.
        mp_policy: ``fully_shard``'s ``MixedPrecisionPolicy``, or a mapping of its ``param_dtype`` (gathered parameters
            and compute), ``reduce_dtype`` and ``output_dtype`` to names of dtypes.
        ddp: ``DistributedDataParallel``'s buckets for replicated parameters: ``"buckets"``, or ``"views"`` with
            ``gradient_as_bucket_view``. None: gradients are reduced in place.
        autocast: Dtype of ``torch.autocast`` around forward and loss. One within the forward counts as it is.
        zero: 1 counts optimizer state on one rank a parameter along the data axes, as torch's
            ``ZeroRedundancyOptimizer`` shares it out.
        context: What attention exchanges along context axes: ``"gather"`` (default), keys and values of all ranks; or
            ``"ulysses"``, heads for tokens: queries, keys, values and results.
    """

    data_axes: Iterable[str] | None
    dtype: str | None
    loss: Loss
    checkpointing: bool
    units: Iterable[str] | None
    accumulate: int
    sync: str
    reshard_after_forward: bool
    mp_policy: Any
    ddp: str | None
    autocast: str | None
    zero: int | None
    context: str


def policy_of(options: StepOptions) -> dict[str, str | None]:
    """Return the dtypes of the mixed-precision policy by its fields' names; None where it has none."""
    policy = options.get("mp_policy")
    if policy is None:
        return dict.fromkeys(POLICY)
    if isinstance(policy, Mapping):
        unknown = [Problem("unknown-name", f"mp_policy[{key!r}]", found="no field of a policy", hint=", ".join(POLICY))
                   for key in policy if key not in POLICY]  # fmt: skip
        raise_problems(unknown)
        return {key: policy.get(key) for key in POLICY}
    dtypes = {key: getattr(policy, key, None) for key in POLICY}
    return {key: None if dtype is None else str(dtype).removeprefix("torch.") for key, dtype in dtypes.items()}


def check_options(options: StepOptions) -> None:
    """Refuse options that are wrong on every plan.

    Raises:
        PlanError: With every wrong option.
    """
    require_floating(options.get("dtype"), options.get("autocast"), *policy_of(options).values())
    loss: Any = options.get("loss", "causal-lm")
    accumulate: Any = options.get("accumulate", 1)  # callers are untyped
    zero: Any = options.get("zero")
    ways = {2: "plan with FullyShardPlanner and pass reshard_after_forward=False", 3: "plan with FullyShardPlanner"}
    choices = ("sync", ("each", "last")), ("ddp", (None, "buckets", "views")), ("context", ("gather", "ulysses"))
    rules = (
        (
            isinstance(loss, str) and loss not in LOSSES,
            "loss",
            loss,
            f"one of {', '.join(map(repr, LOSSES))}, a function loss(output, batch), or None",
        ),
        (
            isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1,
            "accumulate",
            accumulate,
            "a number of batches, 1 or more",
        ),
        *(
            (options.get(name, values[0]) not in values, name, options.get(name, values[0]), f"one of {values}")
            for name, values in choices
        ),
        (
            zero not in (None, 1) or isinstance(zero, bool),
            "zero",
            zero,
            ways.get(zero, "1, or None") if isinstance(zero, int) else "1, or None",
        ),
    )
    problems = [
        Problem("invalid-argument", name, found=repr(value), hint=hint) for wrong, name, value, hint in rules if wrong
    ]
    if options.get("sync") == "last" and accumulate == 1:
        problems.append(
            Problem(
                "conflicting-arguments",
                "sync",
                found="gradients are reduced once anyway",
                hint="pass accumulate= with the number of batches, or leave it out",
            )
        )
    raise_problems(problems)


def check_effects(options: StepOptions, *, shards: bool, replicates: bool) -> None:
    """Refuse options without effect on a plan.

    Args:
        options: As the caller gave them.
        shards: True if a data axis of several ranks shards parameters, as ``fully_shard`` does.
        replicates: True if there is a data axis of several ranks.

    Raises:
        PlanError: With every such option.
    """
    of_replicas, along = "leave it out for this plan", "along a data axis of several ranks"
    rules = [
        *(
            (
                name,
                options.get(name) not in (None, True) and not shards,
                "no data axis of several ranks shards parameters, so this option has no effect",
                "leave it out, or shard parameters along a data axis as FullyShardPlanner does",
            )
            for name in ("mp_policy", "reshard_after_forward")
        ),
        *(
            (name, bool(options.get(name)) and (shards or not replicates), text, of_replicas)
            for name, text in (
                ("zero", f"ZeroRedundancyOptimizer shares out the state of replicas {along}"),
                ("ddp", f"DistributedDataParallel wraps models that are replicated {along}"),
            )
        ),
    ]
    raise_problems(
        Problem("conflicting-arguments", name, found=found, hint=hint) for name, wrong, found, hint in rules if wrong
    )


# Class of module -> (output dim of its weight, input dim).
_LINEAR = {"Linear": (0, 1), "Conv1D": (1, 0)}
_EMBEDDING = {"Embedding": (1, 0)}


def uncounted_axes(mesh: MeshSpec, roles: AxisRoles, counted: Iterable[str] = ()) -> list[str]:
    """Return remarks on uncounted costs along axes of several ranks, but those of ``counted`` activations."""
    remarks = (
        ("expert", "experts stay where they are; the exchange of tokens for them is not counted"),
        ("context", "tokens of one sample lie on several ranks; what attention exchanges is not counted"),
        ("stage", "every stage counts as planned; what stages send each other is not counted"),
    )
    axes = ((axis, text) for role, text in remarks for axis in roles.axes(role) if mesh.axis_size(axis) > 1)
    return [f"{axis}: {text}" for axis, text in axes if axis not in counted]


def expert_modules(parameters: Iterable[TensorMetadata]) -> frozenset[str]:
    """Return FQNs of modules with several experts in one parameter, counted by dim 0."""
    stacked = (tensor for tensor in parameters if len(tensor.shape) == 3 and tensor.shape[0] > 1)
    return frozenset(t.name.rpartition(".")[0] for t in stacked if not t.module_type.startswith("Conv"))


def is_embedding(tensor: TensorMetadata) -> bool:
    """Return True if the tensor is a lookup table, not a factor of a product."""
    return tensor.module_type in _EMBEDDING


def role(tensor: TensorMetadata, layout: Layout, axis: str) -> str:
    """Return the role along ``axis``: ``"column"`` (outputs), ``"row"`` (inputs), ``"cut"`` (else) or ``"whole"``."""
    spec = layout.specs[layout.mesh.axis_index(axis)]
    if spec.dim is None or layout.mesh.axis_size(axis) == 1 or isinstance(spec, StageShard):  # one rank holds all
        return "whole"
    dims = _LINEAR.get(tensor.module_type) or _EMBEDDING.get(tensor.module_type)
    is_weight = len(tensor.shape) == 2 and tensor.name.rsplit(".", 1)[-1].startswith("weight")
    if dims is None or not is_weight:
        return "cut"
    return "column" if spec.dim % len(tensor.shape) == dims[0] else "row"


Batch: TypeAlias = Sequence[int] | Any
"""Numbers count the step of all ranks: ``(sequences, length)`` of token ids. Tensors are what one rank passes to
forward: one tensor, a tuple of arguments, or a mapping of keyword arguments."""


def forward_inputs(
    module: nn.Module, batch: Batch, mesh: MeshSpec, roles: AxisRoles
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return one rank's arguments of ``module.forward``; token ids are zeros on the meta device.

    Sequences are divided along data axes, the tokens of each sequence along context axes.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not is_token_batch(batch):
        return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})
    if isinstance(batch, int) or len(batch) != 2 or min(batch) < 1:  # tokens alone have no shape
        raise PlanError(
            Problem(
                "invalid-argument",
                "batch",
                found=f"{batch!r:.100}",
                hint="give (sequences, length), or what one rank passes to forward",
            )
        )
    context = roles.axes("context")
    sides = ("sequences", [axis for axis in roles.data if axis not in context]), ("tokens of a sequence", context)
    shares = [prod(map(mesh.axis_size, axes)) for _, axes in sides]
    raise_problems(
        Problem(
            "does-not-divide",
            "batch",
            axis=axes[0],
            found=f"{size} {what} over {ranks} ranks of {', '.join(axes)}",
            hint=f"give a multiple of {ranks}",
        )
        for size, ranks, (what, axes) in zip(batch, shares, sides, strict=True)
        if size % ranks
    )
    local = (size // ranks for size, ranks in zip(batch, shares, strict=True))
    tokens = torch.zeros(*local, dtype=torch.long, device="meta")
    if "input_ids" in inspect.signature(module.forward).parameters:  # transformers
        return (), {"input_ids": tokens}
    return (tokens,), {}


def is_token_batch(batch: Batch) -> bool:
    """Return True if ``batch`` is made of numbers: ``(sequences, length)`` of token ids, or wrong."""
    return isinstance(batch, int) or (isinstance(batch, Sequence) and all(isinstance(each, int) for each in batch))
