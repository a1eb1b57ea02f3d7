"""`from_sharding_plan`: what a plan cuts becomes styles that train as the whole module does, or an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tp_styles.from_plan.axis_shards import AxisCuts, cuts_on_axis
from tp_styles.from_plan.fake_model import Call
from tp_styles.from_plan.local_head_counts import local_counts
from tp_styles.from_plan.regions import Region, find_regions, uncut_blocks
from tp_styles.from_plan.simulate_ranks import Stage, Verdict
from tp_styles.problems import PlanError, Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.colwise import ColwiseParallel
from tp_styles.styles.experts import ParametersParallel
from tp_styles.styles.fused import FusedColwiseParallel
from tp_styles.styles.layers import linear_shape
from tp_styles.styles.mha import MultiheadAttentionParallel
from tp_styles.styles.replicated import NoParallel
from tp_styles.styles.rowwise import RowwiseParallel
from tp_styles.styles.tp_block import ColwiseKVReplicated, TPBlockParallel
from tp_styles.values.spec import describe
from tp_styles.values.split import Split

if TYPE_CHECKING:
    from shard_spec import ShardingPlan

Unproven = Literal["refuse", "gather"]
Choice = Literal["refuse", "gather", "leave"]


def from_sharding_plan(
    plan: ShardingPlan,
    module: nn.Module,
    *,
    axis: str = "tp",
    unproven: Unproven = "refuse",
    call: Call | None = None,
) -> dict[str, ParallelStyle]:
    """Styles that lay out a module's parameters as a `shard_spec.ShardingPlan` says, for one axis of its mesh.

    The axis is taken as tensor parallel: activations between blocks are the same on all of its ranks. Cut layers that
    form a region (attention by heads, a feed-forward block by channels, experts, the vocabulary's ends) keep their
    activations divided in between. That is done only after each rank's forward was rehearsed on a copy without
    weights: its row-wise layer has to be handed its slice of what the whole module would hand it. Parameters that act
    inside a region (norms of heads) get their gradients summed, dropouts inside draw other numbers on each rank.

    Args:
        plan: The plan; its other axes are other packages' matter.
        module: The model; on the meta device too.
        axis: Name of the tensor-parallel axis.
        unproven: What becomes of cut layers that form no region, or one that could not be rehearsed. `"refuse"`: an
            error. `"gather"`: each is right on its own, between whole activations, at the price of communication.
        call: Runs a model as the caller does, for the rehearsal, for example `lambda m: m(ids, mask=None)`; by default
            some usual calls are tried. What it passes has to be on the CPU and in float64.

    Returns:
        FQN -> style, for `apply_plan`; layers that the axis does not cut are not in it.

    Raises:
        PlanError: Layouts that no style has a meaning for, regions that cannot be divided, remarks of the planner
            that are not carried out; all of them at once. A plan for a data-parallel axis (FSDP) is refused, too.
    """
    if unproven not in ("refuse", "gather"):
        raise PlanError(Problem("invalid-argument", "unproven", found=repr(unproven), hint='"refuse" or "gather"'))
    cuts = cuts_on_axis(plan, module, axis)
    conversion = _Conversion(module, cuts, unproven, call)
    if getattr(plan, "certificate", None) is not None:
        conversion.refuse_mixtures()
    return conversion.styles(getattr(plan, "notes", ()))


def styles_of_free_regions(module: nn.Module, tp_size: int, free: set[str]) -> dict[str, ParallelStyle]:
    """Styles of every region that the planner recognises among some parameters and that can be rehearsed.

    Args:
        module: The model.
        tp_size: Number of ranks.
        free: FQNs of parameters that no style has yet.
    """
    from shard_spec.planners import MegatronPlanner

    planner = MegatronPlanner({"tp": tp_size}, vocabulary=False, kv_replicate=True)
    units = [unit for unit in planner.analyse(module).units if unit.rows and unit.columns]
    units = [unit for unit in units if {*(cut.name for cut in unit.cuts), *unit.replicated} <= free]
    chosen = {cut.name for unit in units for cut in unit.cuts}
    cuts = cuts_on_axis(planner.build_plan(module), module, "tp")
    conversion = _Conversion(
        module, replace(cuts, splits={n: s for n, s in cuts.splits.items() if n in chosen}), "leave", None
    )
    return conversion.styles(())


class _Conversion:
    """One plan and one model."""

    def __init__(self, module: nn.Module, cuts: AxisCuts, unproven: Choice, call: Call | None) -> None:
        self.module, self.cuts, self.unproven, self.call = module, cuts, unproven, call
        self.found: dict[str, ParallelStyle] = {}
        self.problems: list[Problem] = []
        self.divided: list[Region] = []
        self.summed: set[str] = set()  # parameters whose gradients are summed
        self.activations: set[str] = set()  # modules whose inputs' gradients are
        self.picked: set[str] = set()  # attentions whose ranks pick key-value heads

    def refuse_mixtures(self) -> None:
        """Of an optimised plan: where a block is not cut, the plan divides the batch or the sequence along the axis."""
        hint = "activations differ between the axis's ranks there, which no style expresses; plan with MegatronPlanner"
        self.problems += [
            Problem("plan-not-executable", name, axis=self.cuts.axis, found="a block by batch or sequence", hint=hint)
            for name in uncut_blocks(self.module, self.cuts)
        ]

    def styles(self, notes: Iterable[Any]) -> dict[str, ParallelStyle]:
        regions = find_regions(self.module, self.cuts)
        explained: set[int] = set()
        for region, verdict in self._proven(regions):
            if verdict.right:
                self._divide(region, verdict)
                explained |= {id(self.module.get_parameter(name)) for name in region.parameters}
            elif self.unproven == "refuse":
                self.problems.append(_not_proven(region, verdict))
                explained |= {id(self.module.get_parameter(name)) for name in region.parameters}
        self._alone({n for n in self.cuts.splits if id(self.module.get_parameter(n)) not in explained})
        self._tied()
        self.problems += [note for note in map(self._not_carried_out, notes) if note is not None]
        if self.problems:
            raise PlanError(dict.fromkeys(self.problems), "the plan cannot be carried out by styles:")
        ordered = [name for name, _ in self.module.named_modules(remove_duplicate=False)]
        return {name: self.found[name] for name in ordered if name in self.found}

    # ------------------------------------------------------------------ evidence

    def _proven(self, regions: list[Region]) -> Iterator[tuple[Region, Verdict]]:
        """Each region with what its rehearsal showed; styles for whole modules need none."""
        stage: Stage | None = None
        for region in regions:
            if not region.row or not region.columns or region.is_torchs or region.kind == "experts":
                yield region, Verdict(True)
                continue
            stage = stage if stage is not None else Stage(self.module, self.call)
            yield region, self._rehearsed(stage, region)

    def _rehearsed(self, stage: Stage, region: Region) -> Verdict:
        if region.kind == "attention" and region.heads is None:
            return Verdict(False, "its heads cannot be counted, or not be dealt out")
        first: Verdict | None = None
        for sizes in local_counts(self.module, region, self.cuts.tp_size):
            verdict = stage.rehearse(
                region.scope,
                {**region.columns, **region.picked},
                region.row,
                region.row_split,
                region.inner,
                sizes,
                self.cuts.tp_size,
            )
            if verdict.right:
                self._localise(sizes)
                return verdict
            first = first if first is not None else verdict
            if verdict.right is None:
                break
        assert first is not None
        return first

    # ------------------------------------------------------------------ styles

    def _localise(self, sizes: Mapping[str, Mapping[str, int]]) -> None:
        """Counts of the modules around the layers; each says for how many ranks it was rehearsed."""
        for name, values in sizes.items():
            known = self.found.get(name)
            before = known.attributes if isinstance(known, TPBlockParallel) else {}
            self.found[name] = TPBlockParallel(self.cuts.tp_size, {**before, **values})

    def _divide(self, region: Region, verdict: Verdict) -> None:
        self.divided.append(region)
        if region.is_torchs:
            self.found[region.scope] = MultiheadAttentionParallel()
            return
        if region.kind == "experts":
            self._experts(region)
            return
        inner = bool(region.row) and bool(region.columns)
        for name, split in region.columns.items():
            self.found[name] = column(split, Shard(-1) if inner else Replicate())
        for name, split in region.picked.items():
            (section,) = split.sections
            self.found[name] = ColwiseKVReplicated(section.size, unit=section.unit, copies=section.copies)
            self.picked.add(region.scope)
            self.summed |= {f"{name}.{key}" for key in self.module.get_submodule(name)._parameters}
        if region.row:
            self.found[region.row] = RowwiseParallel()
        self._between(region, verdict)

    def _between(self, region: Region, verdict: Verdict) -> None:
        """Parameters and dropouts that stand inside."""
        by_owner: dict[str, tuple[dict[str, int], list[str]]] = {}
        for name, split in region.inner.items():
            owner, _, key = name.rpartition(".")
            assert split.dim is not None
            by_owner.setdefault(owner, ({}, []))[0][key] = split.dim
        for name in verdict.summed:
            if name not in region.inner:
                owner, _, key = name.rpartition(".")
                by_owner.setdefault(owner, ({}, []))[1].append(key)
                self.summed.add(name)
        for owner, (cut, summed) in by_owner.items():
            module = self.module.get_submodule(owner)
            known = self.found.get(owner)
            counts = known.attributes if isinstance(known, TPBlockParallel) else {}
            if not cut and not counts and {name for name, _ in module.named_parameters()} == set(summed):
                self.found[owner] = NoParallel(sum_gradient=True)
            else:
                self.found[owner] = TPBlockParallel(self.cuts.tp_size, counts, cut, tuple(summed))
        for name in verdict.dropouts:
            self.found[name] = NoParallel(sum_gradient=True)

    def _experts(self, region: Region) -> None:
        names = {name.rpartition(".")[2]: split for name, split in region.parameters.items()}
        module = self.module.get_submodule(region.scope)
        kinds = {}
        for key, split in names.items():
            parameter = module.get_parameter(key)
            kind = "rowwise" if split.dim == parameter.dim() - 1 and not key.endswith("bias") else "colwise"
            kinds[key] = f"packed_{kind}" if len(split.sections) > 1 else kind
        for key, _ in module.named_parameters():
            kinds.setdefault(key, "rowwise")  # the bias after the projection down, whole on every rank
        self.found[region.scope] = ParametersParallel(kinds, role="experts")
        self.activations.add(region.scope)

    def _alone(self, names: set[str]) -> None:
        """Cut layers that are part of no region."""
        if self.unproven == "leave":
            return
        for name in dict.fromkeys(n.rpartition(".")[0] for n in self.cuts.splits if n in names):
            module = self.module.get_submodule(name)
            keys = {key for key in module._parameters if f"{name}.{key}".lstrip(".") in names}
            style, problem = gathering(self.cuts, name, module, keys)
            if problem is not None:
                self.problems.append(problem)
            elif style is not None and self.unproven == "gather":
                self.found.setdefault(name, style)
            else:
                self.problems.append(no_region(self.cuts, name, keys))

    def _tied(self) -> None:
        """A tied weight's other layers get the style that divides it alike."""
        owners: dict[int, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
        for names in owners.values():
            if not any(name in self.found for name in names):
                continue
            for name in names:
                module = self.module.get_submodule(name)
                split = self.cuts.splits.get(below(name, "weight"))
                if name in self.found or split is None:
                    continue
                if isinstance(module, nn.Embedding):
                    self.found[name] = RowwiseParallel()
                elif linear_shape(describe(module)) is not None:
                    self.found[name] = column(replace(split, dim=0), Replicate())

    # ------------------------------------------------------------------ remarks

    def _not_carried_out(self, note: Any) -> Problem | None:
        """A remark that asks for something that these styles do not do, in a region that they divide."""
        asked: set[str] = set()
        if note.code == "partial-gradient":
            asked = {name for region in self.divided for name in region.whole} - self.summed
        elif note.code == "partial-activation":
            asked = {region.scope for region in self.divided if region.kind == "experts"} - self.activations
        elif note.code == "kv-replicated":
            asked = {region.scope for region in self.divided} - self.picked
        missing = sorted(name for name in asked if fnmatchcase(name, note.name))
        if not missing:
            return None
        hint = f"the planner asks: {note.hint}; nothing here does so"
        return Problem(note.code, ", ".join(missing), axis=self.cuts.axis, found=note.found, hint=hint)


def _not_proven(region: Region, verdict: Verdict) -> Problem:
    hint = (
        "pass call= with which it can be tried; or "
        if verdict.right is None
        else "its channels or heads cannot be computed separately: leave it replicated; or "
    )
    return Problem(
        "unverified" if verdict.right is None else "slices-mix",
        region.scope,
        found=f"{region.kind} by columns and rows: {verdict.reason}",
        hint=hint + 'unproven="gather" takes each layer on its own',
    )


def no_region(cuts: AxisCuts, name: str, keys: set[str]) -> Problem:
    """The error for a layer that is part of no region."""
    found = ", ".join(f"{key}: {cuts.splits[below(name, key)]}" for key in sorted(keys))
    hint = (
        "it is part of no recognised block that the plan cuts by columns and rows. For a data-parallel axis use "
        'FSDP or shard_spec.apply_plan; for a tensor-parallel one unproven="gather" makes it right on its own'
    )
    return Problem("unknown-name", name, axis=cuts.axis, found=found, hint=hint)


def gathering(
    cuts: AxisCuts, name: str, module: nn.Module, keys: set[str]
) -> tuple[ParallelStyle | None, Problem | None]:
    """The style that makes the layer right between whole activations; or why there is none."""
    info = describe(module, name)
    weight, bias = (cuts.splits.get(below(name, key)) for key in ("weight", "bias"))
    shape = linear_shape(info)
    if shape is not None and weight is not None:
        by_rows = weight.dim == shape.out_dim
        has_bias = module._parameters.get("bias") is not None
        if has_bias and (not cuts.agree(below(name, "bias"), replace(weight, dim=0)) if by_rows else bias):
            hint = "shard the bias with the rows of its weight, and replicate it with the columns"
            return None, Problem("layout-mismatch", below(name, "bias"), found=str(bias or "whole"), hint=hint)
        if by_rows:
            return column(replace(weight, dim=0), Replicate()), None
        if weight.is_single and all(section.unit == 1 for section in weight.sections):
            return RowwiseParallel(input_layouts=Replicate()), None
    if isinstance(module, nn.Embedding) and weight is not None and weight.is_single:
        by_rows = weight.dim == 0
        return RowwiseParallel() if by_rows else ColwiseParallel(output_layouts=Replicate()), None
    found = f"{type(module).__name__} with " + ", ".join(
        f"{key}: {cuts.splits[below(name, key)]}" for key in sorted(keys)
    )
    hint = "styles shard nn.Linear and nn.Embedding weights; keep this one replicated on the axis"
    return None, Problem("layout-mismatch", name, axis=cuts.axis, found=found, hint=hint)


def column(split: Split, output: Any) -> ParallelStyle:
    """The column-wise style that divides output features so."""
    if len(split.sections) == 1 and split.sections[0].unit == 1:
        return ColwiseParallel(output_layouts=output)
    return FusedColwiseParallel(
        tuple(s.size for s in split.sections), unit=tuple(s.unit for s in split.sections), output_layouts=output
    )


def below(name: str, attribute: str) -> str:
    """FQN of something of a module."""
    return f"{name}.{attribute}" if name else attribute
