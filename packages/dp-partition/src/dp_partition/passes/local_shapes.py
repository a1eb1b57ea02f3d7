"""Local shapes: run a rank's graph on fake tensors and record each node's local value."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Placement

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import FakeTensorMode
from dp_partition.plan.placements import local_shape


class _Recorder(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:400]
            hint = "this is a defect of dp-partition's rule for the operator"
            raise PlanError(Problem("shape-mismatch", f"node {n.name} ({n.target})", found=text, hint=hint)) from error
        n.meta["val"] = value
        n.meta.pop("tensor_meta", None)  # of the global value
        return value


def record_local_values(module: fx.GraphModule, inputs: list[Any], mode: FakeTensorMode) -> None:
    """Fill ``meta["val"]`` of every node from fake local inputs.

    Raises:
        PlanError: An operator does not accept its local inputs (code ``shape-mismatch``).
    """
    with mode, torch.no_grad():
        _Recorder(module, garbage_collect_values=True).run(*inputs)


def local_inputs(
    graph: fx.Graph, placements: list[Placement], mode: FakeTensorMode, world: int, rank: int
) -> list[Any]:
    """Return a fake local tensor for every placeholder, in order; other values unchanged."""
    fakes: list[Any] = []
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    with mode:
        for node, placement in zip(nodes, placements, strict=True):
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                fakes.append(0.5 if value is None else value)  # a hyperparameter: any float
                continue
            shape = local_shape(tuple(value.shape), placement, world, rank)
            stride = value.stride() if shape == tuple(value.shape) else torch.empty(shape, device="meta").stride()
            fakes.append(torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device))
    return fakes
