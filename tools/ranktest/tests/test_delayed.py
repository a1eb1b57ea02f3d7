"""The delayed group finds early reads, touched buffers, and handles without a wait."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from ranktest import _torch_compat as compat


@pytest.mark.ranks(2)
def test_early_read_sees_poison(ranks: Ranks) -> None:
    floats, ints = torch.ones(3, device=ranks.device), torch.ones(3, dtype=torch.int16, device=ranks.device)
    halves, flags = floats.bfloat16(), torch.zeros(2, dtype=torch.uint8, device=ranks.device)
    with ranks.delayed():
        tensors = [floats, ints, halves]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (floats, halves)]
        out = torch.zeros(6, dtype=torch.uint8, device=ranks.device)
        works.append(compat.all_gather_single(out, out[:3].clone(), async_op=True))
        assert floats.isnan().all()  # the planted fault: reading before wait()
        assert halves.isnan().all()
        assert (out == 0xFF).all()
        for work in works:
            work.wait()
        assert floats.tolist() == halves.tolist() == [2.0] * 3
        assert out.tolist() == [0] * 6
    assert len(tensors) == 3
    assert flags.sum() == 0


@pytest.mark.ranks(2)
def test_synchronous_calls_deliver(ranks: Ranks) -> None:
    with ranks.delayed(), ranks.record() as log:
        x = torch.full((4,), float(ranks.rank), device=ranks.device)
        dist.all_reduce(x)
        assert x.tolist() == [1.0] * 4
        dist.broadcast(x, src=0)
        parts = [torch.empty(4, device=ranks.device) for _ in range(2)]
        dist.all_gather(parts, x)
        assert [part.tolist() for part in parts] == [[1.0] * 4] * 2
        out = torch.empty(2 if ranks.rank else 4, device=ranks.device)
        dist.all_to_all_single(out, x[:3], [1, 1] if ranks.rank else [2, 2], [2, 1])
        assert out.tolist() == [1.0] * len(out)
        peer = 1 - ranks.rank
        ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, parts[0], peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.barrier()
        assert [tuple(objects) for objects in [ranks.gather(1)]] == [(1, 1)]
    assert log.count() == 7


@pytest.mark.ranks(2)
def test_input_reused_before_wait(ranks: Ranks) -> None:
    def program() -> None:
        x, out = torch.ones(4, device=ranks.device), torch.empty(8, device=ranks.device)
        work = compat.all_gather_single(out, x, async_op=True)
        x.zero_()  # the planted fault
        work.wait()

    program()
    changed = r"all_gather .*its input float32\[4\] was changed between"
    with pytest.raises(AssertionError, match=changed), ranks.delayed():
        program()


@pytest.mark.ranks(2)
def test_output_written_before_wait(ranks: Ranks) -> None:
    def program(write: Callable[[torch.Tensor], object]) -> None:
        x = torch.ones(4, device=ranks.device)
        work = dist.all_reduce(x, async_op=True)
        write(x)  # the planted fault
        work.wait()

    for write in (lambda x: x[1].fill_(2), lambda x: x.add_(1)):  # NaN + 1 leaves the same bytes
        with pytest.raises(AssertionError, match=r"its output float32\[4\] was written between"), ranks.delayed():
            program(write)


@pytest.mark.ranks(2)
def test_swallowed_error_is_raised_at_the_end(ranks: Ranks) -> None:
    def program() -> None:
        x = torch.ones(4, device=ranks.device)
        work = dist.all_reduce(x, async_op=True)
        x.fill_(2)
        with contextlib.suppress(AssertionError):
            work.wait()

    with pytest.raises(AssertionError, match="was written between"), ranks.delayed():
        program()


@pytest.mark.ranks(2)
def test_handle_that_nobody_waits_for(ranks: Ranks) -> None:
    x = torch.ones(4, device=ranks.device)
    message = re.escape("all_reduce on group default_pg, issued at ") + ".*test_delayed.py.*was never waited for"
    with pytest.raises(AssertionError, match=message), ranks.delayed():
        dist.all_reduce(x, async_op=True)
    assert x.tolist() == [2.0] * 4, "delivered at the end all the same"


@pytest.mark.ranks(2)
def test_in_place_gather_keeps_its_input(ranks: Ranks) -> None:
    """FSDP2 gathers into a buffer whose own part is the input."""
    with ranks.delayed():
        out = torch.zeros(4, device=ranks.device)
        own = out[2 * ranks.rank : 2 * ranks.rank + 2]
        own.fill_(ranks.rank + 1)
        work = compat.all_gather_single(out, own, async_op=True)
        assert out.isnan().all()
        work.wait()
    assert out.tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.ranks(2)
def test_functional_collectives_deliver_at_wait(ranks: Ranks) -> None:
    group = dist.group.WORLD
    assert group is not None
    with ranks.delayed():
        pending = compat.functional.all_reduce(torch.ones(4, device=ranks.device), "sum", group)
        inside = pending.elem if isinstance(pending, compat.functional.AsyncCollectiveTensor) else pending
        assert inside.isnan().all()
        assert (pending + 1).tolist() == [3.0] * 4


@pytest.mark.ranks(2)
def test_future_arrives_later(ranks: Ranks) -> None:
    with ranks.delayed():
        x = torch.ones(4, device=ranks.device)
        future = dist.all_reduce(x, async_op=True).get_future()
        assert x.isnan().all()
        doubled = future.then(lambda done: done.value()[0] * 2)
        assert doubled.wait().tolist() == [4.0] * 4
        assert x.tolist() == [2.0] * 4
