"""MegatronPlanner: tensor parallelism by column and row pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shard_spec._shared.problems import Problem, raise_problems
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshLike
from shard_spec.planners.base import Decisions, LayoutPlanner, merge_notes
from shard_spec.planners.megatron.blocks import (
    POSITION_WORDS,
    Context,
    Cut,
    Found,
    FusedOrder,
    Options,
    TPBlock,
    TPBlockKind,
    find_attention,
    not_lent,
)
from shard_spec.planners.megatron.others import find_experts, find_mlps, find_multihead_attention, find_vocabulary
from shard_spec.planners.modules.block_simulator import join

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Analysis:
    """Result of the analysis of a model by `MegatronPlanner`.

    Attributes:
        units: sharded regions, in module order.
        left_whole: FQN of each recognised parameter that stays replicated, with the reason.
        unrecognised: FQN of each matmul weight of unknown role, with the reason.
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
        """Return every cut by the FQN of its parameter."""
        return {cut.name: cut for unit in self.units for cut in unit.cuts}

    @property
    def sharded_share(self) -> float:
        """Sharded share of the matmul-weight bytes; 1.0 for a model without any."""
        total = sum(self.matmul_bytes.values())
        cut = self.cuts
        return sum(size for name, size in self.matmul_bytes.items() if name in cut) / total if total else 1.0

    @property
    def rest(self) -> dict[str, str]:
        """Return the matmul weights that stay replicated, each with the reason."""
        why = {**self.left_whole, **self.unrecognised}
        return {name: str(why[name]) for name in self.matmul_bytes if name in why}


def analyse(root: nn.Module, options: Options) -> Analysis:
    """Recognise attention first, then feed-forward blocks, experts, embeddings and heads."""
    context = Context(root, options)
    candidates: list[Found] = []
    for name in context.modules:  # attention first: its output projection could pass for a feed-forward row
        candidates += [
            candidate
            for candidate in (find_multihead_attention(context, name), find_attention(context, name))
            if candidate
        ]
    candidates = not_lent(context, candidates)
    heads = find_vocabulary(context)  # before feed-forward blocks: a model's `output` is not the row of one
    for name in context.modules:
        candidates += find_mlps(context, name)
    for name in context.modules:
        experts = find_experts(context, name)
        candidates += [experts] if experts else []
    candidates += heads
    units = tuple(candidate.unit for candidate in candidates if candidate.unit is not None)
    left_whole = {name: problem for candidate in candidates for name, problem in candidate.left_whole}
    notes = [note for candidate in candidates for note in candidate.notes]
    for unit in units:
        if unit.kind is TPBlockKind.EXPERTS:
            notes.append(
                Problem(
                    "partial-activation",
                    unit.name,
                    found="each rank holds a partial output of the experts",
                    hint="all-reduce the gradients of this module's inputs, router weights too (tp-styles does)",
                )
            )
        notes += [
            Problem(
                "partial-gradient",
                name,
                found="replicated on every rank, used only for the rank's own heads",
                hint="sum its gradient over the tensor-parallel axis; DTensor and tp-styles do so by themselves",
            )
            for name in unit.replicated
        ]
    matmul: dict[str, int] = {}
    seen: set[int] = set()  # tied tensors count once
    for name, module in context.modules.items():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen and _is_matmul_weight(name, module, key, parameter):
                seen.add(id(parameter))
                matmul[join(name, key)] = parameter.numel() * parameter.element_size()
    decided = {cut.name for unit in units for cut in unit.cuts} | set(left_whole)  # left_whole has its own reason
    unknown = {
        n: Problem(
            "heads-not-recognised",
            n,
            found="belongs to no attention, feed-forward block, expert or head that this planner recognises",
            hint="it stays replicated; add a rule for it if its size matters",
        )
        for n in matmul
        if n not in decided
    }
    return Analysis(units, left_whole, unknown, tuple(notes), matmul)


def _is_matmul_weight(name: str, module: nn.Module, key: str, parameter: nn.Parameter) -> bool:
    """Return True for weights of linears, experts and routers; not for tables, convolutions or biases."""
    if isinstance(module, nn.Linear):
        return key == "weight"
    if isinstance(module, nn.MultiheadAttention):
        return key.endswith("_weight")
    if isinstance(module, (nn.Embedding, *_CONVOLUTIONS)) or not parameter.is_floating_point():
        return False
    no_table = not any(word in join(name, key).lower() for word in (*POSITION_WORDS, "token", "conv", "bias"))
    return parameter.dim() in (2, 3) and min(parameter.shape) > 1 and no_table  # min: [1, n] is a scale, not a matrix


class MegatronPlanner(LayoutPlanner):
    """Shard attention by heads, feed-forward blocks and experts by channels, embeddings and heads by vocabulary.

    The first linears of a block are sharded along their outputs (``S(0)``), the last along its inputs (``S(1)``), so a
    block needs one all-reduce forward and one backward (Shoeybi et al., "Megatron-LM", 2019). Attention, feed-forward
    blocks (gated ones too), grouped-query attention, fused ``qkv`` and ``gate_up``, experts in three-dimensional
    weights, ``nn.MultiheadAttention``, token embeddings and tied or untied heads are recognised by structure, names
    and head counts.

    Nothing is sharded on a guess. A block from a class outside of torch and transformers is *probed*: its forward is
    run on a few random numbers without its weights, to check that no head or channel depends on another rank's. If it
    cannot be run, clear names and matching shapes are accepted with a note (`unverified`); fused weights are not.
    Replicated weights are listed on the plan: `plan.unrecognised`, `plan.notes`.

    Args:
        mesh: the axes of the plan.
        axis: the sharding axis; other axes replicate.
        kv_replicate: with fewer key-value heads than ranks, replicate k and v and shard q (the executor of the plan
            picks each rank's key-value heads). Otherwise such an attention stays replicated, with a note.
        fused: the order of fused outputs if it cannot be inferred: ``"sections"`` (all of q, then k, then v; all of
            gate, then up), ``"heads"`` (q, k, v of each head together), ``"groups"`` (query heads with their k and v),
            ``"pairs"`` (gate and up alternate).
        vocabulary: shard embeddings and heads.
        probe: probe unknown blocks.

    Raises:
        PlanError: `axis` is not in the mesh.
    """

    def __init__(
        self,
        mesh: MeshLike,
        axis: str = "tp",
        *,
        kv_replicate: bool = False,
        fused: FusedOrder | None = None,
        vocabulary: bool = True,
        probe: bool = True,
    ) -> None:
        super().__init__(mesh)
        self.axis, self.vocabulary = axis, vocabulary
        self.options = Options(self.mesh.axis_size(axis), kv_replicate, fused, probe)

    def analyse(self, module: nn.Module) -> Analysis:
        """Return the analysis of `module`; the plan follows from it."""
        return analyse(module, self.options)

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        analysis = self.analyse(module)
        skipped = () if self.vocabulary else ("embedding", "head")
        layouts = {
            cut.name: Layout(self.mesh, {self.axis: cut.placement})
            for unit in analysis.units
            if unit.kind not in skipped
            for cut in unit.cuts
        }
        # Layouts of tied tensors stand under the first of their names.
        first: dict[int, str] = {}
        by_first_name: dict[str, Layout] = {}
        problems = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            owner = first.setdefault(id(parameter), name)
            if name in layouts and by_first_name.setdefault(owner, layouts[name]) != layouts[name]:
                problems.append(
                    Problem(
                        "tied-weights",
                        name,
                        found=f"{owner} -> {by_first_name[owner]}, {name} -> {layouts[name]}",
                        hint="untie them or write the rule by hand",
                    )
                )
        raise_problems(problems)
        notes = (*analysis.left_whole.values(), *analysis.notes)
        return Decisions(by_first_name, merge_notes(notes), analysis.unrecognised, axis_roles={self.axis: "model"})
