"""Messages of a simulated step: tokens and experts, attention along a context, stages of a pipeline.

Experts exchange tokens on expert axes, attention exchanges keys or heads on context axes. Each exchange is a function
of autograd on the meta device. Its result comes in memory of its own, beside the packed and the received buffer of one
message, as tp-styles' `ExpertParallel` and `ContextParallel` have them; gradients take the way back.

A plan says which stage holds a parameter (``@ pp:1``). A module without parameters of its own, a rotary embedding for
example, runs where the module before it runs. A tied weight is used on every stage of its names: each holds a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.step_options import expert_modules, mapped, replaced, tensors_of
from shard_spec.layout import Layout, StageShard
from shard_spec.plan.resolve import Resolution, TensorMetadata

Shape: TypeAlias = tuple[int, ...]
Move: TypeAlias = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Record: TypeAlias = Callable[[str, str, str, str, int], None]  # axis, operation, content, name, bytes


class Moved(torch.autograd.Function):
    """Tensors as ``there`` returns them; ``back`` does the same to their gradients."""

    @staticmethod
    def forward(ctx: Any, there: Move, back: Move, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the moved tensors."""
        ctx.back = back
        # A recomputation ends with the last saved tensor: this one is saved so that it sends again, as ranks do.
        ctx.save_for_backward(tensors[0].new_empty(0))
        return tuple(there(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients on the ranks of the tensors."""
        return None, None, *ctx.back(gradients)


def exchanged(
    tensors: Sequence[torch.Tensor], shapes: Sequence[Shape], copies: int = 1, held: int = 1, summed: bool = False
) -> list[torch.Tensor]:
    """Return tensors of ``shapes``, which one message brings in place of ``tensors``.

    Args:
        tensors: What is sent.
        shapes: Shapes of what arrives.
        copies: Number of rows in the message for each row of ``tensors`` and of the results (experts of a token).
        held: Number of those that stay as long as the result.
        summed: The rows that arrive are put in the order of their tokens before they are summed: one buffer more.
    """
    rows = tensors[0].new_empty(0 if copies == 1 else copies * tensors[0].numel())  # of tokens, before they are packed
    packed = tensors[0].new_empty(copies * sum(each.numel() for each in tensors))
    received = tensors[0].new_empty((copies + copies * summed) * sum(map(prod, shapes)))
    # The first of the rows that arrive stand for all of them: their memory is there as long as the result is.
    results = [each.new_empty((held, *shape))[0] for each, shape in zip(tensors, shapes, strict=True)]
    del rows, packed, received
    return results


class Exchanges:
    """Exchanges of a step along expert and context axes.

    Args:
        sizes: Ranks of each axis.
        context: Context axes of several ranks.
        kind: ``"gather"`` or ``"ulysses"``; see `StepOptions`.
        record: Takes each collective.
        bytes_of: Bytes of a tensor on one rank.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        context: tuple[str, ...],
        kind: str,
        record: Record,
        bytes_of: Callable[[torch.Tensor], int],
    ) -> None:
        self._context, self._kind, self._record, self._bytes_of = context, kind, record, bytes_of
        self._ranks = prod(sizes[axis] for axis in context)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Return attention of one rank's queries to the keys of all ranks along the context axes.

        Args:
            query: Of one rank's tokens, ``[..., heads, tokens, size]``; keys and values likewise.
            key: See ``query``.
            value: See ``query``.
            mask: Mask of these tokens, or None.
            attention: Takes all four.
        """
        if not self._context:
            return attention(query, key, value, mask)
        by_heads = self._kind == "ulysses" and query.dim() > 2
        if mask is not None:
            rows = mask.shape[-2] * (self._ranks if by_heads and mask.shape[-2] > 1 else 1)
            mask = mask.new_empty((*mask.shape[:-2], rows, mask.shape[-1] * self._ranks))
        if not by_heads:
            shapes = [(*each.shape[:-2], each.shape[-2] * self._ranks, each.shape[-1]) for each in (key, value)]
            key, value = self._along_context((key, value), shapes, "all_gather", "reduce_scatter")
            return attention(query, key, value, mask)
        if query.shape[-3] % self._ranks:
            raise PlanError(
                Problem(
                    "does-not-divide",
                    "context",
                    axis=self._context[0],
                    found=f"{query.shape[-3]} heads over {self._ranks} ranks",
                    hint="context='gather' takes any number of heads",
                )
            )
        shapes = [
            (*each.shape[:-3], -(-each.shape[-3] // self._ranks), each.shape[-2] * self._ranks, each.shape[-1])
            for each in (query, key, value)
        ]
        both_ways = "all_to_all", "all_to_all"
        out = attention(*self._along_context((query, key, value), shapes, *both_ways), mask)
        by_token = (*query.shape[:-3], query.shape[-2], query.shape[-3], value.shape[-1])  # as kernels lay it out
        (out,) = self._along_context((out,), [by_token], *both_ways)
        return out.transpose(-3, -2)

    def _along_context(
        self, tensors: Sequence[torch.Tensor], shapes: Sequence[Shape], there: str, back: str
    ) -> tuple[torch.Tensor, ...]:
        """Return tensors of ``shapes`` after the collectives ``there``; gradients return by ``back``."""
        full = self._ranks if there == "all_gather" else 1
        sizes = [full * self._bytes_of(each) for each in tensors]
        own_shapes = [tuple(each.shape) for each in tensors]

        def by(op: str, shapes: Sequence[Shape]) -> Move:
            def move(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                for axis in self._context:
                    for size in sizes:
                        self._record(axis, op, "activations", "attention", size)
                return exchanged(tensors, shapes)

            return move

        moved: tuple[torch.Tensor, ...] = Moved.apply(by(there, shapes), by(back, own_shapes), *tensors)  # type: ignore[no-untyped-call]  # torch's
        return moved

    def watch_experts(self, module: nn.Module, resolution: Resolution, axes: tuple[str, ...]) -> list[Any]:
        """Send tokens to the ranks of their experts and back, in forward and in backward. Return the hooks.

        A module of experts gets hidden states (tokens, hidden) and the chosen experts of each (tokens, choices).
        """
        handles = []
        for name in expert_modules(resolution.metadata.parameters):
            owned = [each.name for each in resolution.metadata.parameters if each.name.rpartition(".")[0] == name]
            layouts = [resolution.layouts[each] for each in owned if each in resolution.layouts]
            along = [axis for axis in axes if any(axis in each.sharded_axes for each in layouts)]
            choices = [0]  # of the call that runs

            def sent(
                tensor: torch.Tensor, arrives: bool, name: str = name, along: Any = along, choices: Any = choices
            ) -> Any:
                copies, shapes = choices[0], [tuple(tensor.shape)]

                def move(held: int, summed: bool, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                    for axis in along:
                        self._record(axis, "all_to_all", "activations", name, copies * self._bytes_of(tensors[0]))
                    return exchanged(tensors, shapes, copies, held, summed)

                there, back = partial(move, copies if arrives else 1, not arrives), partial(move, 1, arrives)
                return Moved.apply(there, back, tensor)[0]  # type: ignore[no-untyped-call]  # torch's

            def before(module: nn.Module, args: Any, kwargs: Any, sent: Any = sent, choices: Any = choices) -> Any:
                tensors = list(tensors_of((args, kwargs)))
                chosen = [each for each in tensors if not each.is_floating_point()]
                choices[0] = 0
                if not (tensors and chosen and tensors[0].is_floating_point()):
                    return None
                choices[0] = chosen[0].shape[-1]
                arrived = sent(tensors[0], True)
                return replaced(args, tensors[0], arrived), replaced(kwargs, tensors[0], arrived)

            def after(module: nn.Module, args: Any, output: Any, sent: Any = sent, choices: Any = choices) -> Any:
                returned = next(tensors_of(output), None)
                if not choices[0] or returned is None:
                    return None
                return replaced(output, returned, sent(returned, False))

            if along:
                experts = module.get_submodule(name)
                handles.append(experts.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(experts.register_forward_hook(after))
        return handles


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
