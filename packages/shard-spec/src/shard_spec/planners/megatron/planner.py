"""MegatronPlanner: tensor parallelism by column and row pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.layout import Layout
from shard_spec.planners.base import Decisions, LayoutPlanner, MeshLike, together
from shard_spec.planners.megatron.analysis import Analysis, analyse
from shard_spec.planners.megatron.context import FusedOrder, Options

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
            the plan
            picks each rank's key-value heads). Otherwise such an attention stays whole, and the plan says so.
        fused: the order of fused outputs where it cannot be found out: ``"sections"`` (all of q, then k, then v; all
            of gate,
            then up), ``"heads"`` (q, k, v of each head together), ``"groups"`` (query heads with their k and v),
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
                f"{len(analysis.rest)} matmul weights would stay whole",
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
        return Decisions(_one_name_each(module, layouts), together(notes), unrecognised)

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
