"""Ranks in one process: a rank's partitioned graph runs node by node, and its collectives are met by the others'.

A rank is a generator of events. It stops at every collective, at every wait, and after every node that it shares with
the single-device graph, so that a driver can let all ranks advance side by side. A collective's result is poisoned
until it is waited for, and its input must not be written in between: a wait that is missing or a buffer that is used
too early shows as a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import collectives
from dp_partition.passes.insert_collectives import REDUCTIONS
from torch import fx

_KINDS: dict[Any, str] = {
    collectives.all_reduce.default: "all_reduce",
    collectives.all_reduce_.default: "all_reduce",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.all_gather_into_tensor.default: "all_gather",
}


@dataclass
class Issued:
    """A collective that a rank has issued; it goes on with ``result``, whose values come when it waits."""

    node: fx.Node
    kind: str
    source: torch.Tensor
    settings: tuple[Any, ...]
    result: torch.Tensor
    before: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.source.clone()
        if self.result is not self.source:
            self.result.copy_(poison(self.result))


@dataclass
class Waited:
    """A rank waits for a collective."""

    node: fx.Node
    issued: Issued


@dataclass
class Done:
    """A rank has run a node of the single-device graph.

    Attributes:
        original: That node.
        node: The rank's version of it.
        value: Its value.
        written: The tensors it wrote, in the order of `mutated_inputs`.
    """

    original: fx.Node
    node: fx.Node
    value: Any
    written: list[torch.Tensor]


Event = Issued | Waited | Done
Call = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]


def poison(like: torch.Tensor) -> torch.Tensor:
    """Values that no computation survives unnoticed."""
    if like.is_floating_point():
        return torch.full_like(like, float("nan"))
    return torch.full_like(like, True if like.dtype is torch.bool else torch.iinfo(like.dtype).max)


def run_rank(
    module: fx.GraphModule,
    originals: dict[fx.Node, fx.Node],
    inputs: Iterable[Any],
    constants: Callable[[str], Any],
    call: Call,
    written: Callable[[fx.Node], list[fx.Node]],
) -> Generator[Event, None, list[Any]]:
    """Run one rank's graph.

    Args:
        module: Its partitioned graph.
        originals: For nodes after which a node of the single-device graph is done, that node.
        inputs: Values of the placeholders.
        constants: Values of ``get_attr`` nodes.
        call: Runs a node: ``call(node, args, kwargs)``.
        written: The input nodes that a node writes.

    Returns:
        The values that the graph returns.
    """
    env: dict[fx.Node, Any] = {}
    pending: dict[fx.Node, Issued] = {}
    values = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(values)
            continue
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: env[n])
        if node.op == "output":
            return list(args[0])
        if node.op == "get_attr":
            env[node] = constants(str(node.target))
        elif node.target in _KINDS:
            pending[node] = issued = _issue(node, args)
            env[node] = issued.result
            yield issued
        elif node.target is collectives.wait_tensor.default:
            env[node] = args[0]
            yield Waited(node, pending.pop(node.all_input_nodes[0]))
        else:
            env[node] = call(node, args, kwargs)
            if node in originals:
                yield Done(originals[node], node, env[node], [env[n] for n in written(node)])
    raise AssertionError("a graph without an output")


def _issue(node: fx.Node, args: tuple[Any, ...]) -> Issued:
    source = args[0]
    kind = _KINDS[node.target]
    if kind != "all_reduce" and not source.is_contiguous():
        message = f"a collective of a tensor with strides {source.stride()} for shape {tuple(source.shape)}"
        raise PlanError(Problem("unsupported-tensor", f"node {node.name}", found=message))
    if node.target is collectives.all_reduce_.default:
        result = source
    elif kind == "all_reduce":
        result = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    else:
        world = args[-2]
        rows = source.shape[0] * world if kind == "all_gather" else source.shape[0] // world
        result = source.new_empty((rows, *source.shape[1:]))
    return Issued(node, kind, source, tuple(args[1:]), result)


def deliver(calls: list[Issued]) -> None:
    """Give every rank the result of a collective that all of them wait for."""
    for rank, one in enumerate(calls):
        if not torch.equal(one.source, one.before) and not _both_nan(one.source, one.before):
            message = f"rank {rank} wrote the input of {one.node.name} before it waited for it"
            raise PlanError(Problem("invalid-program", f"node {one.node.name}", found=message))
    sources = [one.before for one in calls]
    kind = calls[0].kind
    if kind == "all_gather":
        results = [torch.cat(sources)] * len(calls)
    else:
        total = REDUCTIONS[calls[0].settings[0]](torch.stack(sources))
        results = list(total.chunk(len(calls))) if kind == "reduce_scatter" else [total] * len(calls)
    for one, result in zip(calls, results, strict=True):
        one.result.copy_(result)


def _both_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def advance(ranks: list[Generator[Event, None, list[Any]]], until: fx.Node | None) -> list[Any]:
    """Let all ranks run up to and including a node of the single-device graph, or to their ends.

    Returns:
        Every rank's `Done`, or what every rank's graph returns.

    Raises:
        PlanError: When ranks do not issue the same collectives in the same order (code ``ranks-disagree``).
    """
    while True:
        events: list[Any] = []
        ended = 0
        for rank in ranks:
            try:
                events.append(next(rank))
            except StopIteration as end:
                events.append(end.value)
                ended += 1
        if ended == len(ranks):
            assert until is None, f"the ranks ended before {until}"
            return events
        _check_in_step(events, ended)
        first = events[0]
        if isinstance(first, Waited):
            deliver([event.issued for event in events])
        elif isinstance(first, Done) and first.original is until:
            return events


def _check_in_step(events: list[Any], ended: int) -> None:
    first = events[0]
    for rank, event in enumerate(events):
        same = not ended and type(event) is type(first)
        if same and isinstance(event, Issued):
            same = (event.kind, event.settings, event.source.shape, event.source.dtype) == (
                first.kind,
                first.settings,
                first.source.shape,
                first.source.dtype,
            )
        elif same and isinstance(event, Done):
            same = event.original is first.original
        elif same:
            same = event.issued.kind == first.issued.kind
        if not same:
            message = f"rank 0 is at {_where(first)}, rank {rank} at {_where(event)}"
            raise PlanError(Problem("ranks-disagree", found=message))


def _where(event: Any) -> str:
    if isinstance(event, Issued):
        return f"{event.kind} of {list(event.source.shape)} {event.settings} (node {event.node.name})"
    if isinstance(event, Waited | Done):
        return f"node {event.node.name}"
    return "its end"
