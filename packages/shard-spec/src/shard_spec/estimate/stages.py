"""Stages of a pipeline in a simulated step: the stage of each module, and what stages send each other.

A plan says which stage holds a parameter (``@ pp:1``). A module without parameters of its own, a rotary embedding for
example, runs where the module before it runs. A tied weight is used on every stage of its names: each holds a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.exchanges import Moved, Record
from shard_spec.estimate.fully_shard import mapped
from shard_spec.layout.layout import Layout
from shard_spec.layout.placements import StageShard
from shard_spec.plan.metadata import TensorMetadata
from shard_spec.plan.resolve import Resolution


@dataclass(frozen=True)
class Stages:
    """Stages of a model along one axis.

    Attributes:
        axis: Mesh axis of the stages.
        count: Number of stages.
        of_module: FQN of each module to the stage of its first parameter, or of the module before it.
        inside: FQNs of the outermost modules that lie on one stage each, in the model's order.
    """

    axis: str
    count: int
    of_module: dict[str, int]
    inside: tuple[str, ...]

    def copies(self, tensor: TensorMetadata, layout: Layout) -> list[int]:
        """Return the stages of a tied tensor's further names, which hold a copy of it."""
        if self.axis not in layout.stages:
            return []
        own = layout.stages[self.axis]
        used = {self.of_module.get(alias.rpartition(".")[0], own) for alias in tensor.aliases}
        return sorted(used - {own})

    def layouts(self, tensor: TensorMetadata, layout: Layout) -> Iterator[Layout]:
        """Yield the layout of a tensor, and that of each copy on another stage."""
        yield layout
        at = layout.mesh.axis_index(self.axis) if self.axis in layout.stages else -1
        for stage in self.copies(tensor, layout):
            specs = [StageShard(stage) if place == at else spec for place, spec in enumerate(layout.specs)]
            yield Layout(layout.mesh, specs, layout.order)


def stages_of(resolution: Resolution) -> Stages | None:
    """Return the stages of a plan on its model; None if it names none.

    Raises:
        PlanError: ``conflicting-arguments`` if stages lie along several axes.
    """
    staged = {name: layout for name, layout in resolution.layouts.items() if layout.stages}
    if not staged:
        return None
    axes = sorted({axis for layout in staged.values() for axis in layout.stages})
    if len(axes) > 1:
        raise PlanError(
            Problem(
                "conflicting-arguments",
                "stages",
                found=f"along {', '.join(axes)}",
                hint="write all stages along one axis",
            )
        )
    first: dict[str, int] = {}
    below: dict[str, set[int]] = {}  # of modules with parameters: others run wherever they are called
    for tensor in resolution.metadata.parameters:
        for alias in tensor.aliases:
            parts = alias.split(".")[:-1]
            for outer in (".".join(parts[:depth]) for depth in range(len(parts) + 1)):
                below.setdefault(outer, set())
                if tensor.name in staged and len(tensor.aliases) == 1:
                    below[outer].add(staged[tensor.name].stages[axes[0]])
                    first.setdefault(outer, staged[tensor.name].stages[axes[0]])
    of_module: dict[str, int] = {}
    current, inside = 0, list[str]()
    for path, kind in resolution.metadata.modules.items():
        current = of_module[path] = first.get(path, current)
        within = any(path.startswith(f"{outer}.") for outer in inside[-1:])
        if path and kind not in ("ModuleList", "ModuleDict") and not within and len(below.get(path, "..")) < 2:
            inside.append(path)
    return Stages(axes[0], resolution.one_mesh.axis_size(axes[0]), of_module, tuple(inside))


def watch_stages(
    module: nn.Module,
    stages: Stages,
    enter: Callable[[int], int],
    record: Record,
    in_backward: Callable[[], bool],
) -> list[Any]:
    """Run each module on its stage, and send what it reads of earlier ones. Return the hooks.

    Args:
        module: The model of the step.
        stages: Its stages.
        enter: Makes a stage the current one, and returns the one before.
        record: Takes each message.
        in_backward: Tells a recomputation, which reads what has arrived in forward.
    """
    sources: dict[str, int] = {}  # FQN of a module to the stage that ran before it in forward

    def send(stage: int, name: str, again: bool, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the buffers of what arrives on ``stage``."""
        for each in () if again else tensors:
            record(stages.axis, "p2p", "activations", name, each.nbytes)
        enter(stage)
        return [torch.empty_like(each) for each in tensors]

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        stage = stages.of_module[name]
        source = sources.setdefault(name, enter(stage))
        if stage == source:
            return None

        def arrived(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                enter(source)  # the sender's message
                there, back = partial(send, stage, name, in_backward()), partial(send, source, name, False)
                return Moved.apply(there, back, value)[0]  # type: ignore[no-untyped-call]  # torch's
            return value if isinstance(value, torch.Tensor) else mapped(value, arrived)

        return arrived(args), arrived(kwargs)

    return [
        module.get_submodule(name).register_forward_pre_hook(partial(before, name), with_kwargs=True, prepend=True)
        for name in stages.inside
    ]


def of_fullest_stage(transfers: list[Any]) -> tuple[list[Any], int | None]:
    """Return the transfers of the stage whose ranks send most, and that stage; all if there are no stages."""
    sent: dict[int, float] = {}
    for each in transfers:
        if each.stage is not None:
            sent[each.stage] = sent.get(each.stage, 0.0) + each.sent_bytes
    if not sent:
        return transfers, None
    fullest = max(sent, key=lambda stage: (sent[stage], -stage))
    return [each for each in transfers if each.stage in (None, fullest)], fullest
