"""Destinations that cannot take what is sent: each was filled wrongly without an error before it was looked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import (
    PlanError,
    Resharder,
    StateDictResharder,
    plan_reshard,
    reshard_state_dict,
)
from shard_reshard.execution.checks import overlaps_itself, sharing
from shard_spec import Box
from torch.distributed.tensor import DTensor, Shard


def _places(tensor: torch.Tensor) -> set[int]:
    """The addresses of a tensor's bytes, one by one."""
    addresses = {tensor.data_ptr()} if tensor.numel() else set()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        addresses = {place + at * stride * tensor.element_size() for place in addresses for at in range(size)}
    return {place + byte for place in addresses for byte in range(tensor.element_size())}


def _view(rng: random.Random, memory: torch.Tensor) -> torch.Tensor:
    typed = memory.view(rng.choice([torch.uint8, torch.int16, torch.float32]))
    sizes = [rng.randint(0 if rng.random() < 0.1 else 1, 4) for _ in range(rng.randint(0, 3))]
    strides = [rng.choice([0, 1, 1, 2, 3, 4, 8]) for _ in sizes]
    reach = sum(max(0, size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if reach >= typed.numel():
        return typed[:1]
    return typed.as_strided(sizes, strides, rng.randint(0, typed.numel() - reach - 1))


def test_shared_bytes_are_those_that_counting_finds() -> None:
    rng, memory = random.Random(0), torch.zeros(64, dtype=torch.uint8)
    inside = common = 0
    for _ in range(400):
        views = [_view(rng, memory) for _ in range(3)]
        for view in views:
            counted = len(_places(view)) < view.numel() * view.element_size()
            assert overlaps_itself(view) is counted
            inside += counted
        expected = [(a, b) for a, b in ((0, 1), (0, 2), (1, 2)) if _places(views[a]) & _places(views[b])]
        assert sharing(views) == expected
        assert sharing(views[:1], views[1:]) == [pair for pair in expected if pair[0] == 0]
        common += len(expected)
    assert min(inside, common) > 100


@pytest.mark.ranks(2)
def test_one_tensor_that_cannot_be_filled(ranks: Ranks) -> None:
    local = torch.full((4, 3), float(ranks.rank), device=ranks.device)
    one = torch.zeros(4, 3, device=ranks.device)
    both = {0: [Box((0, 0), (4, 3)), Box((4, 0), (4, 3))]}
    cases: list[tuple[str, Any, Callable[[], Any]]] = [
        ("invalid-out", both, lambda: [one, one] if ranks.rank == 0 else []),
        ("invalid-out", "2: S(0) on ranks 1,0", lambda: one.reshape(-1).as_strided((4, 3), (1, 1))),
        ("invalid-out", "2: S(0) on ranks 1,0", lambda: one[:1].expand(4, 3)),
        ("invalid-out", "2: S(0) on ranks 1,0", lambda: local),
    ]
    for code, dst, outs in cases:
        plan = plan_reshard((8, 3), torch.float32, "2: S(0)", dst)
        with ranks.record() as log, pytest.raises(PlanError, match=code):
            Resharder(plan, check="always")(local, out=outs())
        assert log.count("all_to_all") == 0
    # Interleaved in one memory, without a byte in common: each is filled, nothing beside it is touched.
    frame = torch.full((4, 9), -1.0, device=ranks.device)
    frame[:, 3:6] = ranks.rank
    Resharder(plan_reshard((8, 3), torch.float32, "2: S(0)", "2: S(0) on ranks 1,0"))(frame[:, 3:6], out=frame[:, :3])
    assert torch.equal(frame, torch.tensor([1.0 - ranks.rank, ranks.rank, -1]).repeat_interleave(3).expand(4, 9))


def _attempt(ranks: Ranks, code: str, state: Mapping[str, Any], layouts: Any, out: dict[str, Any], **more: Any) -> None:
    """The call raises the same error on all ranks, nothing has moved and ``out`` is as it was."""
    before = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in out.items()}
    with ranks.record() as log, pytest.raises(PlanError, match=code) as caught:
        reshard_state_dict(state, layouts, out=out, check="always", **more)
    assert log.count("all_to_all") == 0
    assert len(set(ranks.gather(str(caught.value)))) == 1
    assert list(out) == list(before)
    for name, value in before.items():
        current = out[name]
        assert (
            value is current or value.is_meta or torch.equal(value, current)
            if isinstance(value, torch.Tensor)
            else current == value
        )


@pytest.mark.ranks(2)
def test_state_dicts_that_cannot_be_filled(ranks: Ranks) -> None:
    full = torch.arange(6.0, device=ranks.device).view(2, 3)
    for atomic in (True, False):
        version = {"_shard_reshard_version": 7}

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=ranks.device)

        # Without the check the local rows were broadcast to the whole, and of two boxes one was lost.
        _attempt(ranks, "shape-mismatch", {"a": full}, {"a": "2: S(0)"}, {"a": zeros(2, 3), **version}, atomic=atomic)
        boxes = {"a": {0: [Box((0, 0), (1, 3)), Box((1, 0), (1, 3))], 1: [Box((0, 0), (1, 3)), Box((1, 0), (1, 3))]}}
        _attempt(ranks, "argument-count", {"a": full}, boxes, {"a": zeros(1, 3), **version}, atomic=atomic)
        # On rank 0 the tensor stayed as it was and was said to be of the new version.
        _attempt(ranks, "missing-source", {"a": full}, {"a": "rank 1"}, {"a": zeros(2, 3), **version}, atomic=atomic)
        _attempt(ranks, "invalid-out", {"a": full}, {"a": "2: R"}, {"a": zeros(1, 1).expand(2, 3)}, atomic=atomic)
        # It stayed as it was.
        _attempt(ranks, "wrong-type", {"a": full}, {"a": "2: R"}, {"a": [zeros(2, 3)]}, atomic=atomic)
        # Ranks raised an IndexError each.
        _attempt(ranks, "rank-outside-mesh", {"a": full}, {"a": "3: S(0)"}, {}, atomic=atomic)
        # With atomic=True what was copied there at the end was lost.
        _attempt(ranks, "no-data", {"a": full}, {"a": "2: R"}, {"a": zeros(2, 3).to("meta")}, atomic=atomic)
        frame = zeros(2, 4)
        overlapping = {"a": frame[:, :3], "b": frame[:, 1:]}
        state = {"a": full, "b": full + 1}
        _attempt(ranks, "invalid-out", state, "2: R", overlapping, atomic=atomic)
    # Filled in place, a view that negates showed the values negated; swapped tensors were read after they were written.
    _attempt(ranks, "invalid-out", {"a": full}, "2: R", {"a": torch._neg_view(zeros(2, 3))}, atomic=False)
    rows = {name: full[ranks.rank : ranks.rank + 1] + at for at, name in enumerate("ab")}
    swap: dict[str, Any] = {"src_layouts": dict.fromkeys("ab", "2: S(0)"), "shapes": dict.fromkeys("ab", (2, 3))}
    swap["key_map"] = {"a": "b", "b": "a"}
    for bucket_bytes in (1 << 20, 1):
        _attempt(ranks, "invalid-out", rows, "2: S(0)", rows, atomic=False, bucket_bytes=bucket_bytes, **swap)
    before = {name: tensor.clone() for name, tensor in rows.items()}
    reshard_state_dict(rows, "2: S(0)", out=rows, **swap)  # into tensors of their own first
    assert torch.equal(rows["a"], before["b"])
    assert torch.equal(rows["b"], before["a"])


@pytest.mark.ranks(2)
def test_tied_only_at_the_destination(ranks: Ranks) -> None:
    full = torch.arange(6.0, device=ranks.device).view(2, 3)
    tied = torch.zeros(2, 3, device=ranks.device)
    state, out = {"embed": full, "head": full.clone()}, {"embed": tied, "head": tied}
    for atomic in (True, False):  # the later one would win, even where it has other values
        _attempt(ranks, "invalid-out", state, "2: R", out, atomic=atomic)
    reshard_state_dict(state, "2: R", out=out, key_map={"head": None})  # as the error says
    assert torch.equal(tied, full)
    # A tie on one rank that the plan does not know is refused on all before anything moves.
    resharder = StateDictResharder(state, "2: S(0)", out={"embed": tied[:1], "head": tied[1:]})
    with pytest.raises(PlanError, match="invalid-out") as caught:
        resharder(state, out={"embed": tied[:1], "head": tied[ranks.rank :][:1]})
    assert len(set(ranks.gather(str(caught.value)))) == 1
    # Of one memory, of which one tensor declares a layout and the other does not.
    mesh = ranks.mesh((2,), ("x",))
    mixed = {"embed": DTensor.from_local(tied[:1], mesh, [Shard(0)], run_check=False), "head": tied[:1]}
    with pytest.raises(PlanError, match="invalid-out"):
        reshard_state_dict(state, "2: S(0)", out=mixed)
    reshard_state_dict(state, "2: S(0)", out=mixed, key_map={"head": None}, strict=False)
    assert torch.equal(tied[:1], full[ranks.rank :][:1])
