"""Reduction of a flat buffer of gradients: its dtype, the mesh axes, and the caller's hook.

Written as generators: what comes up to a ``yield`` is sent, what comes after it is needed later. `bucket` says where in
the graph each part stands.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import FakeTensorMode, collectives, make_fx
from dp_partition.capture.node_meta import meta_of
from dp_partition.ops import aten, is_op, is_wait
from dp_partition.passes.moves import Mover

StagedEmission = Generator[None, None, fx.Node]


@dataclass(frozen=True)
class FlatBuffer:
    """A flat buffer of gradients.

    Attributes:
        node: It.
        numel: Number of its elements.
        like: A tensor of its dtype and device.
        op: ``"avg"`` (local semantics) or ``"sum"``.
        scatter: Whether each rank keeps its part of the result instead of all of it.
    """

    node: fx.Node
    numel: int
    like: torch.Tensor
    op: str
    scatter: bool


@dataclass(frozen=True)
class GradientGroup:
    """The ranks that a bucket of gradients is averaged over, as a ``comm_hook`` sees them.

    Attributes:
        name: Name of the process group, as torch's functional collectives take it.
        world: Number of its ranks.
        scatter: Whether a rank keeps its part only: the hook's result then has ``1 / world`` of the bucket's elements.
        replica_group: Name of the group that holds this rank's counterparts in other replicas (``"hybrid"``); empty
            elsewhere.
        replicas: Number of ranks of that.
    """

    name: str
    world: int
    scatter: bool
    replica_group: str = ""
    replicas: int = 1

    @property
    def size(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.world * self.replicas

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of the ranks' flat tensors: all of it, or this rank's part where gradients become shards."""
        return self._reduce(tensor, "sum")

    def average(self, tensor: torch.Tensor) -> torch.Tensor:
        """Average of the ranks' flat tensors, likewise."""
        return self._reduce(tensor, "avg")

    def _reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        if self.scatter:
            work = collectives.reduce_scatter_tensor(tensor, op, self.world, self.name)
        else:
            work = collectives.all_reduce(tensor, op, self.name)
        result: torch.Tensor = collectives.wait_tensor(work)
        if self.replica_group:
            result = collectives.wait_tensor(collectives.all_reduce(result, op, self.replica_group))
        return result


CommHook = Callable[[torch.Tensor, GradientGroup], torch.Tensor]


def bf16_compress(bucket: torch.Tensor, group: GradientGroup) -> torch.Tensor:
    """A ``comm_hook`` that sends gradients in bfloat16, divided before they are summed."""
    return _compressed(bucket, group, torch.bfloat16)


def fp16_compress(bucket: torch.Tensor, group: GradientGroup) -> torch.Tensor:
    """A ``comm_hook`` that sends gradients in float16, divided before they are summed."""
    return _compressed(bucket, group, torch.float16)


def _compressed(bucket: torch.Tensor, group: GradientGroup, dtype: torch.dtype) -> torch.Tensor:
    return group.sum(bucket.to(dtype) / group.size).to(bucket.dtype)


def reduce_flat(mover: Mover, flat: FlatBuffer, dtype: torch.dtype | None, hook: CommHook | None) -> StagedEmission:
    """The reduced buffer, or this rank's part of it, in the dtype that it came in.

    With ``dtype`` the buffer is cast before it is sent and cast back when it is there. The average is the collective's
    own, but in float16 the sum is divided in two parts, before and after, each near the root of the number of ranks,
    as FSDP does: neither the sum nor what is sent leaves the dtype's range.
    """
    if hook is not None:
        return (yield from _by_hook(mover, flat, hook))
    cast = dtype is not None and dtype != flat.like.dtype
    averaged, op, node = flat.op == "avg", flat.op, flat.node
    before, after = 1.0, 1.0
    if cast:
        node = mover.call(aten._to_copy.default, node, dtype=dtype)
        if averaged and dtype is torch.float16:
            op, (before, after) = "sum", division(mover.world * mover.replicas)
    node = _divided(mover, node, before)
    if flat.scatter:
        work = mover.issue(collectives.reduce_scatter_tensor.default, node, op, mover.world, mover.group)
    else:
        work = mover.issue(collectives.all_reduce_.default, node, op, mover.group)
    yield
    node = mover.wait(work)
    if averaged and mover.replica_group:
        work = mover.issue(collectives.all_reduce_.default, node, op, mover.replica_group, ranks=mover.replicas)
        yield
        node = mover.wait(work)
    node = _divided(mover, node, after)
    return mover.call(aten._to_copy.default, node, dtype=flat.like.dtype) if cast else node


def division(ranks: int) -> tuple[float, float]:
    """Return the divisors before and after a sum over ``ranks``: a power of two near the root, and the rest."""
    before = 1.0
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return before, ranks / before


def _divided(mover: Mover, node: fx.Node, by: float) -> fx.Node:
    return node if by == 1 else mover.call(aten.div.Scalar, node, by)


def _by_hook(mover: Mover, flat: FlatBuffer, hook: CommHook) -> StagedEmission:
    """The nodes of a hook; what comes before its first wait is sent early."""
    group = GradientGroup(mover.group, mover.world, flat.scatter, mover.replica_group, mover.replicas)
    traced = trace_hook(hook, group, flat)
    copies: dict[fx.Node, fx.Node] = {}
    sent = False
    result: fx.Node | None = None
    for node in traced.nodes:
        if node.op == "placeholder":
            copies[node] = flat.node
        elif node.op == "output":
            result = copies[node.args[0]]
        else:
            if is_wait(node) and not sent:
                sent = True
                yield
            copies[node] = mover.graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = {}
            if mover.replica_group and mover.replica_group in node.args:
                meta_of(copies[node])["ranks"] = mover.replicas
    if not sent:
        yield
    assert result is not None
    return result


def trace_hook(hook: CommHook, group: GradientGroup, flat: FlatBuffer) -> fx.Graph:
    """A hook as a graph of one flat bucket.

    Raises:
        PlanError: When it cannot be traced, keeps tensors of its own, communicates behind the graph's back, or returns
            something else than a flat tensor of the right size and dtype.
    """
    name = getattr(hook, "__name__", type(hook).__name__)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        bucket = torch.empty(flat.numel, dtype=flat.like.dtype, device=flat.like.device)
    try:
        with torch.no_grad(), mode:
            module = make_fx(lambda one: hook(one, group))(bucket)
    except Exception as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        hint = "a hook is traced: it uses tensor operations, group.sum and group.average, and no value of a tensor"
        raise PlanError(Problem("not-traceable", name, found=found, hint=hint)) from error
    graph = module.graph
    _check_hook(graph, name, flat.numel // group.world if group.scatter else flat.numel, flat.like.dtype)
    return graph


def _check_hook(graph: fx.Graph, name: str, numel: int, dtype: torch.dtype) -> None:
    problems = []
    for node in graph.nodes:
        if node.op == "get_attr":
            hint = "keep no tensors in a hook: it has no state from call to call"
            problems.append(Problem("python-state", name, found=f"reads the tensor {node.target}", hint=hint))
        elif is_op(node) and node.target.namespace == "c10d":
            hint = "use group.sum and group.average, or torch's functional collectives with group.name"
            problems.append(Problem("not-traceable", name, found=f"calls {node.target}", hint=hint))
    output: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    value = output.meta.get("val") if isinstance(output, fx.Node) else output
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != (numel,) or value.dtype != dtype:
        found = f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        hint = f"return a tensor of shape [{numel}] and {dtype}"
        problems.append(Problem("cannot-accumulate", name, found=f"returns {found}", hint=hint))
    if problems:
        raise PlanError(problems, "the comm_hook cannot be part of the graph")
