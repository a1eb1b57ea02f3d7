"""State dicts in flight: buckets in any order of waiting give what the synchronous call gives, and overlap by count."""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from layout_pairs import local_tensors, random_layout, random_shape
from ranktest import Ranks
from shard_reshard import (
    Pair,
    PlanError,
    StateDictResharder,
    StateDictWork,
    reshard_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def random_state(rng: random.Random, ranks: Ranks, size: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return full tensors, source layouts and destination layouts of a drawn state dict."""
    full, src, dst = {}, {}, {}
    for at in range(rng.randint(1, 7)):
        shape = random_shape(rng)
        layouts = [random_layout(rng, shape, size) for _ in range(2)]
        if any(len(layout.local_shapes(rank)) > 1 for layout in layouts for rank in range(size)):
            continue  # a state dict has one tensor of a name on a rank
        values = torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
        full[f"w{at}"], src[f"w{at}"], dst[f"w{at}"] = values.to(rng.choice(DTYPES)), *layouts
    return full, src, dst


@pytest.mark.ranks(3)
def test_drawn_state_dicts_in_drawn_orders_of_waiting(ranks: Ranks) -> None:
    rng, compared, several, handles = random.Random(7), 0, 0, 0  # drawn alike on every rank
    for _ in range(40):
        full, src, dst = random_state(rng, ranks, 3)
        state = {n: local_tensors(src[n], ranks.rank, t)[0].to(ranks.device) for n, t in full.items()
                 if ranks.rank in src[n].rank_set}  # fmt: skip
        wanted = {n: local_tensors(dst[n], ranks.rank, t)[0].to(ranks.device) for n, t in full.items()
                  if ranks.rank in dst[n].rank_set}  # fmt: skip
        options: dict[str, Any] = {"src_layouts": src, "shapes": {n: t.shape for n, t in full.items()}}
        options["bucket_bytes"] = rng.choice([64, 256, 1 << 20])
        in_flight, atomic, into = rng.choice([0, 1, 2, 9]), rng.random() < 0.5, rng.random() < 0.6
        kept = StateDictResharder(state, dst, **options) if rng.random() < 0.5 else None
        for _ in range(3):
            out = {n: torch.zeros_like(t) for n, t in wanted.items()} if into else None
            with ranks.delayed():
                call: dict[str, Any] = {"out": out, "atomic": atomic, "async_op": True, "in_flight": in_flight}
                work = kept(state, **call) if kept else reshard_state_dict(state, dst, **options, **call)
                assert isinstance(work, StateDictWork)
                handles += 1
                several += len(work.buckets) > 1
                names = [name for bucket in work.buckets for name in bucket.names]
                assert sorted(names) == sorted(work.plan.outputs) == sorted(full)  # each name once
                arrived = 0
                for number in sorted(rng.sample(range(len(work.buckets)), rng.randint(0, len(work.buckets)))):
                    if rng.random() < 0.5:
                        work.buckets[number].post()
                    bucket = work.buckets[number].wait()
                    assert bucket.keys() == set(work.buckets[number].names) & wanted.keys()
                    for name, value in bucket.items():
                        assert torch.equal(value, wanted[name]), name
                        compared += value.numel()
                        if out is not None and atomic:  # filled at the end alone
                            assert not torch.count_nonzero(out[name])
                    arrived = number + 1
                assert work.is_completed() is (arrived == len(work.buckets))
                moved = work.wait()
            assert work.is_completed()
            assert work.wait() is moved
            assert list(moved) == sorted(wanted)
            for name, value in moved.items():
                assert torch.equal(value, wanted[name]), name
                assert out is None or value is out[name]
                compared += value.numel()
    assert handles == 120
    assert several >= 30
    assert compared > 2500


@pytest.mark.ranks(2)
def test_how_many_buckets_are_in_flight(ranks: Ranks) -> None:
    full = {f"w{at}": torch.randn(8, 6, generator=torch.Generator().manual_seed(at)) for at in range(5)}
    state = {n: t.chunk(2)[ranks.rank].to(ranks.device) for n, t in full.items()}
    options: dict[str, Any] = {"src_layouts": dict.fromkeys(full, "2: S(0)"), "shapes": dict.fromkeys(full, (8, 6))}
    resharder = StateDictResharder(state, "2: S(1)", bucket_bytes=200, check="first", **options)
    resharder(state)
    assert len(resharder.plan.buckets) == 5
    for in_flight in (0, 1, 2, 5):
        with ranks.record() as log, ranks.delayed():
            work = resharder(state, async_op=True, in_flight=in_flight)
            posted = [log.count("all_to_all")]
            for bucket in work.buckets:
                assert bucket.sources == bucket.names
                ((name, value),) = bucket.wait().items()
                assert torch.equal(value.cpu(), full[name].chunk(2, 1)[ranks.rank])
                posted.append(log.count("all_to_all"))
            work.wait()
        assert posted == [min(5, in_flight + number) for number in range(6)]
        assert log.ops == ("all_to_all",) * 5
        assert log.bytes_sent() == sum(4 * 24 // 2 for _ in full)  # the lower bound: half of each shard
    with ranks.record() as log, ranks.delayed():
        work = resharder(state, async_op=True, in_flight=0)
        work.buckets[2].post()
        assert log.count("all_to_all") == 3
        work.buckets[1].post()  # is posted already
        assert log.count("all_to_all") == 3
        work.wait()
    assert log.count("all_to_all") == 5


@pytest.mark.ranks(2)
def test_updates_between_two_state_dicts_in_flight(ranks: Ranks) -> None:
    """Gradients go to owner ranks bucket by bucket, and new values come back, each bucket as soon as it is updated."""
    shapes = {f"w{at}": (4 + at, 6) for at in range(6)}
    masters = {n: torch.randn(s, generator=torch.Generator().manual_seed(s[0])) for n, s in shapes.items()}
    owners = {n: at % 2 for at, n in enumerate(shapes)}
    rows: Any = dict.fromkeys(shapes, "2: S(0)")
    owned: Any = {n: f"rank {owner}" for n, owner in owners.items()}
    mine = {n: t.clone().to(ranks.device) for n, t in masters.items() if owners[n] == ranks.rank}
    params = {n: t.tensor_split([-(-t.shape[0] // 2)])[ranks.rank].clone().to(ranks.device) for n, t in masters.items()}
    grads = {n: torch.zeros_like(t) for n, t in params.items()}
    to_owner = StateDictResharder(grads, owned, src_layouts=rows, shapes=shapes, bucket_bytes=300, check="first")
    back = StateDictResharder(mine, rows, src_layouts=owned, shapes=shapes, out=params, bucket_bytes=300, check="first")
    assert to_owner.plan.buckets == back.plan.buckets
    assert len(back.plan.buckets) >= 3
    for step in range(6):
        for name, value in params.items():
            grads[name].copy_(value * 0.1 + step)
        with ranks.record() as log, ranks.delayed():
            arriving = to_owner(grads, async_op=True)
            leaving = back(mine, out=params, atomic=False, async_op=True, in_flight=0)
            for gradients, values in zip(arriving.buckets, leaving.buckets, strict=True):
                for name, gradient in gradients.wait().items():
                    mine[name] -= 0.5 * gradient  # read when the bucket is posted
                values.post()
            arriving.wait()
            assert all(value is params[name] for name, value in leaving.wait().items())
        assert log.count("all_to_all") == 2 * len(back.plan.buckets)
        for name, value in masters.items():  # one process
            value -= 0.5 * (value * 0.1 + step)
            shard = value.tensor_split([-(-value.shape[0] // 2)])[ranks.rank]
            assert torch.equal(params[name].cpu(), shard), (step, name)


@pytest.mark.ranks(2)
def test_problems_of_one_rank_are_raised_on_all(ranks: Ranks) -> None:
    state = {"w": torch.arange(16.0, device=ranks.device).view(4, 4).chunk(2)[ranks.rank]}
    options: dict[str, Any] = {"src_layouts": {"w": "2: S(0)"}, "shapes": {"w": (4, 4)}}
    wanted = torch.arange(16.0, device=ranks.device).view(4, 4).chunk(2, 1)[ranks.rank]
    resharder = StateDictResharder(state, "2: S(1)", **options)
    work = resharder(state, async_op=True)
    if ranks.rank == 0:
        work.wait()
    with pytest.raises(PlanError, match="a call in flight") as caught:
        resharder(state)
    assert [problem.code for problem in caught.value.problems] == ["conflicting-arguments"]
    assert torch.equal(work.wait()["w"], wanted)  # the call in flight is not harmed
    assert torch.equal(resharder(state)["w"], wanted)
    for number in (-1, 1.5, None):
        with pytest.raises(PlanError, match="invalid-argument"):
            resharder(state, async_op=True, in_flight=number if ranks.rank else 2)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="invalid-argument"):
            reshard_state_dict(state, "2: S(1)", **options, async_op=True, in_flight=number if ranks.rank else 2)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="unknown-name"):
        resharder(state | ({"v": state["w"]} if ranks.rank else {}), async_op=True)
    assert torch.equal(resharder(state, async_op=True).wait()["w"], wanted)


@pytest.mark.ranks(2)
def test_a_handle_that_is_dropped_warns_and_harms_no_later_call(ranks: Ranks) -> None:
    full = {f"w{at}": torch.randn(8, 6, generator=torch.Generator().manual_seed(at)) for at in range(3)}
    state = {n: t.chunk(2)[ranks.rank].to(ranks.device) for n, t in full.items()}
    options: dict[str, Any] = {"src_layouts": dict.fromkeys(full, "2: S(0)"), "shapes": dict.fromkeys(full, (8, 6))}
    resharder = StateDictResharder(state, "2: S(1)", bucket_bytes=200, **options)
    for waited in (0, 2, 3):
        work = resharder(state, async_op=True, in_flight=3)
        if waited:
            work.buckets[waited - 1].wait()
        with pytest.warns(RuntimeWarning, match=rf"{3 - waited} of its 3 buckets") if waited < 3 else nullcontext():
            del work  # a warning after the last wait would be an error
            gc.collect()
        for name, value in resharder(state).items():
            assert torch.equal(value.cpu(), full[name].chunk(2, 1)[ranks.rank])


@pytest.mark.ranks(2)
def test_ties_pairs_dtensors_and_nested_values_arrive_as_in_the_synchronous_call(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("x",))
    full = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)).to(ranks.device)
    numbers, scales = full.to(torch.float8_e4m3fn), torch.rand(2, 2, generator=torch.Generator().manual_seed(4))
    local = full.chunk(2)[ranks.rank].clone()
    plain: dict[str, Any] = {"a.weight": local, "b.tied": local, "c.weight": numbers.chunk(2)[ranks.rank].clone()}
    plain["c.weight_scale_inv"] = scales.to(ranks.device)
    pair = Pair("*.weight", "*.weight_scale_inv", (4, 4), dequantize=torch.float32)
    options: dict[str, Any] = {"src_layouts": dict.fromkeys(("a.weight", "b.tied", "c.weight"), "2: S(0)")}
    options |= {"shapes": dict.fromkeys(options["src_layouts"], (8, 8)), "pairs": pair}
    plain["c.weight_scale_inv"] = plain["c.weight_scale_inv"].chunk(2)[ranks.rank].clone()
    nested = {"state": {"w": {"step": 3, "m": distribute_tensor(full, mesh, [Shard(0)])}}, "lr": 0.5}
    layouts = {"state.w.m": (mesh, (Shard(1),))}
    for bucket_bytes in (260, 400, 1 << 20):
        sizes: dict[str, Any] = {"bucket_bytes": bucket_bytes}
        want = reshard_state_dict(plain, "2: S(1)", **options, **sizes)
        with ranks.delayed():
            work = reshard_state_dict(plain, "2: S(1)", **options, **sizes, async_op=True)
            by_bucket = {name: value for bucket in work.buckets for name, value in bucket.wait().items()}
            moved = work.wait()
        assert moved.keys() == want.keys() == {"a.weight", "b.tied", "c.weight"}
        assert all(torch.equal(moved[name], value) and by_bucket[name] is moved[name] for name, value in want.items())
        assert moved["a.weight"] is moved["b.tied"]
        with ranks.delayed():
            work = reshard_state_dict(nested, layouts, **sizes, async_op=True)
            back = work.wait().nested()
        assert (back["state"]["w"]["step"], back["lr"]) == (3, 0.5)
        assert isinstance(back["state"]["w"]["m"], DTensor)
        assert torch.equal(back["state"]["w"]["m"].full_tensor(), full)
    with pytest.raises(PlanError, match=r"allow at least 24 bytes .*by bucket_bytes="):
        reshard_state_dict(plain, "2: S(1)", **options, bucket_bytes=4)


@pytest.mark.ranks(2)
def test_only_changes_are_sent_and_values_are_right(ranks: Ranks) -> None:
    full = {f"w{at}": torch.randn(16, 8, generator=torch.Generator().manual_seed(at)) for at in range(3)}
    state = {n: t.chunk(2)[ranks.rank].to(ranks.device) for n, t in full.items()}
    options: dict[str, Any] = {"src_layouts": dict.fromkeys(full, "2: S(0)"), "shapes": dict.fromkeys(full, (16, 8))}
    resharder = StateDictResharder(state, "2: S(1)", bucket_bytes=520, changed_only=True, **options)
    sent = []
    for step in range(5):
        for name in full:
            full[name][step, step] += 1
            state[name].copy_(full[name].chunk(2)[ranks.rank])
        with ranks.record() as log:
            moved = resharder(state, async_op=True, in_flight=step % 3).wait()
        sent.append(log.bytes_sent("all_to_all"))
        for name, value in moved.items():
            assert torch.equal(value.cpu(), full[name].chunk(2, 1)[ranks.rank]), (step, name)
    assert max(sent[1:]) < sent[0]
