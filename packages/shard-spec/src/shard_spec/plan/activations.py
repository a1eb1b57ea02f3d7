"""Activations: an estimate of what autograd keeps between forward and backward, on the rank that keeps most.

The forward runs once on the meta device: shapes only. What autograd saves is counted once for each memory that holds
it, parameters and buffers left out. Which of it a model axis cuts is followed from weight to weight: what comes out of
a weight with cut output features is cut, what comes out of one with cut input features is whole again, and everything
computed from something cut is cut. It is an estimate because a real run may fuse, recompute or allocate otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import memory_of, on_every_operator
from shard_spec.plan.resolve import Resolution, resolve
from shard_spec.plan.roles import data_axes_of, role
from shard_spec.report.text import human_bytes

if TYPE_CHECKING:
    from shard_spec.plan.content import PlanContent


@dataclass(frozen=True)
class ActivationEstimate:
    """What autograd keeps between forward and backward. An estimate, see the module.

    Attributes:
        local_bytes: Bytes on one rank, where every axis cuts evenly.
        whole_bytes: Bytes if nothing were cut: one process on the same local batch.
        num_tensors: Number of memories that were counted.
    """

    local_bytes: int
    whole_bytes: int
    num_tensors: int

    def __str__(self) -> str:
        return f"about {human_bytes(self.local_bytes)} of activations on a rank (an estimate)"


def estimate_activations(
    plan: PlanContent,
    module: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    data_axes: Iterable[str] | None = None,
) -> ActivationEstimate:
    """The estimate for one forward; see ``ShardingPlan.activations``."""
    found = resolve(plan, module)
    if found.mesh is None:
        raise PlanError(Problem("several-meshes", found="no single mesh", hint="put all layouts on one mesh"))
    model_axes = set(found.mesh.axis_names) - set(data_axes_of(found.mesh, data_axes))
    state, effects = _meta_state(module, found, model_axes)
    flow = _Flow(effects)
    kept: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = memory_of(tensor)
        if memory not in flow.effects:
            kept[memory] = (tensor, flow.cut.get(memory, frozenset()))
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor), on_every_operator(flow.run):
        made = torch.func.functional_call(module, state, tuple(map(_to_meta, inputs)), _each_to_meta(kwargs))
    del made
    whole = local = 0
    for tensor, axes in kept.values():
        size = tensor.untyped_storage().nbytes()
        whole += size
        for axis in axes:
            size = -(-size // found.mesh.axis_size(axis))
        local += size
    return ActivationEstimate(local, whole, len(kept))


class _Flow:
    """Follows, memory by memory, along which axes each result is cut."""

    def __init__(self, effects: dict[int, tuple[frozenset[str], frozenset[str]]]) -> None:
        self.effects = effects  # memory of a parameter -> (axes it makes cut, axes it makes whole)
        self.cut: dict[int, frozenset[str]] = {}
        self.alive: list[torch.Tensor] = []  # a memory's address means something only while the memory lives

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and note what it made."""
        result = operator(*args, **kwargs)
        axes: frozenset[str] = frozenset()
        gone: frozenset[str] = frozenset()
        for tensor in _tensors((args, kwargs)):
            memory = memory_of(tensor)
            made, whole = self.effects.get(memory, (self.cut.get(memory, frozenset()), frozenset()))
            axes, gone = axes | made, gone | whole
        for tensor in _tensors(result):
            memory = memory_of(tensor)
            self.alive.append(tensor)
            if memory not in self.effects:
                self.cut[memory] = axes - gone
        return result


def _meta_state(
    module: nn.Module, found: Resolution, model_axes: set[str]
) -> tuple[dict[str, torch.Tensor], dict[int, tuple[frozenset[str], frozenset[str]]]]:
    """Parameters and buffers on meta, and what each one's cuts do to what is computed with it."""
    state: dict[str, torch.Tensor] = {}
    effects = {}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        facts = found.tensor(name)
        meta = torch.empty(facts.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
        state[name] = meta
        made, whole = set(), set()
        layout = found.layouts.get(facts.name)
        for axis in model_axes if layout is not None else ():
            assert layout is not None
            kind = role(facts, layout, axis)
            if kind == "row":
                whole.add(axis)
            elif kind != "whole":
                made.add(axis)
        effects[memory_of(meta)] = (frozenset(made), frozenset(whole))
    return state, effects


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _to_meta(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, torch.Tensor) else value


def _each_to_meta(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: _to_meta(value) for name, value in (kwargs or {}).items()}
