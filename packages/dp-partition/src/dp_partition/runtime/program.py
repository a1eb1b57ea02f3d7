"""One traced and partitioned step, ready to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dp_partition._torch_compat import failed_node, is_gloo, pytree
from dp_partition.backends.gloo import reduce_scatter_as_all_to_all
from dp_partition.backends.inductor import Lowered
from dp_partition.capture.fakes import Input
from dp_partition.capture.tracer import Capture
from dp_partition.mesh import shard_group
from dp_partition.nodes import is_collective, is_wait, meta_of
from dp_partition.passes.moves import record_local_values


@dataclass
class Program:
    """A step partitioned for one rank.

    Attributes:
        capture: The trace; its module is the partitioned graph.
        inputs: Source of each placeholder's value.
        output_placements: Placement of each returned value.
        mesh: The ranks.
        lowered: The partitioned graph with compiled compute; None if it runs as it is.
        bound: The partitioned graph as it runs otherwise; made at its first run.
        guard_values: Hyperparameters and numbers of the last guard check without a violation.
        checked_numbers: Numbers of its checked calls.
        checked_sizes: Sizes of its checked calls, with tensor and dim.
        noting: The same graph, with copies of its gradients and their names; made at the first check.
        is_checked: A check by execution has run it.
        is_new: The tracing call has not run it yet.
        labelled: Inputs by their kinds, as cached by `labels`.
    """

    capture: Capture
    inputs: list[Input]
    output_placements: list[Placement | None]
    mesh: DeviceMesh
    local_fakes: list[Any] | None = None
    guard_values: tuple[float, ...] = ()
    checked_numbers: set[tuple[float, ...]] = field(default_factory=set)
    checked_sizes: set[tuple[tuple[int, int], int]] = field(default_factory=set)
    is_checked: bool = False
    is_new: bool = False
    lowered: Lowered | None = None
    bound: fx.GraphModule | None = None
    noting: tuple[fx.GraphModule, list[str]] | None = None
    labelled: dict[tuple[str, ...], list[tuple[str, int]]] = field(default_factory=dict)

    @property
    def module(self) -> fx.GraphModule:
        return self.capture.module

    def run(self, inputs: list[Any]) -> Any:
        if self.lowered is not None:
            return self.lowered(*inputs)
        if self.bound is None:
            self.bound = fx.GraphModule(self.module, self.for_backend())
        return self.execute(self.bound, inputs)

    def execute(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        """Run a graph; add the name of a failing compute node to its error."""
        try:
            return module.forward(*inputs)  # not the module's call: it prints and drops the traceback
        except Exception as error:
            node = failed_node(module, error)
            if node is not None and not is_collective(node) and not is_wait(node):
                error.add_note(f"raised by node {node.name} ({node.target}) of the graph")
            raise

    def run_noting_gradients(self, inputs: list[Any]) -> tuple[Any, dict[str, Any]]:
        """Return the graph's values, and copies of gradients by name for their first reader."""
        if self.lowered is not None:
            return self.lowered(*inputs), {}  # values between its compiled pieces are not accessible
        if self.noting is None:  # its code takes longer to make than a checked call
            graph = self.for_backend()
            noted: dict[str, fx.Node] = {}
            for node in [node for node in graph.nodes if "reads" in meta_of(node)]:
                leaves = pytree.tree_leaves((node.args, node.kwargs))
                for place, name, _ in meta_of(node)["reads"]:
                    with graph.inserting_before(node):  # clipping writes them in place
                        noted[name] = graph.call_function(torch.ops.aten.clone.default, (leaves[place],))
            output = next(node for node in reversed(graph.nodes) if node.op == "output")
            output.args = ((output.args[0], list(noted.values())),)
            self.noting = fx.GraphModule(self.module, graph), list(noted)
        module, names = self.noting
        values, gradients = self.execute(module, inputs)
        return values, dict(zip(names, gradients, strict=True))

    @cached_property
    def communicates(self) -> bool:
        """Return True if the graph has collectives, of which no rank alone may run one."""
        return any(map(is_collective, self.module.graph.nodes))

    def for_backend(self) -> fx.Graph:
        """Return a copy of the partitioned graph with the best collectives for the backend."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.module.graph, {}))  # a copy: rewrites leave the original
        if is_gloo(shard_group(self.mesh), self.mesh.device_type):
            reduce_scatter_as_all_to_all(graph)
        return graph

    def labels(self, kinds: tuple[str, ...]) -> list[tuple[str, int]]:
        """Return name and position of the inputs of these kinds; cached."""
        if kinds not in self.labelled:
            self.labelled[kinds] = [(e.label, index) for index, e in enumerate(self.inputs) if e.kind in kinds]
        return self.labelled[kinds]

    def with_local_values(self) -> fx.GraphModule:
        """Return the partitioned graph, with this rank's shapes in ``meta["val"]``; computed at the first call."""
        if self.local_fakes is not None:
            record_local_values(self.module, self.local_fakes, self.capture.mode)
            self.local_fakes = None  # computed once
        return self.module

    def sizes_of(self, leaves: list[Any]) -> dict[tuple[int, int], int]:
        """Return the marked sizes among a call's arguments, by tensor and dim."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return {(index, dim): tensors[index].shape[dim] for index, dim in self.capture.sizes}

    def numbers_of(self, leaves: list[Any]) -> tuple[float, ...]:
        return tuple([leaves[position] for position in self.capture.numbers])

    def note_checked(self, leaves: list[Any]) -> None:
        """Count a check; live numbers need two of them, with different values."""
        self.checked_sizes.update(self.sizes_of(leaves).items())
        self.checked_numbers.add(self.numbers_of(leaves))
        self.is_checked = len(self.checked_numbers) > 1 or not self.capture.numbers

    def guards_hold(self, values: dict[tuple[Any, ...], float], numbers: tuple[float, ...] = ()) -> bool:
        """Return True if these hyperparameters and numbers allow each decision of the trace."""
        now = (*values.values(), *numbers)
        if now == self.guard_values:  # a steady call changes none
            return True
        symbols = self.capture.symbols
        substitution = {symbol: values[hyper] for hyper, symbol in symbols.items() if symbol is not None}
        given = (*self.capture.numbers.values(), *self.capture.sizes.values())
        substitution |= dict(zip(given, numbers, strict=True))
        if not all(bool(guard.xreplace(substitution)) for guard in self.capture.guards):
            return False
        self.guard_values = now
        return True
