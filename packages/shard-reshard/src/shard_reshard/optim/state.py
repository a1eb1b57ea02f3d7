"""State dicts of optimizers on owners: saved by matrix, loaded on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from shard_reshard._shared.consensus import all_gather_objects
from shard_reshard._shared.dtensor import as_dtensor
from shard_reshard._shared.problems import PlanError, Problem, raise_problems
from shard_reshard._shared.sharding_info import sharding_info_of
from shard_reshard.group import condensed, raise_on_all_ranks
from shard_reshard.layout.shard_map import torch_dtype
from shard_reshard.optim.block import Block, Engine
from shard_reshard.optim.step import agree, write_values
from shard_reshard.state_dict.agreement import local_tensor
from shard_reshard.state_dict.resharder import reshard_state_dict

_SUBJECT = "WholeMatrices.load_state_dict"
Entry = dict[str, Any]  # state of one matrix or parameter by key


def state_of(engine: Engine, param_groups: Sequence[Mapping[str, Any]], allocate: bool) -> dict[str, Any]:
    """Return the state dict of this rank; see `WholeMatrices.state_dict`."""
    state: dict[str, Entry] = {}
    stepped: list[str] = []
    if not allocate:  # tensors to load into are needed after a failure too
        engine.raise_broken("WholeMatrices.state_dict")
    for block in engine.blocks:
        for family in block.families:
            for chunk, optimizer in family.optimizers.items():
                named = {id(block.masters[m.name]): m.name for _, m in block.owned(chunk)}
                own = _by_name(optimizer, named)
                state |= {name: own.get(name, {}) for name in named.values() if name in block.stepped}
        if allocate:
            state |= {name: entry for name, entry in _allocated(block) if name not in state}
        if block.in_shards is not None:
            entries = _by_name(block.in_shards, {id(p): name for name, p in block.rest.items()})
            if allocate:
                entries = _allocated_in_shards(block) | entries
            state |= _with_layouts(block, entries)
            stepped += [name for name in block.rest if name in entries]
        stepped += [m.name for m in block.owners.matrices if m.name in block.stepped]
    names = engine.names
    groups = [
        {"params": [names[id(p)] for p in group["params"]], **{k: v for k, v in group.items() if k != "params"}}
        for group in param_groups
    ]
    return {"state": state, "param_groups": groups, "steps": engine.num_steps, "stepped": stepped}


def _by_name(optimizer: Optimizer, named: Mapping[int, str]) -> dict[str, Entry]:
    """Return an optimizer's own state dict by names: by numbers it is in the order of its groups."""
    order = [named[id(p)] for group in optimizer.param_groups for p in group["params"]]
    return {order[number]: dict(entry) for number, entry in optimizer.state_dict()["state"].items()}


def _allocated(block: Block) -> Iterator[tuple[str, Entry]]:
    """Yield state for this rank's matrices that have none: of a step on zeros, one matrix at a time."""
    for chunk in range(len(block.owners.chunks)):
        family = block.family_of(chunk)
        for at, matrix in block.owned(chunk):
            parameter = block.parameters[matrix.parameter]
            if parameter.requires_grad and matrix.name not in block.stepped:
                device = local_tensor(parameter).device
                zeros = nn.Parameter(torch.zeros(matrix.shape, dtype=torch_dtype(matrix.dtype), device=device))
                yield matrix.name, _of_zeros(family.made({at: zeros}), {matrix.name: zeros}).get(matrix.name, {})


def _allocated_in_shards(block: Block) -> dict[str, Entry]:
    """Return state for parameters in their shards, of a step on zeros."""
    assert block.make_in_shards is not None
    zeros = {name: nn.Parameter(torch.zeros_like(p.detach())) for name, p in block.rest.items() if p.requires_grad}
    return _of_zeros(block.make_in_shards(list(zeros.values())), zeros) if zeros else {}


def _of_zeros(optimizer: Optimizer, zeros: Mapping[str, nn.Parameter]) -> dict[str, Entry]:
    """Return an optimizer's state by name after a step on zeros."""
    for parameter in zeros.values():
        parameter.grad = torch.zeros_like(parameter.detach())
    optimizer.step()
    return _by_name(optimizer, {id(parameter): name for name, parameter in zeros.items()})


def _with_layouts(block: Block, state: dict[str, Entry]) -> dict[str, Entry]:
    """Return the state of parameters in their shards as DTensors where these are plain local shards."""
    for name, entry in state.items():
        parameter = block.rest[name]
        info = None if hasattr(parameter, "device_mesh") else sharding_info_of(parameter)
        for key, value in entry.items() if info is not None else ():
            if not torch.is_tensor(value) or value.shape != local_tensor(parameter).shape or value.dim() == 0:
                continue
            assert info is not None
            if info.needs_sections:
                raise PlanError(
                    Problem(
                        "unsupported-tensor",
                        name,
                        found="state of a fused parameter in its shards, which no DTensor describes",
                        hint="give the parameter to make=, where its sections are matrices",
                    )
                )
            entry[key] = as_dtensor(local_tensor(value), info.mesh, info.placements, info.shape)
    return state


# ---- loading ---------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """A state dict with names of matrices, as one rank passes it.

    Attributes:
        state: State by matrix, or by parameter in shards.
        groups: Hyperparameters of each group, and the names of its parameters.
        steps: Number of steps before it was saved; None in a state dict of torch's.
        stepped: Names of the matrices with state, on all ranks of the job that saved it.
    """

    state: dict[str, Entry]
    groups: list[tuple[dict[str, Any], list[str]]]
    steps: int | None
    stepped: list[str]


def load_state(engine: Engine, param_groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Load a state dict; see `WholeMatrices.load_state_dict`."""
    members = engine.members
    try:
        parsed = _parsed(engine, param_groups, state_dict)
    except Exception as error:
        raise_on_all_ranks(members, error)
    # Ranks have to know shape and dtype of a tensor, else the value.
    content = {
        name: {k: (tuple(v.shape), str(v.dtype)) if torch.is_tensor(v) else (v,) for k, v in entry.items()}
        for name, entry in parsed.state.items()
    }
    everyone = all_gather_objects(members.group, (content, parsed.groups, parsed.steps, parsed.stepped), _SUBJECT)
    stepped = sorted({name for other in everyone for name in other[3]})
    _compare(everyone, stepped, engine)
    arrived = _moved(engine, parsed, [other[0] for other in everyone], stepped)
    engine.broken = "loading a state dict failed"
    for block in engine.blocks:
        block.reset(stepped)
    failure: Exception | None = None
    try:
        for (values, _), group in zip(parsed.groups, param_groups, strict=True):
            write_values(group, values)
        for block in engine.blocks:
            _install(block, arrived)
            if block.in_shards is not None:
                _install_in_shards(block, block.in_shards, parsed.state)
    except Exception as error:
        failure = error
    agree(members, _SUBJECT, failure)
    engine.num_steps, engine.broken = parsed.steps or 0, ""


def _parsed(engine: Engine, param_groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]) -> Given:
    """Return a state dict of ours, or of torch's optimizer in one process, with names of matrices."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise PlanError(
            Problem(
                "wrong-type",
                "state_dict",
                found=f"keys {sorted(map(str, state_dict))}",
                hint="pass what state_dict() of this class or of a torch optimizer returned",
            )
        )
    groups = state_dict["param_groups"]
    names = engine.names
    own = [[names[id(p)] for p in group["params"]] for group in param_groups]
    if "steps" in state_dict:
        listed = [list(group["params"]) for group in groups]
        state = {name: dict(entry) for name, entry in state_dict["state"].items()}
        stepped = list(state_dict["stepped"])
    else:
        total = [number for group in groups for number in group["params"]]
        order = [name for group in groups for name in group.get("param_names", ())]
        order = order or list(dict.fromkeys(name for block in engine.blocks for name in block.order))
        if len(order) != len(total):
            raise PlanError(
                Problem(
                    "argument-count",
                    "state_dict",
                    found=f"{len(total)} parameters, this optimizer has {len(order)}",
                    hint="load it into the same groups",
                )
            )
        name_of = dict(zip(total, order, strict=True))
        listed = [[name_of[number] for number in group["params"]] for group in groups]
        by_parameter = {name_of[number]: dict(entry) for number, entry in state_dict["state"].items()}
        state = {name: entry for block in engine.blocks for name, entry in _split(block, by_parameter)}
        stepped = list(state)
    if [sorted(group) for group in listed] != [sorted(group) for group in own]:
        raise PlanError(
            Problem(
                "invalid-argument",
                "param_groups",
                found=f"groups of {list(map(len, listed))} parameters, this optimizer's are of {list(map(len, own))}",
                hint="make the same parameter groups, of the same names, before loading",
            )
        )
    values = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
    return Given(state, list(zip(values, listed, strict=True)), state_dict.get("steps"), stepped)


def _split(block: Block, by_parameter: Mapping[str, Entry]) -> Iterator[tuple[str, Entry]]:
    """Yield state by matrix from state by parameter: a tensor of the parameter's shape is cut as the parameter is."""
    yield from ((name, entry) for name, entry in by_parameter.items() if name in block.rest)
    matrices = block.owners.matrices
    elements: dict[str, int] = {}
    for matrix in matrices:
        elements[matrix.parameter] = elements.get(matrix.parameter, 0) + prod(matrix.shape)
    for matrix in matrices:
        if (entry := by_parameter.get(matrix.parameter)) is None:
            continue
        own: Entry = {}
        for key, value in entry.items():
            is_one = matrix.name == matrix.parameter or not torch.is_tensor(value) or value.numel() <= 1
            if not is_one and value.numel() != elements[matrix.parameter]:
                raise PlanError(
                    Problem(
                        "shape-mismatch",
                        matrix.parameter,
                        found=f"{key} of {tuple(value.shape)} belongs to the parameter, which is several matrices here",
                        hint=f"pass together=[{matrix.parameter!r}], or load the model's weights alone",
                    )
                )
            own[key] = value if is_one else matrix.window(value)
        yield matrix.name, own


def _compare(everyone: Sequence[tuple[Any, ...]], stepped: Sequence[str], engine: Engine) -> None:
    """Raise on all ranks what keeps the state of all ranks from being loaded."""
    problems = [
        Problem(
            "ranks-disagree",
            "state_dict",
            found=f"rank {rank}: other groups or another number of steps than rank 0",
            hint="pass parts of one checkpoint on every rank",
        )
        for rank, other in enumerate(everyone)
        if repr(other[1:3]) != repr(everyone[0][1:3])
    ]
    held = {name for other in everyone for name in other[0]}
    matrices = {matrix.name for block in engine.blocks for matrix in block.owners.matrices}
    rest = {name for block in engine.blocks for name in block.rest}
    hint = "pass every rank's part, or load into state_dict(allocate=True) by torch.distributed.checkpoint"
    for name in stepped:
        if name in rest:
            lacking = [rank for rank, other in enumerate(everyone) if name not in other[0]]
            if lacking:
                problems.append(
                    Problem(
                        "missing-source",
                        name,
                        found=f"rank {lacking[0]} does not pass the state of its shard",
                        hint=hint,
                    )
                )
        elif name not in matrices:
            problems.append(
                Problem(
                    "unknown-name",
                    name,
                    found="this optimizer has no such matrix",
                    hint="pass the same parameters and together=",
                )
            )
        elif name not in held:
            problems.append(Problem("missing-source", name, found="no rank passes its state", hint=hint))
    raise_problems(condensed(problems))


def _moved(
    engine: Engine, given: Given, everyone: Sequence[Mapping[str, Any]], stepped: Sequence[str]
) -> dict[str, Entry]:
    """Return the state of this rank's matrices; tensors that an owner lacks are sent to it."""
    owner = {name: rank for block in engine.blocks for name, rank in block.owners.owner.items()}
    mine = engine.members.rank
    arrived: dict[str, Entry] = {}
    sources: dict[str, torch.Tensor] = {}
    places: dict[str, tuple[str, str]] = {}
    layouts: tuple[dict[str, str], dict[str, str]] = {}, {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in (name for name in stepped if name in owner):
        holder = owner[name]
        if name not in everyone[holder]:
            holder = next(rank for rank, content in enumerate(everyone) if name in content)
        if owner[name] == mine:
            arrived[name] = {k: v[0] for k, v in everyone[holder][name].items() if len(v) == 1}
            if holder == mine:
                own = given.state[name].items()
                arrived[name] |= {k: v.detach().clone() for k, v in own if torch.is_tensor(v)}
        for key, kind in everyone[holder][name].items() if holder != owner[name] else ():
            if len(kind) == 2:
                label = f"{name}/{key}"
                places[label], shapes[label] = (name, key), kind[0]
                layouts[0][label], layouts[1][label] = f"rank {holder}", f"rank {owner[name]}"
                if holder == mine:
                    sources[label] = local_tensor(given.state[name][key])
    if places:
        moved = reshard_state_dict(
            sources, layouts[1], src_layouts=layouts[0], shapes=shapes, group=engine.members.group
        )
        for label, value in moved.items():
            name, key = places[label]
            arrived[name][key] = value
    return arrived


def _install(block: Block, arrived: Mapping[str, Entry]) -> None:
    """Load the state of this rank's matrices into its optimizers, by their own `load_state_dict`."""
    for chunk in range(len(block.owners.chunks)):
        names = [matrix.name for _, matrix in block.owned(chunk)]
        if not any(name in block.stepped for name in names) or (optimizer := block.optimizer_of(chunk)) is None:
            continue
        block.family_of(chunk).write_hyperparameters(optimizer)
        _load(optimizer, {id(block.masters[name]): name for name in names}, arrived)


def _load(optimizer: Optimizer, named: Mapping[int, str], entries: Mapping[str, Entry]) -> None:
    """Load state by name into an optimizer, whose own state dict numbers it in the order of its groups."""
    order = [named[id(p)] for group in optimizer.param_groups for p in group["params"]]
    packed = optimizer.state_dict()
    packed["state"] = {number: entries[name] for number, name in enumerate(order) if entries.get(name)}
    optimizer.load_state_dict(packed)


def _install_in_shards(block: Block, optimizer: Optimizer, state: Mapping[str, Entry]) -> None:
    entries = {name: dict(state.get(name, {})) for name in block.rest}
    for name, parameter in block.rest.items():
        entry = entries[name]
        for key, value in entry.items():
            if torch.is_tensor(value) and value.dim():
                wanted = local_tensor(parameter).shape
                if local_tensor(value).shape != wanted:
                    raise PlanError(
                        Problem(
                            "shape-mismatch",
                            name,
                            found=f"{key} of {tuple(local_tensor(value).shape)}, the shard is of {tuple(wanted)}",
                            hint="load it by torch.distributed.checkpoint into state_dict(allocate=True)",
                        )
                    )
                if not hasattr(parameter, "device_mesh"):
                    entry[key] = local_tensor(value)
    _load(optimizer, {id(parameter): name for name, parameter in block.rest.items()}, entries)
