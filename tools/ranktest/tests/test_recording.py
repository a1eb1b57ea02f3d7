"""Every way to communicate is logged, with its ranks and bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from ranktest import _torch_compat as compat


def ones(ranks: Ranks, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=ranks.device)


@pytest.mark.ranks(4)
def test_bytes_of_each_collective(ranks: Ranks) -> None:
    """The table of the README, with 4 ranks and float32."""
    r, root = ranks.rank, 1
    with ranks.record() as log:
        dist.all_reduce(ones(ranks, 6))
        dist.all_gather([ones(ranks, 2) for _ in range(4)], ones(ranks, 2))
        dist.reduce_scatter(ones(ranks, 3), [ones(ranks, 3) for _ in range(4)])
        dist.broadcast(ones(ranks, 5), src=root)
        dist.reduce(ones(ranks, 5), dst=root)
        dist.gather(ones(ranks, 2), [ones(ranks, 2) for _ in range(4)] if r == root else None, dst=root)
        dist.scatter(ones(ranks, 2), [ones(ranks, 2) for _ in range(4)] if r == root else None, src=root)
        dist.barrier()
    assert log.ops == (
        *("all_reduce", "all_gather", "reduce_scatter", "broadcast"),
        *("reduce", "gather", "scatter", "barrier"),
    )
    assert all(event.ranks == (0, 1, 2, 3) for event in log.events)
    assert all(event.dtype == torch.float32 for event in log.events[:-1])
    assert log.events[-1].dtype is None

    def others(num_bytes: int) -> tuple[int, ...]:
        return tuple(0 if p == r else num_bytes for p in range(4))

    def to(peer: int, num_bytes: int) -> tuple[int, ...]:
        return tuple(num_bytes if p == peer and p != r else 0 for p in range(4))

    is_root, none = r == root, (0, 0, 0, 0)
    assert [event.bytes_sent for event in log.events] == [
        to((r + 1) % 4, 24),
        others(8),
        others(12),
        others(20) if is_root else none,
        to(root, 20),
        to(root, 8),
        others(8) if is_root else none,
        none,
    ]
    assert log.bytes_sent("all_gather") == 24
    assert log.count() == 8


@pytest.mark.ranks(4)
def test_bytes_of_single_tensors_and_splits(ranks: Ranks) -> None:
    with ranks.record() as log:
        dist.all_reduce(ones(ranks, 6))
        compat.all_gather_single(ones(ranks, 8), ones(ranks, 2))
        compat.reduce_scatter_single(ones(ranks, 3), ones(ranks, 12))
        splits = [1 + (ranks.rank + p) % 3 for p in range(4)]
        dist.all_to_all_single(ones(ranks, sum(splits), 2), ones(ranks, sum(splits), 2), splits, splits)
    others = [p for p in range(4) if p != ranks.rank]
    assert [sum(event.bytes_sent) for event in log.events] == [24, 24, 36, 8 * sum(splits[p] for p in others)]
    assert log.events[-1].bytes_sent == tuple(0 if p == ranks.rank else 8 * splits[p] for p in range(4))


@pytest.mark.ranks(2)
def test_point_to_point(ranks: Ranks) -> None:
    peer = 1 - ranks.rank
    with ranks.record() as log:
        if ranks.rank == 0:
            dist.send(ones(ranks, 3), dst=1)
        else:
            dist.recv(ones(ranks, 3), src=0)
        ops = [dist.P2POp(dist.isend, ones(ranks, 4), peer), dist.P2POp(dist.irecv, ones(ranks, 4), peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    assert sorted(log.ops[1:]) == ["recv", "send"]
    assert log.bytes_sent() == 16 + (12 if ranks.rank == 0 else 0)


@pytest.mark.ranks(4)
def test_subgroups_are_named_by_their_ranks(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    odd = dist.new_group([1, 3])
    with ranks.record() as log:
        dist.all_reduce(ones(ranks, 1), group=mesh.get_group("tp"))
        dist.all_reduce(ones(ranks, 1), group=mesh.get_group("dp"))
        if ranks.rank in (1, 3):
            dist.all_reduce(ones(ranks, 1), group=odd)
    first = ranks.rank // 2 * 2
    assert log.events[0].ranks == (first, first + 1)
    assert log.events[1].ranks == (ranks.rank % 2, ranks.rank % 2 + 2)
    assert log.count() == (3 if ranks.rank in (1, 3) else 2)


@pytest.mark.ranks(2)
def test_functional_collectives(ranks: Ranks) -> None:
    group = dist.group.WORLD
    assert group is not None
    with ranks.record() as log:
        mean = compat.functional.all_reduce(ones(ranks, 4) * ranks.rank, "avg", group)
        gathered = compat.functional_all_gather_single(ones(ranks, 2), 0, group)
        scattered = compat.functional_reduce_scatter_single(ones(ranks, 4), "sum", 0, group)
        both = compat.functional.all_reduce_coalesced([ones(ranks, 2), ones(ranks, 3)], "sum", group)
        swapped = compat.functional.all_to_all_single(ones(ranks, 4), [2, 2], [2, 2], group)
    assert mean.tolist() == [0.5] * 4
    assert gathered.tolist() == [1.0] * 4
    assert scattered.tolist() == [2.0] * 2
    assert [part.tolist() for part in both] == [[2.0] * 2, [2.0] * 3]
    assert swapped.tolist() == [1.0] * 4
    assert log.ops == ("all_reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    assert [sum(event.bytes_sent) for event in log.events] == [16, 8, 8, 20, 8]


@pytest.mark.ranks(2)
def test_object_collectives_are_recorded_and_gather_is_not(ranks: Ranks) -> None:
    with ranks.record() as log:
        gathered = [None, None]
        dist.all_gather_object(gathered, {"rank": ranks.rank})
    assert log.ops == ("all_gather", "all_gather")  # sizes, then pickles
    with ranks.record(allow_empty=True) as log:
        assert ranks.gather("x") == ["x", "x"]
    assert log.events == ()


@pytest.mark.ranks(2)
def test_block_without_communication_raises(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="communicated nothing"), ranks.record():
        pass


@pytest.mark.ranks(2)
def test_refused_call_is_not_logged(ranks: Ranks) -> None:
    with ranks.record(allow_empty=True) as log, pytest.raises(ValueError, match="does not divide"):
        dist.all_to_all_single(ones(ranks, 3), ones(ranks, 3))
    assert log.events == ()
