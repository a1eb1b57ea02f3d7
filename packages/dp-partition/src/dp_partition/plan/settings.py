"""Choices of the caller of `compile`, as one value for all stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.distributed.tensor import Placement

from dp_partition._shared.problems import Problem
from dp_partition.plan.placements import DataParallelStyle

Style = Literal["default", "replicate", "zero1", "zero2", "fully_shard", "hybrid"]
Semantics = Literal["local", "global"]
Backend = Literal["eager", "inductor"]

_REDUCED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
    """Choices for all programs of a step, as documented at `compile`; ``dynamic`` is its ``mark_dynamic``."""

    style: DataParallelStyle
    semantics: str = "local"
    placements: Mapping[str, Placement] = field(default_factory=dict)
    batch_dim: int = 0
    comm: CommConfig = field(default_factory=CommConfig)
    accumulate: int = 1
    reshard: bool | frozenset[str] = True
    backend: str = "eager"
    check: str = "sampled"
    dynamic: tuple[int, ...] = ()
    capture: str = "auto"
    full: str = "keep"
    observe: bool = True

    def text(self) -> str:
        """Return choices to compare between ranks beside the plan and the collectives."""
        chosen = (self.semantics, self.accumulate, self.batch_dim, self.backend, self.check, self.capture)
        return ", ".join(map(str, (*chosen, self.dynamic)))

    def needs_graph(self) -> str:
        """Return a choice that needs a graph; empty if the step may run eagerly."""
        needs = {
            "semantics='global'": self.semantics == "global",
            f"accumulate={self.accumulate}": self.accumulate > 1,
            "placements": bool(self.placements),
            f"backend={self.backend!r}": self.backend != "eager",
            "reduce_dtype": self.comm.reduce_dtype is not None,
        }
        return next((name for name, is_needed in needs.items() if is_needed), "")

    def reduction(self) -> str:
        """Return the reduction of gradients as text for the plan; empty if it is plain."""
        dtype = self.comm.reduce_dtype
        return "" if dtype is None else f"in {str(dtype).removeprefix('torch.')}"

    def problems(self) -> list[Problem]:
        """Return the problems of the choices, by themselves and together."""
        result = [  # every choice, not only the first wrong one
            *_choice("semantics", self.semantics, ("local", "global")),
            *_choice("backend", self.backend, ("eager", "inductor")),
            *_choice("check", self.check, ("sampled", "first", "never")),
            *_choice("capture", self.capture, ("auto", "always", "never")),
            *_choice("full", self.full, ("keep", "refuse")),
        ]
        if self.semantics == "global" and self.accumulate > 1:
            text = f"accumulate={self.accumulate}, global semantics"
            result.append(Problem("cannot-accumulate", "accumulate", found=text, hint="use semantics='local'"))
        if self.semantics == "global" and self.style is DataParallelStyle.HYBRID:  # rules know one axis
            text = "hybrid, global semantics"
            result.append(Problem("conflicting-arguments", "style", found=text, hint="use semantics='local'"))
        if self.capture == "never" and self.needs_graph():  # no eager way to do it
            hint = "leave it out, or use capture='always'"
            result.append(Problem("conflicting-arguments", "capture", found=f"never, {self.needs_graph()}", hint=hint))
        if self.dynamic and (self.semantics, self.accumulate, self.backend) != ("local", 1, "eager"):
            hint = "leave it out, each length takes a trace then; or use local semantics, eager, without accumulate"
            text = f"semantics={self.semantics!r}, accumulate={self.accumulate}, backend={self.backend!r}"
            result.append(Problem("conflicting-arguments", "mark_dynamic", found=text, hint=hint))
        dtype: object = self.comm.reduce_dtype  # not checked yet
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in _REDUCED):
            hint = f"use one of {', '.join(map(str, _REDUCED))}"
            result.append(Problem("invalid-argument", "reduce_dtype", found=repr(dtype), hint=hint))
        if self.accumulate < 1 or self.comm.prefetch < 0 or self.comm.bucket_bytes < 0:
            result.append(
                Problem("invalid-argument", "accumulate, prefetch or bucket_mb", found="a number below its least")
            )
        return result


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> list[Problem]:
    if value in allowed:
        return []
    hint = f"use one of {', '.join(map(repr, allowed))}"
    return [Problem("invalid-argument", name, found=repr(value), hint=hint)]
