"""Seconds of one collective or one matmul.

The collectives follow the ring and pairwise-exchange algorithms in the alpha-beta model: a message of ``b`` bytes takes
``latency + b / bandwidth``. Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (IJHPCA 19(1), 2005) for all-gather, reduce-scatter and all-to-all; Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations" (JPDC 69(2), 2009) for all-reduce as
reduce-scatter then all-gather. `nccl-tests` (`doc/PERFORMANCE.md`) uses the same byte factors for its bus bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shard_spec.estimate.topology import Link, Topology


@runtime_checkable
class CostModel(Protocol):
    """Times of compute and collectives, in seconds. Implement these six methods to bring your own measurements.

    A link with one rank must cost 0. `num_bytes` is always the full tensor as one group sees it, that is what each rank
    holds after an all-gather, before a reduce-scatter, before and after an all-reduce, before and after an all-to-all.
    """

    def all_reduce(self, num_bytes: float, link: Link) -> float:
        """Sum of a buffer of `num_bytes` on every rank."""
        ...

    def all_gather(self, num_bytes: float, link: Link) -> float:
        """Shards of ``num_bytes / size`` become `num_bytes` on every rank."""
        ...

    def reduce_scatter(self, num_bytes: float, link: Link) -> float:
        """Buffers of `num_bytes` become summed shards of ``num_bytes / size``."""
        ...

    def all_to_all(self, num_bytes: float, link: Link) -> float:
        """Every rank sends ``num_bytes / size`` of its `num_bytes` to each rank."""
        ...

    def p2p(self, num_bytes: float, link: Link) -> float:
        """One rank sends `num_bytes` to another."""
        ...

    def compute(self, num_flops: float, topology: Topology) -> float:
        """One rank does `num_flops` floating point operations of dense matmul."""
        ...


@dataclass(frozen=True)
class AlphaBetaCostModel:
    """Ring collectives with a latency (alpha) and a byte time (beta) for each axis.

    Args:
        bw_efficiency: share of a link's bandwidth that large collectives reach.
        flops_efficiency: share of the peak rate that large matmuls reach.

    Both defaults are round numbers of what well tuned training reports; pass your own if you have measured.
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
        """``(n-1) alpha + (n-1)/n b / bw``."""
        return self._steps(num_bytes, link)

    def reduce_scatter(self, num_bytes: float, link: Link) -> float:
        """``(n-1) alpha + (n-1)/n b / bw``."""
        return self._steps(num_bytes, link)

    def all_to_all(self, num_bytes: float, link: Link) -> float:
        """``(n-1) alpha + (n-1)/n b / bw`` (pairwise exchange)."""
        return self._steps(num_bytes, link)

    def p2p(self, num_bytes: float, link: Link) -> float:
        """``alpha + b / bw``."""
        if link.size == 1 or num_bytes == 0:
            return 0.0
        return link.latency_seconds + num_bytes / (self.bw_efficiency * link.bytes_per_second)

    def compute(self, num_flops: float, topology: Topology) -> float:
        """``flops / (efficiency * rate)``."""
        return num_flops / (self.flops_efficiency * topology.flops)

    def _steps(self, num_bytes: float, link: Link) -> float:
        """``n - 1`` messages of a shard each."""
        return (link.size - 1) * self.p2p(num_bytes / link.size, link)
