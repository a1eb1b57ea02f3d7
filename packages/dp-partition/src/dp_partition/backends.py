"""Other ways to run a rank's graph: gloo's reduce-scatters, and compute compiled by inductor.

Gloo's own reduce_scatter is an all_reduce of a copy, twice the bytes (torch 2.13). An all_to_all sends only the bytes
of the operation, and the sum of a rank's rows is one read of them: about half the time, on two ranks and on four,
from 100 KiB to 16 MiB. Rows are added in the order of the ranks, half precision in float32, and rounded once. The
partitioned graph keeps ``reduce_scatter``, the operation of the step and of `estimate`; the all_to_all is only its
execution.

Inductor compiles compute between a graph's collectives, everything else runs as it is. Pieces stand in the order of the
graph, so collectives, random numbers and writes keep theirs. Views pass from piece to piece: torch's standalone compile
knows which of its inputs share memory. The optimizer runs as it is, and so does what takes Python numbers.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import collectives, inductor_compile, inductor_problem
from dp_partition.nodes import base_name, is_collective, is_op, is_random, is_wait, kind_of, meta_of
from dp_partition.passes.insert_collectives import REDUCTIONS


def reduce_scatter_as_all_to_all(graph: fx.Graph) -> None:
    """Replace a graph's reduce-scatters by all-to-alls and sums, in place."""
    for node in list(graph.nodes):
        if node.target is collectives.reduce_scatter_tensor.default and node.args[1] in REDUCTIONS:
            users = list(node.users)
            if len(users) != 1 or not is_wait(users[0]):
                continue
            wait = users[0]
            sent, op, world, group = node.args
            node.target, node.args = exchanged, (sent, world, group)  # its wait stays, with a sum behind it
            with graph.inserting_after(wait):
                total = graph.call_function(combined, (wait, sent, op, world))
            wait.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)
            total.meta = dict(wait.meta)
            if "val" in sent.meta:
                node.meta["val"] = wait.meta["val"] = torch.empty_like(sent.meta["val"])


def gather_into_buffers(graph: fx.Graph) -> None:
    """Let a graph's all-gathers fill a buffer of ours, in place.

    After each collective gloo's two worker threads write its name into one string of the group, without a lock (torch
    2.11 to 2.15). A name of more than 15 letters is on the heap: two threads free it twice, or write it after it was
    freed. Of all collectives here only the all-gather that makes its own output has such a name.
    """
    for node in graph.nodes:
        if node.target is collectives.all_gather_into_tensor.default:
            node.target = gathered


def gathered(tensor: torch.Tensor, world: int, group: str) -> torch.Tensor:
    """Return all ranks' rows. Not valid before the wait."""
    rows = tensor.new_empty((world * tensor.shape[0], *tensor.shape[1:]))
    sent, received = [torch.view_as_real(x) if x.is_complex() else x for x in (tensor, rows)]
    collectives.all_gather_into_tensor_out(sent, world, group, out=received)
    return rows  # of the memory that the wait goes by


def exchanged(tensor: torch.Tensor, world: int, group: str) -> torch.Tensor:
    """Return all ranks' rows for this one, in the order of ranks. Not valid before the wait.

    Complex numbers are sent as pairs of real ones: gloo does not support them.
    """
    rows = [tensor.shape[0] // world] * world
    sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    result: torch.Tensor = collectives.all_to_all_single(sent, rows, rows, group)
    return result


def combined(received: torch.Tensor, sent: torch.Tensor, op: str, world: int) -> torch.Tensor:
    """Return the sum, average, ... of the ranks' rows, each as large as the rank's own."""
    values = torch.view_as_complex(received) if sent.is_complex() else received
    return REDUCTIONS[op](values.view(world, sent.shape[0] // world, *sent.shape[1:]))


LEAST = 2  # operators that a piece computes with; a smaller one is not worth compiling
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


class Lowered:
    """Runs a rank's graph with its compute compiled: ``num_nodes`` operators in ``num_compiled`` pieces.

    ``kept`` counts the operators that run as they are, collectives and numbers left out.
    """

    def __init__(self, module: fx.GraphModule, num_compiled: int, num_nodes: int, kept: Counter[str]) -> None:
        self.module, self.num_compiled, self.num_nodes, self.kept = module, num_compiled, num_nodes, kept

    def __call__(self, *values: Any) -> Any:
        return self.module.forward(*values)

    def explain(self) -> str:
        eager_ops = ", ".join(f"{count} {name}" for name, count in sorted(self.kept.items())) or "nothing"
        return (
            f"inductor: {self.num_nodes} operators compiled in {self.num_compiled} pieces between collectives; "
            f"as they are run: {eager_ops}"
        )


def check_inductor(device_type: str) -> None:
    """Raise if nothing can be compiled here.

    Raises:
        PlanError: With the missing part (code ``missing-dependency``).
    """
    missing = inductor_problem(device_type)
    if missing is not None:
        hint = 'install a C++ compiler (set CXX) on every rank, or Triton for a GPU, or use backend="eager"'
        raise PlanError(Problem("missing-dependency", "backend", found=" ".join(missing.split()), hint=hint))


def lower(graph: fx.Graph, module: fx.GraphModule, name: str) -> Lowered:
    """Lower a rank's graph with local values in ``meta["val"]``, and use it up. ``module`` holds its tensors.

    Raises:
        PlanError: Inductor cannot compile a piece (code ``compile-failed``).
    """
    # What is taken out of an operator's several results stands right behind it: no list leaves a piece.
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            after = node.all_input_nodes[0]
            while after.next.target is operator.getitem and after.next.args[0] is node.args[0]:
                after = after.next
            if after is not node:
                after.append(node)
    pieces = number_pieces(graph)
    compiled = {f"submod_{number}" for number in pieces.values() if number % 2}
    plain = [node for node, number in pieces.items() if not number % 2 and is_op(node) and not is_collective(node)]
    kept = Counter(base_name(n) for n in plain if base_name(n) not in ("wait_tensor", "_local_scalar_dense"))
    whole = split_module(fx.GraphModule(module, graph), module, pieces.__getitem__, keep_original_order=True)
    for node in list(whole.graph.nodes):
        if node.op == "call_module":
            piece: Any = getattr(whole, str(node.target))
            node.op, node.target = "call_function", _compile(piece, name) if node.target in compiled else _plain(piece)
    whole.recompile()
    return Lowered(whole, len(compiled), sum(number % 2 for number in pieces.values()), kept)


def number_pieces(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the number of each call's piece: consecutive calls, compiled where the number is odd."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    runs: list[list[fx.Node]] = [[]]
    for node in calls:
        if is_compiled(node) is not (len(runs) % 2 == 0):
            runs.append([])
        runs[-1].append(node)
    numbers: dict[fx.Node, int] = {}
    number = 0
    for place, run in enumerate(runs):
        compiles = place % 2 and sum(node.target is not operator.getitem for node in run) >= LEAST
        number += number % 2 != compiles  # a piece that is too small joins those that run as they are
        numbers |= dict.fromkeys(run, number)
    return numbers


def is_compiled(node: fx.Node) -> bool:
    """Return whether the node may be part of a compiled piece."""
    if not is_op(node):
        return node.target is operator.getitem and is_compiled(node.all_input_nodes[0])
    target: Any = node.target
    # Packing belongs to no phase: one copy each, which compiled takes as long and is long to compile.
    if meta_of(node).get("phase") not in ("forward", "backward"):
        return False
    if is_collective(node) or is_wait(node) or is_random(node) or target.namespace not in ("aten", "prims"):
        return False
    # Numbers change from step to step (a learning rate, a size): compiled code would hold the first one.
    return not any(
        kind_of(one) in ("hyper", "number")
        if one.op == "placeholder"
        else one.op == "call_function" and isinstance(one.meta.get("val"), _NUMBERS)
        for one in (node, *node.all_input_nodes)
    )


def _plain(piece: fx.GraphModule) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        return piece.forward(*inputs)  # not the module's call, which prints and drops the traceback

    return run


def _compile(piece: fx.GraphModule, name: str) -> Callable[..., Any]:
    """Return the piece compiled. It returns tensors as the trace has them, by which later pieces were compiled.

    A dtype is another one where torch's fake kernel for an operator is wrong about it: compiled code would read such
    memory as what it is not.
    """
    output = next(node for node in piece.graph.nodes if node.op == "output")
    is_one = isinstance(output.args[0], fx.Node)
    wanted = [output.args[0]] if is_one else list(output.args[0])
    output.args = (tuple(wanted),)
    expected = [(node.name, node.meta["val"].dtype) for node in wanted]
    try:
        call = inductor_compile(piece, [node.meta["val"] for node in piece.graph.nodes if node.op == "placeholder"])
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        where = f"nodes {next(iter(piece.graph.nodes)).name} to {wanted[-1].name}"
        hint = 'use backend="eager"'
        raise PlanError(Problem("compile-failed", where, found=reason, hint=hint), f"{name}: inductor") from error

    def run(*inputs: Any) -> Any:
        results = call(*inputs)
        for value, (node, dtype) in zip(results, expected, strict=True):
            if value.dtype is not dtype:
                reason = f"is {value.dtype}, and {dtype} in the trace"
                raise PlanError(Problem("compile-failed", f"node {node}", found=reason, hint='use backend="eager"'))
        return results[0] if is_one else results

    return run
