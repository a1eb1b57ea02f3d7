"""On a GPU: values of every move, no wait of the host for the device, and packing at the speed of a copy.

    OUT=FOLDER nox -s "tests(shard-reshard)" -- -m gpu --ranks-device cuda

`--ranks-device cpu` runs the same tests on small tensors and asserts no speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import Resharder, StateDictResharder, plan_reshard, reshard, reshard_state_dict
from shard_reshard.execution.exchange import Exchange
from shard_reshard.lowering import build_program

pytestmark = pytest.mark.gpu
MOVES = (("8: S(0)", "8: S(1)"), ("8: S(1)", "8: S(0)"), ("2x4: S(0), S(1)", "2x4: S(1), S(0)"))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kept", [False, True], ids=["async", "resharder"])
def test_later_calls_do_not_wait_for_the_device(ranks: Ranks, kept: bool) -> None:
    x = torch.ones(64, 96, device=ranks.device)
    resharder = Resharder(plan_reshard((64, 96), torch.float32, "1: S(0)", "1: S(1)"))

    def call() -> object:
        if kept:
            return resharder(x)
        return reshard(x, "1: S(0)", "1: S(1)", shape=(64, 96), async_op=True).wait()

    for _ in range(3):
        call()
    with ranks.no_host_waits():
        results = [call() for _ in range(3)]
    assert all(isinstance(result, torch.Tensor) and torch.equal(result, x) for result in results)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("move", MOVES)
def test_packing_beside_a_copy_of_the_same_bytes(ranks: Ranks, dtype: torch.dtype, move: tuple[str, str]) -> None:
    """The side of rank 3 of 8: packing and unpacking alone, nothing is sent."""
    # On an H200, launches for tensors smaller than this take as long as their copies.
    device, side = ranks.device, 65536 if ranks.device.type == "cuda" else 64
    plan = plan_reshard((side, side), dtype, *move)
    exchange = Exchange(build_program((plan,), 3, 8))
    sources = [torch.ones(local, dtype=dtype, device=device) for local in plan.src.local_shapes(3)]

    def call(outs: Any = None) -> None:
        outs = exchange.allocate(device) if outs is None else outs
        exchange.prepare(sources, outs, device).run(lambda *_: None, False)

    outs, copied = exchange.allocate(device), 0
    for memory in exchange.memories(sources, outs)[0]:
        copied += sum(part.num_bytes for part in (memory.sends, memory.receives) if part.span is None)
        copied += sum(math.prod(source.sizes) * plan.itemsize for source, *_ in memory.own)
    plain = torch.ones(max(copied // 4, 1), device=device)
    copy: Callable[[], object] = partial(torch.empty_like(plain).copy_, plain)
    ratio = ranks.seconds(copy) / ranks.seconds(partial(call, outs))
    del outs, plain, copy
    peak = 0.0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        peak = (torch.cuda.max_memory_allocated() - before) / plan.peak_bytes(3)
    ranks.write_row(what=f"{dtype} {move}", copied_bytes=copied, promised=plan.peak_bytes(3), speed=ratio, peak=peak)
    assert plan.peak_bytes(3) > 0
    if device.type == "cuda":
        assert ratio >= 0.85 or not copied, "packing is slower than 0.85 of a plain copy"
        assert peak <= 1.02, "packing takes more memory than the plan promises"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_every_move_between_two_ranks(ranks: Ranks, dtype: torch.dtype) -> None:
    full = torch.arange(48 * 64, device=ranks.device).view(48, 64).to(dtype)
    parts = {"2: R": full, "2: S(0)": full.chunk(2)[ranks.rank], "2: S(1)": full.chunk(2, 1)[ranks.rank]}
    for source, shard in parts.items():
        for target, wanted in parts.items():
            assert torch.equal(reshard(shard, source, target, shape=(48, 64)), wanted), (source, target)
    summed = reshard(full, "2: P", "2: S(1)", shape=(48, 64))
    assert torch.equal(summed, parts["2: S(1)"] + parts["2: S(1)"])


@pytest.mark.ranks(2)
def test_buckets_are_waited_for_on_another_stream(ranks: Ranks) -> None:
    """Buffers and results that a side stream still reads are not handed out again by the packing stream."""
    side = torch.cuda.Stream() if ranks.device.type == "cuda" else None
    full = {f"w{at}": torch.arange(96 * 64, device=ranks.device).view(96, 64) + at for at in range(6)}
    state = {name: value.chunk(2)[ranks.rank].clone() for name, value in full.items()}
    options: dict[str, Any] = {"src_layouts": dict.fromkeys(full, "2: S(0)"), "shapes": dict.fromkeys(full, (96, 64))}
    kept = StateDictResharder(state, "2: S(1)", bucket_bytes=60_000, check="first", **options)
    compared = 0
    for step in range(6):
        for value in (*state.values(), *full.values()):
            value.add_(1)
        call: dict[str, Any] = {"async_op": True, "in_flight": 2}
        work = kept(state, **call) if step % 2 else reshard_state_dict(state, "2: S(1)", **options, **call)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side) if side is not None else nullcontext():
            for bucket in work.buckets:
                for name, value in bucket.wait().items():
                    assert torch.equal(value, full[name].chunk(2, 1)[ranks.rank]), (step, name)
                    compared += 1
            del work
        poison = [torch.full((96, 64), -1, device=ranks.device) for _ in range(8)]
        del poison
    assert compared == 36
