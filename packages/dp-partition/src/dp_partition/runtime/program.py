"""One traced and partitioned step: its runs, their inputs and outputs, and a caller's changes between calls.

A change is adopted if its meaning is clear, and refused by name if not.

State from `load_state_dict` is full and plain; a parameter after thawing, or new in the optimizer
by `add_param_group`, has no state yet; a buffer may be another tensor. A graph on any of these unchanged
would compute on wrong memory.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from dp_partition._shared.dtensor import as_dtensor
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import failed_node, is_gloo, pytree
from dp_partition.backends import gather_into_buffers, reduce_scatter_as_all_to_all
from dp_partition.capture.inputs import OptimizerReads, read_optimizers, states_by_id
from dp_partition.capture.state import StepState, has_state, shared_memory
from dp_partition.capture.tracer import Capture
from dp_partition.nodes import GraphValue, is_collective, is_wait, meta_of, root_of
from dp_partition.passes.insert_collectives import record_local_values
from dp_partition.plan.placements import on_mesh, shard_group
from dp_partition.runtime.state import REPLACED, Binding, ModelChangedError


@dataclass
class Program:
    """A step partitioned for one rank."""

    capture: Capture  # the trace; its module is the partitioned graph
    inputs: list[GraphValue]
    output_placements: list[Placement | None]
    mesh: DeviceMesh
    local_fakes: list[Any] | None = None
    guard_values: tuple[float, ...] = ()  # hyperparameters and numbers of the last guard check without a violation
    checked_numbers: set[tuple[float, ...]] = field(default_factory=set)  # numbers of its checked calls
    # sizes of its checked calls, with tensor and dim
    checked_sizes: set[tuple[tuple[int, int], int]] = field(default_factory=set)
    is_checked: bool = False  # a check by execution has run it
    is_new: bool = False  # the tracing call has not run it yet
    bound: fx.GraphModule | None = None  # the partitioned graph as it runs; made at its first run
    # the same graph, with copies of its gradients and their names; made at the first check
    noting: tuple[fx.GraphModule, list[str]] | None = None

    @property
    def module(self) -> fx.GraphModule:
        return self.capture.module

    def run(self, inputs: list[Any]) -> Any:
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
        for node in graph.nodes:
            # A kernel may give other strides than its fake: CPU's batch norm of a transposed tensor is contiguous. Then
            # the step on one device has a copy here, as `reshape` makes it, and `view` raises.
            is_view = node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
            if is_view and root_of(node).op == "call_function":
                node.target = torch.ops.aten.reshape.default
        if is_gloo(shard_group(self.mesh), self.mesh.device_type):
            reduce_scatter_as_all_to_all(graph)
            gather_into_buffers(graph)
        return graph

    @cached_property
    def written(self) -> list[list[tuple[str, int]]]:
        """Names and positions of the inputs that a run writes: parameters and state, then buffers."""
        kinds = ("param", "state"), ("buffer",)
        return [[(e.label, index) for index, e in enumerate(self.inputs) if e.kind in kind] for kind in kinds]

    def with_local_values(self) -> fx.GraphModule:
        """Return the partitioned graph, with this rank's shapes in ``meta["val"]``; computed at the first call."""
        if self.local_fakes is not None:
            record_local_values(self.module, self.local_fakes, self.capture.mode)
            self.local_fakes = None  # computed once
        return self.module

    def sizes_of(self, leaves: list[Any]) -> dict[tuple[int, int], int]:
        """Return the marked sizes among a call's arguments, by tensor and dim."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return {(index, dim): tensors[index].shape[dim] for index, dim in self.capture.live.sizes}

    def numbers_of(self, leaves: list[Any]) -> tuple[float, ...]:
        return tuple([leaves[position] for position in self.capture.live.arguments])

    def guards_hold(self, values: dict[tuple[Any, ...], float], numbers: tuple[float, ...] = ()) -> bool:
        """Return True if these hyperparameters and numbers allow each decision of the trace."""
        now = (*values.values(), *numbers)
        if now == self.guard_values:  # a steady call changes none
            return True
        if not self.capture.live.allow(values, numbers):
            return False
        self.guard_values = now
        return True


def reconcile(binding: Binding) -> OptimizerReads:
    """Convert state and buffers to the layout of the graphs; return the optimizers' contents.

    Raises:
        PlanError: ``model-changed`` for new or missing parameters and buffers, ``parameter-not-in-module`` for an
            unplaced parameter of an optimizer, ``state-device`` for state on another mesh or with
            other placements, ``shape-mismatch`` for state of another shape than before, ``tied-weights`` if one of two
            names of a buffer stands for another one now.
    """
    step_state = binding.step_state
    # The model's tensors are compared with the placed ones, by name. After other changes they are indexed again.
    if step_state.reads.look() or binding.built is not step_state.reads.structure:
        before = {fqn for fqn, *_ in (*binding.param_slots, *binding.buffer_slots)}
        after = {fqn for fqn, *_ in step_state.slots()}
        if after != before:
            changes = [(name, "was not there when the step was placed") for name in sorted(after - before)]
            changes += [(name, "is not there any more") for name in sorted(before - after)]
            raise ModelChangedError([Problem("model-changed", n, found=change, hint=REPLACED) for n, change in changes])
        binding.index_slots()
        binding.check_in_place()  # a layer of the same names in the place of another has parameters of its own
        binding.built = step_state.reads.structure
    for slot, module, attribute, name in binding.buffer_slots:
        now = module._buffers[attribute]
        assert now is not None  # a buffer that is None since the last call is another structure, which raised above
        if now is step_state.buffers[name]:
            continue
        if slot != name:
            raise ModelChangedError(
                Problem("tied-weights", slot, found=f"is no longer the buffer that {name} is", hint=REPLACED)
            )
        step_state.buffers[name] = now
        if overlaps := shared_memory(step_state.buffers):
            raise PlanError(overlaps)
    problems: list[Problem] = []
    index = states_by_id(binding.step_state.optimizers)
    for number, optimizer in enumerate(binding.step_state.optimizers):
        states = index[number]
        for group in optimizer.param_groups:
            for param in group["params"]:
                fqn = binding.names.get(id(param))
                if fqn is None:
                    raise ModelChangedError(
                        Problem(
                            "parameter-not-in-module",
                            f"optimizer {number}",
                            found=f"holds a tensor of shape {tuple(param.shape)} that is not a placed parameter",
                            hint=REPLACED,
                        )
                    )
                if param.requires_grad or id(param) in states:
                    state, seen = states.get(id(param)), binding.seen.get((number, fqn))
                    # The same objects as at the last call still have their layout: the usual case.
                    same = state is not None and seen is not None and len(state) == len(seen)
                    if not same or not all(map(operator.is_, state.values(), seen)):  # type: ignore[union-attr,arg-type]
                        problems += _reconcile_state(binding, number, group, fqn, states)
    if problems:
        raise PlanError(problems)
    return read_optimizers(binding.step_state.optimizers, index)


def _reconcile_state(
    binding: Binding, number: int, group: dict[str, Any], fqn: str, states: dict[int, Any]
) -> list[Problem]:
    optimizer, param = binding.step_state.optimizers[number], binding.step_state.params[fqn]
    state = states.get(id(param))
    if not has_state(state):
        states.pop(id(param), None)
        optimizer.state.pop(param, None)
        fresh = binding.fresh_state(optimizer, group, fqn, param)
        if fresh:  # thawed, or in a new group
            optimizer.state[param] = states[id(param)] = fresh
        return []
    shapes = binding.state_shapes.get((number, fqn), {})
    wanted = on_mesh(binding.plan[fqn].state, binding.mesh)
    problems = []
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            continue  # numbers and scalars need no placement
        if isinstance(value, DTensor):
            if value.device_mesh != binding.mesh or tuple(value.placements) != tuple(wanted):
                problems.append(
                    Problem(
                        "state-device",
                        f"{fqn} {key}",
                        found=f"lies as {tuple(value.placements)} on {value.device_mesh}, not as {tuple(wanted)}",
                        hint="load it into the state that is there, or load full tensors",
                    )
                )
        elif value.shape == param.shape:
            state[key] = binding.place_state(fqn, value, full=True)
        if key in shapes and state[key].shape != shapes[key]:
            problems.append(
                Problem(
                    "shape-mismatch",
                    f"{fqn} {key}",
                    found=f"has shape {tuple(state[key].shape)}, and had {tuple(shapes[key])}",
                    hint="load state that was saved for this model",
                )
            )
    if not problems:
        binding.seen[number, fqn] = tuple(state.values())
        binding.state_shapes[number, fqn] = {k: v.shape for k, v in state.items() if isinstance(v, torch.Tensor)}
    return problems


def check_no_gradients(step_state: StepState, cleared: bool) -> None:
    """Refuse gradients on parameters that the step would add to.

    Raises:
        PlanError: ``python-state`` for each such parameter.
    """
    if cleared or not step_state.optimizers:
        return
    problems = [
        Problem(
            "python-state",
            fqn,
            found="holds a gradient from outside the step; backward would add to it",
            hint="call zero_grad() before the step",
        )
        for fqn, param in step_state.params.items()
        if param.grad is not None
    ]
    if problems:
        raise PlanError(problems)


def bind_inputs(binding: Binding, program: Program, leaves: list[Any], optimizers: OptimizerReads) -> list[Any]:
    """Return local tensors and numbers for the placeholders, in order."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    params, buffers = binding.step_state.params, binding.step_state.buffers
    values: list[Any] = []
    for entry in program.inputs:  # without calls for each entry: this runs at every step
        kind = entry.kind
        if kind == "param":
            values.append(params[entry.name]._local_tensor)  # type: ignore[attr-defined]  # a DTensor
        elif kind == "buffer":
            values.append(buffers[entry.name])
        elif kind == "state":
            state = optimizers.states[entry.optimizer][id(params[entry.name])][entry.key]
            values.append(state._local_tensor if isinstance(state, DTensor) else state)
        elif kind == "hyper":
            values.append(optimizers.values[entry.key])
        elif kind == "number":
            values.append(leaves[int(entry.name)])
        else:
            values.append(tensors[int(entry.name)])
    return values


def store_outputs(binding: Binding, program: Program, values: tuple[Any, ...], leaves: list[Any]) -> None:
    """Store buffers, state, hyperparameters and gradients of arguments, and set the step's modes."""
    for module, mode in program.capture.effects.modes:
        module.training = mode
    for name, trained in program.capture.effects.trained.items():
        binding.step_state.params[name].requires_grad_(trained)
    outputs, placements = program.capture.returned.outputs, program.output_placements
    for value, entry, placement in zip(values, outputs, placements, strict=True):
        if entry.kind == "buffer":
            for _, module, attribute, name in binding.buffer_slots:  # under all of its names
                if name == entry.name:
                    module._buffers[attribute] = value
            binding.step_state.buffers[entry.name] = value
        elif entry.kind == "state":
            param = binding.step_state.params[entry.name]
            new, shape = value, getattr(value, "shape", ())  # a count has none
            if placement is not None and shape and tuple(shape) == binding.local_state_shape(entry.name):
                rows = value.clone() if value.untyped_storage().nbytes() > value.nbytes else value  # not the full one
                wanted = on_mesh(placement, binding.mesh)
                new = as_dtensor(rows, binding.mesh, wanted, param.shape, param.stride())
            binding.step_state.optimizers[entry.optimizer].state[param][entry.key] = new
        elif entry.kind == "hyper":
            group = binding.step_state.optimizers[entry.key.optimizer].param_groups[entry.key.group]
            if isinstance(group[entry.key.key], torch.Tensor):  # a learning rate on the device
                group[entry.key.key].fill_(value)
            else:
                group[entry.key.key] = value
        elif entry.kind == "attribute":
            module, key = entry.key
            vars(module)[key] = value
        elif entry.kind == "argument":
            tensor = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)][int(entry.name)]
            # Not in place: after a mismatch the check puts the old gradient back.
            tensor.requires_grad_().grad = value if tensor.grad is None else tensor.grad + value
