"""What a layout costs: machines (`Topology`), links of mesh axes (`Link`) and time models (`CostModel`).

Units everywhere in this folder: bytes, seconds, bytes per second, floating point operations per second.
"""

from shard_spec.cost.model import AlphaBetaCostModel, CostModel
from shard_spec.cost.presets import PRESETS, topology_preset
from shard_spec.cost.topology import Link, Topology

__all__ = ["Topology", "Link", "PRESETS", "topology_preset", "CostModel", "AlphaBetaCostModel"]
