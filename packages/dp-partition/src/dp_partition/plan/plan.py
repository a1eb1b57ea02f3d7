"""The plan: placements of every parameter, its gradient and its optimizer state, from shapes and settings alone.

`Settings` are the choices of the caller of `compile`, as one value for all stages.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from dp_partition._shared.page import human_bytes
from dp_partition._shared.problems import PlanError, Problem
from dp_partition.plan.placements import DataParallelStyle, describe, local_shape

Style = Literal["default", "replicate", "zero1", "zero2", "fully_shard", "hybrid"]
Semantics = Literal["local", "global"]

_REDUCED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class CommConfig:
    """Settings of communication.

    Attributes:
        bucket_bytes: Largest size of a bucket; a larger tensor is sent alone. 0: no buckets.
        prefetch: Number of parameter buckets in flight ahead of the one needed by compute, and of
            gradient buckets in flight before they become shards.
        reduce_dtype: Dtype of the reduction of gradients; None: their own.
    """

    bucket_bytes: int = 25 << 20
    prefetch: int = 1
    reduce_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Batch:
    """Position of the batch in the tensor arguments of a step.

    Attributes:
        dim: The batch dim of every tensor argument that has dims.
    """

    dim: int = 0


@dataclass(frozen=True)
class Settings:
    """Choices for all programs of a step, as documented at `compile`; ``dynamic`` is its ``mark_dynamic``.

    `distribute` uses the style, the check, the communication, and its own ``full`` and ``observe``.
    """

    style: DataParallelStyle
    semantics: str = "local"
    placements: Mapping[str, Placement] = field(default_factory=dict)
    batch_dim: int = 0
    comm: CommConfig = field(default_factory=CommConfig)
    accumulate: int = 1
    reshard: bool | frozenset[str] = True
    check: str = "sampled"
    dynamic: tuple[int, ...] = ()
    full: str = "keep"
    observe: bool = True

    def text(self) -> str:
        """Return choices to compare between ranks beside the plan and the collectives."""
        chosen = (self.semantics, self.accumulate, self.batch_dim, self.check)
        return ", ".join(map(str, (*chosen, self.dynamic)))

    def needs_graph(self) -> bool:
        """Return True if a choice is `compile`'s alone: `distribute` would leave it out."""
        return self.semantics == "global" or self.accumulate > 1 or bool(self.placements)

    def reduction(self) -> str:
        """Return the reduction of gradients as text for the plan; empty if it is plain."""
        dtype = self.comm.reduce_dtype
        return "" if dtype is None else f"in {str(dtype).removeprefix('torch.')}"

    def problems(self) -> list[Problem]:
        """Return the problems of the choices, by themselves and together."""
        result = [  # every choice, not only the first wrong one
            *choice("semantics", self.semantics, ("local", "global")),
            *choice("check", self.check, ("sampled", "first", "never")),
        ]
        if self.semantics == "global" and self.accumulate > 1:
            result.append(
                Problem(
                    "cannot-accumulate",
                    "accumulate",
                    found=f"accumulate={self.accumulate}, global semantics",
                    hint="use semantics='local'",
                )
            )
        if self.semantics == "global" and self.style is DataParallelStyle.HYBRID:  # rules know one axis
            result.append(
                Problem(
                    "conflicting-arguments", "style", found="hybrid, global semantics", hint="use semantics='local'"
                )
            )
        if self.dynamic and (self.semantics, self.accumulate) != ("local", 1):
            result.append(
                Problem(
                    "conflicting-arguments",
                    "mark_dynamic",
                    found=f"semantics={self.semantics!r}, accumulate={self.accumulate}",
                    hint="leave it out, each length takes a trace then; or use local semantics, without accumulate",
                )
            )
        result += reduction_problems(self.comm.reduce_dtype)
        if self.accumulate < 1 or self.comm.prefetch < 0 or self.comm.bucket_bytes < 0:
            result.append(Problem("invalid-argument", "accumulate, prefetch or bucket_mb", found="a number too small"))
        return result


def reduction_problems(dtype: object) -> list[Problem]:
    """Return a problem for a dtype in which no gradient is reduced, such as an integer one."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype in _REDUCED_DTYPES):
        return []
    return [
        Problem(
            "invalid-argument",
            "reduce_dtype",
            found=repr(dtype),
            hint=f"use one of {', '.join(map(str, _REDUCED_DTYPES))}",
        )
    ]


def choice(name: str, value: object, allowed: tuple[object, ...]) -> list[Problem]:
    """Return a problem for an argument that has none of the allowed values."""
    if value in allowed:
        return []
    return [Problem("invalid-argument", name, found=repr(value), hint=f"use one of {', '.join(map(repr, allowed))}")]


def not_placed(name: str) -> PlanError:
    """Return the error of a step that has not run yet."""
    return PlanError(Problem("not-sharded", name, found="nothing is placed yet", hint="call the step once"))


FORMAT = 1


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of a parameter for planning."""

    name: str
    shape: tuple[int, ...]  # global
    dtype: torch.dtype
    requires_grad: bool = True

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ParamPlan:
    """Placement of one parameter, with the reason.

    Attributes:
        info: The parameter.
        param: Placement of the parameter between steps.
        grad: Placement of its reduced gradient.
        state: Placement of optimizer state of the same shape.
        reason: The deciding rule.
        aliases: Its other registered names (tied parameters).
    """

    info: TensorInfo
    param: Placement
    grad: Placement
    state: Placement
    reason: str
    aliases: tuple[str, ...] = ()

    def local_numel(self, placement: Placement, world: int, rank: int) -> int:
        """Return the elements of a rank's shard under one of the placements."""
        return math.prod(local_shape(self.info.shape, placement, world, rank))


@dataclass(frozen=True)
class PartitionPlan:
    """Placement of everything that persists between steps.

    Attributes:
        style: The requested style.
        semantics: ``"local"`` or ``"global"``.
        world: Number of data-parallel ranks.
        params: One entry per unique parameter.
        replicas: Number of replicas of all that (``"hybrid"``); a gradient is averaged over them too.
        reduction: Reduction of gradients, unless it is plain: their dtype in it, or the hook's name.
        checks: Calls compared with the eager step, and reasons for no comparison; not compared between plans.
        problems: Problems of the plan; a plan with problems is not executed.
    """

    style: DataParallelStyle
    semantics: str
    world: int
    params: tuple[ParamPlan, ...]
    problems: tuple[Problem, ...] = field(default=())
    replicas: int = 1
    reduction: str = ""
    checks: str = field(default="", compare=False)

    def __getitem__(self, name: str) -> ParamPlan:
        for param in self.params:
            if name == param.info.name or name in param.aliases:  # tied: any of its names
                return param
        raise KeyError(name)

    def param_bytes(self, rank: int = 0) -> int:
        """Return the bytes of parameters on a rank between steps."""
        return sum(p.local_numel(p.param, self.world, rank) * p.info.dtype.itemsize for p in self.params)

    def explain(self, name: str | None = None) -> str:
        """Return text about one parameter, or a table of all."""
        if name is not None:
            item, world = self[name], self.world
            info = item.info
            elements = [item.local_numel(item.param, world, rank) for rank in range(min(world, 8))]
            return "\n".join([
                f"{info.name}: {list(info.shape)} {info.dtype}, {'trained' if info.requires_grad else 'frozen'}",
                f"  parameter {describe(item.param)}, gradient {describe(item.grad)}, "
                f"optimizer state {describe(item.state)} ({item.reason})",
                f"  elements per rank: {elements}",
                *self._notes(),
                *([f"  also registered as {', '.join(item.aliases)}"] if item.aliases else []),
            ])  # fmt: skip
        lines = [
            f"{self.style.name.lower()} over {self.world} ranks, {self.semantics} semantics, "
            f"{human_bytes(self.param_bytes())} of parameters on rank 0",
            *self._notes(),
        ]
        width = max((len(p.info.name) for p in self.params), default=0)
        for p in self.params:
            where = f"param {describe(p.param):5} grad {describe(p.grad):5} state {describe(p.state):5}"
            lines.append(f"  {p.info.name:{width}}  {where} {list(p.info.shape)}  {p.reason}")
        lines += [f"  problem: {problem}" for problem in self.problems]
        return "\n".join(lines)

    def _notes(self) -> list[str]:
        """Return lines about replicas, reduction and checks, unless they are plain."""
        lines = []
        if self.replicas > 1:
            lines.append(f"  {self.replicas} replicas of these ranks; gradients are averaged over the replicas as well")
        if self.reduction:
            lines.append(f"  gradients are reduced {self.reduction}")
        lines += [f"  {line}" for line in self.checks.splitlines()]
        return lines

    def to_json(self) -> str:
        """Return the plan as JSON; the same on every rank."""
        return json.dumps(
            {
                "format": FORMAT,
                "style": self.style.name,
                "semantics": self.semantics,
                "world": self.world,
                "replicas": self.replicas,
                "reduction": self.reduction,
                "params": [
                    {
                        "name": p.info.name,
                        "aliases": list(p.aliases),
                        "shape": list(p.info.shape),
                        "dtype": str(p.info.dtype).removeprefix("torch."),
                        "requires_grad": p.info.requires_grad,
                        "param": describe(p.param),
                        "grad": describe(p.grad),
                        "state": describe(p.state),
                        "reason": p.reason,
                    }
                    for p in self.params
                ],
                "problems": [str(problem) for problem in self.problems],
            },
            sort_keys=True,  # the digest compares ranks
        )

    @property
    def digest(self) -> str:
        """A hash, for comparing plans between ranks."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def plan_placements(
    params: list[TensorInfo],
    style: DataParallelStyle,
    world: int,
    *,
    semantics: str = "local",
    overrides: Mapping[str, Placement] | None = None,
    aliases: Mapping[str, str] | None = None,
    replicas: int = 1,
    reduction: str = "",
) -> PartitionPlan:
    """Plan every parameter's placement. Pure: shapes and integers in, a value out.

    Args:
        params: The unique parameters, in registration order.
        style: Style of parameters not named by ``overrides``.
        world: Number of data-parallel ranks; ``semantics``, ``replicas`` and ``reduction`` are recorded alone.
        overrides: Name patterns (``fnmatch``) -> ``Replicate()`` or ``Shard(0)``; the first match counts.
        aliases: Further names of tied parameters -> their name in the plan.
    """
    patterns = dict(overrides or {})  # in order: the first match counts
    used: set[str] = set()  # all matches, not only the first ones
    problems: list[Problem] = []
    planned = []
    others: dict[str, list[str]] = {}
    for alias, name in (aliases or {}).items():
        others.setdefault(name, []).append(alias)
    for info in params:
        names = [info.name, *others.get(info.name, [])]
        pattern = next((p for p in patterns if any(fnmatch.fnmatchcase(n, p) for n in names)), None)
        if pattern is not None:
            used.update(p for p in patterns if any(fnmatch.fnmatchcase(n, p) for n in names))
            placement = patterns[pattern]
            if not isinstance(placement, Replicate) and (placement != Shard(0) or not info.shape):
                problems.append(
                    Problem(
                        "invalid-layout",
                        info.name,
                        found=f"{placement!r} for shape {list(info.shape)}",
                        hint="use Replicate() or Shard(0)",
                    )
                )  # passes shard dim 0 only
            chosen = (placement, placement, placement, f"placements[{pattern!r}]")  # parameter, gradient, state
        else:
            chosen = placements_by_style(info.shape, style, world)
        planned.append(ParamPlan(info, *chosen, aliases=tuple(others.get(info.name, ()))))
    hint = "patterns are matched against full names with fnmatch"
    unused = [pattern for pattern in patterns if pattern not in used]
    problems += [Problem("unmatched-pattern", name, found="matches no parameter", hint=hint) for name in unused]
    return PartitionPlan(style, semantics, world, tuple(planned), tuple(problems), replicas, reduction)


def placements_by_style(
    shape: tuple[int, ...], style: DataParallelStyle, world: int
) -> tuple[Placement, Placement, Placement, str]:
    """Return placements of a parameter, its gradient and its state, and the reason."""
    full, shard = Replicate(), Shard(0)
    if not shape:  # no dim to shard
        return full, full, full, "a scalar cannot be sharded"
    if style is DataParallelStyle.REPLICATE:
        return full, full, full, "style"
    if style is DataParallelStyle.ZERO1:  # gradients are all-reduced
        return full, full, shard, "style"
    if style is DataParallelStyle.ZERO2:  # gradients are reduce-scattered
        return full, shard, shard, "style"
    if style is DataParallelStyle.DEFAULT and shape[0] % world:
        return full, full, full, f"dim 0 of size {shape[0]} does not divide by {world}"
    uneven = "" if shape[0] % world == 0 else f", padded: dim 0 of size {shape[0]}"
    return shard, shard, shard, f"style{uneven}"
