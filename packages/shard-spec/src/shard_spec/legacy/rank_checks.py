"""Checks that the specs of one call name the ranks of the group, in one order."""

from __future__ import annotations

from collections.abc import Mapping

from shard_spec._shared.problems import Problem
from shard_spec.apply.tensors import TensorAction
from shard_spec.distributed.parameter_format import choose_format
from shard_spec.distributed.shard_tensor import rank_problems
from shard_spec.layout.layout import Layout
from shard_spec.specs import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec

_MANY_DIMS = 64  # a chunk spec names the same ranks whatever the shape is


def layout_problems(action: TensorAction, ranks: tuple[int, ...]) -> list[Problem]:
    assert action.layout is not None
    name = action.names[0]
    problems = rank_problems(name, tuple(action.layout.mesh.ranks), ranks)
    expression = choose_format(action.layout, action.shape, name)
    return [*problems, expression] if isinstance(expression, Problem) else problems


def ranks_of(wanted: ShardingSpec | Layout) -> tuple[int, ...] | None:
    """The ranks in the order of their shards; None where only the shape of an output tells them.

    Raises:
        PlanError: When no mesh can say what a spec says.
    """
    known = known_layout(wanted)
    return None if known is None else tuple(known.mesh.ranks)


def known_layout(wanted: ShardingSpec | Layout) -> Layout | None:
    """A layout on the mesh that an output will lie on; None where only its shape tells that mesh.

    Raises:
        PlanError: When no mesh can say what a spec says.
    """
    if isinstance(wanted, Layout):
        return wanted
    if isinstance(wanted, ChunkShardingSpec):
        return wanted.to_layout((1,) * _MANY_DIMS)
    if isinstance(wanted, EnumerableShardingSpec):
        ends = [shard.box.ends for shard in wanted.shards]
        return wanted.to_layout(tuple(max(column) for column in zip(*ends, strict=True)))
    return None


def order_problems(tensors: tuple[TensorAction, ...], outputs: Mapping[str, ShardingSpec | Layout]) -> list[Problem]:
    """One order of ranks for everything in one call: a sharded output of one module is the input of the next."""
    orders: dict[tuple[int, ...], str] = {}
    for action in tensors:
        if action.layout is not None:
            orders.setdefault(tuple(action.layout.mesh.ranks), action.names[0])
    for path, wanted in outputs.items():
        named = ranks_of(wanted)
        if named is not None:
            orders.setdefault(named, f"output_plan[{path!r}]")
    if len(orders) < 2:
        return []
    found = "; ".join(f"{name}: {list(order)}" for order, name in orders.items())
    hint = "name the ranks in one order in all specs of one call"
    return [Problem("rank-orders-differ", found=found, hint=hint)]
