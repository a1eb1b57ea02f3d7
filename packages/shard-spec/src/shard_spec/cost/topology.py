"""A machine in seven numbers, and what one axis of a mesh sees of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What the ranks of one mesh axis have between them.

    Args:
        size: number of ranks in the group.
        bandwidth: bytes per second that one rank can send while every rank of the group sends.
        latency: seconds of one message that carries nothing.
        crosses_hosts: whether some of the messages leave the host.
    """

    size: int
    bandwidth: float
    latency: float
    crosses_hosts: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Link(size={self.size}): a group has at least one rank.")
        _require_positive("Link", bandwidth=self.bandwidth)
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"Link(latency={self.latency}): give seconds, zero or more.")


@dataclass(frozen=True)
class Topology:
    """A cluster of equal ranks in equal hosts.

    Args:
        hbm_bytes: memory of one rank, in bytes.
        ranks_per_host: ranks that share the fast links; rank ``r`` lives on host ``r // ranks_per_host``.
        intra_bw: bytes per second and direction that one rank sends within its host.
        inter_bw: bytes per second and direction that one rank sends to other hosts (its share of the NICs).
        latency: seconds of one empty message within a host.
        flops: dense matmul operations per second of one rank, in the dtype that trains (peak, see
            `AlphaBetaCostModel`).
        inter_latency: seconds of one empty message between hosts; ``None`` takes `latency`.
        name: what reports call it.

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
        _require_positive(
            "Topology",
            hbm_bytes=self.hbm_bytes,
            ranks_per_host=self.ranks_per_host,
            intra_bw=self.intra_bw,
            inter_bw=self.inter_bw,
            flops=self.flops,
        )
        for field, value in (("latency", self.latency), ("inter_latency", self.inter_latency)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Topology({field}={value}): give seconds, zero or more.")

    def link(self, axes: Mapping[str, int], axis: str, ranks: Sequence[int] | None = None) -> Link:
        """The link that the groups of `axis` have, for the slowest of them.

        Ranks are numbered row-major over `axes` (the last axis varies fastest), as in a DeviceMesh. A group with ``g``
        ranks on a host leaves it through ``g`` ranks' shares of the NICs, because collectives run one ring per NIC;
        it is never faster than the links inside the host.

        Args:
            axes: axis name to size, in mesh order.
            axis: which of them.
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
        fewest_together = self._fewest_ranks_of_a_group_on_a_host(size, stride, world_size, ranks)
        if fewest_together >= size:
            return Link(size, self.intra_bw, self.latency)
        latency = self.latency if self.inter_latency is None else self.inter_latency
        return Link(size, min(self.intra_bw, self.inter_bw * fewest_together), latency, crosses_hosts=True)

    def _fewest_ranks_of_a_group_on_a_host(
        self, size: int, stride: int, world_size: int, ranks: Sequence[int] | None
    ) -> int:
        """How many ranks the worst group has on its most thinly used host."""
        if ranks is None and stride * size <= self.ranks_per_host and self.ranks_per_host % (stride * size) == 0:
            return size  # a whole number of groups fits in a host: no need to look at each
        fewest = size
        for block in range(0, world_size, stride * size):
            for offset in range(stride):
                on_host: dict[int, int] = {}
                for position in range(block + offset, block + offset + stride * size, stride):
                    rank = position if ranks is None else ranks[position]
                    host = rank // self.ranks_per_host
                    on_host[host] = on_host.get(host, 0) + 1
                fewest = min(fewest, *on_host.values())
        return fewest


def _require_positive(owner: str, **values: float) -> None:
    for field, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{owner}({field}={value}): must be positive and finite.")
