"""Canonical form of a graph: one node per tensor, live inputs, nothing dead or lost, operators with a rule.

After `normalize` every in-place operator is used for its effect alone (later uses take the written tensor), no alias
without a change of shape is left, hyperparameters are inputs, and dead nodes are gone. An operator that writes memory
is never dead, even without users. `decompose` is for global semantics: losses with a mean, batch statistics, all that
torch decomposes. An operator without rule and decomposition stays, and runs on gathered inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule

from dp_partition._torch_compat import FakeTensorMode, decomposition_of, make_fx, pytree
from dp_partition.capture.inputs import FUSED_ARGUMENTS
from dp_partition.capture.tracer import Capture
from dp_partition.nodes import (
    Hyperparameter,
    arguments,
    aten,
    base_name,
    copy_notes,
    has_effect,
    is_op,
    is_random,
    is_tensor,
    kind_of,
    meta_of,
    mutated_inputs,
    place_of,
    set_argument,
)
from dp_partition.sharding.op_rules import find_rule

_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)

# Their results are views too; the names only switch off autograd's tracking.
_VIEWS = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


def normalize(capture: Capture) -> None:
    """Bring a captured graph into canonical form, in place."""
    graph = capture.module.graph
    for node in list(graph.nodes):  # a hyperparameter's or argument's placeholder is a Python number at run time
        if node.target is aten._local_scalar_dense.default and kind_of(node.args[0]) in ("hyper", "number"):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    connect_fused_hyperparameters(graph, capture.groups)
    erase_profiler(graph)
    merge_aliases(graph)
    for node in graph.nodes:
        node.target = _VIEWS.get(node.target, node.target)
    eliminate_dead(graph)


def connect_fused_hyperparameters(graph: fx.Graph, groups: dict[str, tuple[int, int]]) -> None:
    """Replace traced floats in fused optimizer kernels by the live inputs."""
    placeholders = [(node, meta_of(node)["input"]) for node in graph.nodes if "input" in meta_of(node)]
    hyperparameters = {entry.key: node for node, entry in placeholders if entry.kind == "hyper"}
    owner = {node: groups.get(entry.name) for node, entry in placeholders if entry.kind == "param"}
    for node in graph.nodes:
        if not is_op(node) or not node.target._schema.name.startswith("aten::_fused_"):
            continue
        first = pytree.tree_leaves(node.args[0])  # the kernel's parameters
        group = owner.get(first[0]) if first else None
        if group is None:
            continue
        for argument, value in arguments(node):
            if argument.name in FUSED_ARGUMENTS and isinstance(value, float | int):
                beta = argument.name.startswith("beta")  # one element of `betas`
                key = ("betas", int(argument.name[-1]) - 1) if beta else (argument.name, None)
                source = hyperparameters.get(Hyperparameter(*group, *key))
                if source is not None:
                    set_argument(node, argument.name, source)


def erase_profiler(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if is_op(node) and node.target.namespace == "profiler":
            graph.erase_node(node)


def merge_aliases(graph: fx.Graph) -> None:
    """Merge detached aliases and outputs of in-place operators: one node for every tensor."""
    for node in list(graph.nodes):
        if not is_op(node):
            continue
        source: fx.Node | None = None
        if node.target in _ALIASES and isinstance(node.args[0], fx.Node):
            source = node.args[0]
        elif is_tensor(node):
            written = mutated_inputs(node)
            returned = node.target._schema.returns[0].alias_info
            if len(written) == 1 and returned is not None and returned.is_write:
                source = written[0] if place_of(node) == place_of(written[0]) else None  # same strides, same place
        if source is not None:
            node.replace_all_uses_with(source)
            if node.target in _ALIASES:
                graph.erase_node(node)


def eliminate_dead(graph: fx.Graph) -> bool:
    """Erase nodes without users and without effects; return True if there were any."""
    changed = False
    for node in reversed(list(graph.nodes)):
        if not node.users and not has_effect(node):
            graph.erase_node(node)
            changed = True
    return changed


def make_contiguous_for_fused(graph: fx.Graph) -> None:
    """Give every fused optimizer kernel of a rank's graph contiguous tensors. It goes by memory, not by strides."""
    for node in list(graph.nodes):
        if not is_op(node) or not node.target._schema.name.startswith("aten::_fused_"):
            continue
        values = [param.meta.get("val") if isinstance(param, fx.Node) else None for param in node.args[0]]
        strided = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor) and not x.is_contiguous()]
        written: list[tuple[fx.Node, fx.Node]] = []
        for argument, value in list(arguments(node)) if strided else ():
            if not isinstance(value, list | tuple) or not value or argument.name == "state_steps":  # scalars
                continue
            members = list(value)  # others stay as they are
            for index in strided:
                with graph.inserting_before(node):
                    layout: Any = {"memory_format": torch.contiguous_format}
                    copied = graph.call_function(aten.clone.default, (members[index],), layout)
                copy_notes(members[index], copied, "node_type")
                copy_notes(node, copied, "phase")
                if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
                    written.append((members[index], copied))
                members[index] = copied
            set_argument(node, argument.name, members)
        with graph.inserting_after(node):
            for original, copied in reversed(written):  # each goes right after the kernel
                back = graph.call_function(aten.copy_.default, (original, copied))  # results, in the old strides
                copy_notes(node, back, "phase")


MEAN = 1  # torch's number for reduction="mean"


def decompose(module: GraphModule, mode: FakeTensorMode) -> None:
    """Decompose operators without a rule, in place, as far as possible."""
    pending = [node for node in module.graph.nodes if is_op(node)]
    while pending:
        node = pending.pop()
        target: Any = node.target
        recipe = _OWN.get(target)
        if base_name(node).startswith("nll_loss"):
            stays = MEAN not in node.args  # sums have a rule
        else:
            stays = find_rule(node) is not None or is_random(node) or not any(map(is_tensor, node.all_input_nodes))
            stays = stays or base_name(node) in ("copy", "_local_scalar_dense", "bernoulli", "empty_like")
        if recipe is None and not stays:
            recipe = decomposition_of(target)
        if recipe is not None:
            pending += _splice(module, node, recipe, mode)
    eliminate_dead(module.graph)  # outputs that no one uses


def _splice(module: GraphModule, node: fx.Node, recipe: Callable[..., Any], mode: FakeTensorMode) -> list[fx.Node]:
    """Replace a node by the graph of its decomposition; return the new nodes."""
    sources = list(node.all_input_nodes)

    def run(*values: Any) -> Any:
        env = dict(zip(sources, values, strict=True))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: env[n])
        result = recipe(*args, **kwargs)
        return tuple(result) if isinstance(result, tuple) else result  # a plain tuple: fx would record a named one

    try:
        with mode:
            part = make_fx(run)(*[source.meta["val"] for source in sources])
    except NotImplementedError:
        return []  # torch's decomposition does not cover these arguments: the operator runs on gathered inputs
    new: list[fx.Node] = []
    copies: dict[fx.Node, Any] = {}
    placeholders = iter(sources)
    with module.graph.inserting_before(node):
        for inner in part.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(placeholders)
            elif inner.op == "output":
                _replace(module.graph, node, fx.map_arg(inner.args[0], lambda n: copies[n]))
            else:
                if inner.op == "get_attr":
                    name = f"_constant_{len([n for n in module.graph.nodes if n.op == 'get_attr'])}_{inner.name}"
                    module.register_buffer(name, getattr(part, str(inner.target)), persistent=False)
                    inner.target = name
                copies[inner] = module.graph.node_copy(inner, lambda n: copies[n])
                copy_notes(node, copies[inner], "phase")
                if inner.op == "call_function" and is_op(inner):
                    new.append(copies[inner])
    return new


def _replace(graph: fx.Graph, node: fx.Node, result: Any) -> None:
    if isinstance(result, fx.Node):
        copy_notes(node, result, "gradient")
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            index = user.args[1]
            assert isinstance(index, int), f"{user} reads {node} in another way than by index"
            item = result[index]
            if item is None:
                user.replace_all_uses_with(None)  # type: ignore[arg-type]
            else:
                copy_notes(user, item, "gradient")
                user.replace_all_uses_with(item)
            graph.erase_node(user)
    graph.erase_node(node)


def _var_mean(
    source: torch.Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return variance and mean from sums: over a sharded batch partial ones, with global counts."""
    dims = list(dim) if dim else list(range(source.ndim))
    count = math.prod(source.shape[d] for d in dims)
    mean = source.sum(dims, keepdim=True) / count
    centred = source - mean
    free = count - (1 if correction is None else correction)
    var = (centred * centred).sum(dims, keepdim=keepdim) / free
    return var, mean if keepdim else mean.sum(dims)  # the summed dims have size one here


_OWN: dict[Any, Callable[..., Any]] = {
    aten.var_mean.correction: _var_mean,
    aten.var.correction: lambda *args, **kwargs: _var_mean(*args, **kwargs)[0],
    aten.std.correction: lambda *args, **kwargs: _var_mean(*args, **kwargs)[0].sqrt(),
}
