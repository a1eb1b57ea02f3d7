"""A lowered program: its pieces, run one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import increment_version

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import inductor_compile, inductor_problem
from dp_partition.backends.split import Piece, split
from dp_partition.ops import base_name, is_collective, is_op


@dataclass(frozen=True)
class _Call:
    """One piece, ready to run; values are identified by their position in a table."""

    function: Callable[..., Any]
    boxed: bool  # takes a list and may empty it, to free used inputs early
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    written: tuple[int, ...]  # compiled code does not count versions
    dead: tuple[int, ...]  # not used afterwards


class Lowered:
    """Runs a rank's graph with its compute compiled.

    Attributes:
        num_compiled: Number of compiled pieces.
        kept: Number of calls by operator that run as they are, without collectives and numbers.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        functions: Sequence[Callable[..., Any]],
        graph: fx.Graph,
        module: fx.GraphModule,
    ) -> None:
        self.num_compiled = sum(piece.compiled for piece in pieces)
        self.num_nodes = sum(len(piece.nodes) for piece in pieces if piece.compiled)
        plain = [n for p in pieces if not p.compiled for n in p.nodes if is_op(n) and not is_collective(n)]
        self.kept = Counter(base_name(n) for n in plain if base_name(n) not in ("wait_tensor", "_local_scalar_dense"))
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        constants = [node for node in graph.nodes if node.op == "get_attr"]
        self._places = {node: place for place, node in enumerate([*inputs, *constants])}  # then outputs
        self._constants = [_attribute(module, str(node.target)) for node in constants]
        self._calls = self._link(pieces, functions)

    def _link(self, pieces: Sequence[Piece], functions: Sequence[Callable[..., Any]]) -> list[_Call]:
        last: dict[fx.Node, int] = {}
        for number, piece in enumerate(pieces):
            for node in piece.inputs:
                last[node] = number
            for node in piece.outputs:
                self._places[node] = len(self._places)
        calls = []
        for number, (piece, function) in enumerate(zip(pieces, functions, strict=True)):
            inputs, outputs, written = (tuple(self._places[n] for n in part) for part in _parts(piece))
            dead = tuple(self._places[n] for n, end in last.items() if end == number)  # after their last use
            calls.append(_Call(function, piece.compiled, inputs, outputs, written, dead))
        return calls

    def __call__(self, *values: Any) -> Any:
        """Run on local inputs; return the graph's values."""
        table: list[Any] = [*values, *self._constants]  # outputs of pieces follow
        table += [None] * (len(self._places) - len(table))
        result: Any = None
        for call in self._calls:
            given = [table[place] for place in call.inputs]
            if call.written:
                increment_version([table[place] for place in call.written])
            for place in call.dead:  # only the list of the call holds them
                table[place] = None
            result = call.function(given) if call.boxed else call.function(*given)
            del given
            for place, value in zip(call.outputs, result, strict=False):
                table[place] = value
        return result

    def explain(self) -> str:
        """Return a line on compiled operators and others."""
        kept = ", ".join(f"{count} {name}" for name, count in sorted(self.kept.items())) or "nothing"
        return (
            f"inductor: {self.num_nodes} operators compiled in {self.num_compiled} pieces between collectives; "
            f"as they are run: {kept}"
        )


def _parts(piece: Piece) -> tuple[list[fx.Node], ...]:
    return piece.inputs, piece.outputs, piece.written if piece.compiled else []


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
    """Lower a rank's graph, and use it up.

    Args:
        graph: The graph, with local values in ``meta["val"]``.
        module: Holds the tensors named in it.
        name: Name of the step, for errors.

    Raises:
        PlanError: Inductor cannot compile a piece (code ``compile-failed``).
    """
    pieces = split(graph)
    functions = []
    for piece in pieces:
        body = fx.GraphModule(module, piece.graph)
        functions.append(_compile(body, piece, name) if piece.compiled else body.forward)
    return Lowered(pieces, functions, graph, module)


def _compile(body: fx.GraphModule, piece: Piece, name: str) -> Callable[..., Any]:
    examples = [node.meta["val"] for node in piece.inputs]
    wanted = {node.name: node.meta["val"] for node in piece.outputs}
    try:
        return as_traced(inductor_compile(body, examples), wanted)
    except Exception as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        where = f"nodes {piece.nodes[0].name} to {piece.nodes[-1].name}"
        hint = 'use backend="eager"'
        raise PlanError(Problem("compile-failed", where, found=found, hint=hint), f"{name}: inductor") from error


def as_traced(function: Callable[..., Any], wanted: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """Make a compiled piece return tensors as in the trace, as later pieces assume.

    Inductor keeps strides without gaps; a part of a wider tensor it returns without them. A dtype differs if torch's
    fake kernel of an operator is wrong about it; compiled code would misread such memory.

    Raises:
        PlanError: At a call, for a tensor of another dtype (code ``compile-failed``).
    """
    expected = [(name, fake.dtype, fake.stride()) for name, fake in wanted.items()]

    def call(inputs: list[Any]) -> list[torch.Tensor]:
        results: list[torch.Tensor] = list(function(inputs))
        for index, (name, dtype, strides) in enumerate(expected):
            if results[index].dtype is not dtype:
                found = f"is {results[index].dtype}, and {dtype} in the trace"
                raise PlanError(Problem("compile-failed", f"node {name}", found=found, hint='use backend="eager"'))
            if results[index].stride() != strides:  # a copy, only where needed
                results[index] = _laid_out(results[index], strides)
        return results

    return call


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if all(size == 1 or a == b for size, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True)):
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def _attribute(module: fx.GraphModule, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value
