"""Wrong rules, planted one at a time: every row of the rule table is made wrong in every way that changes a plan.

A *probe* is a small train step that uses some operators on a batch that lies sharded. A *mutation* changes what a row
says: where the output lies, which reduction is due, which input is needed whole. Where the mutated row changes the plan
of a probe, `verify` (or the planner) must refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import dp_partition as dp
import torch
from dp_partition.nodes import base_name
from dp_partition.passes import insert_collectives as insert
from dp_partition.sharding import propagate
from dp_partition.sharding.op_rules import find_rule
from dp_partition.sharding.rule_table import RULES, Call, Candidate, OutputPlacement, R, Rule
from dp_verification import verify_capture
from rule_probes import all_probes, probe
from torch import fx
from torch.distributed.tensor import Partial, Placement, Shard

# Mutations of what a row says about one call.

Change = Callable[[Call, Candidate], Candidate]


def _outputs(change: Callable[[Placement, torch.Tensor], Placement]) -> Change:
    def changed(call: Call, candidate: Candidate) -> Candidate:
        value = call.node.meta.get("val")

        def one(state: OutputPlacement, tensor: Any) -> OutputPlacement:
            if isinstance(state, tuple):
                return tuple(one(s, t) for s, t in zip(state, tensor, strict=True))
            if not isinstance(state, Placement) or not isinstance(tensor, torch.Tensor):
                return state
            return change(state, tensor)

        return Candidate(candidate.inputs, one(candidate.output, value))

    return changed


def _moved(state: Placement, tensor: torch.Tensor) -> Placement:
    return Shard((state.dim + 1) % tensor.ndim) if isinstance(state, Shard) and tensor.ndim > 1 else state


def _whole(state: Placement, tensor: torch.Tensor) -> Placement:
    return R if isinstance(state, Shard) else state


def _reduced(state: Placement, tensor: torch.Tensor) -> Placement:
    return R if isinstance(state, Partial) else state


def _other_kind(state: Placement, tensor: torch.Tensor) -> Placement:
    if not isinstance(state, Partial):
        return state
    other = {"sum": "avg", "avg": "sum", "max": "min", "min": "max"}
    return Partial(other.get(state.reduce_op, "sum"))


def _as_sum(state: Placement, tensor: torch.Tensor) -> Placement:
    return Partial("sum") if isinstance(state, Shard) else state


def _gathered(call: Call, candidate: Candidate) -> Candidate:
    first = next((n for n, p in candidate.inputs.items() if isinstance(p, Shard) and call.placement_of(n) == p), None)
    return candidate if first is None else Candidate({**candidate.inputs, first: R}, candidate.output)


def _gathered_last(call: Call, candidate: Candidate) -> Candidate:
    shards = [n for n, p in candidate.inputs.items() if isinstance(p, Shard) and call.placement_of(n) == p]
    return candidate if len(shards) < 2 else Candidate({**candidate.inputs, shards[-1]: R}, candidate.output)


CHANGES: dict[str, Change] = {
    "output on another dim": _outputs(_moved),
    "output taken for whole": _outputs(_whole),
    "output taken for a partial sum": _outputs(_as_sum),
    "reduction forgotten": _outputs(_reduced),
    "another reduction": _outputs(_other_kind),
    "first input whole": _gathered,
    "last input whole": _gathered_last,
}
CARELESS = "runs on any shard"


def mutated(rule: Rule, change: str) -> Rule:
    """A rule that says something wrong."""

    def wrong(call: Call) -> Iterator[Candidate]:
        if change == CARELESS:
            yield from _careless(call)
            yield from rule(call)
            return
        for candidate in rule(call):
            yield CHANGES[change](call, candidate)

    return wrong


def _careless(call: Call) -> Iterator[Candidate]:
    """The output lies as the first sharded input does, as if the call were elementwise."""
    value = call.node.meta.get("val")
    tensors = [v for v in (value if isinstance(value, tuple | list) else [value]) if isinstance(v, torch.Tensor)]
    for node, dim in call.shards(call.tensors())[:1]:
        if tensors and all(dim < tensor.ndim for tensor in tensors) and isinstance(call.placement_of(node), Shard):
            state: OutputPlacement = Shard(dim)
            inputs = {n: call.placement_of(n) for n in call.tensors()}
            yield Candidate(inputs, tuple(state for _ in value) if isinstance(value, tuple | list) else state)


@contextmanager
def planted(row: str, change: str) -> Iterator[None]:
    """Within the block the row is wrong."""

    def found(node: fx.Node) -> Rule | None:
        rule = find_rule(node)
        return mutated(rule, change) if rule is not None and base_name(node) == row else rule

    with patch.object(propagate, "find_rule", found):
        yield


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation: ``killed``, ``survived``, or ``""`` where it changes no plan."""

    row: str
    change: str
    result: str
    probe: str = ""
    how: str = ""


def try_mutation(row: str, change: str, probes: list[str]) -> Outcome:
    """Plant a wrong rule and let the probes that use the row find it."""
    survived = Outcome(row, change, "")
    for name in probes:
        one = probe(name)
        right = one.plans()
        try:
            with planted(row, change):
                if _same(one.plans(), right):
                    continue
                verify_capture(one.step, one.capture, one.plan, one.values)
        except dp.PlanError as error:
            first = error.problems[0]
            return Outcome(row, change, "killed", name, f"{first.code}: {first.name}")
        survived = Outcome(row, change, "survived", name)
    return survived


def _same(plans: dict[fx.Node, Any], right: dict[fx.Node, Any]) -> bool:
    return all((plans[n].output, plans[n].inputs) == (right[n].output, right[n].inputs) for n in right)


@contextmanager
def shape_argument_left(target: Any) -> Iterator[None]:
    """Within the block an argument that names the global shape is left as it is."""
    tables = [insert.SHAPE_ARGUMENTS, insert.ROW_ARGUMENTS]
    copies = [dict(table) for table in tables]
    try:
        for table in tables:
            table.pop(target, None)
        yield
    finally:
        for table, old in zip(tables, copies, strict=True):
            table.update(old)


def try_shape_argument(target: Any, probes: list[str]) -> Outcome:
    """Leave a shape argument as it is."""
    row, change = base_name_of(target), "shape argument left global"
    survived = Outcome(row, change, "")
    for name in probes:
        one = probe(name)
        try:
            with shape_argument_left(target):
                verify_capture(one.step, one.capture, one.plan, one.values)
        except dp.PlanError as error:
            return Outcome(row, change, "killed", name, f"{error.problems[0].code}: {error.problems[0].name}")
        survived = Outcome(row, change, "survived", name)
    return survived


def base_name_of(target: Any) -> str:
    return str(target._schema.name.split("::")[-1])


def shape_argument_of(row: str) -> Any:
    """The operator of the row whose arguments name a shape, if there is one."""
    return next((t for t in (*insert.SHAPE_ARGUMENTS, *insert.ROW_ARGUMENTS) if base_name_of(t) == row), None)


def using(rows_of: dict[str, set[str]], row: str) -> list[str]:
    """The probes that call a row."""
    return [name for name, rows in rows_of.items() if row in rows]


__all__ = [
    "CARELESS",
    "CHANGES",
    "RULES",
    "Outcome",
    "all_probes",
    "probe",
    "shape_argument_of",
    "try_mutation",
    "try_shape_argument",
    "using",
    "verify_capture",
]
