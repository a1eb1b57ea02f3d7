"""Reshard after forward: let go of gathered parameters after forward, and gather them again for backward.

A pass over the single-device graph. It chooses the sharded parameters, marks them, and gives backward views of its own
where it used views that forward made: those would keep the gathered parameter alive. `insert` gathers a marked
parameter once for each half of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import Placement, Shard

from dp_partition._torch_compat import known_size
from dp_partition.capture.node_meta import kind_of, meta_of
from dp_partition.ops import aten, mutated_inputs, root_of, substitution, viewed_input
from dp_partition.plan.settings import CommConfig
from dp_partition.sharding.propagate import gradient_name, is_gradient

WORTH = 0.02  # "auto" gathers twice only what lowers the peak by more than this part of it
_CASTS = (aten._to_copy.default,)


@dataclass(frozen=True)
class Idle:
    """A sharded parameter that forward and backward both need.

    Attributes:
        param: Its placeholder.
        derived: Views and casts of it that forward made, in order.
        start: Position of its last use in forward.
        end: Position of its first use in backward.
        num_bytes: Of the gathered parameter, its casts included.
    """

    param: fx.Node
    derived: tuple[fx.Node, ...]
    start: int
    end: int
    num_bytes: int


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered for backward in one bucket.

    Attributes:
        members: The parameters, in the order of first use in backward.
        end: Position at which their bucket is issued; from there on they are in memory again.
    """

    members: tuple[Idle, ...]
    end: int

    def idle_bytes(self, position: int) -> int:
        """Bytes that are not in memory at a position if the unit is let go of."""
        return sum(one.num_bytes for one in self.members if one.start < position < self.end)


def reshard_after_forward(
    graph: fx.Graph,
    homes: Mapping[fx.Node, Placement],
    mode: str | bool | frozenset[str],
    comm: CommConfig,
    world: int,
    *,
    local: bool,
) -> int:
    """Mark the parameters that are gathered twice; how many.

    Args:
        graph: The single-device graph, with phases.
        homes: Where the placeholders lie.
        mode: ``True``: all that both halves use. ``"auto"``: those that are idle where most memory is live, as long as
            that lowers the peak. ``False``: none. Names: those, as far as both halves use them.
        comm: How parameters will travel: what shares a bucket comes back together.
        world: Number of data-parallel ranks.
        local: Whether the graph's activations are one rank's (else those of all ranks together).
    """
    if mode is False:
        return 0
    nodes = list(graph.nodes)
    place = {node: position for position, node in enumerate(nodes)}
    sharded = [n for n in nodes if kind_of(n) == "param" and isinstance(homes[n], Shard)]
    idle = [one for node in sharded if (one := _idle(node, place)) is not None]
    chosen = idle
    if isinstance(mode, frozenset):
        chosen = [one for one in idle if meta_of(one.param)["input"].name in mode]
    if mode == "auto" and idle:
        live = _live_bytes(nodes, place, idle, {meta_of(n)["input"].name for n in sharded}, world, local=local)
        chosen = _lower_the_peak(live, _units(idle, nodes, comm))
    for one in chosen:
        meta_of(one.param)["gather_again"] = True
        _views_for_backward(graph, one)
    return len(chosen)


def _idle(node: fx.Node, place: dict[fx.Node, int]) -> Idle | None:
    """The parameter's idle time; None if it has none, or if forward or backward write it or a cast of it."""
    derived: list[fx.Node] = []
    queue = [node]
    while queue:
        for user in queue.pop().users:
            if _follows(user) and meta_of(user).get("phase") == "forward" and user not in derived:
                derived.append(user)
                queue.append(user)
    users = [user for one in (node, *derived) for user in one.users if user not in derived]
    if any(set(mutated_inputs(user)) & {node, *derived} for user in users if meta_of(user).get("phase") != "optimizer"):
        return None  # gathered or cast again, it would not have what was written
    forward = [place[user] for user in users if meta_of(user).get("phase") == "forward"]
    backward = [place[user] for user in users if meta_of(user).get("phase") == "backward"]
    if not forward or not backward or max(forward) >= min(backward):
        return None
    size = sum(_bytes(one) for one in (node, *derived) if one is node or one.target in _CASTS)
    return Idle(node, tuple(sorted(derived, key=place.__getitem__)), max(forward), min(backward), size)


def _follows(node: fx.Node) -> bool:
    """Return whether the node is a view or a cast of one tensor."""
    return node.op == "call_function" and (viewed_input(node) is not None or node.target in _CASTS)


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return known_size(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


def _units(idle: list[Idle], nodes: list[fx.Node], comm: CommConfig) -> list[Unit]:
    """The buckets that the parameters would come back in, as `bucket` fills and issues them."""
    groups: list[list[Idle]] = []
    for one in sorted(idle, key=lambda one: one.end):
        fits = groups and sum(_bytes(m.param) for m in (*groups[-1], one)) <= comm.bucket_bytes
        if fits:
            groups[-1].append(one)
        else:
            groups.append([one])
    backward = next(position for position, node in enumerate(nodes) if meta_of(node).get("phase") == "backward")
    ahead = comm.prefetch if comm.bucket_bytes > 0 else 0
    issued = [groups[k - ahead][0].end if k >= ahead else backward for k in range(len(groups))]
    return [Unit(tuple(group), end) for group, end in zip(groups, issued, strict=True)]


def _lower_the_peak(live: list[int], units: list[Unit]) -> list[Idle]:
    """The units that are idle at the peak, largest first, up to where the peak is lowest."""
    chosen: list[Unit] = []
    before = lowest = max(live)
    best = 0
    while True:
        peak = max(range(len(live)), key=live.__getitem__)
        there = [unit for unit in units if unit not in chosen and unit.idle_bytes(peak)]
        if not there:
            break
        unit = max(there, key=lambda unit: unit.idle_bytes(peak))
        chosen.append(unit)
        for one in unit.members:
            for position in range(one.start + 1, unit.end):
                live[position] -= one.num_bytes
        if max(live) < lowest:
            lowest, best = max(live), len(chosen)
    if lowest > (1 - WORTH) * before:
        return []
    return [one for unit in chosen[:best] for one in unit.members]


def _live_bytes(
    nodes: list[fx.Node],
    place: dict[fx.Node, int],
    idle: list[Idle],
    sharded: set[str],
    world: int,
    *,
    local: bool,
) -> list[int]:
    """Bytes of intermediate values and gathered parameters at every node of forward and backward."""
    spans: dict[fx.Node, tuple[int, int]] = {}
    for position, node in enumerate(nodes):
        root = root_of(node)
        if root.op == "placeholder" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        last = max((place[user] for user in node.users), default=position)
        start, end = spans.get(root, (position, position))
        spans[root] = (start, max(end, last))
    change = [0] * (len(nodes) + 1)
    for root, (start, end) in spans.items():
        gradient = is_gradient(root)
        parts = world if (gradient and gradient_name(root) in sharded) or not (local or gradient) else 1
        change[start] += _bytes(root) // parts
        change[end + 1] -= _bytes(root) // parts
    for one in idle:
        users = [place[user] for source in (one.param, *one.derived) for user in source.users]
        needed = [position for position in users if meta_of(nodes[position]).get("phase") != "optimizer"]
        change[min(needed)] += one.num_bytes
        change[max(needed) + 1] -= one.num_bytes
    live, now = [], 0
    for node, delta in zip(nodes, change, strict=False):
        now += delta
        live.append(now if meta_of(node).get("phase") != "optimizer" else 0)
    return live


def _views_for_backward(graph: fx.Graph, one: Idle) -> None:
    """Copies of forward's views and casts for the users in backward."""
    late = {n for n in one.derived if any(meta_of(user).get("phase") == "backward" for user in n.users)}
    needed = set(late)
    for node in reversed(one.derived):
        if node in needed:
            needed.update(source for source in node.all_input_nodes if source in one.derived)
    users = {user for node in late for user in node.users if meta_of(user).get("phase") == "backward"}
    if not users:
        return
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(min(users)):
        for node in one.derived:
            if node in needed:
                copies[node] = graph.node_copy(node, substitution(copies))
                meta_of(copies[node])["phase"] = "backward"
    for node in late:
        for user in [u for u in node.users if u in users]:
            user.replace_input_with(node, copies[node])
