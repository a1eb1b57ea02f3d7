"""The decision for a full model: every module's style, by pattern, and its meaning. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from torch import nn
from torch.distributed.tensor import DTensor

from tp_styles._shared.patterns import Pattern, most_specific
from tp_styles._torch_compat import TorchParallelStyle
from tp_styles.plan.model import PlannedModule, TPPlan, UnstyledParameter
from tp_styles.plan.style import AddedByPlanner, ParallelStyle
from tp_styles.problems import PlanError, Problem, StyleTypeError
from tp_styles.values import (
    ParameterSpec,
    PerRank,
    Split,
    StyleSpec,
    describe,
    is_below,
    names_of_parameters,
)


def match_plan(
    names: Iterable[str], plan: Mapping[str, object], *, strict: bool
) -> tuple[dict[str, str], list[Problem]]:
    """Give every name at most one pattern. An exact name beats globs, which must agree.

    Args:
        names: FQNs, in the model's order.
        plan: Pattern -> style, or its name.
        strict: Report a pattern without a match.

    Returns:
        Name -> pattern in the order of `names`; and the problems: no match, conflicting globs.
    """
    names = list(names)
    problems: list[Problem] = []
    patterns: list[Pattern] = []
    for text in plan:
        try:
            patterns.append(Pattern(text))
        except PlanError as error:
            problems += error.problems
    used: set[Pattern] = set()
    matches: dict[str, str] = {}
    for name in names:
        matching = [pattern for pattern in patterns if pattern.matches(name)]
        used.update(matching)
        if not matching:
            continue
        first, *others = most_specific(matching)  # one exact name, or all globs
        rivals = [other for other in others if plan[other.text] != plan[first.text]]  # equal styles do not conflict
        if rivals:
            problems.append(
                Problem(
                    "ambiguous-pattern",
                    name,
                    found=", ".join(repr(pattern.text) for pattern in (first, *rivals)),
                    hint="they give it different styles: add an exact entry, or narrow one of the globs",
                )
            )
        matches[name] = first.text
    if strict:
        problems += [_unmatched(pattern.text, names) for pattern in patterns if pattern not in used]
    return matches, problems


def _not_a_style(pattern: str, style: object) -> Problem:
    kind = style.__name__ if isinstance(style, type) else "ColwiseParallel"
    return Problem(
        "wrong-type",
        pattern,
        found=repr(style),
        hint=f"pass a style, as {kind}(); from_hf_tp_plan(model, plan) takes plans of style names",
    )


def _unmatched(pattern: str, names: list[str]) -> Problem:
    import difflib  # only for the hint

    # `layers.*.atn` is near `layers.0.attn` by what all layers share.
    starred = {".".join("*" if part.isdigit() else part for part in name.split(".")): name for name in reversed(names)}
    near = difflib.get_close_matches(
        pattern, [name for name in {**dict.fromkeys(names), **starred} if name], n=3, cutoff=0.5
    )
    near = near or [name for name in names if name and name.rpartition(".")[2] == pattern.rpartition(".")[2]][:3]
    return Problem(
        "unmatched-pattern",
        pattern,
        found="no module of that name",
        hint="modules with similar names: " + ", ".join(near) if near else "`*` is one name, `**` any number of them",
    )


Plan = Mapping[str, TorchParallelStyle]
Rest = Literal["plain", "replicated"]


def plan_styles(
    model: nn.Module, plan: Plan | TorchParallelStyle, tp_size: int, *, strict: bool = True, rest: Rest = "plain"
) -> TPPlan:
    """Plan splits and communication of every module in the plan. No process group, no communication.

    Args:
        model: Any model, on any device, the meta device too.
        plan: FQN pattern -> style (an exact name beats a glob; `""` is the model itself), or one style for the model.
        tp_size: Number of ranks.
        strict: Report a pattern without a module.
        rest: As `apply_plan`.

    Returns:
        The plan; look at its `.problems`.

    Raises:
        StyleTypeError: It is no plan at all.
    """
    return plan_module(model, plan, tp_size, strict=strict, is_staged=False, rest=rest)


def plan_module(
    model: nn.Module,
    plan: Plan | TorchParallelStyle,
    tp_size: int,
    *,
    strict: bool,
    is_staged: bool,
    rest: Rest = "plain",
) -> TPPlan:
    """Plan one of several calls. A later call may still shard the other of two tied weights."""
    if isinstance(plan, TorchParallelStyle):  # for the model itself
        plan = {"": plan}
    styles: object = plan
    if not isinstance(styles, Mapping):
        raise StyleTypeError(
            Problem("wrong-type", "plan", found=str(type(plan)), hint="pass a style, or a dict of FQN and style"),
            f"Expect Union[ParallelStyle, Dict[str, ParallelStyle]] for parallelize_plan, {type(plan)} found!",
        )
    if tp_size < 1:
        return TPPlan(tp_size, problems=(Problem("mesh-mismatch", found=str(tp_size), hint="at least one rank"),))
    modules = dict(model.named_modules(remove_duplicate=False))  # shared modules: under all names
    matches, problems = match_plan(modules, plan, strict=strict)
    problems += [_not_a_style(key, item) for key, item in styles.items() if not isinstance(item, TorchParallelStyle)]
    planned: dict[str, PlannedModule] = {}
    for name, pattern in matches.items():
        style = styles[pattern]
        for entry in _expanded(modules, name, pattern, style, tp_size) if isinstance(style, TorchParallelStyle) else ():
            rival = planned.get(entry.name)
            if rival is not None and rival.style != entry.style:
                problems.append(_two_styles(entry, rival))
                continue  # the first style stays
            planned[entry.name] = entry
    for name in _around_layers(modules, planned):
        spec = StyleSpec(compute="none", attributes=(("use_nested_tensor", False),))
        planned.setdefault(
            name, PlannedModule(describe(modules[name], name), "(around its layers)", AddedByPlanner(), spec)
        )
    for name, keys in _replicated(modules, planned).items() if rest == "replicated" else ():  # left by all styles
        # The module's own forward runs on local ones.
        spec = StyleSpec("module", tuple((key, ParameterSpec(Split.replicated())) for key in keys))
        planned[name] = PlannedModule(describe(modules[name], name), 'rest="replicated"', AddedByPlanner(), spec)
    ordered = [planned[name] for name in modules if name in planned]  # the model's order on all ranks
    ordered = _without_shared(ordered, modules, problems)
    problems += _adapted(ordered, modules)
    for entry in ordered:
        problems += _state_problems(entry, modules[entry.name], tp_size)  # first: a weight norm hides the weight
        problems += entry.spec.problems
    claims = _claims(ordered, problems)
    problems += _tied_problems(model, claims, ordered, is_staged)
    left = [
        UnstyledParameter(name, tuple(parameter.shape), parameter.numel() * parameter.element_size())
        for name, parameter in model.named_parameters()
        if name not in claims and not any(is_below(name, f.name) for f in ordered if f.spec.compute == "foreign")
    ]
    return TPPlan(tp_size, tuple(ordered), tuple(left), tuple(dict.fromkeys(problems)))


def explain(
    model: nn.Module,
    plan: Plan | TorchParallelStyle,
    tp_size: int,
    *,
    num_tokens: int | None = None,
    strict: bool = True,
) -> str:
    """Return a plan for a model as text: no process group, any device.

    Args:
        model: The model.
        plan: FQN pattern -> style, or one style.
        tp_size: Number of ranks.
        num_tokens: Tokens of one step, for bytes per step; by default bytes are per token.
        strict: Report a pattern without a module.
    """
    return plan_styles(model, plan, tp_size, strict=strict).explain(num_tokens=num_tokens)


# ---------------------------------------------------------------------------------------------- steps


def _expanded(
    modules: dict[str, nn.Module], name: str, pattern: str, style: TorchParallelStyle, tp_size: int
) -> Iterator[PlannedModule]:
    """Yield the module with its style, then the modules below with styles from it."""
    info = describe(modules[name], name)
    if not isinstance(style, ParallelStyle) or style.is_foreign:  # no spec: its own `_apply` decides
        yield PlannedModule(info, pattern, style, StyleSpec(compute="foreign"))
        return
    spec = style.spec(info, tp_size)
    if not style.takes_functions and (style._prepare_input is not None or style._prepare_output is not None):
        spec = replace(
            spec,
            problems=(
                *spec.problems,
                Problem(
                    "invalid-argument",
                    info.where(),
                    found=repr(style),
                    hint=f"the style takes layouts; tp_styles.legacy.{type(style).__name__} takes prepare functions",
                ),
            ),
        )
    yield PlannedModule(info, pattern, style, spec)
    for child, below in spec.children:
        assert isinstance(below, TorchParallelStyle)
        yield from _expanded(modules, info.where(child), f"{pattern} ({type(style).__name__})", below, tp_size)


def _replicated(modules: dict[str, nn.Module], planned: dict[str, PlannedModule]) -> dict[str, tuple[str, ...]]:
    """Return unstyled parameters by module: leaf layers, and blocks with parameters of their own."""
    opaque = [name for name, item in planned.items() if item.spec.compute == "foreign"]
    claimed = {
        id(modules[item.name].get_parameter(key)) for item in planned.values() for key, _ in item.spec.parameters
    }
    rest: dict[str, tuple[str, ...]] = {}
    for name, module in modules.items():
        # torch's attention reads the weights of its output projection itself.
        names = [key for key, _ in module.named_parameters(recurse=isinstance(module, nn.MultiheadAttention))]
        free = tuple(key for key in names if id(module.get_parameter(key)) not in claimed)
        if free and name not in planned and not any(is_below(name, item) for item in opaque):
            rest[name] = free
            claimed |= {id(module.get_parameter(key)) for key in free}
    # A tied weight brings along every module with it.
    owners = {name: {id(p) for p in module._parameters.values() if p is not None} for name, module in modules.items()}
    mine = {id(modules[name].get_parameter(key)) for name, keys in rest.items() for key in keys}
    for name, ids in owners.items():
        if ids & mine and name not in rest and name not in planned:
            free = tuple(key for key, p in modules[name]._parameters.items() if id(p) in mine)
            rest[name] = free
    return rest


def _around_layers(modules: dict[str, nn.Module], planned: dict[str, PlannedModule]) -> list[str]:
    """List `nn.TransformerEncoder`s around parallel layers: in evaluation they would pass nested tensors."""
    return [
        name
        for name, module in modules.items()
        if isinstance(module, nn.TransformerEncoder)
        and getattr(module, "use_nested_tensor", False)
        and any(is_below(other, name) and other != name for other in planned)
    ]


def _two_styles(planned: PlannedModule, rival: PlannedModule) -> Problem:
    return Problem(
        "ambiguous-pattern",
        planned.name,
        found=f"{rival.style!r} by {rival.pattern!r} and {planned.style!r} by {planned.pattern!r}",
        hint="a module takes one style",
    )


def _without_shared(
    ordered: list[PlannedModule], modules: dict[str, nn.Module], problems: list[Problem]
) -> list[PlannedModule]:
    """Keep one entry for a module with several names in the model."""
    first_uses: dict[int, PlannedModule] = {}
    for planned in ordered:
        rival = first_uses.setdefault(id(modules[planned.name]), planned)
        if rival.style != planned.style:
            problems.append(_two_styles(planned, rival))
    return list(first_uses.values())


def _state_problems(planned: PlannedModule, module: nn.Module, tp_size: int) -> Iterator[Problem]:
    """Yield reasons in a module's state not to shard it."""
    if planned.spec.compute == "foreign":  # its own `_apply` decides
        return
    if "forward" in vars(module) and planned.spec.compute not in ("hooks", "none"):
        yield Problem(
            "already-applied",
            planned.name,
            found=repr(type(vars(module)["forward"]).__name__),
            hint="the module is parallel already (undo it first), or something else has replaced its forward",
        )
    for name, value in planned.spec.attributes:
        path, _, attribute = name.rpartition(".")
        count = getattr(module.get_submodule(path), attribute, None)
        if isinstance(value, PerRank) and (not isinstance(count, int) or count % tp_size):
            yield Problem(
                "does-not-divide", planned.info.where(name), found=f"{count} over {tp_size} ranks", hint="a count"
            )
    for name, _ in planned.spec.buffers:
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        if owner._buffers.get(attribute) is None or attribute not in owner._non_persistent_buffers_set:
            yield Problem(
                "unknown-name",
                planned.info.where(name),
                found="no buffer outside of state dicts",
                hint="register_buffer(..., persistent=False): a state dict would hold one rank's shard",
            )
    # Experts of transformers: a rank whose rows are unaligned would raise alone, and leave the others waiting.
    kernel = getattr(getattr(module, "config", None), "_experts_implementation", "")
    is_grouped = kernel == "grouped_mm" and hasattr(module, "is_transposed")
    for name, item in planned.spec.parameters:
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        parameter = owner._parameters.get(attribute)  # a parametrization makes it a property
        if parameter is None:
            yield Problem(
                "module-not-shardable",
                planned.info.where(name),
                found="no plain parameter of that name (a parametrization or weight norm)",
                hint="remove it before, and put it back after",
            )
        elif not isinstance(parameter, DTensor) and hasattr(parameter, "__tensor_flatten__"):  # torchao's
            yield Problem(
                "module-not-shardable",
                planned.info.where(name),
                found=f"a weight of {type(parameter).__module__}.{type(parameter).__name__}",
                hint="shard first, then quantise each rank's weights; or leave the module out of the plan",
            )
        elif isinstance(parameter, DTensor):
            yield Problem(
                "already-applied",
                planned.info.where(name),
                found=f"a DTensor with {parameter.placements}",
                hint="tensor parallelism comes first, before FSDP and before another plan",
            )
        elif is_grouped and item.split.dim and any(n * parameter.itemsize % 16 for n in item.split.sizes(tp_size)):
            yield Problem(
                "does-not-divide",
                planned.info.where(name),
                dim=item.split.dim,
                found=f"shards of {item.split.sizes(tp_size)} {parameter.dtype}: no multiples of 16 bytes",
                hint='grouped products of torch take no others: set_experts_implementation("eager") of the model does',
            )


def _adapted(ordered: list[PlannedModule], modules: dict[str, nn.Module]) -> Iterator[Problem]:
    """Yield each module around parameters of peft's `target_parameters` that has a style, or has a styled module below.

    In its forward peft adds a full update to such a parameter by a parametrization, which sees neither shards nor the
    local tensors of a style.
    """
    wrappers = [name for name, module in modules.items() if type(module).__name__ == "ParamWrapper"]
    for planned in ordered:
        above = [name for name in wrappers if is_below(planned.name, name)]
        if above and (planned.spec.parameters or any(planned.spec.flows())):
            yield Problem(
                "module-not-shardable",
                above[0],
                found="parameters with low-rank updates of their own (target_parameters of peft)",
                hint="merge them before the plan (merge_and_unload), leave this module and those below out of the plan,"
                " or adapt linear layers (target_modules)",
            )


def _claims(ordered: list[PlannedModule], problems: list[Problem]) -> dict[str, PlannedModule]:
    """Map each parameter FQN to the module with its style."""
    claims: dict[str, PlannedModule] = {}
    for planned in ordered:
        for name, _ in planned.spec.parameters:
            fqn = planned.info.where(name)
            rival = claims.setdefault(fqn, planned)
            if rival is not planned:
                problems.append(
                    Problem(
                        "ambiguous-pattern",
                        fqn,
                        found=f"{rival.style!r} on {rival.name!r} and {planned.style!r} on {planned.name!r}",
                        hint="a parameter belongs to one style",
                    )
                )
    return claims


def _tied_problems(
    model: nn.Module, claims: dict[str, PlannedModule], ordered: list[PlannedModule], is_staged: bool
) -> Iterator[Problem]:
    """Yield tied parameters without the same split everywhere: they would no longer be tied."""
    foreign = [planned for planned in ordered if planned.spec.compute == "foreign"]
    for tied in names_of_parameters(model):
        owners = {id(model.get_submodule(name.rpartition(".")[0])) for name in tied}
        if len(owners) == 1 and len({name.rpartition(".")[2] for name in tied}) == 1:  # one module, under several names
            continue
        splits = {}
        for name in tied:
            owner = claims.get(name)
            if owner is not None:
                split = dict(owner.spec.parameters)[name.removeprefix(owner.name + ".") if owner.name else name].split
                splits[name] = str(split)
            elif any(is_below(name, planned.name) for planned in foreign):
                splits[name] = "foreign style"
            else:
                splits[name] = "no style"
        kinds = set(splits.values()) - ({"no style"} if is_staged else set())  # a later call may style it
        if kinds <= {"no style"} or (len(kinds) == 1 and "foreign style" not in kinds):
            continue
        yield Problem(
            "tied-weights",
            tied[0],
            found="; ".join(f"{name}: {kind}" for name, kind in splits.items()),
            hint="one tensor under several names: give every one of them a style that splits it alike "
            "(an embedding by RowwiseParallel and a head by ColwiseParallel do)",
        )
