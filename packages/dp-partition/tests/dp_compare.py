"""One trial of `verify`: the single-device graph and all ranks' graphs run side by side, compared after every node.

The ranks' values of a node are put together as its placement says and compared with the single device's. What was
compared is then set right, so that a difference is found at the node that makes it and rounding does not add up: if
every node is right for right inputs, the whole is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import pytree
from dp_partition.capture.phases import TAG_GRAD
from dp_partition.capture.tracer import Capture
from dp_partition.check.reference import first_difference
from dp_partition.nodes import is_op, is_random, kind_of, meta_of, mutated_inputs, viewed_input
from dp_partition.passes.insert_collectives import REDUCTIONS, Mover
from dp_partition.passes.save_memory import OWN_ROWS, SHARE_ROWS
from dp_partition.pipeline import partition_for_rank
from dp_partition.plan.placements import RankLocal, chunk_bounds, describe
from dp_partition.plan.plan import PartitionPlan
from dp_partition.runner import Runner
from dp_partition.runtime.state import local_tensor
from dp_partition.sharding.propagate import NodePlan, StoragePlacements
from dp_partition.sharding.rule_table import OutputPlacement
from dp_simulate import Done, Event, advance, run_rank
from torch import fx
from torch.distributed.tensor import Partial, Placement, Shard

_GONE = (TAG_GRAD, OWN_ROWS, SHARE_ROWS)  # markers of the single-device graph that no rank has


class NoKernel(Exception):
    """The single-device graph cannot be run in double precision."""


class NodeComparison:
    """One side-by-side run for one number of ranks."""

    def __init__(
        self,
        step: Runner,
        capture: Capture,
        plan: PartitionPlan,
        homes: StoragePlacements,
        plans: dict[fx.Node, NodePlan],
        double: bool,
    ) -> None:
        self.step, self.capture, self.plan, self.homes, self.plans = step, capture, plan, homes, plans
        self.world, self.local, self.double = plan.world, plan.semantics == "local", double
        self.nodes = list(capture.module.graph.nodes)
        self.place = {node: position for position, node in enumerate(self.nodes)}
        self.num_nodes = self.num_elements = 0
        self.on_ranks: set[fx.Node] = set()  # the nodes that ranks have too; a gradient's views may lie in a bucket

    def run(self, values: list[list[Any]]) -> None:
        """Run everything and compare."""
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.envs = envs = self.reference_inputs(placeholders, values)
        inputs = [self.rank_inputs(placeholders, values, rank) for rank in range(self.world)]
        ranks = [self.start_rank(rank, inputs[rank]) for rank in range(self.world)]
        gpus = {v.device.index or 0 for one in values for v in one if isinstance(v, torch.Tensor) and v.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(devices=sorted(gpus)):
            for node in self.nodes[len(placeholders) :]:
                if node.op == "output":
                    break
                self.run_reference(node, envs)
                if node in self.on_ranks and node.target not in _GONE:
                    events = advance(ranks, node)
                    self.compare_node(node, envs, events)
            results = advance(ranks, None)
        self.compare_end(placeholders, envs, inputs, results)

    def reference_inputs(self, placeholders: list[fx.Node], values: list[list[Any]]) -> list[dict[fx.Node, Any]]:
        """The single device's inputs: one run per rank, or one run with all rows."""
        if self.local:
            return [{n: self.own(v) for n, v in zip(placeholders, one, strict=True)} for one in values]
        env = {}
        for index, node in enumerate(placeholders):
            parts = [self.own(one[index]) for one in values]
            cut = kind_of(node) == "arg" and isinstance(self.homes.placements[node], Shard)
            env[node] = torch.cat(parts, self.step.settings.batch_dim) if cut else parts[0]
        return [env]

    def rank_inputs(self, placeholders: list[fx.Node], values: list[list[Any]], rank: int) -> list[Any]:
        """A rank's inputs: parameters and state as they are placed, its own rows."""
        inputs = []
        for index, node in enumerate(placeholders):
            placement = self.homes.placements[node]
            has_rows = kind_of(node) == "arg" and isinstance(placement, Shard | RankLocal)
            value = self.own(values[rank if has_rows else 0][index])
            if isinstance(placement, Shard) and kind_of(node) != "arg":
                value = self.part(value, placement.dim, rank).clone()
            inputs.append(value)
        return inputs

    def own(self, value: Any) -> Any:
        """A copy to compute with, in the precision of this trial."""
        if not isinstance(value, torch.Tensor):
            return value
        value = local_tensor(value).detach()
        return value.to(torch.float64, copy=True) if self.double and value.is_floating_point() else value.clone()

    def part(self, full: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        start, end = chunk_bounds(full.shape[dim], self.world, rank)
        return full.narrow(dim, start, end - start)

    def constant(self, name: str) -> Any:
        return self.own(getattr(self.capture.module, name))

    def start_rank(self, rank: int, inputs: list[Any]) -> Generator[Event, None, list[Any]]:
        """Partition a copy of the graph for a rank."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.capture.module.graph, copies)
        output = graph.output(result)
        copies[self.nodes[-1]] = output
        plans = {
            copies[node]: replace(plan, inputs={copies[source]: lies for source, lies in plan.inputs.items()})
            for node, plan in self.plans.items()
        }
        module = fx.GraphModule(self.capture.module, graph)
        comm = replace(self.step.settings.comm, reduce_dtype=None)  # what changes no result
        partition_for_rank(module, plans, Mover(graph, self.world, rank, "simulated"), comm)
        present = set(module.graph.nodes)
        originals = {copy: node for node, copy in copies.items() if copy in present and node.op == "call_function"}
        self.on_ranks |= set(originals.values())

        def call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            original = originals.get(node)
            if original is not None:
                self.seed(original, rank)
            try:
                return self.run_node(node, args, kwargs)
            except PlanError:
                raise
            except Exception as error:
                text = str(error).strip().splitlines()[0][:300] if str(error) else ""
                message = f"rank {rank} of {self.world} fails: {type(error).__name__}: {text}"
                raise self.problem(original or node, "verify-error", message) from error

        return run_rank(module, _reported(originals), inputs, self.constant, call, mutated_inputs)

    def seed(self, node: fx.Node, rank: int) -> None:
        if is_random(node):
            torch.manual_seed(1000 * self.place[node] + rank)

    def run_node(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call in the precision of this trial."""
        target: Any = node.target
        if self.double:
            change: Callable[[Any], Any] = lambda d: torch.float64 if d.is_floating_point else d  # noqa: E731
            args, kwargs = pytree.tree_map_only(torch.dtype, change, (args, kwargs))
        return target(*args, **kwargs)

    def run_reference(self, node: fx.Node, envs: list[dict[fx.Node, Any]]) -> None:
        """Run a node on the single device, for every run of it."""
        for rank, env in enumerate(envs):
            if node.op == "get_attr":
                env[node] = self.constant(str(node.target))
                continue
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n, env=env: env[n])  # type: ignore[misc]
            self.seed(node, rank)
            try:
                env[node] = self.run_node(node, args, kwargs)
            except Exception as error:
                if self.double:
                    raise NoKernel from error
                message = f"the single-device graph fails: {type(error).__name__}: {error}"
                raise PlanError(Problem("unverified", f"node {node.name} ({node.target})", found=message)) from error
        if node.target is TAG_GRAD and self.local:
            self.average(node, envs)

    def average(self, node: fx.Node, envs: list[dict[fx.Node, Any]]) -> None:
        """A gradient is the average over the runs; the ranks' values must be meant to become it."""
        mean = torch.stack([env[node] for env in envs]).mean(0)
        state = self.plans[node].output
        if isinstance(state, Partial):
            total = combine([env[node] for env in envs], state.reduce_op)
            self.check(node, state, mean, total, "the ranks' gradients together", False)
        for env in envs:
            env[node] = mean.clone()

    def compare_node(self, node: fx.Node, envs: list[dict[fx.Node, Any]], events: list[Done]) -> None:
        """Compare a node's value and what it wrote, and set the ranks' values right."""
        plan = self.plans[node]
        before = self.num_elements
        written = mutated_inputs(node)
        drawn = is_random(node) and not self.local  # every rank draws its own rows: only shapes can be compared
        for index, source in enumerate(written):
            state: OutputPlacement = plan.inputs.get(source)
            values = [one.written[index] for one in events]
            what = f"what it writes into {source.name}"
            self.compare(node, state, [env[source] for env in envs], values, what, True, drawn)
        view = viewed_input(events[0].node) is not None or bool(written)
        self.compare_state(node, plan.output, [env[node] for env in envs], [d.value for d in events], not view, drawn)
        self.num_nodes += self.num_elements > before

    def compare_state(
        self,
        node: fx.Node,
        state: OutputPlacement,
        expected: list[Any],
        values: list[Any],
        correct: bool,
        drawn: bool = False,
    ) -> None:
        if isinstance(state, tuple):
            for index, one in enumerate(state):
                pick = [e[index] for e in expected], [f[index] for f in values]
                self.compare(node, one, *pick, f"output {index}", correct, drawn)
        else:
            self.compare(node, state, expected, values, "", correct, drawn)

    def compare(
        self,
        node: fx.Node,
        state: OutputPlacement,
        expected: list[Any],
        values: list[Any],
        what: str,
        correct: bool,
        drawn: bool = False,
    ) -> None:
        """Compare the ranks' values of one tensor, put together, with the single device's."""
        if not isinstance(state, Placement) or not isinstance(expected[0], torch.Tensor):
            return
        if "empty" in str(node.target):
            return
        if isinstance(state, Partial):
            self.compare_partial(node, state, expected[0], values, what, correct)
            return
        for rank, value in enumerate(values):
            reference = expected[rank if self.local else 0]
            if isinstance(state, Shard):
                reference = self.part(reference, state.dim, rank)
            who = f"rank {rank}'s {'part ' if isinstance(state, Shard) else ''}value"
            self.check(node, state, reference, value, f"{who} {what}".strip(), drawn and isinstance(state, Shard))
            if correct and is_plain(value):
                value.copy_(reference)

    def compare_partial(
        self, node: fx.Node, state: Partial, expected: torch.Tensor, parts: list[torch.Tensor], what: str, correct: bool
    ) -> None:
        shapes = {tuple(value.shape) for value in parts}
        if shapes != {tuple(expected.shape)}:
            raise self.differs(node, state, f"{what} shapes {sorted(shapes)}, expected {list(expected.shape)}")
        total = combine(parts, state.reduce_op)
        cancelled = 8 * eps(total) * max(map(max_abs, parts))
        self.check(node, state, expected, total, f"the ranks' values together {what}".strip(), False, cancelled)
        if correct and state.reduce_op in ("sum", "avg") and is_plain(parts[0]) and expected.is_floating_point():
            parts[0] += (expected - total) * (len(parts) if state.reduce_op == "avg" else 1)

    def check(
        self,
        node: fx.Node,
        state: Placement,
        expected: torch.Tensor,
        value: Any,
        who: str,
        shapes_only: bool,
        cancelled: float = 0.0,
    ) -> None:
        if not isinstance(value, torch.Tensor) or value.shape != expected.shape:
            shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise self.differs(node, state, f"{who} has shape {shape}, expected {list(expected.shape)}")
        self.num_elements += value.numel()
        if shapes_only or value.numel() == 0:
            return
        apart, worst = max_error(value, expected)
        if not apart <= TOLERANCE.get(value.dtype, 0.0) and not worst <= cancelled + self.rounding(node, value):
            raise self.differs(
                node, state, f"{who} is {first_difference(value, expected)}; apart by {apart:.3g} of the greatest"
            )

    def rounding(self, node: fx.Node, value: torch.Tensor) -> float:
        """Return the error that is allowed where everything cancels: rounding of sums over the node's inputs."""
        tensors = [self.envs[0].get(source) for source in node.all_input_nodes]
        sums = [math.sqrt(t.numel()) * max_abs(t) for t in tensors if isinstance(t, torch.Tensor) and t.numel()]
        return 8 * eps(value) * max(sums, default=0.0)

    def compare_end(
        self, placeholders: list[fx.Node], envs: list[dict[fx.Node, Any]], inputs: list[list[Any]], results: list[Any]
    ) -> None:
        """Compare what the step leaves behind and what it returns."""
        for index, node in enumerate(placeholders):
            if kind_of(node) in ("param", "state", "buffer"):
                home = self.homes.placements[node]
                values = [one[index] for one in inputs]
                self.compare(node, home, [env[node] for env in envs], values, "after the step", False)
        output = self.nodes[-1]
        plan = self.plans[output]
        for index, source in enumerate(output.args[0]):
            if isinstance(source, fx.Node):
                values = [one[index] for one in results]
                expected = [env[source] for env in envs]
                self.compare(source, plan.inputs.get(source), expected, values, "as it is returned", False)

    def problem(self, node: fx.Node, code: str, message: str) -> PlanError:
        name = f"node {node.name} ({node.target})" if is_op(node) else f"node {node.name}"
        hint = "a rule of dp-partition is wrong for this operator; please report it"
        return PlanError(Problem(code, name, found=message, hint=hint), f"{self.step.name} on {self.world} ranks")

    def differs(self, node: fx.Node, state: Placement, message: str) -> PlanError:
        return self.problem(node, "verify-mismatch", f"[{describe(state)}] {message}")


def _reported(originals: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """After which node of a rank's graph each node of the single-device graph is done."""
    reported = {}
    for node, original in originals.items():
        shared = next((user for user in node.users if "agrees" in meta_of(user)), node)
        reported[shared] = original
    return reported


# Relative to the greatest value of a tensor. Sums of a rank's parts round differently from one sum.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def combine(values: list[torch.Tensor], kind: str) -> torch.Tensor:
    """The ranks' partial values reduced."""
    stacked = torch.stack(values)
    if kind in REDUCTIONS:
        return REDUCTIONS[kind](stacked)
    order = float(kind.removeprefix("norm"))
    return stacked.abs().pow(order).sum(0).pow(1 / order)


def max_error(value: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Greatest difference, relative to the greatest value wanted and as it is; infinite for values of another kind."""
    if value.dtype != expected.dtype:
        return math.inf, math.inf
    if not value.is_floating_point():
        apart = 0.0 if torch.equal(value, expected) else math.inf
        return apart, apart
    odd = ~torch.isfinite(expected)
    if (
        not torch.equal(value.nan_to_num(0.0)[odd], expected.nan_to_num(0.0)[odd])
        or not torch.isfinite(value[~odd]).all()
    ):
        return math.inf, math.inf
    difference = (value - expected)[~odd].abs()
    if not difference.numel():
        return 0.0, 0.0
    worst, scale = difference.max().item(), expected[~odd].abs().max().item()
    return (worst / scale if scale else 0.0 if worst == 0 else math.inf), worst


def eps(value: torch.Tensor) -> float:
    """The rounding of a tensor's dtype; 0 for integers."""
    return torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0


def max_abs(value: torch.Tensor) -> float:
    """The greatest finite value of a tensor; 0 for integers."""
    return value.abs().nan_to_num(posinf=0.0).max().item() if value.is_floating_point() and value.numel() else 0.0


def is_plain(value: torch.Tensor) -> bool:
    """Return whether the tensor's elements lie apart, so that it can be written."""
    return all(stride != 0 or size == 1 for stride, size in zip(value.stride(), value.shape, strict=True))
