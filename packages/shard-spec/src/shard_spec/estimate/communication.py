"""Communication of one training step under a plan, axis by axis, and its time on a machine.

A topology says how fast links and matmuls of a machine are.

Along data axes by units (see :mod:`shard_spec.estimate.step_options`), to the byte. Along model axes a step runs on
shapes (see :mod:`shard_spec.estimate.activations`): tensor-parallel training moves activations at each boundary.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.activations import Step
from shard_spec.estimate.exchanges import Stages, of_fullest_stage, stages_of
from shard_spec.estimate.memory import MemorySettings, owned_matrices
from shard_spec.estimate.optimizers import OptimizerChoice
from shard_spec.estimate.step_options import (
    StepOptions,
    Transfer,
    check_options,
    expert_modules,
    policy_of,
    uncounted_axes,
    unit_transfers,
)
from shard_spec.formatting import Table
from shard_spec.layout import MeshSpec
from shard_spec.plan.resolve import Resolution


@dataclass(frozen=True)
class Link:
    """Link between the ranks of one mesh axis.

    Args:
        size: number of ranks in the group.
        bytes_per_second: send rate of one rank while every rank of the group sends.
        latency_seconds: time of one empty message.
        crosses_hosts: True if some of the messages leave the host.
    """

    size: int
    bytes_per_second: float
    latency_seconds: float
    crosses_hosts: bool = False


@dataclass(frozen=True)
class Topology:
    """A cluster of equal ranks in equal hosts.

    Args:
        hbm_bytes: memory of one rank, in bytes.
        ranks_per_host: ranks with fast links among them; rank ``r`` lives on host ``r // ranks_per_host``.
        intra_bw: bytes per second and direction from one rank within its host.
        inter_bw: bytes per second and direction from one rank to other hosts (its share of the NICs).
        latency: seconds of one empty message within a host.
        flops: dense matmul operations per second of one rank, in the training dtype (peak, see `AlphaBetaCostModel`).
        inter_latency: seconds of one empty message between hosts; ``None`` means `latency`.
        name: name in reports.

    Raises:
        ValueError: a quantity is not positive.
    """

    hbm_bytes: int
    ranks_per_host: int
    intra_bw: float
    inter_bw: float
    latency: float
    flops: float
    inter_latency: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("hbm_bytes", "ranks_per_host", "intra_bw", "inter_bw", "flops"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) > 0):
                raise ValueError(f"Topology({field}={getattr(self, field)}): must be positive and finite.")
        for field, value in (("latency", self.latency), ("inter_latency", self.inter_latency)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Topology({field}={value}): give seconds, zero or more.")

    def link(self, axes: Mapping[str, int], axis: str, ranks: Sequence[int] | None = None) -> Link:
        """Return the link of the groups of `axis`, for the slowest of them.

        Ranks are numbered row-major over `axes` (the last axis varies fastest), as in a DeviceMesh. A group with ``g``
        ranks on a host leaves it through ``g`` ranks' shares of the NICs, because collectives run one ring per NIC;
        it is never faster than the links inside the host.

        Args:
            axes: axis name to size, in mesh order.
            axis: axis of the groups.
            ranks: global rank of each mesh position, if it is not 0..n-1.

        Raises:
            ValueError: `axis` is not one of `axes`, or `ranks` has another length than the mesh.
        """
        if axis not in axes:
            raise ValueError(f"Topology.link: no axis {axis!r} in a mesh of {list(axes)}.")
        names = list(axes)
        size = axes[axis]
        stride = math.prod(axes[name] for name in names[names.index(axis) + 1 :])
        world_size = math.prod(axes.values())
        if ranks is not None and len(ranks) != world_size:
            raise ValueError(f"Topology.link: {len(ranks)} ranks for a mesh of {world_size}.")
        fewest, span = size, stride * size  # the fewest ranks of a group on one of its hosts
        inside = ranks is None and span <= self.ranks_per_host and self.ranks_per_host % span == 0
        for block in () if inside else range(0, world_size, span):  # no search if every group lies within one host
            for offset in range(stride):  # one group each
                # Row-major numbering: members of a group are `stride` apart.
                on_host: dict[int, int] = {}
                for position in range(block + offset, block + offset + stride * size, stride):
                    host = (position if ranks is None else ranks[position]) // self.ranks_per_host
                    on_host[host] = on_host.get(host, 0) + 1
                fewest = min(fewest, *on_host.values())
        if fewest >= size:  # no group leaves its host
            return Link(size, self.intra_bw, self.latency)
        latency = self.latency if self.inter_latency is None else self.inter_latency  # between hosts
        return Link(size, min(self.intra_bw, self.inter_bw * fewest), latency, crosses_hosts=True)


# ---- common machines, from their makers' data sheets ----
#
# Peak numbers: `AlphaBetaCostModel` scales them to expected rates. Bandwidths are per rank and per direction, so
# half of the two-way totals in data sheets. Latencies are of the order of NCCL's own tuning constants
# (hardware latencies in its `src/graph/tuning.cc`: a few microseconds a step on NVLink and PCIe, about ten
# over a network), not measured here. Memory is the data sheet's number of decimal gigabytes, which is a little less
# than the driver reports and leaves room for it.

PRESETS: dict[str, Topology] = {
    # NVIDIA H100 SXM5 data sheet: 80 GB, NVLink 900 GB/s two-way, 989 TFLOP/s dense BF16. DGX H100: one 400 Gb/s NIC
    # a GPU.
    "h100-sxm": Topology(80 * 10**9, 8, 450e9, 50e9, 4e-6, 989e12, inter_latency=12e-6, name="h100-sxm"),
    # NVIDIA H200 data sheet: 141 GB, links and BF16 rate of the H100.
    "h200-sxm": Topology(141 * 10**9, 8, 450e9, 50e9, 4e-6, 989e12, inter_latency=12e-6, name="h200-sxm"),
    # NVIDIA A100 80GB SXM data sheet: NVLink 600 GB/s two-way, 312 TFLOP/s BF16. DGX A100: one 200 Gb/s HDR NIC a GPU.
    "a100-sxm-80gb": Topology(80 * 10**9, 8, 300e9, 25e9, 4e-6, 312e12, inter_latency=12e-6, name="a100-sxm-80gb"),
    # The same board with 40 GB; NICs as in the first DGX A100.
    "a100-sxm-40gb": Topology(40 * 10**9, 8, 300e9, 25e9, 4e-6, 312e12, inter_latency=12e-6, name="a100-sxm-40gb"),
    # NVIDIA HGX B200: 180 GB usable, NVLink 1.8 TB/s two-way, 2.25 PFLOP/s dense BF16, one 400 Gb/s NIC a GPU.
    "b200-hgx": Topology(180 * 10**9, 8, 900e9, 50e9, 4e-6, 2.25e15, inter_latency=12e-6, name="b200-hgx"),
    # AMD MI300X data sheet: 192 GB, seven 64 GB/s one-way Infinity Fabric links, 1307 TFLOP/s dense BF16; 400 Gb/s
    # NIC a GPU.
    "mi300x": Topology(192 * 10**9, 8, 448e9, 50e9, 5e-6, 1307e12, inter_latency=12e-6, name="mi300x"),
    # NVIDIA L40S data sheet: 48 GB, PCIe 4.0 x16 (64 GB/s two-way, no NVLink), 362 TFLOP/s dense BF16.
    # NICs differ between servers: one 200 Gb/s NIC for two GPUs is assumed.
    "l40s": Topology(48 * 10**9, 8, 32e9, 12.5e9, 5e-6, 362e12, inter_latency=15e-6, name="l40s"),
    # Processes on one or more CPU hosts with gloo: 16 GB a rank, loopback sockets, 10 Gb/s Ethernet between hosts.
    # The orders of magnitude of a laptop or a CI runner, to make small examples sensible; not a product.
    "cpu-gloo": Topology(16 * 10**9, 8, 2e9, 1.25e9, 50e-6, 5e10, inter_latency=100e-6, name="cpu-gloo"),
}


def topology_preset(name: str) -> Topology:
    """Return the preset called `name`.

    Raises:
        PlanError: ``unknown-name``; the message lists the presets.
    """
    if name not in PRESETS:
        hint = f"{', '.join(sorted(PRESETS))}, or a Topology"
        raise PlanError(Problem("unknown-name", "topology", found=f"no preset {name!r:.100}", hint=hint))
    return PRESETS[name]


@dataclass(frozen=True)
class AlphaBetaCostModel:
    """Ring collectives with a latency (alpha) and a byte time (beta) for each axis.

    Args:
        bw_efficiency: achieved share of a link's bandwidth for large collectives.
        flops_efficiency: achieved share of the peak rate for large matmuls.

    Both defaults are round numbers from reports of well tuned training; pass your own if you have measured. For other
    formulas subclass it: times are seconds, and a link with one rank costs 0. ``num_bytes`` is the full tensor of a
    group: each rank's buffer after an all-gather, before a reduce-scatter, before and after the others.
    """

    bw_efficiency: float = 0.8
    flops_efficiency: float = 0.6

    def __post_init__(self) -> None:
        for field, value in (("bw_efficiency", self.bw_efficiency), ("flops_efficiency", self.flops_efficiency)):
            if not 0 < value <= 1:
                raise ValueError(f"AlphaBetaCostModel({field}={value}): give a share, above 0 and at most 1.")

    def all_reduce(self, num_bytes: float, link: Link) -> float:
        """``2 (n-1) alpha + 2 (n-1)/n b / bw``."""
        return self.reduce_scatter(num_bytes, link) + self.all_gather(num_bytes, link)

    def all_gather(self, num_bytes: float, link: Link) -> float:
        """``(n-1) alpha + (n-1)/n b / bw``: ``n - 1`` messages of a shard each."""
        return (link.size - 1) * self.p2p(num_bytes / link.size, link)

    reduce_scatter = all_to_all = all_gather  # by the same formula

    def p2p(self, num_bytes: float, link: Link) -> float:
        """``alpha + b / bw``."""
        if link.size == 1 or num_bytes == 0:
            return 0.0  # nothing to send: no latency either
        return link.latency_seconds + num_bytes / (self.bw_efficiency * link.bytes_per_second)

    def compute(self, num_flops: float, topology: Topology) -> float:
        """``flops / (efficiency * rate)``."""
        return num_flops / (self.flops_efficiency * topology.flops)


@dataclass(frozen=True, eq=False)
class Communication:
    """Communication volume of one step.

    Attributes:
        mesh: The mesh of the axes.
        transfers: One entry for each tensor, axis and kind of collective, for the fullest rank.
        seconds: Axis to the time of its collectives in sequence, if a topology was given.
        assumptions: Assumptions about activations.
        flops: Floating-point operations of one rank's products in the step; 0 without a batch.
        compute_seconds: Their time, if a topology was given with a batch.
    """

    mesh: MeshSpec
    transfers: tuple[Transfer, ...]
    seconds: dict[str, float] | None
    assumptions: tuple[str, ...]
    flops: int = 0
    compute_seconds: float | None = None

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """Least and most time of the step: all collectives beside the products, or one after another."""
        if self.seconds is None or self.compute_seconds is None:
            return None
        sent = sum(self.seconds.values())
        return max(sent, self.compute_seconds), sent + self.compute_seconds

    def by_axis(self) -> dict[str, dict[str, float]]:
        """Return each rank's sent bytes of a step, by axis and kind of content."""
        totals: dict[str, dict[str, float]] = {axis: {} for axis in self.mesh.axis_names}
        for transfer in self.transfers:
            kinds = totals[transfer.axis]
            kinds[transfer.what] = kinds.get(transfer.what, 0.0) + transfer.sent_bytes
        return totals

    def count(self, axis: str | None = None, op: str | None = None) -> int:
        """Count the collectives of a step, optionally of one axis or kind."""
        return sum(t.count for t in self.transfers if axis in (None, t.axis) and op in (None, t.op))

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by each rank in a step, over all axes."""
        return sum(transfer.sent_bytes for transfer in self.transfers)

    def to_json(self) -> str:
        """Return the numbers as JSON."""
        document: dict[str, Any] = {
            "format": "shard-spec/communication",
            "version": 1,
            "by_axis": self.by_axis(),
            "seconds": self.seconds,
            "flops": self.flops,
            "compute_seconds": self.compute_seconds,
            "assumptions": list(self.assumptions),
            "transfers": [[t.axis, t.op, t.what, t.name, t.full_bytes, t.count] for t in self.transfers],
        }
        return json.dumps(document, sort_keys=True, indent=1)

    def __str__(self) -> str:
        sums: dict[tuple[str, str, str], list[float]] = {}  # a line for each axis and kind of collective
        for transfer in self.transfers:
            entry = sums.setdefault((transfer.axis, transfer.what, transfer.op), [0, 0.0])
            entry[0] += transfer.count
            entry[1] += transfer.sent_bytes
        rows = [[*key, str(int(count)), human_bytes(sent)] for key, (count, sent) in sums.items()]
        head = ["axis", "what", "collective", "count", "sent by each rank"]
        lines = [str(Table(head, rows, (3, 4))) if rows else "nothing moves"]
        if self.seconds is not None:
            times = ", ".join(f"{axis} {seconds * 1e3:.2f} ms" for axis, seconds in self.seconds.items())
            lines.append(f"time of the collectives, one after another: {times}")
        if self.step_seconds is not None:
            least, most = (f"{seconds * 1e3:.2f}" for seconds in self.step_seconds)
            products = f"{self.flops / 1e12:.3g} TFLOP of products in {self.compute_seconds or 0:.3g} s"
            lines.append(f"time of the step: {least} to {most} ms, collectives beside or after {products}")
        return "\n".join([*lines, *(f"- {line}" for line in self.assumptions)])


def communication_of(
    resolution: Resolution,
    step: Step | None,
    options: StepOptions,
    optimizer: OptimizerChoice,
    *,
    topology: Topology | str | None = None,
    cost_model: AlphaBetaCostModel | None = None,
) -> Communication:
    """Return the communication of a step of a resolved plan; see ``ShardingPlan.communication``.

    Args:
        resolution: The plan on its model.
        step: Its simulated step; None: activations are not counted.
        options: How the step runs.
        optimizer: The optimizer, which may exchange gradients and values of its own.
        topology: Machine for times, or the name of a preset.
        cost_model: Times of collectives and products on it.
    """
    check_options(options)
    topology = topology_preset(topology) if isinstance(topology, str) else topology
    mesh = resolution.one_mesh
    roles = resolution.axis_roles(options.get("data_axes"))
    data, model_axes = roles.data, roles.axes("model")
    transfers = unit_transfers(resolution, roles, options) if step is None else [*step.transfers]
    lines = [
        f"data axes (ranks see different samples): {', '.join(data) or 'none'}",
        f"model axes (ranks see the same samples): {', '.join(model_axes) or 'none'}",
        "weights sharded along a data axis are gathered for the forward and again for the backward, the root once",
    ]
    if step is None:
        lines.append("no batch given: activations are not counted")
    else:
        flow = step.flow
        for (axis, op, what, name, size, at), count in Counter(step.flow.timeline.all("sent")).items():
            if axis in (*model_axes, *roles.axes("expert", "context", "stage")) and mesh.axis_size(axis) > 1:
                uses, stage = count * options.get("accumulate", 1), at if step.stages is not None else None
                transfers.append(Transfer(axis, op, what, name, size, uses, mesh.axis_size(axis), stage))
        experts = expert_modules(resolution.metadata.parameters)
        for axis in model_axes:
            names = [each.name for each in flow.weights.values() if axis in each.other and each.is_weight]
            names = [name for name in names if name.rpartition(".")[0] not in experts]
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                lines.append(f"{axis}: activations around {names[0]}{more} are not counted: no linear or embedding")
    if sparse := [tensor.name for tensor in resolution.metadata.parameters if tensor.sparse_grad and data]:
        lines.append(f"gradients of sparse tables ({', '.join(sparse[:3])}) are not counted: they depend on the batch")
    exchanged, remarks = _of_optimizer(resolution, data, options, optimizer)
    transfers += exchanged
    lines += remarks
    if (stages := stages_of(resolution)) is not None:
        transfers += _sums_of_copies(resolution, stages, options)
        transfers, fullest = of_fullest_stage(transfers)
        lines.append(
            f"{stages.axis}: bytes are those of stage {fullest}, which sends most; products those of the busiest"
        )
    seconds, compute, flops = None, None, 0
    if step is not None:
        products = Counter[int]()  # by stage
        for each, stage in step.flow.timeline.all("flops"):
            products[stage] += each
        flops = max(products.values(), default=0) * options.get("accumulate", 1)
    if topology is not None:
        model: Any = cost_model or AlphaBetaCostModel()
        seconds = {}
        for axis in mesh.axis_names:
            link = topology.link(mesh.axes, axis, mesh.rank_list)
            seconds[axis] = sum(t.count * getattr(model, t.op)(t.full_bytes, link) for t in transfers if t.axis == axis)
        compute = model.compute(flops, topology) if step is not None else None
    if options.get("ddp"):
        lines.append(
            "DDP's buckets count as one all-reduce a unit, with exact bytes; broadcasts of buffers are not counted"
        )
    counted = {each.axis for each in transfers if each.what == "activations"}
    if counted & set(roles.axes("expert")):
        lines.append("tokens travel to experts and back by all-to-all; routing counts as even")
    lines += [*roles.assumptions, *uncounted_axes(mesh, roles, counted)]
    return Communication(mesh, tuple(transfers), seconds, tuple(lines), flops, compute)


def _sums_of_copies(resolution: Resolution, stages: Stages, options: StepOptions) -> list[Transfer]:
    """Return the sums of gradients of tied weights, which lie on several stages."""
    sums = []
    dtype = policy_of(options)["reduce_dtype"] or options.get("dtype")
    for tensor, layout in resolution.placed():
        if tensor.kind != "parameter" or not tensor.requires_grad or not (copies := stages.copies(tensor, layout)):
            continue
        for stage in (layout.stages[stages.axis], *copies):
            size = tensor.bytes_of(prod(layout.local_shape(layout.first_rank, tensor.shape)), dtype)
            sums.append(Transfer(stages.axis, "all_reduce", "gradients", tensor.name, size, 1, 1 + len(copies), stage))
    return sums


def _of_optimizer(
    resolution: Resolution, data: tuple[str, ...], options: StepOptions, optimizer: OptimizerChoice
) -> tuple[list[Transfer], list[str]]:
    """Return the exchanges of an optimizer's step, and lines about them: parameters of ZeRO-1, matrices of owners."""
    mesh, dtype = resolution.one_mesh, options.get("dtype")
    transfers, lines = [], []
    for axis in (axis for axis in data if options.get("zero") and mesh.axis_size(axis) > 1):
        size = sum(
            each.bytes_of(prod(layout.local_shape(layout.first_rank, each.shape)), dtype)
            for each, layout in resolution.placed()
            if each.trains
        )
        transfers.append(Transfer(axis, "all_gather", "parameters", "", size, 1, mesh.axis_size(axis)))
    owned = owned_matrices(resolution, MemorySettings(optimizer, True, dtype))
    if owned is not None and (world := mesh.world_size) > 1:
        axis = next(name for name, size in mesh.axes.items() if size > 1)
        # A rank sends the mean of `total`; a full buffer is what that would be a part of.
        transfers += [
            Transfer(axis, "all_to_all", what, "owners", round(total / (world - 1)), 1, world)
            for what, total in zip(("gradients", "parameters"), owned.sent, strict=True)
        ]
        lines.append(f"matrices on owners: gradients there and values back among all {world} ranks, counted at {axis}")
    return transfers, lines
