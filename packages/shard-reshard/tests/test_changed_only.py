"""Syncs that send changes alone: bit for bit what a full sync brings, in few bytes, whatever ranks do meanwhile."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, StateDictResharder
from shard_reshard.execution.changes import decode, encode

SHAPES = {"a": (40, 24), "b": (17, 30), "c": (64,), "d": (9, 4), "e": (12, 12), "f": (3, 5)}
DTYPES = {
    "a": torch.float32, "b": torch.bfloat16, "c": torch.int64, "d": torch.bool, "e": torch.complex128,
    "f": torch.float16,
}  # fmt: skip


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).mul(9).to(DTYPES[name]) for name, shape in SHAPES.items()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def _change(state: dict[str, torch.Tensor], rng: random.Random) -> str:
    """Change some bits of the full state, the same on every rank; returns how."""
    how = rng.choice(["nothing", "an element", "some", "rows", "everything", "zeros", "payloads"])
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    for value in state.values():
        bits = _bits(value)
        if how == "an element":
            bits[rng.randrange(bits.numel())] += 1
        elif how == "some":
            bits[torch.rand(bits.shape, generator=generator) < 0.05] += 1
        elif how == "rows":
            value[rng.randrange(value.shape[0])] = 1
        elif how == "everything":
            bits.copy_(torch.randint(0, 256, bits.shape, generator=generator))
        elif how == "zeros":  # a negative zero equals a positive one, and is another value
            value.copy_(torch.where(torch.rand(value.shape, generator=generator) < 0.3, -0.0, value))
        elif how == "payloads" and value.is_floating_point():  # NaNs, which differ from themselves
            bits[::3] = 0xFF
    state["d"].copy_(_bits(state["d"]).view(torch.uint8).remainder(2).bool().view(SHAPES["d"]))
    return how


def _columns(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    step = -(-full.shape[-1] // size)
    return full[..., min(rank * step, full.shape[-1]) : (rank + 1) * step]


def _rows(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    step = -(-full.shape[0] // size)
    return full[min(rank * step, full.shape[0]) : (rank + 1) * step].clone()


class World:
    """A sync of rows to columns of a changing state."""

    def __init__(self, ranks: Ranks, **options: Any) -> None:
        self.ranks, self.size, self.full = ranks, ranks.world_size, _state()
        self.options = options
        self.out = {name: torch.zeros_like(_columns(t, ranks.rank, self.size)) for name, t in self.full.items()}
        self.out = {name: t.contiguous() for name, t in self.out.items()}
        self.sync = self.new()

    def given(self) -> dict[str, torch.Tensor]:
        return {name: _rows(value, self.ranks.rank, self.size) for name, value in self.full.items()}

    def new(self) -> StateDictResharder:
        sources = dict.fromkeys(SHAPES, f"{self.size}: S(0)")
        return StateDictResharder(
            self.given(), f"{self.size}: S(-1)", src_layouts=sources, shapes=SHAPES, changed_only=True, **self.options
        )

    def call(self, how: str = "out", **options: Any) -> int:
        """Sync, compare bit for bit, and return the bytes that this rank sent."""
        with self.ranks.record() as log:
            moved = self.sync(self.given(), out=self.out if how != "fresh" else None, atomic=how == "atomic", **options)
        compared = 0
        for name, value in self.full.items():
            expected = _columns(value, self.ranks.rank, self.size)
            assert torch.equal(_bits(moved[name]), _bits(expected)), name
            compared += expected.numel()
        assert compared >= sum(value.numel() for value in self.full.values()) // self.size // 2
        return sum(sum(event.bytes_sent) for event in log.events if event.op == "all_to_all")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("bucket", [2**20, 2000])
def test_changes_are_exact(ranks: Ranks, bucket: int) -> None:
    world, rng = World(ranks, bucket_bytes=bucket), random.Random(3)
    full = world.call()
    most_sent: dict[str, int] = {}
    for _ in range(60):
        how = _change(world.full, rng)
        if rng.random() < 0.3:  # what receivers do with their tensors makes no difference
            for name in SHAPES:
                world.out[name].zero_()
        sent = world.call(rng.choice(["out", "atomic", "fresh"]))
        most_sent[how] = max(most_sent.get(how, 0), sent)
        headers = 24 * ranks.world_size * len(world.sync.plan.buckets) * 4
        assert sent <= full + headers, how
        assert how != "nothing" or sent <= headers
    assert len(most_sent) == 7
    assert most_sent["an element"] < full // 2 < most_sent["everything"] or bucket < 2**20


@pytest.mark.ranks(2)
@pytest.mark.parametrize("percent", [0, 1, 3, 10, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_follow_what_changed(ranks: Ranks, percent: int, dtype: torch.dtype) -> None:
    shape, itemsize = (512, 512), dtype.itemsize
    generator = torch.Generator().manual_seed(percent)
    full = torch.randn(shape, generator=generator).to(dtype)
    layouts: dict[str, Any] = {"src_layouts": {"w": "2: S(0)"}, "shapes": {"w": shape}}

    def given() -> dict[str, torch.Tensor]:
        return {"w": full.chunk(2)[ranks.rank].clone()}

    sync = StateDictResharder(given(), "2: S(1)", changed_only=True, **layouts)
    sync(given())
    mask = torch.rand(shape, generator=generator) < percent / 100
    full[mask] = (full[mask].float() * 1.5 + 1).to(dtype)
    with ranks.record() as log:
        moved = sync(given())["w"]
    assert torch.equal(moved, full.chunk(2, 1)[ranks.rank])
    sent = sum(sum(event.bytes_sent) for event in log.events if event.op == "all_to_all")
    # What crosses is the other rank's columns of this rank's rows.
    crossing = int(mask.chunk(2)[ranks.rank].chunk(2, 1)[1 - ranks.rank].sum())
    dense, index, header = 512 * 512 // 4 * itemsize, crossing, 24 + 16
    assert crossing >= percent * 500
    assert sent <= min(dense, 1.25 * crossing * itemsize + 1.05 * index) + header


@pytest.mark.ranks(2)
def test_a_rank_that_lost_the_chain_gets_everything(ranks: Ranks) -> None:
    world = World(ranks)
    full = world.call()
    world.full["a"][3, 3] += 1
    assert max(ranks.gather(world.call())) < full // 2
    # One rank drops a call before it has arrived: all send everything, and changes again after that.
    state = world.given()
    work = world.sync(state, async_op=True)
    if ranks.rank == 1:
        with pytest.warns(RuntimeWarning, match="never waited for"):
            del work  # the last reference
    else:
        work.wait()
    world.full["a"][4, 4] += 1
    assert world.call() >= full
    assert max(ranks.gather(world.call())) < full // 2


@pytest.mark.ranks(2)
def test_a_call_that_failed_is_followed_by_everything(ranks: Ranks) -> None:
    world = World(ranks, check="always")
    full = world.call()
    for fault in ("sources", "values"):
        world.full["a"] += 1
        state = world.given()
        if fault == "sources" and ranks.rank:
            state["a"] = state["a"].double()
        if fault == "values" and ranks.rank:
            state["strange"] = torch.ones(2)
        with pytest.raises(PlanError):
            world.sync(state, out=world.out)
        assert world.call() >= full
        world.full["a"][0, 0] += 1
        assert max(ranks.gather(world.call())) < full // 2


ODD: dict[str, Any] = {
    "another shape": lambda given: given | {"b": torch.ones(2, 2)},
    "freed": lambda given: given["b"].untyped_storage().resize_(0) and given,
    "a name less": lambda given: {name: value for name, value in given.items() if name != "b"},
    "a name more": lambda given: given | {"strange": torch.ones(3)},
    "no tensor": lambda given: given | {"b": 3},
    "meta": lambda given: given | {"b": given["b"].to("meta")},
    "no mapping": lambda given: 7,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["changed_only", "compared"])
def test_a_problem_of_one_rank_at_a_later_call_is_raised_by_all(ranks: Ranks, kind: str) -> None:
    """Also where ranks no longer compare plans, and where the others move already."""
    options: dict[str, Any] = {"changed_only": True} if kind == "changed_only" else {}
    world = World(ranks)
    sources = dict.fromkeys(SHAPES, "2: S(0)")
    world.sync = StateDictResharder(world.given(), "2: S(-1)", src_layouts=sources, shapes=SHAPES, **options)
    for number in range(30):
        how = [*ODD, "nothing", "overlap"][number % 9]
        culprit, atomic = number // 9 % 2, number % 3 > 0
        world.full["a"] += 1
        state, before = world.given(), {name: world.out[name].clone() for name in SHAPES}
        out: dict[str, Any] = dict(world.out)
        if ranks.rank == culprit:
            if how in ODD:
                state = ODD[how](state)
            elif how == "overlap":
                out["a"] = torch.zeros(1).expand(out["a"].shape)
        if how != "nothing":
            with pytest.raises(PlanError) as caught:
                world.sync(state, out=out, atomic=atomic)
            assert len(set(ranks.gather(str(caught.value)))) == 1
            assert all(torch.equal(before[n], world.out[n]) for n in before)
        world.call("atomic" if atomic else "out")


@pytest.mark.ranks(2)
def test_ranks_that_call_two_resharders_raise(ranks: Ranks) -> None:
    """Of splits of equal size: without a comparison the bytes of one plan would be read as those of another."""
    full = torch.arange(64.0).view(8, 8)
    layouts: dict[str, Any] = {"src_layouts": {"w": "2: S(0)"}, "shapes": {"w": (8, 8)}}
    for changed_only in (True, False):
        state = {"w": full.chunk(2)[ranks.rank].clone()}
        one, other = (
            StateDictResharder(state, to, changed_only=changed_only, **layouts)
            for to in ("2: S(1)", "2: B(1,2,cyclic)")
        )
        one(state), other(state)
        with pytest.raises(PlanError, match="ranks-disagree"):
            (other if ranks.rank else one)(state)
        assert torch.equal(one(state)["w"], full.chunk(2, 1)[ranks.rank])


@pytest.mark.ranks(2)
def test_strides_may_change_from_call_to_call(ranks: Ranks) -> None:
    """They decide whether a rank's own bytes pass through the collective, on each rank by itself."""
    layouts: dict[str, Any] = {"src_layouts": {"w": "2: S(0)"}, "shapes": {"w": (64, 48)}}
    full, rng, compared = torch.randn(64, 48), random.Random(ranks.rank), 0
    full = ranks.gather(full)[0]
    sync = StateDictResharder({"w": full.chunk(2)[ranks.rank].clone()}, "2: S(1)", changed_only=True, **layouts)
    for number in range(40):
        full[number, ::5] += 1
        local = full.chunk(2)[ranks.rank].clone()
        local = local.t().contiguous().t() if rng.random() < 0.5 else local
        out = torch.zeros(64, 24) if rng.random() < 0.5 else torch.zeros(64, 30)[:, :24]
        out = torch.zeros(24, 64).t() if rng.random() < 0.3 else out
        moved = sync({"w": local}, out={"w": out}, atomic=rng.random() < 0.3)["w"]
        assert torch.equal(moved, full.chunk(2, 1)[ranks.rank])
        compared += moved.numel()
    assert compared == 40 * 64 * 24


@pytest.mark.ranks(2)
def test_a_late_rank_and_one_that_makes_another_resharder(ranks: Ranks) -> None:
    world = World(ranks)
    for number in range(4):
        if number % 2 == ranks.rank:
            time.sleep(0.2)
        world.full["b"][number] += 1
        world.call()
    with pytest.raises(PlanError, match="ranks-disagree"):
        (world.new if ranks.rank else world.call)()  # restarted, while the other goes on
    world.sync = world.new()
    world.call()
    other = StateDictResharder(world.given(), "rank 0", src_layouts=dict.fromkeys(SHAPES, "2: S(0)"), shapes=SHAPES)
    assert torch.equal(other(world.given()).get("a", world.full["a"]), world.full["a"])
    with pytest.raises(PlanError, match="ranks-disagree"):  # not the same on every rank
        StateDictResharder(
            world.given(), "rank 0", src_layouts=dict.fromkeys(SHAPES, "2: S(0)"), shapes=SHAPES,
            changed_only=ranks.rank == 0,
        )  # fmt: skip


def test_messages_are_read_as_they_were_written() -> None:
    rng, kinds, compared = random.Random(1), set(), 0
    for number in range(400):
        itemsize = rng.choice([1, 2, 4, 8])
        size = rng.choice([1, 2, 7, 300, 3000, 200_000 if number % 20 == 0 else 64])
        old = torch.randint(0, 256, (size * itemsize,), dtype=torch.uint8)
        new, share = old.clone(), rng.choice([0.0, 1e-5, 0.001, 0.02, 0.3, 1.0])
        words = new.view(size, itemsize)
        if rng.random() < 0.5:
            words[torch.rand(size) < share] += 1
        else:
            begin = rng.randrange(size)
            words[begin : begin + max(1, int(size * share))] += 1
        message, data = encode(new, old, itemsize)
        assert data.numel() == message.num_bytes <= (new.numel() + 7) // 8 * 8
        decode(message, data, old, itemsize)
        assert torch.equal(old, new)
        kinds.add((message.width, message.num_values > 0))
        compared += size
    assert kinds == {(0, False), (1, False), (1, True), (2, True)}
    assert compared > 100_000
