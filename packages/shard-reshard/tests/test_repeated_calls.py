"""Calls that look like the one before: memory that was freed, moved, negated or handed on never gives an old value."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, Resharder, plan_reshard, reshard

SHAPE = (8, 6)
CALLS = 160


class _Given:
    """A source tensor that is changed between calls in every way that keeps or reuses its memory."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.number = 0.0
        self.tensor = torch.zeros(shape, device=device)

    def changes(self) -> dict[str, Callable[[], None]]:
        return {
            "in place": self._write,
            "in place ": self._write,
            "in place  ": self._write,
            "freed": self._freed,
            "other data": self._data,
            "resized": self._resized,
            "turned": self._turned,
            "expanded": self._expanded,
            "negated": self._negated,
            "set": self._set,
        }

    def _write(self) -> None:
        self.number += 1
        if self.tensor.is_neg() or self.tensor.stride()[0] == 0:
            self._fresh()
        self.tensor.copy_(torch.randn(self.shape, device=self.device) + self.number)

    def _fresh(self) -> None:
        self.tensor = torch.randn(self.shape, device=self.device)

    def _freed(self) -> None:
        del self.tensor  # the allocator likes to give the same address out again
        self._fresh()

    def _data(self) -> None:
        self._plain()
        self.tensor.data = torch.randn(self.shape, device=self.device)

    def _set(self) -> None:
        self._plain()
        with torch.no_grad():
            self.tensor.set_(torch.randn(self.shape, device=self.device))  # type: ignore[call-overload]  # as torch has it

    def _resized(self) -> None:
        # As sharded data parallelism frees its parameters: the tensor stays, its memory goes to somebody else.
        self._fresh()
        storage, size = self.tensor.untyped_storage(), self.tensor.untyped_storage().nbytes()
        storage.resize_(0)
        if self.number % 2:
            self.other = torch.randn(self.shape, device=self.device)
        storage.resize_(size)
        self.tensor.copy_(torch.randn(self.shape, device=self.device))

    def _turned(self) -> None:
        self._plain()
        self.tensor = self.tensor.reshape(-1).as_strided(self.shape, (1, self.shape[0]))

    def _expanded(self) -> None:
        self._plain()
        self.tensor = self.tensor.reshape(-1)[: self.shape[1]].expand(self.shape)

    def _negated(self) -> None:
        self._plain()
        self.tensor = torch._neg_view(self.tensor)

    def _plain(self) -> None:
        if self.tensor.is_neg() or not self.tensor.is_contiguous():
            self._fresh()


@pytest.mark.ranks(2)
def test_whatever_happens_to_the_memory(ranks: Ranks) -> None:
    pairs = [("2: S(0)", "2: S(1)"), ("2: S(1)", "2: S(0)"), ("2: S(0)", "2: R"), ("2: P", "2: S(0)")]
    counts = {"same": 0, "compared": 0}
    for src, dst in pairs:
        plan = plan_reshard(SHAPE, torch.float32, src, dst)
        resharder = Resharder(plan)
        rng = random.Random(5)
        source = _Given(plan.src.local_shapes(ranks.rank)[0], ranks.device)
        shape = plan.dst.local_shapes(ranks.rank)[0]
        out = torch.zeros(shape, device=ranks.device)
        previous: tuple[int, int] | None = None
        for _ in range(CALLS // len(pairs)):
            changes = source.changes()
            changes[rng.choice(sorted(changes))]()
            chosen = rng.choice(
                ["kept out", "kept out", "kept out", "new out", "strided out", "no out", "graph", "async"]
            )
            if chosen == "new out":
                out = torch.zeros(shape, device=ranks.device)
            elif chosen == "strided out":
                out = torch.zeros(*shape[:-1], 2 * shape[-1], device=ranks.device)[..., ::2]
            tensor = source.tensor.detach().requires_grad_() if chosen == "graph" else source.tensor
            expected = reshard(source.tensor.clone(), plan.src, plan.dst)
            moved = resharder(tensor, out=None if chosen in ("no out", "graph") else out, async_op=chosen == "async")
            moved = moved.wait() if chosen == "async" else moved
            assert torch.equal(moved.detach(), expected), (src, dst, chosen)
            addresses = source.tensor.data_ptr(), out.data_ptr()
            counts["same"] += addresses == previous and chosen not in ("no out", "graph")
            counts["compared"] += 1
            previous = addresses
    assert counts["compared"] >= CALLS - len(pairs)
    assert counts["same"] > CALLS // 10  # calls that could be taken for the one before


class _Saved:
    """A tensor that a graph saved for backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.ranks(2)
def test_what_is_held_on_to_and_when_it_is_let_go(ranks: Ranks) -> None:
    resharder = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(0)", "2: S(1)"))
    leaf = torch.randn(4, 6, device=ranks.device, requires_grad=True)
    out = torch.empty(8, 3, device=ranks.device)
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: torch.Tensor) -> _Saved:
        holder = _Saved(tensor)
        saved.append(weakref.ref(holder))
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        computed = leaf * leaf  # its graph holds on to tensors of a forward pass
    graph = saved[0]
    with torch.no_grad():
        for _ in range(3):
            resharder(computed, out=out)
        tensors = weakref.ref(computed), weakref.ref(out)
        expected = out.clone()
        del computed, out
        gc.collect()
        assert graph() is None
        assert [tensor() for tensor in tensors] == [None, None]
        # At most the memory of one call stays, until a call comes with other memory.
        other_out = torch.empty(8, 3, device=ranks.device)
        resharder(leaf * leaf, out=other_out)
        assert torch.equal(other_out, expected)
        # Results belong to the caller alone: the allocator gives the same address out, and nothing is kept for it.
        for _ in range(4):
            moved = resharder(other_out.view(4, 6))
        result = weakref.ref(moved)
        del moved
        assert result() is None


@pytest.mark.ranks(2)
def test_views_that_negate_and_conjugate(ranks: Ranks) -> None:
    full = torch.arange(48.0, device=ranks.device).view(SHAPE)
    negated = torch.complex(full, full).conj().imag
    assert negated.is_neg()
    resharder = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(0)", "2: S(1)"))
    for tensor in (full, torch._neg_view(full), full, negated):  # the first three have one address
        moved = resharder(tensor.chunk(2)[ranks.rank])
        assert torch.equal(moved, tensor.clone().chunk(2, 1)[ranks.rank])
    sending = Resharder(plan_reshard(SHAPE, torch.float32, "rank 0", "rank 1"))  # sent and received where it lies
    moved = sending(negated if ranks.rank == 0 else None)
    assert moved is None if ranks.rank == 0 else torch.equal(moved, -full)
    # Writing into the copy that such a view resolves to would leave the view as it was.
    for out in (torch._neg_view(torch.zeros(8, 3)), torch.zeros(8, 3, dtype=torch.complex64).conj()):
        odd = Resharder(plan_reshard(SHAPE, out.dtype, "2: S(0)", "2: S(1)"), check="always")
        with pytest.raises(PlanError, match="invalid-out"):
            odd(torch.zeros(4, 6, dtype=out.dtype), out=out)


@pytest.mark.ranks(2)
def test_inference_mode_first_and_training_after(ranks: Ranks) -> None:
    resharder = Resharder(plan_reshard(SHAPE, torch.float32, "2: S(1)", "2: S(0)"))
    full = torch.arange(48.0, device=ranks.device).view(SHAPE)
    local = full.chunk(2, 1)[ranks.rank].contiguous()
    out = torch.empty(4, 6, device=ranks.device)
    for step in range(6):
        with torch.inference_mode(step % 4 < 2):
            assert torch.equal(resharder(local, out=out), full.chunk(2)[ranks.rank])
            assert torch.equal(resharder(local), full.chunk(2)[ranks.rank])
    leaf = local.clone().requires_grad_()
    resharder(leaf).sum().backward()
    assert leaf.grad is not None


@pytest.mark.ranks(2)
def test_a_result_written_over_is_noticed_by_backward(ranks: Ranks) -> None:
    # In the second and third case what arrives is received where it lies, without a copy that autograd could notice.
    for src, dst in (("2: S(0)", "2: S(1)"), ("rank 0", "rank 1"), ("2: S(0)", "2: S(0) on ranks 1,0")):
        plan = plan_reshard(SHAPE, torch.float32, src, dst)
        resharder = Resharder(plan)
        shapes, outs = plan.src.local_shapes(ranks.rank), plan.dst.local_shapes(ranks.rank)
        out = torch.zeros(outs[0], device=ranks.device) if outs else None
        local = torch.ones(shapes[0], device=ranks.device) if shapes else None
        weight = torch.ones(outs[0] if outs else (), device=ranks.device, requires_grad=True)
        for _ in range(3):
            loss = (out * weight).sum() if out is not None else None  # saves out
            resharder(local, out=out)
            if loss is not None:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    torch.autograd.backward(loss)
