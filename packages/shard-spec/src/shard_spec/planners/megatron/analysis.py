"""Everything the recognisers found in one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shard_spec._shared.problems import Problem
from shard_spec.planners.megatron import names
from shard_spec.planners.megatron.attention import find_attention, not_lent
from shard_spec.planners.megatron.blocks import Cut, Found, TPBlock, TPBlockKind
from shard_spec.planners.megatron.context import Context, Options
from shard_spec.planners.megatron.linear import join
from shard_spec.planners.megatron.mlp import find_mlps
from shard_spec.planners.megatron.others import find_experts, find_multihead_attention, find_vocabulary

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Analysis:
    """Analysis of a model by `MegatronPlanner`.

    Attributes:
        units: regions that are cut, in module order.
        left_whole: FQN of each parameter that was understood and stays whole, with the reason.
        unrecognised: FQN of each matmul weight that was not understood, with the reason.
        notes: remarks.
        matmul_bytes: bytes of each matmul weight (linears, expert weights, attention projections, heads) by FQN.
    """

    units: tuple[TPBlock, ...]
    left_whole: Mapping[str, Problem]
    unrecognised: Mapping[str, Problem]
    notes: tuple[Problem, ...]
    matmul_bytes: Mapping[str, int]

    @property
    def cuts(self) -> dict[str, Cut]:
        """Every cut by the FQN of its parameter."""
        return {cut.name: cut for unit in self.units for cut in unit.cuts}

    @property
    def sharded_share(self) -> float:
        """Share of the matmul-weight bytes that is cut; 1.0 for a model without any."""
        total = sum(self.matmul_bytes.values())
        cut = self.cuts
        return sum(size for name, size in self.matmul_bytes.items() if name in cut) / total if total else 1.0

    @property
    def rest(self) -> dict[str, str]:
        """Matmul weights that stay whole, and why."""
        why = {**self.left_whole, **self.unrecognised}
        return {name: str(why[name]) for name in self.matmul_bytes if name in why}


def analyse(module: nn.Module, options: Options) -> Analysis:
    """Recognises attention first, then feed-forward blocks, experts, embeddings and heads."""
    context = Context(module, options)
    found: list[Found] = []
    for name in context.modules:
        found += [one for one in (find_multihead_attention(context, name), find_attention(context, name)) if one]
    found = not_lent(context, found)
    heads = find_vocabulary(context)  # before feed-forward blocks: a model's `output` is not one's end
    for name in context.modules:
        found += find_mlps(context, name)
    for name in context.modules:
        experts = find_experts(context, name)
        found += [experts] if experts else []
    found += heads
    units = tuple(one.unit for one in found if one.unit is not None)
    left_whole = {name: problem for one in found for name, problem in one.left_whole}
    notes = tuple(note for one in found for note in one.notes) + tuple(_gradient_notes(units))
    matmul = _matmul_weights(context)
    known = {cut.name for unit in units for cut in unit.cuts} | set(left_whole)
    unrecognised = {name: _unrecognised(name) for name in matmul if name not in known}
    return Analysis(units, left_whole, unrecognised, notes, matmul)


def _gradient_notes(units: tuple[TPBlock, ...]) -> list[Problem]:
    notes = []
    for unit in units:
        if unit.kind is TPBlockKind.EXPERTS:
            notes.append(
                Problem(
                    "partial-activation",
                    unit.name,
                    found="routing weights multiply each rank's summand",
                    hint="sum the gradient of every input of this module over the axis, routing weights included",
                )
            )
        for name in unit.replicated:
            notes.append(
                Problem(
                    "partial-gradient",
                    name,
                    found="held whole on every rank, used only for the rank's own heads",
                    hint="sum its gradient over the tensor-parallel axis; DTensor and tp-styles do so by themselves",
                )
            )
    return notes


def _matmul_weights(context: Context) -> dict[str, int]:
    """Bytes of every weight that a matmul reads, each tensor once."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for name, module in context.modules.items():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen and _is_matmul_weight(name, module, key, parameter):
                seen.add(id(parameter))
                found[join(name, key)] = parameter.numel() * parameter.element_size()
    return found


def _is_matmul_weight(name: str, module: nn.Module, key: str, parameter: nn.Parameter) -> bool:
    """Weights of linears, experts and routers; not tables (but heads tied to one), convolutions or biases."""
    if isinstance(module, nn.Linear):
        return key == "weight"
    if isinstance(module, nn.MultiheadAttention):
        return key.endswith("_weight")
    if isinstance(module, (nn.Embedding, *_CONVOLUTIONS)) or not parameter.is_floating_point():
        return False
    no_table = not any(word in join(name, key).lower() for word in (*names.POSITION_WORDS, "token", "conv", "bias"))
    return parameter.dim() in (2, 3) and min(parameter.shape) > 1 and no_table


def _unrecognised(name: str) -> Problem:
    return Problem(
        "heads-not-recognised",
        name,
        found="belongs to no attention, feed-forward block, expert or head that this planner knows",
        hint="it stays whole on every rank; add a rule for it if it matters",
    )
