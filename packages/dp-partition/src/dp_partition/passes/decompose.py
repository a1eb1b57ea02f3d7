"""Decompose operators without a rule: losses with a mean, batch statistics, all that torch decomposes.

Only global semantics needs this. An operator without rule and decomposition stays, and runs on gathered inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule

from dp_partition._torch_compat import FakeTensorMode, decomposition_of, make_fx
from dp_partition.capture.node_meta import copy_notes, meta_of
from dp_partition.capture.phases import TAG_GRAD
from dp_partition.ops import aten, base_name, is_op, is_random, is_tensor
from dp_partition.passes.normalize import eliminate_dead
from dp_partition.sharding.op_rules import find_rule

MEAN = 1  # torch's number for reduction="mean"


def remove_tags(graph: fx.Graph) -> None:
    """Replace gradient tags by a note on the tagged node."""
    for node in list(graph.nodes):
        if node.target is TAG_GRAD:
            source = node.args[0]
            meta_of(source)["gradient"] = node.args[1] if len(node.args) > 1 else ""
            node.replace_all_uses_with(source)
            graph.erase_node(node)


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
            one = result[index]
            if one is None:
                user.replace_all_uses_with(None)  # type: ignore[arg-type]
            else:
                copy_notes(user, one, "gradient")
                user.replace_all_uses_with(one)
            graph.erase_node(user)
    graph.erase_node(node)


def _var_mean(
    source: torch.Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return variance and mean from sums: over a sharded batch partial ones, with global counts."""
    dims = list(dim) if dim else list(range(source.ndim))
    count = 1
    for d in dims:
        count *= source.shape[d]
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
