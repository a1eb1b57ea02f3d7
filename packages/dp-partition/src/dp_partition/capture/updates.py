"""An optimizer's update traced for one parameter, and repeated for those that are like it.

On the CPU torch's optimizers loop over parameters, a dozen operators and as many Python numbers for each: with hundreds
of parameters that would be half of the trace. The loop treats each by itself, as its group and the shapes of parameter,
gradient and state say, so the nodes of one are those of another with other tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from dp_partition.ops import substitution

_new_library: Any = torch.library.Library  # its methods are not typed
library: Any = _new_library("dp_partition", "FRAGMENT")
library.define("update_mark(Tensor(a!)[] tensors, str update) -> ()")
library.impl("update_mark", lambda tensors, update: None, "CompositeExplicitAutograd")
MARK_UPDATE = torch.ops.dp_partition.update_mark.default

_AT_ONCE = ("fused", "foreach", "capturable", "differentiable")
_number = itertools.count()


def shared_updates(optimizer: Optimizer) -> Callable[..., Any]:
    """Return ``optimizer.step`` for a trace that `repeat_updates` completes: parameters alike are updated once."""
    step, kind = optimizer.step, type(optimizer)
    own = vars(optimizer).get("step")
    untouched = own is None or getattr(own, "__wrapped__", None) is kind.step  # a scheduler counts calls
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    # Those of torch loop over parameters that offer to update all at once instead.
    loops = kind.__module__.startswith("torch.optim.") and "foreach" in optimizer.defaults
    if not loops or not untouched or hooks:
        return step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        groups = optimizer.param_groups
        alike: dict[Any, list[torch.Tensor]] = {}
        for index, group in enumerate(groups):
            for param in group["params"]:
                if param.grad is not None:
                    alike.setdefault((index, *map(_metadata, _tensors(optimizer, param))), []).append(param)
        at_once = any(group.get(key) for group in groups for key in _AT_ONCE)
        if args or kwargs or at_once or all(len(params) == 1 for params in alike.values()):
            return step(*args, **kwargs)
        names = {key: f"update{next(_number)}" for key in alike}
        order = {id(param): key for key, params in alike.items() for param in params}
        for group in groups:  # where the loop would come to them
            for param in group["params"]:
                if id(param) in order:
                    _mark(_tensors(optimizer, param), names[order[id(param)]])
        try:
            for key, params in alike.items():
                before = list(optimizer.state[params[0]].values())
                _mark(_tensors(optimizer, params[0]), f"{names[key]} begin")
                optimizer.param_groups = [{**groups[key[0]], "params": params[:1]}]
                step()
                after = list(optimizer.state[params[0]].values())
                if len(before) == len(after) and all(map(_is_same, before, after)):
                    _mark([params[0]], f"{names[key]} end")
                elif len(params) > 1:  # new state, which the trace has to return
                    optimizer.param_groups = [{**groups[key[0]], "params": params[1:]}]
                    step()
        finally:
            optimizer.param_groups = groups

    return stepped


def _tensors(optimizer: Optimizer, param: torch.Tensor) -> list[torch.Tensor]:
    """The parameter, its gradient and its state, in one order for those that are alike."""
    assert param.grad is not None
    state = optimizer.state[param]
    return [param, param.grad, *(state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor))]


def _metadata(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout, tensor.is_conj(), tensor.is_neg()


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and one == other)


def _mark(tensors: list[torch.Tensor], update: str) -> None:
    with torch.no_grad():
        MARK_UPDATE(tensors, update)


def repeat_updates(graph: fx.Graph) -> frozenset[str]:
    """Put the nodes of each update where its parameters stand, in place of marks; return the names of new nodes."""
    made: set[str] = set()
    marks: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is MARK_UPDATE:
            marks.setdefault(str(node.args[1]), []).append(node)
    for update, places in marks.items():
        end = marks.get(f"{update} end")
        if end is not None:
            (begin,) = marks[f"{update} begin"]
            body, node = [], begin.next
            while node is not end[0]:
                body.append(node)
                node = node.next
            own: dict[fx.Node, fx.Node] = {}
            for place in places:
                copies = dict(zip(begin.args[0], place.args[0], strict=True))  # type: ignore[arg-type]
                with graph.inserting_before(place):
                    for node in body:
                        copies[node] = graph.node_copy(node, substitution(copies))
                        made.add(copies[node].name)
                if place.args[0] == begin.args[0]:
                    own = copies
            for node in reversed(body):
                node.replace_all_uses_with(own[node])  # what follows the step may name the tensors as written
                graph.erase_node(node)
    for places in marks.values():
        for place in places:
            graph.erase_node(place)
    return frozenset(made)
