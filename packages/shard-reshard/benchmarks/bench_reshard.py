"""Every row of the design's target table, interleaved with its peers in one run on four gloo ranks.

    python packages/shard-reshard/benchmarks/bench_reshard.py [--json FILE] [--repeats 7]

Times are medians over pairs: each repeat times our call and its peers one after the other, so that a busy machine slows
all of them alike. Peers: `DTensor.redistribute`, `ShardedTensor.reshard`, and the floor: a raw `all_to_all_single`
of the same bytes and the copies that the move cannot do without, each in one call of torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4
SIDE = 4096  # 64 MiB in float32


def main(argv: list[str] | None = None) -> None:
    """Run on four ranks, print measured against target, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args(argv)
    rows = _planning_rows()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        workers = [
            context.Process(target=_rank, args=(rank, folder, arguments.repeats, results)) for rank in range(RANKS)
        ]
        for worker in workers:
            worker.start()
        rows = results.get() + rows
        for worker in workers:
            worker.join()
    width = max(len(row["what"]) for row in rows)
    for row in rows:
        print(f"{row['what']:<{width}}  measured {row['measured']}  target {row['target']}  peer {row['peer']}")
    if arguments.json:
        command = "python packages/shard-reshard/benchmarks/bench_reshard.py"
        data = {"title": "shard-reshard: one all-to-all against its peers", "command": command, "rows": rows}
        Path(arguments.json).write_text(json.dumps(data, indent=1))


def _row(what: str, target: str, measured: str, peer: str) -> dict[str, str]:
    return {"what": what, "target": target, "measured": measured, "peer": peer}


def _rank(rank: int, folder: str, repeats: int, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", RANKS)  # type: ignore[attr-defined]  # public, though not declared so
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    rows = []
    for section in (
        _one_tensor,
        _odd_shapes,
        _wire_bytes,
        _peak_memory,
        _many_tensors,
        _pairs,
        _experts,
        _small_tensor,
        _two_axes,
    ):
        rows += section(rank, repeats)
        dist.barrier()
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def _interleaved(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call on the slowest rank, one list for each; the calls of a repeat follow each other."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            spent = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times[name].append(float(spent))
    return times


def _ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ms"


# ---- rows -----------------------------------------------------------------------------------------------------


def _one_tensor(rank: int, repeats: int) -> list[dict[str, str]]:
    from shard_reshard import Resharder, plan_reshard
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS,))
    rows = []
    for src, dst in ((0, 1), (1, 0)):
        plan = plan_reshard((SIDE, SIDE), torch.float32, f"4: S({src})", f"4: S({dst})")
        local = torch.randn(plan.src.local_shapes(rank)[0])
        out = torch.empty(plan.dst.local_shapes(rank)[0])
        resharder = Resharder(plan)
        dtensor = DTensor.from_local(local, mesh, (Shard(src),), run_check=False)
        sharded = _sharded_tensor(local, src, list(range(RANKS)))
        flat, flat_out = torch.randn(local.numel()), torch.empty(local.numel())
        strided = flat.view(SIDE // RANKS, RANKS, -1).transpose(0, 1)
        staged = torch.empty(strided.shape)
        calls = {
            "floor": lambda a=strided, b=staged, c=flat_out: (b.copy_(a), dist.all_to_all_single(c, b.view(-1))),
            "ours": lambda r=resharder, t=local, o=out: r(t, out=o),
            "raw": lambda a=flat, b=flat_out: dist.all_to_all_single(b, a),
            "dtensor": lambda t=dtensor, d=dst: t.redistribute(placements=(Shard(d),)),
            "sharded": lambda t=sharded, s=src, d=dst: _reshard_sharded(t, s, d, list(range(RANKS))),
        }
        times = _interleaved(calls, repeats)
        what = f"64 MiB Shard({src}) -> Shard({dst}), kept workspace"
        rows.append(
            _row(f"{what}, against a raw all_to_all_single after the one strided copy", "<= 1.05x",
                 f"{_ratio(times, 'ours', 'floor'):.2f}x",
                 f"raw {_ms(times['raw'])}, raw after the copy {_ms(times['floor'])}, ours {_ms(times['ours'])}; ours "
                 f"against raw alone {_ratio(times, 'ours', 'raw'):.2f}x")
        )  # fmt: skip
        for peer, target in (("dtensor", ">= 9x"), ("sharded", ">= 1.5x")):
            ratio = _ratio(times, peer, "ours")
            rows.append(_row(f"{what}, faster than {peer}", target, f"{ratio:.1f}x", f"{peer} {_ms(times[peer])}"))
    rows.append(_permuted(rank, repeats))
    return rows


def _odd_shapes(rank: int, repeats: int) -> list[dict[str, str]]:
    """Rows to columns of odd shapes: beside the strided copy alone, and packing while rounds are sent."""
    from shard_reshard import Resharder, plan_reshard

    rows = []
    for shape in ((6000, 2800), (5003, 3353), (2731, 6143), (1000, 16777)):
        layouts = shape, torch.float32, "4: S(0)", "4: S(1)"
        plan = plan_reshard(*layouts)
        local, out = (torch.randn(side.local_shapes(rank)[0]) for side in (plan.src, plan.dst))
        half = shape[0] * shape[1] * 4 // RANKS // 2  # bytes, of a shard
        resharder, rounds = Resharder(plan), Resharder(plan_reshard(*layouts, max_workspace_bytes=half))
        # The exchange of ours, and what has to be copied for it: the columns of each rank, one after the other.
        regions = list(local.split(plan.dst.local_shapes(0)[0][1], 1))
        sent = torch.empty(local.numel())
        places = [part.view(r.shape) for part, r in zip(sent.split([r.numel() for r in regions]), regions, strict=True)]
        sizes, received = [r.numel() for r in regions], [0] * RANKS
        for number in range(RANKS):
            received[number] = plan.src.local_shapes(number)[0][0] * out.shape[1]

        def exchange(out: Any = out, sent: Any = sent, received: Any = received, sizes: Any = sizes) -> None:
            dist.all_to_all_single(out.view(-1), sent, received, sizes)

        def floor(places: Any = places, regions: Any = regions, exchange: Any = exchange) -> None:
            torch._foreach_copy_(places, regions)
            exchange()

        calls: dict[str, Callable[[], Any]] = {
            "raw": exchange,
            "copy": lambda a=places, b=regions: torch._foreach_copy_(a, b),
            "floor": floor,
            "ours": lambda r=resharder, t=local, o=out: r(t, out=o),
            "rounds": lambda r=rounds, t=local, o=out: r(t, out=o),
        }
        times = _interleaved(calls, repeats)
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            exchange()
        busy = torch.tensor((time.process_time() - cpu) / (time.perf_counter() - begin))
        dist.all_reduce(busy)
        rows.append(
            _row(f"64 MiB {shape[0]} x {shape[1]}, rows to columns, against a raw exchange after the one strided copy",
                 "<= 1.05x", f"{_ratio(times, 'ours', 'floor'):.2f}x",
                 f"raw {_ms(times['raw'])}, raw after the copy {_ms(times['floor'])}, ours {_ms(times['ours'])}; ours "
                 f"against raw alone {_ratio(times, 'ours', 'raw'):.2f}x; the copy alone {_ms(times['copy'])}, rows of "
                 f"{4 * out.shape[1]} bytes; packing while rounds are sent {_ratio(times, 'rounds', 'floor'):.2f}x; "
                 f"the raw exchange keeps {float(busy):.1f} cores busy")
        )  # fmt: skip
    return rows


def _permuted(rank: int, repeats: int) -> dict[str, str]:
    """ShardedTensor with placements in another order; an involution, the only kind that torch's survives."""
    from shard_reshard import Resharder, plan_reshard
    from shard_spec.specs import ChunkShardingSpec

    order = [1, 0, 3, 2]
    specs = [ChunkShardingSpec(dim, [f"rank:{r}/cpu" for r in ranks]) for dim, ranks in ((0, order), (1, range(4)))]
    plan = plan_reshard((SIDE, SIDE), torch.float32, *specs)
    local = torch.randn(plan.src.local_shapes(rank)[0])
    out = torch.empty(plan.dst.local_shapes(rank)[0])
    resharder, sharded = Resharder(plan), _sharded_tensor(local, 0, order)
    calls = {
        "ours": lambda: resharder(local, out=out),
        "sharded": lambda: _reshard_sharded(sharded, 0, 1, list(range(RANKS)), order),
    }
    times = _interleaved(calls, repeats)
    ratio = _ratio(times, "sharded", "ours")
    return _row("64 MiB permuted placements, faster than sharded", ">= 2.2x", f"{ratio:.1f}x", _ms(times["sharded"]))


def _sharded_tensor(local: torch.Tensor, dim: int, order: list[int]) -> Any:
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed._shard.sharded_tensor.reshard import build_reshard_metadata
    from torch.distributed._shard.sharded_tensor.shard import Shard

    size = list(local.shape)
    size[dim] *= RANKS
    metadata, _ = build_reshard_metadata(torch.Size(size), _torch_spec(dim, order), RANKS)
    shard = Shard(local, metadata[dist.get_rank()])
    return ShardedTensor._init_from_local_shards([shard], torch.Size(size))


def _torch_spec(dim: int, order: list[int]) -> Any:
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in order])


def _reshard_sharded(st: Any, src: int, dst: int, order: list[int], src_order: list[int] | None = None) -> Any:
    """What ShardedTensor.reshard does, without changing the tensor, so that it can be timed again."""
    from torch.distributed._shard.sharded_tensor.reshard import reshard_local_shard

    src_spec = _torch_spec(src, src_order or order)
    return reshard_local_shard(st.local_tensor(), st.size(), src_spec, _torch_spec(dst, order), dist.group.WORLD)


def _wire_bytes(rank: int, repeats: int) -> list[dict[str, str]]:
    from shard_reshard import plan_reshard

    worst, count = 0.0, 0
    layouts = [
        "4: S(0)",
        "4: S(1)",
        "2x2: S(0), S(1)",
        "2x2: S(1), S(0)",
        "4: I(0,2)",
        "2: S(0) on ranks 2..3",
        "rank 1",
    ]
    for src in layouts:
        for dst in layouts:
            plan = plan_reshard((512, 96), torch.bfloat16, src, dst)
            if plan.lower_bound:
                worst = max(worst, plan.wire_bytes / plan.lower_bound)
                count += 1
    return [_row(f"bytes on the wire / lower bound, {count} pairs (recorded in tests/test_exchange.py)", "1.00 exactly",
                 f"{worst:.2f}", "DTensor 4.0 for Shard(0) -> Shard(1)")]  # fmt: skip


def _peak_memory(rank: int, repeats: int) -> list[dict[str, str]]:
    from shard_reshard import Resharder, plan_reshard, reshard
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    plan = plan_reshard((SIDE, SIDE), torch.float32, "4: S(0)", "4: S(1)")
    local = torch.randn(plan.src.local_shapes(rank)[0])
    out = torch.empty(plan.dst.local_shapes(rank)[0])
    shard = local.numel() * 4
    resharder = Resharder(plan)
    resharder(local, out=out)
    dtensor = DTensor.from_local(local, init_device_mesh("cpu", (RANKS,)), (Shard(0),), run_check=False)
    peaks = {
        "fresh": _peak(lambda: reshard(local, "4: S(0)", "4: S(1)", shape=(SIDE, SIDE))) / shard,
        "kept": _peak(lambda: resharder(local, out=out)) / shard,
        "bounded": _peak(
            lambda: reshard(local, "4: S(0)", "4: S(1)", shape=(SIDE, SIDE), max_workspace_bytes=shard // 4)
        )
        / shard,
        "dtensor": _peak(lambda: dtensor.redistribute(placements=(Shard(1),))) / shard,
    }
    peer = f"DTensor {peaks['dtensor']:.1f} shards"
    return [
        _row("peak extra memory, fresh, output included", "<= 2.0 shards", f"{peaks['fresh']:.2f}", peer),
        _row("peak extra memory, out= and kept workspace", "0", f"{peaks['kept']:.2f}", peer),
        _row("peak extra memory, w = 1/4 shard", "<= 1.5 shards", f"{peaks['bounded']:.2f}", peer),
    ]


def _peak(call: Callable[[], Any]) -> int:
    """Most bytes of tensors that were alive at one time during a call, beyond those before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        result = call()
    del result
    alive = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def _many_tensors(rank: int, repeats: int) -> list[dict[str, str]]:
    from shard_reshard import StateDictResharder, reshard_state_dict
    from shard_reshard._torch_compat import dtensor_maker
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS,))
    count, side = 150, 120  # 56 KiB each
    state = {
        f"layer{at}": DTensor.from_local(torch.randn(side // RANKS, side), mesh, (Shard(0),), run_check=False)
        for at in range(count)
    }
    layout = (mesh, (Shard(1),))
    flat = torch.randn(count * side * side // RANKS)
    flat_out = torch.empty_like(flat)
    sharded = [_sharded_tensor(torch.randn(side // RANKS, side), 0, list(range(RANKS))) for _ in range(count)]
    fused, floor = _fused(state)
    resharder = StateDictResharder(state, layout)
    make = dtensor_maker(resharder(state)["layer0"])
    calls = {
        "fused": fused,
        "floor": floor,
        "state": lambda: reshard_state_dict(state, layout),
        "kept": lambda: resharder(state),
        "make": lambda: {name: make(torch.empty(side, side // RANKS)) for name in state},
        "raw": lambda: dist.all_to_all_single(flat_out, flat),
        "dtensor": lambda: [t.redistribute(placements=(Shard(1),)) for t in state.values()],
        "sharded": lambda: [_reshard_sharded(t, 0, 1, list(range(RANKS))) for t in sharded],
    }
    times = _interleaved(calls, repeats)
    # A few milliseconds each, with more ranks than cores: the median of 7 lies anywhere between 1.05x and 2.3x.
    short = _interleaved({name: calls[name] for name in ("fused", "floor", "raw")}, 20 * repeats)
    raw = (
        f"raw {_ms(short['raw'])}, floor {_ms(short['floor'])}: packing in one call of torch._foreach_copy_, raw, "
        f"unpacking in another; ours {_ms(short['fused'])}, {_ratio(short, 'fused', 'raw'):.1f}x of raw alone"
    )
    rows = [
        _row(
            "150 DTensors of 56 KiB, one plan kept, out=, against the floor",
            "<= 1.25x",
            f"{_ratio(short, 'fused', 'floor'):.2f}x",
            raw,
        ),
        _row(
            "150 DTensors of 56 KiB, one plan kept, into fresh ones, against the floor",
            "-",
            f"{_ratio(times, 'kept', 'floor'):.2f}x",
            f"{_ms(times['kept'])}; of them allocating and making the DTensors {_ms(times['make'])}",
        ),
        _row(
            "150 DTensors of 56 KiB, one-shot from the second call on, against kept into fresh ones",
            "<= 1.5x",
            f"{_ratio(times, 'state', 'kept'):.2f}x",
            f"{_ms(times['state'])}",
        ),
    ]
    for peer in ("dtensor", "sharded"):
        ratio = _ratio(times, peer, "fused")
        rows.append(
            _row(f"150 DTensors of 56 KiB, faster than {peer} in a loop", ">= 40x", f"{ratio:.0f}x", _ms(times[peer]))
        )
    return rows


def _fused(state: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A kept call, and its copies and collective alone."""
    from shard_reshard import StateDictResharder

    layouts = {name: (t.device_mesh, _columns()) for name, t in state.items()}
    out = dict(StateDictResharder(state, layouts)(state))
    resharder = StateDictResharder(state, layouts, out=out, check="first")

    def call() -> Any:
        return resharder(state, out=out, atomic=False)

    for _ in range(3):
        call()
    prepared: Any = resharder._calls.here.movers[0].workspace.prepared
    send, recv = prepared.sends[0], prepared.recvs[0]

    def floor() -> None:
        torch._foreach_copy_(send.places, send.regions)
        dist.all_to_all_single(recv.received, send.sent, recv.splits, send.splits)
        torch._foreach_copy_(recv.regions, recv.places)

    return call, floor


def _pairs(rank: int, repeats: int) -> list[dict[str, str]]:
    """Quantised weights with their scales, beside the same bytes as plain tensors of one byte an element."""
    from shard_reshard import Pair, reshard_state_dict

    count, side = 8, 1024
    weights = {
        f"layers.{at}.weight": (torch.randn(side // RANKS, side) / 64).to(torch.float8_e4m3fn) for at in range(count)
    }
    scales = {f"layers.{at}.weight_scale_inv": torch.rand(side // 128 // RANKS, side // 128) for at in range(count)}
    plain = {name: value.view(torch.int8) for name, value in weights.items()} | scales
    sizes = dict.fromkeys(weights, (side, side)) | dict.fromkeys(scales, (side // 128, side // 128))
    layouts = dict.fromkeys(sizes, "4: S(0)")
    pair = Pair("*.weight", "*.weight_scale_inv", block=(128, 128))

    def moved(state: dict[str, torch.Tensor], **options: Any) -> Any:
        return reshard_state_dict(state, "4: S(1)", src_layouts=layouts, shapes=sizes, **options)

    result = moved(weights | scales, pairs=pair)
    times = _interleaved({"pairs": lambda: moved(weights | scales, pairs=pair), "plain": lambda: moved(plain)}, repeats)
    measured = f"{result.plan.wire_bytes / result.plan.lower_bound:.2f}"
    peer = f"{_ratio(times, 'pairs', 'plain'):.2f}x the time of the same bytes as plain tensors, {_ms(times['plain'])}"
    return [_row(f"{count} float8 weights with scales: bytes / lower bound", "1.00 exactly", measured, peer)]


def _experts(rank: int, repeats: int) -> list[dict[str, str]]:
    """A folder with two layers of 128 experts, beside a folder of as many plain tensors."""
    from shard_reshard import Part, load_safetensors, save_safetensors

    experts, rows, columns = 128, 256, 256
    names = [f"layers.{layer}.experts.{number}" for layer in range(2) for number in range(experts)]
    share = len(names) // RANKS
    stacked = {f"layers.{layer}.experts": (experts, rows, columns) for layer in range(2)}
    keys = {f"{name}.w": Part(name.rsplit(".", 1)[0], stack=int(name.rsplit(".", 1)[1])) for name in names}
    plain = {f"{name}.plain": (rows, columns) for name in names}
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    own = {f"{name}.w": torch.randn(rows, columns) for name in names[rank * share : (rank + 1) * share]}
    held = {f"{name}.w": f"rank {at // share}" for at, name in enumerate(names)}
    save_safetensors(own, f"{folder[0]}/moe", src_layouts=held, shapes=dict.fromkeys(held, (rows, columns)))
    full = {name: torch.randn(rows // RANKS, columns) for name in plain}
    save_safetensors(full, f"{folder[0]}/plain", src_layouts=dict.fromkeys(full, "4: S(0)"), shapes=plain)
    calls = {
        "moe": lambda: load_safetensors(f"{folder[0]}/moe", dict.fromkeys(stacked, "4: S(0)"), key_map=keys),
        "plain": lambda: load_safetensors(f"{folder[0]}/plain", dict.fromkeys(plain, "4: S(0)")),
    }
    times = _interleaved(calls, repeats)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    what = f"a folder of 2 layers of {experts} experts, stacked on loading, against as many plain tensors"
    measured = f"{_ratio(times, 'moe', 'plain'):.2f}x"
    return [_row(what, "<= 1.3x", measured, f"experts {_ms(times['moe'])}, plain {_ms(times['plain'])}")]


def _columns() -> tuple[Any, ...]:
    from torch.distributed.tensor import Shard

    return (Shard(1),)


def _small_tensor(rank: int, repeats: int) -> list[dict[str, str]]:
    from shard_reshard import Resharder, plan_reshard
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS,))
    local = torch.randn(16, 64)
    resharder = Resharder(plan_reshard((64, 64), torch.float32, "4: S(0)", "4: S(1)"))
    dtensor = DTensor.from_local(local, mesh, (Shard(0),), run_check=False)
    flat, flat_out = torch.randn(1024), torch.empty(1024)
    calls = {
        "ours": lambda: [resharder(local) for _ in range(50)],
        "raw": lambda: [dist.all_to_all_single(flat_out, flat) for _ in range(50)],
        "dtensor": lambda: [dtensor.redistribute(placements=(Shard(1),)) for _ in range(50)],
    }
    times = _interleaved(calls, repeats)
    out = torch.empty(64, 16)
    host = _host_time(lambda: resharder(local, out=out), resharder)
    fresh = _host_time(lambda: resharder(local), resharder)
    per_call = {name: 1e6 * statistics.median(seconds) / 50 for name, seconds in times.items()}
    listed = ", ".join(f"{name} {spent:.0f} us" for name, spent in per_call.items())
    peer = f"whole call: {listed}"
    measured = f"{host:.0f} us with out=, {fresh:.0f} us into a fresh tensor"
    return [_row("16 KB tensor, cached plan: host time beside the collective", "<= 60 us", measured, peer)]


def _host_time(call: Callable[[], Any], resharder: Any) -> float:
    """Microseconds of a call whose collective does nothing."""
    mover = resharder._mover
    collective, mover._collective = mover._collective, lambda *args: None
    best = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(50):
            call()
        best.append((time.perf_counter() - begin) / 50)
    mover._collective = collective
    return 1e6 * min(best)


def _two_axes(rank: int, repeats: int) -> list[dict[str, str]]:
    from shard_reshard import Resharder, plan_reshard
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.randn(SIDE // 2, SIDE // 2)
    plan = plan_reshard((SIDE, SIDE), torch.float32, "2x2: S(0), S(1)", "2x2: S(1), S(0)")
    resharder = Resharder(plan)
    dtensor = DTensor.from_local(local, mesh, (Shard(0), Shard(1)), run_check=False)
    calls = {
        "ours": lambda: resharder(local),
        "dtensor": lambda: dtensor.redistribute(placements=(Shard(1), Shard(0))),
    }
    times = _interleaved(calls, repeats)
    measured = f"one, {plan.wire_bytes / plan.lower_bound:.2f} x the bound, {_ms(times['ours'])}"
    peer = f"DTensor two or more, {_ms(times['dtensor'])}"
    return [_row("[S0, S1] -> [S1, S0] on 2x2: collectives", "one collective, bytes = bound", measured, peer)]


def _planning_rows() -> list[dict[str, str]]:
    from shard_reshard.planning import plan_reshard

    def rank_schedule(src: str, dst: str) -> float:
        best = 1e9
        for _ in range(7):
            _forget_plans()
            begin = time.perf_counter()
            plan_reshard((8192, 8192), "bfloat16", src, dst).rank_schedule(3)
            best = min(best, time.perf_counter() - begin)
        return 1e3 * best

    rows = [
        _row(
            f"plan: own part at 512 ranks, {src} -> {dst}",
            "<= 5 ms",
            f"{rank_schedule(src, dst):.1f} ms",
            "no peer plans; floor 0",
        )
        for src, dst in (("512: S(0)", "512: S(1)"), ("512: S(0)", "64x8: R, S(1)"), ("2x256: R, S(0)", "512: S(1)"))
    ]
    shapes = {}
    for layer in range(80):
        for name, shape in _LLAMA.items():
            shapes[f"layers.{layer}.{name}"] = shape
    shapes |= {"embed": (128256, 8192), "head": (128256, 8192), "norm": (8192,)}
    _forget_plans()
    spent = []
    for _ in range(2):
        begin = time.perf_counter()
        for name, shape in shapes.items():
            dst = "8x8: R, R" if len(shape) == 1 else "8x8: R, S(1)" if name.endswith(("wo", "w2")) else "8x8: R, S(0)"
            plan_reshard(shape, "bfloat16", "64: S(0)", dst).rank_schedule(3)
        spent.append(time.perf_counter() - begin)
    rows.append(
        _row(
            f"plan: {len(shapes)} tensors FSDP-64 -> TP-8, cold",
            "<= 1 s",
            f"{spent[0]:.2f} s",
            "no peer plans; floor 0",
        )
    )
    rows.append(
        _row(
            f"plan: {len(shapes)} tensors FSDP-64 -> TP-8, cached",
            "<= 5 ms",
            f"{1e3 * spent[1]:.1f} ms",
            "no peer plans; floor 0",
        )
    )
    return rows


def _forget_plans() -> None:
    from shard_reshard.plan import rank_schedule
    from shard_reshard.planning import cached_plan

    cached_plan.cache_clear()
    rank_schedule.cache_clear()


_LLAMA = {
    "wq": (8192, 8192),
    "wk": (1024, 8192),
    "wv": (1024, 8192),
    "wo": (8192, 8192),
    "w1": (28672, 8192),
    "w2": (8192, 28672),
    "w3": (28672, 8192),
    "norm1": (8192,),
    "norm2": (8192,),
}


if __name__ == "__main__":
    main()
