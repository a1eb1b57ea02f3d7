"""Options of a training step, in one place for memory, activations and communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypedDict

import torch

from shard_spec._shared.problems import Problem, raise_problems
from shard_spec.plan.metadata import require_floating

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
    problems = []
    loss: Any = options.get("loss", "causal-lm")
    accumulate: Any = options.get("accumulate", 1)  # callers are untyped
    if isinstance(loss, str) and loss not in LOSSES:
        problems.append(
            Problem(
                "invalid-argument",
                "loss",
                found=repr(loss),
                hint=f"one of {', '.join(map(repr, LOSSES))}, a function loss(output, batch), or None",
            )
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        problems.append(
            Problem("invalid-argument", "accumulate", found=repr(accumulate), hint="a number of batches, 1 or more")
        )
    for name, values in (
        ("sync", ("each", "last")),
        ("ddp", (None, "buckets", "views")),
        ("context", ("gather", "ulysses")),
    ):
        value = options.get(name, values[0])
        if value not in values:
            problems.append(Problem("invalid-argument", name, found=repr(value), hint=f"one of {values}"))
    zero: Any = options.get("zero")
    if zero not in (None, 1) or isinstance(zero, bool):
        ways = {2: "plan with FullyShardPlanner and pass reshard_after_forward=False", 3: "plan with FullyShardPlanner"}
        problems.append(
            Problem(
                "invalid-argument",
                "zero",
                found=repr(zero),
                hint=ways.get(zero, "1, or None") if isinstance(zero, int) else "1, or None",
            )
        )
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
    problems = []
    text = "no data axis of several ranks shards parameters, so this option has no effect"
    hint = "leave it out, or shard parameters along a data axis as FullyShardPlanner does"
    for name in ("mp_policy", "reshard_after_forward"):
        if options.get(name) not in (None, True) and not shards:
            problems.append(Problem("conflicting-arguments", name, found=text, hint=hint))
    if options.get("zero") and (shards or not replicates):
        problems.append(
            Problem(
                "conflicting-arguments",
                "zero",
                found="ZeroRedundancyOptimizer shares out the state of replicas along a data axis of several ranks",
                hint="leave it out for this plan",
            )
        )
    if options.get("ddp") and (shards or not replicates):
        problems.append(
            Problem(
                "conflicting-arguments",
                "ddp",
                found="DistributedDataParallel wraps models that are replicated along a data axis of several ranks",
                hint="leave it out for this plan",
            )
        )
    raise_problems(problems)
