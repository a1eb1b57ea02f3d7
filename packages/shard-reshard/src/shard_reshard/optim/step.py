"""One step: gradients to owners, updates, new values back; on all ranks or on none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shard_reshard._shared.consensus import all_gather_objects, problems_of, tensor_hash
from shard_reshard._shared.problems import PlanError, Problem, raise_problems
from shard_reshard._torch_compat import foreach_copy_
from shard_reshard.execution.mover import Finish
from shard_reshard.group import GroupInfo, all_gather_row, assert_consistent
from shard_reshard.optim.block import Block, Engine, Gradients, guard_of
from shard_reshard.optim.exchange import Leg, gradient_plan, in_turn
from shard_reshard.state_dict.agreement import PLAIN, differing

# Numbers of calls among the rows that ranks gather; agreement.py has 3 to 5.
_START, _END = 6, 7
_SUBJECT = "WholeMatrices.step"


class Scaling(NamedTuple):
    """The two tensors that GradScaler sets before a step."""

    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None


class _Turn(NamedTuple):
    """A block's part of a step."""

    block: Block
    gradients: Gradients
    there: Leg
    chunks: Mapping[int, frozenset[str]]  # names of the matrices with gradients


def take_step(engine: Engine, scaling: Scaling) -> None:
    """Update all parameters with gradients; a collective."""
    engine.raise_broken(_SUBJECT)
    gradients, skip = _agreed_gradients(engine, scaling)
    if skip:
        return
    turns = [_turn(engine, block, own) for block, own in zip(engine.blocks, gradients, strict=True)]
    engine.broken = "a step failed when some owners had updated their state"
    problems: list[Problem] = []
    failures: list[Exception] = []
    stepped = [_update(turn, scaling, problems, failures) for turn in turns]
    _step_in_shards(engine, scaling, problems, failures)
    staged = [_send_back(turn) for turn in turns]
    after = _hyperparameters(turns, stepped)
    changed = any(any(values) for values in after.values())
    try:
        rows = all_gather_row(engine.members, _END, bytes([changed]), ["the end of a step"], problems)
    except PlanError as joint:
        raise joint from (failures[0] if failures else None)
    if any(row[0] for row in rows):
        _share_hyperparameters(engine, turns, after)
    for turn, (arrived, apart) in zip(turns, staged, strict=True):
        for finish in arrived:
            finish.commit()
        locals_ = turn.block.locals_of(apart)
        foreach_copy_([t for t in locals_.values() if t.numel()], [v for v in apart.values() if v.numel()])
        turn.block.guards |= {name: guard_of(turn.block.parameters[name]) for name in turn.gradients.local}
        turn.block.stepped |= {name for names in turn.chunks.values() for name in names}
    engine.num_steps += 1
    engine.broken = ""


# ---- before anything moves -------------------------------------------------------------------------------------


def _agreed_gradients(engine: Engine, scaling: Scaling) -> tuple[list[Gradients], bool]:
    """Compare what all ranks are about to do. Return this rank's gradients, and True if the step is to be skipped.

    Masters of parameters that were written since the last step, on any rank, are fetched again.
    """
    members, problems = engine.members, list[Problem]()
    gradients: list[Gradients] = []
    error: Exception | None = None
    try:
        gradients = [block.gradients(problems) for block in engine.blocks]
    except Exception as raised:
        error, problems = raised, [*problems, *problems_of(raised)]
    stale = [block.changed(own.local) for block, own in zip(engine.blocks, gradients, strict=False)]
    overflows = scaling.found_inf is not None and float(scaling.found_inf) != 0
    values = [_plain(group) for block in engine.blocks for group in block.outer]
    names = [(sorted(own.local), sorted(own.unlike.items())) for own in gradients]
    scale = None if scaling.grad_scale is None else float(scaling.grad_scale)
    row = _digest(names) + _digest((values, scale)) + bytes([overflows, any(stale)])
    lines = [f"gradients {names}", f"hyperparameters {values}"]
    try:
        rows = all_gather_row(members, _START, row, lines, problems)
    except PlanError as joint:
        raise joint from error
    if len({other[:32] for other in rows}) > 1:
        everyone = all_gather_objects(members.group, (names, values, scale), _SUBJECT)
        raise PlanError(_disagreements(everyone), f"{_SUBJECT}: nothing was changed on any rank")
    if any(other[32] for other in rows):
        return gradients, True
    if any(other[33] for other in rows):
        everyone = all_gather_objects(members.group, stale, _SUBJECT)
        stale = [sorted({name for own in everyone for name in own[at]}) for at in range(len(engine.blocks))]
    _compare_plain(engine, gradients)
    for block, own, changed in zip(engine.blocks, gradients, stale, strict=True):
        needed = {name for name in block.beside(block.exchange.chunks_of(own.local)) if name not in block.guards}
        if needed | set(changed):
            block.fetch(needed | set(changed))
    return gradients, False


def _plain(group: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a group's hyperparameters as text that is equal on ranks: the class for what shows its address.

    Tensors are left out: reading them would wait for a GPU.
    """
    values = [(key, value) for key, value in group.items() if key != "params" and not torch.is_tensor(value)]
    return [(key, type(value).__qualname__ if " at 0x" in repr(value) else repr(value)) for key, value in values]


def _digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()[:16]


def _disagreements(everyone: Sequence[tuple[Any, Any, Any]]) -> list[Problem]:
    """Return what differs between ranks: gradients, hyperparameters or loss scales."""
    problems: list[Problem] = []
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for (mine, unlike), (theirs, others) in zip(first[0], other[0], strict=True):
            for name in sorted(set(mine) ^ set(theirs)):
                has, lacks = (0, rank) if name in mine else (rank, 0)
                problems.append(
                    Problem(
                        "ranks-disagree",
                        name,
                        found=f"rank {has} has a gradient, rank {lacks} has none",
                        hint="gradients are None on all ranks or on none: fill the missing ones with zeros",
                    )
                )
            for name in sorted(dict(set(unlike) ^ set(others))):
                problems.append(
                    Problem(
                        "ranks-disagree",
                        name,
                        found=f"gradient of {dict(unlike).get(name)} on rank 0, "
                        f"of {dict(others).get(name)} on rank {rank}",
                        hint="a gradient has one layout on all ranks",
                    )
                )
        for number, (mine, theirs) in enumerate(zip(first[1], other[1], strict=True)):
            for key in sorted(dict(set(mine) ^ set(theirs))):
                problems.append(
                    Problem(
                        "ranks-disagree",
                        f"param_groups[{number}][{key!r}]",
                        found=f"{dict(mine).get(key)} on rank 0, {dict(theirs).get(key)} on rank {rank}",
                        hint="write the same hyperparameters, and call schedulers, on every rank",
                    )
                )
        if first[2] != other[2]:
            problems.append(
                Problem(
                    "ranks-disagree",
                    "GradScaler",
                    found=f"a loss scale of {first[2]} on rank 0, of {other[2]} on rank {rank}",
                    hint="after a step that was skipped, give every rank the least scale: scaler.update(new_scale)",
                )
            )
    return list({(p.code, p.name): p for p in problems}.values())


def _compare_plain(engine: Engine, gradients: Sequence[Gradients]) -> None:
    """Compare gradients of full plain parameters between ranks in their first step: equal, or not averaged."""
    plain = [
        (name, own.local[name])
        for block, own in zip(engine.blocks, gradients, strict=True)
        for name in own.local
        if name in block.plain and name not in engine.compared
    ]
    if plain:  # on all ranks: they have gradients of the same parameters
        sums = {name: bytes(tensor_hash(value).view(torch.uint8).tolist()) for name, value in plain}
        hint = "average them over ranks before the step, as DistributedDataParallel does"
        code, _, _ = PLAIN
        raise_problems(
            differing(
                all_gather_objects(engine.members.group, sums, _SUBJECT),
                code,
                "the gradient of a full parameter differs between ranks",
                hint,
            )
        )
        engine.compared.update(sums)


# ---- updates ---------------------------------------------------------------------------------------------------


def _turn(engine: Engine, block: Block, gradients: Gradients) -> _Turn:
    there = block.exchange.there
    if gradients.unlike:  # partial sums are added up on the way
        key = tuple(sorted(gradients.unlike.items()))
        if key not in block.exchange.unlike:
            unlike = {name: gradients.declared[name] for name in gradients.unlike}
            plan = gradient_plan(engine.members, block.owners, unlike)
            block.exchange.unlike[key] = block.exchange.there.replaced(plan)
        there = block.exchange.unlike[key]
    return _Turn(block, gradients, there, block.exchange.chunks_of(gradients.local))


def _update(turn: _Turn, scaling: Scaling, problems: list[Problem], failures: list[Exception]) -> list[int]:
    """Send gradients to owners, and update their masters chunk by chunk, while the next chunk travels.

    Returns:
        The chunks in which this rank has updated matrices.
    """
    block, stepped = turn.block, list[int]()

    def starts() -> Iterator[Any]:
        for chunk, moving in turn.chunks.items():
            own = {matrix.name: block.masters[matrix.name] for _, matrix in block.owned(chunk) if matrix.name in moving}
            arriving = {name: torch.empty_like(master.detach()) for name, master in own.items()}
            yield (chunk, arriving), turn.there.start(chunk, moving, turn.gradients.local, arriving)

    for chunk, arrived in in_turn(starts()):
        if not arrived or failures:
            continue
        try:
            _scale(list(arrived.values()), scaling.grad_scale)
            _update_chunk(block, chunk, arrived)
            stepped.append(chunk)
        except Exception as error:
            failures.append(error)
            problems.append(_failed(f"optimizer of chunk {chunk}", error))
    return stepped


def _failed(where: str, error: Exception) -> Problem:
    """Return the problem of an optimizer that raised on this rank: always a failed rank, whatever it raised."""
    return Problem(
        "rank-failed",
        where,
        found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
        hint="see the traceback of that rank; parameters have their old values",
    )


def _update_chunk(block: Block, chunk: int, gradients: Mapping[str, torch.Tensor]) -> None:
    optimizer = block.optimizer_of(chunk)
    assert optimizer is not None
    block.family_of(chunk).write_hyperparameters(optimizer)
    try:
        for name, gradient in gradients.items():
            block.masters[name].grad = gradient
        optimizer.step()
    finally:
        for name in gradients:
            block.masters[name].grad = None


def _scale(gradients: list[torch.Tensor], scale: torch.Tensor | None) -> None:
    """Divide scaled gradients as ``GradScaler.unscale_`` does."""
    if scale is not None and gradients:
        torch._foreach_mul_(gradients, scale.to(gradients[0].device).double().reciprocal().float())


def _step_in_shards(engine: Engine, scaling: Scaling, problems: list[Problem], failures: list[Exception]) -> None:
    """Step the optimizers of parameters that stay in their shards, unless an owner on this rank has failed."""
    for block in engine.blocks:
        optimizer = block.in_shards
        if optimizer is None or failures:
            continue
        try:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            _scale([p.grad for p in parameters], scaling.grad_scale)
            optimizer.step()
        except Exception as error:
            failures.append(error)
            problems.append(_failed(f"in_shards: {type(optimizer).__name__}", error))


def _send_back(turn: _Turn) -> tuple[list[Finish], dict[str, torch.Tensor]]:
    """Send new values to the parameters' ranks, where they wait: parameters are written once all ranks have all.

    Returns:
        What has arrived, to be committed; and fresh tensors for parameters whose values ranks pass on to each other.
    """
    block = turn.block
    masters = {name: master.detach() for name, master in block.masters.items()}
    locals_ = block.locals_of(turn.gradients.local)
    relayed = {name for entry in turn.chunks.items() for name in block.exchange.back.relayed(*entry)}
    apart = {name: torch.empty_like(locals_[name]) for name in sorted(relayed)}
    locals_ |= apart

    def starts() -> Iterator[Any]:
        for chunk, moving in turn.chunks.items():
            finish = block.exchange.back.start(chunk, moving, masters, locals_)
            yield finish, finish

    return [finish for finish in in_turn(starts()) if finish is not None], apart


# ---- hyperparameters that an optimizer writes itself -----------------------------------------------------------


Values = list[dict[str, Any]]


def _hyperparameters(turns: Sequence[_Turn], stepped: Sequence[Sequence[int]]) -> dict[tuple[int, int, int], Values]:
    """Return what optimizers wrote to their groups, by block, family and chunk that this rank stepped."""
    by_chunk: dict[tuple[int, int, int], Values] = {}
    for number, (turn, chunks) in enumerate(zip(turns, stepped, strict=True)):
        for chunk in chunks:
            family = turn.block.family_of(chunk)
            now = [_written(*pair) for pair in zip(family.optimizers[chunk].param_groups, family.outer, strict=True)]
            by_chunk[number, turn.block.families.index(family), chunk] = now
    return by_chunk


def _written(group: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of an owner's group that its optimizer has changed, tensors as numbers."""
    written: dict[str, Any] = {}
    for key, value in group.items():
        plain = [each.tolist() if torch.is_tensor(each) else each for each in (before.get(key), value)]
        if key not in ("params", "param_names") and repr(plain[0]) != repr(plain[1]):
            written[key] = plain[1]
    return written


def _share_hyperparameters(engine: Engine, turns: Sequence[_Turn], mine: Mapping[Any, Values]) -> None:
    """Write the values that optimizers gave their groups (a step count) to the groups of all ranks.

    Raises:
        PlanError: On all ranks, if owners arrived at different values: their update depends on other matrices.
    """
    everyone = all_gather_objects(engine.members.group, dict(mine), _SUBJECT)
    results: dict[tuple[int, int], Values] = {}
    for (block, family, _), values in [entry for own in everyone for entry in own.items()]:
        first = results.setdefault((block, family), values)
        for number, (mine_, other) in enumerate(zip(first, values, strict=True)):
            for key in sorted({*mine_, *other}):
                if repr(mine_.get(key)) != repr(other.get(key)):
                    raise PlanError(
                        Problem(
                            "not-per-matrix",
                            f"param_groups[{number}][{key!r}]",
                            found=f"{mine_.get(key)!r} on one owner, {other.get(key)!r} on another",
                            hint="use an optimizer that updates each tensor from its own gradient and state",
                        )
                    )
    for (block, family), values in results.items():
        for outer, now in zip(turns[block].block.families[family].outer, values, strict=True):
            write_values(outer, now)


def write_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Write hyperparameters to a parameter group; tensors in it stay the same objects."""
    for key, value in values.items():
        if torch.is_tensor(group.get(key)):
            group[key].fill_(float(value))
        else:
            group[key] = value


def agree(members: GroupInfo, subject: str, error: Exception | None) -> None:
    """Raise one error on all ranks if any rank has one, with this rank's own as its cause; a collective."""
    try:
        assert_consistent(members, subject, [], [] if error is None else problems_of(error))
    except PlanError as joint:
        raise joint from error
