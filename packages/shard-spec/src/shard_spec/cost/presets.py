"""Common machines, from their makers' data sheets.

Peak numbers: `AlphaBetaCostModel` says how much of them it expects to get. Bandwidths are per rank and per direction,
so half of what data sheets print as the two-way total. Latencies are of the order of NCCL's own tuning constants
(hardware latencies in its `src/graph/tuning.cc`: a few microseconds a step on NVLink and PCIe, about ten
over a network), not measured here. Memory is the data sheet's number of decimal gigabytes, which is a little less
than the driver reports and leaves room for it.
"""

from __future__ import annotations

from shard_spec.cost.topology import Topology

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
    """The preset called `name`.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    if name not in PRESETS:
        raise ValueError(f"no topology preset {name!r}: choose one of {sorted(PRESETS)} or build a Topology yourself.")
    return PRESETS[name]
