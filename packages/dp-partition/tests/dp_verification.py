"""Verify: run a step's single-device graph and all ranks' partitioned graphs side by side, and compare every node.

Nothing is communicated: the ranks are simulated in this process, for any world size (see `dp_compare`). Here are the
values that they run with: parameters with noise, state as after some steps, and other rows for every rank.

Under local semantics the single device is run once for every rank's batch, and gradients are averaged over these runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dp_compare import NodeComparison, NoKernel
from dp_partition._torch_compat import pytree
from dp_partition.api import CompiledStep, runner_of
from dp_partition.capture.inputs import CallArguments, read_arguments, read_optimizers
from dp_partition.capture.state import StepState, check_traceable, find_step_state
from dp_partition.capture.tracer import Capture
from dp_partition.nodes import meta_of
from dp_partition.pipeline import capture_single_device, plan_nodes
from dp_partition.plan.plan import PartitionPlan
from dp_partition.runner import Runner
from dp_partition.runtime.state import full_tensor


@dataclass(frozen=True)
class Verified:
    """Amount of what `verify` compared.

    Attributes:
        worlds: The numbers of ranks.
        num_nodes: Nodes of the single-device graph whose value or written tensors were compared, over all worlds.
        num_elements: Elements compared.
        in_double: Whether it all ran in double precision; otherwise some operator has no such kernel.
    """

    worlds: tuple[int, ...]
    num_nodes: int
    num_elements: int
    in_double: bool


def verify(step: CompiledStep, *args: Any, world: Sequence[int] = (2, 3), **kwargs: Any) -> Verified:
    """Check that a step's partitioned graphs compute what the single-device step computes, node by node.

    Parameters and optimizer state are read, perturbed copies are computed with, nothing is changed. Ranks other than
    the first get the batch with its rows rolled and scaled. When the step has placed sharded parameters, all ranks
    call this alike.

    Args:
        step: What `compile` returned, before or after its first call.
        *args: Arguments as the step takes them, with one rank's batch.
        world: Numbers of ranks to verify for.
        **kwargs: Keyword arguments as the step takes them.

    Returns:
        How much was compared.

    Raises:
        PlanError: With the first node whose value differs (code ``verify-mismatch``), or because the step cannot be
            partitioned for one of the worlds.
    """
    total = Verified(tuple(world), 0, 0, True)
    call = read_arguments(step.name, args, kwargs)
    for size in world:
        total = _add(total, _verify_world(runner_of(step), call, size))
    return total


def _add(one: Verified, other: Verified) -> Verified:
    nodes, elements = one.num_nodes + other.num_nodes, one.num_elements + other.num_elements
    return Verified(one.worlds, nodes, elements, one.in_double and other.in_double)


def _verify_world(step: Runner, call: CallArguments, world: int) -> Verified:
    step_state = find_step_state(step.traces.function, call.args, call.kwargs)
    if step.binding is None:
        check_traceable(step_state)
    plan = step.plan_for(step_state, world)
    capture = capture_single_device(step.traces.function, call, step_state, plan, step.settings)
    return verify_capture(step, capture, plan, input_values(step, capture, step_state, call.args, call.kwargs, world))


def verify_capture(step: Runner, capture: Capture, plan: PartitionPlan, values: list[list[Any]]) -> Verified:
    """Verify a captured step for the plan's number of ranks.

    Args:
        step: Where it comes from.
        capture: The single-device graph; it is marked, and otherwise left as it is.
        plan: Where parameters lie.
        values: For every rank the values of all placeholders, parameters and state full.
    """
    homes, plans = plan_nodes(capture, plan, step.settings)
    for node, planned in plans.items():
        meta_of(node)["node_type"] = planned.node_type
    for double in (True, False):
        trial = NodeComparison(step, capture, plan, homes, plans, double)
        try:
            trial.run(values)
        except NoKernel:
            continue
        return Verified((plan.world,), trial.num_nodes, trial.num_elements, double)
    raise AssertionError("an operator ran in a trace and runs in no precision")


def input_values(
    step: Runner, capture: Capture, step_state: StepState, args: tuple[Any, ...], kwargs: dict[str, Any], world: int
) -> list[list[Any]]:
    """For every rank the full value of every placeholder: of parameters and state, and the rank's own batch."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    generator = torch.Generator().manual_seed(0)
    placed, hyperparameters = step.binding, read_optimizers(step_state.optimizers).values
    shared: dict[int, Any] = {}
    for index, entry in enumerate(capture.inputs):
        if entry.kind == "hyper":
            shared[index] = hyperparameters[entry.key]
        elif entry.kind == "param":
            param = step_state.params[entry.name]
            shared[index] = _perturbed(full_tensor(param) if placed else param.detach(), generator)
        elif entry.kind == "buffer":
            shared[index] = _perturbed(step_state.buffers[entry.name].detach(), generator)
        elif entry.kind == "state":
            shared[index] = _some_state(capture, index, generator)
    per_rank = []
    for rank in range(world):
        own = [_other_rows(tensor, rank, step.settings.batch_dim) for tensor in tensors]
        per_rank.append([shared[i] if i in shared else own[int(e.name)] for i, e in enumerate(capture.inputs)])
    return per_rank


def _perturbed(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The value with noise, so that what starts as zeros or ones hides nothing."""
    if not value.is_floating_point():
        return value.clone()
    return value + 0.1 * torch.rand(value.shape, generator=generator).to(value)


def _some_state(capture: Capture, index: int, generator: torch.Generator) -> torch.Tensor:
    """Positive state of the right shape: what an optimizer holds after some steps."""
    node = [n for n in capture.module.graph.nodes if n.op == "placeholder"][index]
    like: Any = node.meta["val"]
    shape, dtype, device = tuple(like.shape), like.dtype, like.device
    if not shape:
        return torch.full((), 2, dtype=dtype, device=device)
    return (0.1 + torch.rand(shape, generator=generator)).to(device, dtype)


def _other_rows(tensor: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    """Another rank's batch, made from this one's: values that are valid wherever the given ones are."""
    value = tensor.detach()
    if value.ndim > dim:
        value = value.roll(rank, dim)
    return value * (1 + rank / 8) if value.is_floating_point() else value.clone()
