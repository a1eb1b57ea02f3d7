"""MegatronPlanner: tensor parallelism by column and row pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.layout import Layout
from shard_spec.planners.base import Decisions, LayoutPlanner, MeshLike, merge_notes
from shard_spec.planners.megatron import names
from shard_spec.planners.megatron.attention import find_attention, not_lent
from shard_spec.planners.megatron.blocks import Context, Cut, Found, FusedOrder, Options, TPBlock, TPBlockKind
from shard_spec.planners.megatron.linear import join
from shard_spec.planners.megatron.mlp import find_mlps
from shard_spec.planners.megatron.others import find_experts, find_multihead_attention, find_vocabulary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
            found = "each rank holds a partial output of the experts"
            hint = "all-reduce the gradients of this module's inputs, router weights too (tp-styles does)"
            notes.append(Problem("partial-activation", unit.name, found=found, hint=hint))
        for name in unit.replicated:
            found = "replicated on every rank, used only for the rank's own heads"
            hint = "sum its gradient over the tensor-parallel axis; DTensor and tp-styles do so by themselves"
            notes.append(Problem("partial-gradient", name, found=found, hint=hint))
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
    found = "belongs to no attention, feed-forward block, expert or head that this planner recognises"
    hint = "it stays replicated; add a rule for it if its size matters"
    return Problem("heads-not-recognised", name, found=found, hint=hint)


class MegatronPlanner(LayoutPlanner):
    """Cuts attention by heads, feed-forward blocks and experts by channels, embeddings and heads by vocabulary.

    The first linears of a block are cut along their outputs (``S(0)``), the last along its inputs (``S(1)``), so that a
    block needs one all-reduce forward and one backward (Shoeybi et al., "Megatron-LM", 2019). Attention, feed-forward
    blocks (gated ones too), grouped-query attention, fused ``qkv`` and ``gate_up``, experts in three-dimensional
    weights, ``nn.MultiheadAttention``, token embeddings and tied or untied heads are recognised by structure, names
    and head counts.

    Nothing is cut on a guess. A block from a class outside of torch and transformers is *probed*: its forward is run
    on a few random numbers without its weights, to see that no head or channel depends on another rank's. Where that
    is impossible, clear names and fitting shapes are accepted with a note (`unverified`); fused weights are not. What
    is left whole is listed on the plan: `plan.unrecognised`, `plan.notes`.

    Args:
        mesh: the axes of the plan.
        axis: the axis that cuts; other axes replicate.
        kv_replicate: where there are fewer key-value heads than ranks, keep k and v whole and cut q (whoever executes
            the plan picks each rank's key-value heads). Otherwise such an attention stays whole, and the plan says so.
        fused: the order of fused outputs where it cannot be found out: ``"sections"`` (all of q, then k, then v; all of
            gate, then up), ``"heads"`` (q, k, v of each head together), ``"groups"`` (query heads with their k and v),
            ``"pairs"`` (gate and up alternate).
        vocabulary: whether embeddings and heads are cut.
        expert_axis: an axis over which whole experts are dealt out instead of cutting each.
        probe: whether unknown blocks are probed.
        strict: raise if a matmul weight is not recognised, instead of listing it.

    Raises:
        PlanError: `axis` or `expert_axis` is not in the mesh.
    """

    def __init__(
        self,
        mesh: MeshLike | DeviceMesh,
        axis: str = "tp",
        *,
        kv_replicate: bool = False,
        fused: FusedOrder | None = None,
        vocabulary: bool = True,
        expert_axis: str | None = None,
        probe: bool = True,
        strict: bool = False,
    ) -> None:
        super().__init__(mesh)
        self.axis, self.expert_axis = axis, expert_axis
        self.vocabulary, self.strict = vocabulary, strict
        self.options = Options(self.mesh.axis_size(axis), kv_replicate, fused, probe)
        if expert_axis is not None:
            self.mesh.axis_size(expert_axis)

    def analyse(self, module: nn.Module) -> Analysis:
        """Return what was recognised, what was not, and why; the plan follows from it."""
        return analyse(module, self.options)

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        """Layouts of every recognised parameter."""
        analysis = self.analyse(module)
        if self.strict and analysis.rest:
            raise PlanError(
                list((dict(analysis.left_whole) | dict(analysis.unrecognised)).values()),
                f"{len(analysis.rest)} matmul weights would stay replicated",
            )
        skipped = () if self.vocabulary else ("embedding", "head")
        layouts = {
            cut.name: Layout(self.mesh, {self.axis: cut.placement})
            for unit in analysis.units
            if unit.kind not in skipped
            for cut in unit.cuts
        }
        if self.expert_axis is not None:
            layouts.update(self._dealt_experts(module))
        unrecognised = {name: problem for name, problem in analysis.unrecognised.items() if name not in layouts}
        notes = (*analysis.left_whole.values(), *analysis.notes)
        return Decisions(_one_name_each(module, layouts), merge_notes(notes), unrecognised)

    def _dealt_experts(self, module: nn.Module) -> dict[str, Layout]:
        """Every three-dimensional expert weight (and its bias) by its first dimension."""
        assert self.expert_axis is not None
        size = self.mesh.axis_size(self.expert_axis)
        layouts = {}
        problems = []
        for name, submodule in module.named_modules():
            own = {key: p for key, p in submodule._parameters.items() if p is not None}
            if not any(p.dim() == 3 and "proj" in key for key, p in own.items()) or isinstance(
                submodule, nn.MultiheadAttention
            ):
                continue
            for key, parameter in own.items():
                fqn = f"{name}.{key}" if name else key
                if parameter.shape[0] % size:
                    found = f"{parameter.shape[0]} experts with {self.expert_axis}={size}"
                    problems.append(Problem("does-not-divide", fqn, 0, self.expert_axis, found))
                layouts[fqn] = Layout(self.mesh, {self.expert_axis: "S(0)"})
        if problems:
            raise PlanError(problems)
        return layouts


def _one_name_each(module: nn.Module, layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Tied tensors under the first of their names; a contradiction between their roles leaves nobody guessing.

    Raises:
        PlanError: one tensor would have two layouts.
    """
    first: dict[int, str] = {}
    kept: dict[str, Layout] = {}
    problems = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        layout = layouts.get(name)
        if layout is None:
            continue
        if owner in kept and kept[owner] != layout:
            found = f"{owner} -> {kept[owner]}, {name} -> {layout}"
            problems.append(Problem("tied-weights", name, found=found, hint="untie them or write the rule by hand"))
        kept.setdefault(owner, layout)
    if problems:
        raise PlanError(problems)
    return kept
