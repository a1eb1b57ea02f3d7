"""Topologies, links and the alpha-beta model."""

from __future__ import annotations

import pickle

import pytest
from shard_spec import topology_preset
from shard_spec.estimate.communication import PRESETS, AlphaBetaCostModel, Link, Topology

MACHINE = Topology(
    hbm_bytes=80, ranks_per_host=8, intra_bw=400.0, inter_bw=50.0, latency=1.0, flops=100.0, inter_latency=3.0
)


def test_presets_are_values_that_print_and_pickle() -> None:
    assert len(PRESETS) >= 5
    for name, topology in PRESETS.items():
        assert topology_preset(name) is topology
        assert topology.name == name
        assert topology.inter_bw <= topology.intra_bw
        assert eval(repr(topology)) == topology
        assert pickle.loads(pickle.dumps(topology)) == topology
        assert hash(topology) == hash(eval(repr(topology)))
    with pytest.raises(ValueError, match="h100-sxm"):
        topology_preset("h1000")


@pytest.mark.parametrize("field", ["hbm_bytes", "ranks_per_host", "intra_bw", "inter_bw", "flops"])
def test_quantities_must_be_positive(field: str) -> None:
    numbers = {"hbm_bytes": 1, "ranks_per_host": 1, "intra_bw": 1.0, "inter_bw": 1.0, "latency": 0.0, "flops": 1.0}
    Topology(**numbers)  # type: ignore[arg-type]  # a dict of mixed numbers
    with pytest.raises(ValueError, match=field):
        Topology(**{**numbers, field: 0})  # type: ignore[arg-type]  # as above


def test_an_axis_inside_a_host_has_the_fast_link() -> None:
    assert MACHINE.link({"dp": 16, "tp": 8}, "tp") == Link(8, 400.0, 1.0)
    assert MACHINE.link({"dp": 2, "tp": 4}, "dp") == Link(2, 400.0, 1.0)


def test_an_axis_across_hosts_leaves_through_its_ranks_share_of_the_nics() -> None:
    # One rank of each dp group on a host: one NIC. All eight: eight NICs, no faster than the links inside.
    assert MACHINE.link({"dp": 16, "tp": 8}, "dp") == Link(16, 50.0, 3.0, crosses_hosts=True)
    assert MACHINE.link({"dp": 16}, "dp") == Link(16, 400.0, 3.0, crosses_hosts=True)
    assert MACHINE.link({"dp": 8, "tp": 2}, "dp") == Link(8, 200.0, 3.0, crosses_hosts=True)
    assert MACHINE.link({"tp": 16, "dp": 2}, "dp") == Link(2, 400.0, 1.0)


def test_ranks_that_are_not_in_order_can_put_a_group_across_hosts() -> None:
    axes = {"dp": 8, "tp": 2}
    assert not MACHINE.link(axes, "tp").crosses_hosts
    scattered = [rank for pair in range(8) for rank in (pair, pair + 8)]
    assert MACHINE.link(axes, "tp", scattered) == Link(2, 50.0, 3.0, crosses_hosts=True)
    with pytest.raises(ValueError, match="4 ranks for a mesh of 16"):
        MACHINE.link(axes, "tp", [0, 1, 2, 3])
    with pytest.raises(ValueError, match="no axis 'pp'"):
        MACHINE.link(axes, "pp")


def test_ragged_groups_count_their_thinnest_host() -> None:
    # Groups of 6 over hosts of 8: the second group has 2 ranks on host 0 and 4 on host 1.
    assert MACHINE.link({"dp": 4, "tp": 6}, "tp") == Link(6, 100.0, 3.0, crosses_hosts=True)


def test_ring_formulas() -> None:
    model = AlphaBetaCostModel(bw_efficiency=1.0, flops_efficiency=0.5)
    link = Link(4, bytes_per_second=10.0, latency_seconds=1.0)
    assert model.all_gather(400.0, link) == 3 * (1.0 + 10.0)
    assert model.reduce_scatter(400.0, link) == 33.0
    assert model.all_reduce(400.0, link) == 66.0
    assert model.all_to_all(400.0, link) == 33.0
    assert model.p2p(400.0, link) == 41.0
    assert model.compute(500.0, MACHINE) == 10.0


def test_nothing_to_send_costs_nothing() -> None:
    model = AlphaBetaCostModel()
    alone = Link(1, bytes_per_second=10.0, latency_seconds=1.0)
    for operation in (model.all_gather, model.reduce_scatter, model.all_reduce, model.all_to_all, model.p2p):
        assert operation(100.0, alone) == 0.0
        assert operation(0.0, Link(4, bytes_per_second=10.0, latency_seconds=1.0)) == 0.0


def test_efficiencies_are_shares() -> None:
    for bad in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match="share"):
            AlphaBetaCostModel(bw_efficiency=bad)
        with pytest.raises(ValueError, match="share"):
            AlphaBetaCostModel(flops_efficiency=bad)
