"""What the time of a step is estimated from: the link between ranks and the machine that computes.

Times follow the usual alpha-beta model: among W ranks a gather or a scatter takes ``ceil(log2(W))`` rounds of latency,
as recursive doubling does, and sends ``(W - 1) / W`` of the whole tensor, which is the least there is; an all-reduce
is one of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from dp_partition.problems import PlanError, Problem


@dataclass(frozen=True)
class Link:
    """The network as one rank sees it.

    Attributes:
        gbps: Bandwidth in which a rank sends, in gigabits per second (400 is 50 GB/s).
        us: Latency of one round of messages, in microseconds.
    """

    gbps: float = 400.0
    us: float = 10.0

    def __post_init__(self) -> None:
        if not (self.gbps > 0 and self.us >= 0):
            raise PlanError(Problem("out-of-range", "Link", found=repr(self), hint="gbps is above 0, us not below"))

    def seconds(self, kind: str, whole_bytes: int, world: int) -> float:
        """Time of one collective.

        Args:
            kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or another with the same amount of traffic.
            whole_bytes: Bytes of the whole tensor: of the sum, of what is gathered, of what is scattered.
            world: Number of ranks.
        """
        passes = 2 if kind == "all_reduce" else 1
        sent = whole_bytes * (world - 1) / world
        rounds = (world - 1).bit_length()
        return passes * (sent / (self.gbps * 1e9 / 8) + rounds * self.us * 1e-6)


@dataclass(frozen=True)
class Machine:
    """A rank's device: a roofline of two lines.

    Attributes:
        tflops: Floating-point operations that matrix products really reach, in 10^12 per second.
        memory_gbs: Bandwidth of the device's memory, in gigabytes per second.
        launch_us: Time that every operator takes at the least, in microseconds.
    """

    tflops: float = 150.0
    memory_gbs: float = 1500.0
    launch_us: float = 2.0

    def __post_init__(self) -> None:
        if not (self.tflops > 0 and self.memory_gbs > 0 and self.launch_us >= 0):
            hint = "tflops and memory_gbs are above 0, launch_us not below"
            raise PlanError(Problem("out-of-range", "Machine", found=repr(self), hint=hint))

    def seconds(self, flops: int, touched_bytes: int) -> float:
        """Time of one operator."""
        return self.launch_us * 1e-6 + max(flops / (self.tflops * 1e12), touched_bytes / (self.memory_gbs * 1e9))
