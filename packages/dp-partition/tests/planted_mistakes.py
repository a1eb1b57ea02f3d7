"""Mistakes of a kind that was once there, or could be: planted one at a time, for the check by execution to find.

A *mended cause* takes back one mending of the package. A *graph mistake* changes the partitioned graph of a rank as a
wrong rule or pass would. A *mutation* multiplies the value of one node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import dp_partition as dp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dp_partition import runner
from dp_partition._torch_compat import pytree
from dp_partition.api import runner_of
from dp_partition.capture import fingerprint, inputs
from dp_partition.nodes import aten, is_collective, is_op, is_wait, mutated_inputs
from dp_partition.runtime.program import Program
from dp_partition.sharding import op_rules
from dp_partition.sharding.rule_table import R
from torch import fx, nn
from torch.distributed.tensor import Partial

# ---- steps ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A bit of everything: batch statistics, dropout, an embedding of positions, a tied scale."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(F.gelu(self.norm(self.up(x))), 0.1, self.training)
        return torch.tanh(self.other(self.one(self.down(hidden)))) * self.scale


def finish(loss: torch.Tensor, model: nn.Module, optim: torch.optim.Optimizer) -> torch.Tensor:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optim.step()
    optim.zero_grad()
    return loss


def plain(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return finish(F.mse_loss(model(x), y), model, optim)


def unclipped(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The step for mistakes that scale gradients: clipped ones have one length, whatever they are scaled by."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


def of_object(model: nn.Module, optim: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    return plain(model, optim, batch.x, batch.y)


def norms(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            mean = param.grad.mean()  # type: ignore[union-attr]
            param.mul_(1 / (1 + mean * mean * 1e4))
    optim.step()
    optim.zero_grad()
    return loss


CONFIG = types.ModuleType("config_of_a_test")
CONFIG.scale = 1.0  # type: ignore[attr-defined]


def configured(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return finish(F.mse_loss(model(x), y) * CONFIG.scale, model, optim)


def counting() -> Callable[..., Any]:
    calls = {"n": 0}

    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls["n"] += 1
        return finish(F.mse_loss(model(x), y) * (1.0 if calls["n"] <= 3 else 0.1), model, optim)

    return step


def in_float32(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return plain(model, optim, x, y)


# ---- mended causes --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Cause:
    """A mending taken back, and a step that shows it.

    Attributes:
        step: Makes the step.
        taken_back: What the package was without it.
        between: What is changed before the second call.
        around: Around each call.
        settings: For `compile`.
        batch: Makes the arguments after model and optimizer.
    """

    step: Callable[[], Callable[..., Any]]
    taken_back: Callable[[], contextlib.AbstractContextManager[Any]]
    between: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optim: None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = nullcontext
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]] = lambda x, y: (x, y)


@contextmanager
def _all(*patches: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield


def _linear_in_each_node(call: Any, name: str, operands: list[fx.Node]) -> Iterator[Any]:
    partial = [node for node in operands if isinstance(call.placement_of(node), Partial)]
    base = name.removeprefix("_foreach_")
    if len(partial) == 1 and base in op_rules.LINEAR_IN_ONE | {"div"}:
        kind = call.placement_of(partial[0])
        yield {node: (kind if node is partial[0] else R) for node in operands}, kind


def _swap_groups(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    one, other = optim.param_groups
    one["params"], other["params"] = other["params"], one["params"]


def _halve_after_steps(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    def halve(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for param in model.parameters():
            param.data.mul_(0.5)

    optim.register_step_post_hook(halve)


def _set(owner: Any, name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda model, optim: setattr(owner, name, value)


MENDED: dict[str, Cause] = {
    "1 batch object": Cause(
        lambda: of_object,
        lambda: _all(
            patch.object(inputs, "_open_leaves", lambda name, leaves, spec: pytree.tree_unflatten(leaves, spec)),
            patch.object(runner, "leaf_key", lambda leaf, marked: 0),
        ),
        batch=lambda x, y: (Batch(x, y),),
    ),
    "4 partial squares": Cause(
        lambda: norms,
        lambda: patch.object(op_rules, "_partial_ways", _linear_in_each_node),
        settings={"style": "fully_shard"},
    ),
    "5 config module": Cause(
        lambda: configured,
        lambda: patch.object(fingerprint.FunctionReads, "read", lambda self, *placed: ()),
        between=_set(CONFIG, "scale", 3.0),
    ),
    "5 counter": Cause(counting, lambda: patch.object(runner.Traces, "check_python_state", lambda *args: None)),
    "6 groups swapped": Cause(
        lambda: plain,
        lambda: patch.object(runner, "program_key", lambda *args: 0),
        between=_swap_groups,
    ),
    "6 optimizer hook": Cause(
        lambda: plain,
        lambda: patch.object(inputs, "optimizer_attributes", lambda optimizer: ()),
        between=_halve_after_steps,
    ),
    "7 ambient autocast": Cause(
        lambda: in_float32,
        lambda: patch.object(runner, "without_autocast", nullcontext),
        around=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        settings={"style": "replicate"},  # shards cannot be gathered in two dtypes: that is no silent mistake
    ),
}

# ---- graph mistakes -------------------------------------------------------------------------------------------------

Change = Callable[[fx.Graph], bool]


def _calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def _named(graph: fx.Graph, text: str) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and text in str(node.target)]


def _after(graph: fx.Graph, node: fx.Node, target: Any, *args: Any) -> bool:
    """Let everything after a node use another value."""
    users = list(node.users)
    with graph.inserting_after(node):
        changed = graph.call_function(target, (node, *args))
    changed.meta.update({key: value for key, value in node.meta.items() if key in ("val", "phase")})
    for user in users:
        user.replace_input_with(node, changed)
    return bool(users)


def _reductions(graph: fx.Graph) -> list[fx.Node]:
    return [
        n
        for n in graph.nodes
        if is_collective(n) and ("reduce_scatter" in str(n.target) or "all_reduce" in str(n.target))
    ]


def _other_op(op: str) -> Change:
    def change(graph: fx.Graph) -> bool:
        for node in _reductions(graph):
            node.update_arg(1, op)
        return bool(_reductions(graph))

    return change


def _no_reduction(graph: fx.Graph) -> bool:
    waits = [node for node in graph.nodes if is_wait(node) and node.args[0] in _reductions(graph)]
    for wait in waits:
        reduction = wait.args[0]
        if "all_reduce" not in str(reduction.target):
            return False
        wait.replace_all_uses_with(reduction.args[0])
        graph.erase_node(wait)
        graph.erase_node(reduction)  # it works in place
    return bool(waits)


def _rolled(graph: fx.Graph) -> bool:
    waits = [node for node in graph.nodes if is_wait(node)]
    gathered = [node for node in waits if "all_gather" in str(node.args[0].target)]
    return bool(gathered) and _after(graph, gathered[0], aten.roll.default, [1])


def _erase(text: str, index: int = 0) -> Change:
    def change(graph: fx.Graph) -> bool:
        unused = [node for node in _named(graph, text) if not node.users]
        if unused:
            graph.erase_node(unused[index])
        return bool(unused)

    return change


def _scaled(text: str, factor: float, index: int = 0) -> Change:
    def change(graph: fx.Graph) -> bool:
        nodes = [n for n in _named(graph, text) if isinstance(n.meta.get("val"), torch.Tensor) and n.users]
        return bool(nodes) and _after(graph, nodes[index], aten.mul.Tensor, factor)

    return change


def _value_for(node: fx.Node, value: float, one: fx.Node) -> Any:
    return value if one is node else one


def _burnt_in(name: str, value: float) -> Change:
    def change(graph: fx.Graph) -> bool:
        inputs = [n for n in graph.nodes if n.op == "placeholder" and n.name.endswith(name)]
        for node in inputs:
            for user in list(node.users):
                user.args = fx.map_arg(user.args, partial(_value_for, node, value))
                user.kwargs = fx.map_arg(user.kwargs, partial(_value_for, node, value))
        return bool(inputs)

    return change


def _instead(text: str, target: Any) -> Change:
    def change(graph: fx.Graph) -> bool:
        nodes = _named(graph, text)
        for node in nodes[:1]:
            node.target, node.args, node.kwargs = target, node.args[:1], {}
        return bool(nodes)

    return change


def _result(target: Any, *args: Any) -> Change:
    def change(graph: fx.Graph) -> bool:
        output = next(node for node in graph.nodes if node.op == "output")
        first = output.args[0][0]
        with graph.inserting_before(output):
            changed = graph.call_function(target, (first, *args))
        output.args = ([changed, *output.args[0][1:]],)
        return True

    return change


def _argument(target: Any, *args: Any) -> Change:
    def change(graph: fx.Graph) -> bool:
        inputs = [n for n in graph.nodes if n.op == "placeholder" and n.meta["input"].kind == "arg"]
        return _after(graph, inputs[0], target, *args)

    return change


def _swapped(graph: fx.Graph) -> bool:
    """Two gradients of one size change places in their bucket."""
    for node in reversed(_named(graph, "split_with_sizes")):
        sizes: Any = node.args[1]
        alike = [index for index, size in enumerate(sizes) if size > 1 and sizes.count(size) > 1]
        users = {user.args[1]: user for user in node.users}
        if len(alike) > 1 and alike[0] in users and sizes[alike[0]] in sizes[alike[0] + 1 :]:
            other = list(sizes).index(sizes[alike[0]], alike[0] + 1)
            users[alike[0]].update_arg(1, other)
            users[other].update_arg(1, alike[0])
            return True
    return False


def _other_mask(graph: fx.Graph) -> bool:
    for node in _named(graph, "aten.bernoulli_"):
        node.update_arg(1, 0.6)
    return bool(_named(graph, "aten.bernoulli_"))


def _one_unreduced(graph: fx.Graph) -> bool:
    """The first gradient of the bucket is this rank's own."""
    reduction = next(
        node for node in _reductions(graph) if any(_named(graph, "split_with_sizes")) and is_wait(node.next)
    )
    split = next(node for node in _named(graph, "split_with_sizes") if node.args[0] is reduction.next)
    sizes: Any = split.args[1]
    one = next(user for user in split.users if user.args[1] == sizes.index(max(sizes)))
    with graph.inserting_before(reduction):
        own = graph.call_function(aten.clone.default, (reduction.args[0],))  # it is reduced in place
        if "reduce_scatter" in str(reduction.target):
            own = graph.call_function(aten.view.default, (own, [reduction.args[2], -1]))
            own = graph.call_function(aten.select.int, (own, 0, dist.get_rank()))
    with graph.inserting_before(split):
        parts = graph.call_function(split.target, (own, split.args[1]))  # type: ignore[arg-type]
    one.update_arg(0, parts)
    return True


# gradients that have another factor or direction, under a norm that hides the factor
CLIPPED_MISTAKES: dict[str, tuple[str, Change]] = {
    "all doubled": ("replicate", _other_op("sum")),
    "all doubled, sharded": ("fully_shard", _other_op("sum")),
    "all doubled, zero1": ("zero1", _other_op("sum")),
    "all doubled, zero2": ("zero2", _other_op("sum")),
    "one not reduced": ("replicate", _one_unreduced),
    "one not reduced, sharded": ("fully_shard", _one_unreduced),
}

# what is planted -> style, change of the graph
GRAPH_MISTAKES: dict[str, tuple[str, Change]] = {
    "sum instead of average": ("replicate", _other_op("sum")),
    "sum instead of average, sharded": ("fully_shard", _other_op("sum")),
    "greatest instead of average": ("replicate", _other_op("max")),
    "no reduction": ("replicate", _no_reduction),
    "gathered rows rolled": ("fully_shard", _rolled),
    "gathered rows rolled, zero1": ("zero1", _rolled),
    "bucket in another order": ("replicate", _swapped),
    "gradient of a weight negated": ("replicate", _scaled("aten.mm", -1.0, -1)),
    "gradient of a weight halved": ("fully_shard", _scaled("aten.mm", 0.5, -1)),
    "forward scaled by a thousandth": ("fully_shard", _scaled("aten.addmm", 1.001)),
    "burnt-in learning rate": ("fully_shard", _burnt_in("_lr", 2e-2)),
    "burnt-in beta": ("replicate", _burnt_in("_betas1", 0.9)),
    "burnt-in weight decay": ("zero2", _burnt_in("_weight_decay", 0.0)),
    "another activation": ("replicate", _instead("aten.gelu.default", aten.relu.default)),
    "result doubled": ("replicate", _result(aten.mul.Tensor, 2.0)),
    "result in another dtype": ("zero1", _result(aten.to.dtype, torch.bfloat16)),
    "rows in another order": ("replicate", _argument(aten.flip.default, [0])),
    "clipping left out": ("fully_shard", _scaled("aten.linalg_vector_norm", 1e-6)),
    "clipping by a shard's norm": ("fully_shard", _scaled("aten.clamp", 0.7)),
    "backward of an activation scaled": ("zero2", _scaled("aten.tanh_backward", 0.99)),
    "mask of another dropout": ("replicate", _other_mask),
    "normalised by another variance": ("replicate", _scaled("aten.gelu_backward", 1.01)),
}


def change_graphs(
    step: dp.CompiledStep,
    change: Callable[[fx.GraphModule], fx.GraphModule],
    traced: dict[Any, Program] | None = None,
    key: Any = None,
) -> None:
    """Apply a pass to every graph that the step partitions from now on.

    Steps that differ by the pass alone take the same trace: the first one puts it into ``traced`` under the ``key``.
    """
    traces = runner_of(step).traces
    build, numbers = traces.build, itertools.count()

    def built(*args: Any) -> Program:
        place = key, next(numbers)
        if traced is None or place not in traced:
            program: Program = build(*args)
            if traced is not None:
                traced[place] = copied(program)
        else:
            program = copied(traced[place])
        program.capture.module = change(program.module)
        return program

    traces.build = built


def copied(program: Program) -> Program:
    """Return a program that has not run, with the same trace and a graph of its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.module.graph, {}))
    capture = dataclasses.replace(program.capture, module=fx.GraphModule(program.module, graph))
    return Program(capture, program.inputs, program.output_placements, program.mesh, program.local_fakes)


def mutation(index: int) -> Change:
    """Multiply one value of the graph, chosen by number, by 1.01."""

    def change(graph: fx.Graph) -> bool:
        nodes = [
            node
            for node in graph.nodes
            if is_op(node)
            and isinstance(node.meta.get("val"), torch.Tensor)
            and node.meta["val"].is_floating_point()
            and node.users
            and not is_collective(node)
            and not mutated_inputs(node)
        ]
        node = nodes[index % len(nodes)]
        return _after(graph, node, aten.mul.Tensor, 1.01)

    return change
