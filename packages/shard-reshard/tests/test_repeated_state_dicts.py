"""State dicts that come again: whatever happened to a tensor, its name or its layout, what arrives is what it holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import shard_reshard
import torch
from ranktest import Ranks, functions_entered
from shard_reshard import PlanError, StateDictResharder, reshard_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

STEPS = 28


class _Trainer:
    """A state dict of DTensors, plain and tied tensors that is changed between calls."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.mesh = ranks, ranks.mesh((2,), ("dp",))
        self.random = torch.Generator().manual_seed(3)  # the same on both ranks
        self.state: dict[str, Any] = {}
        for change in (self.sharded, self.plain, self.scale):
            change()

    def _full(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.ranks.device)

    def sharded(self) -> None:
        for name, dim in (("a", 0), ("b", 1)):
            self.state[name] = distribute_tensor(self._full(6, 4), self.mesh, [Shard(dim)])
        self.state["tied"] = self.state["a"]

    def plain(self) -> None:
        self.state["norm"] = torch.nn.Parameter(self._full(5))

    def scale(self) -> None:
        self.state["scale"] = self._full()

    def in_place(self) -> None:
        with torch.no_grad():
            for tensor in self.state.values():
                tensor.mul_(1.5)

    def data(self) -> None:
        self.state["norm"].data = self._full(5)

    def local(self) -> None:
        value = self.state["b"]
        value._local_tensor = torch.clone(value.to_local()) + 1

    def freed(self) -> None:
        storage = self.state["b"].to_local().untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        self.others = [torch.zeros(6, 2, device=self.ranks.device) for _ in range(3)]  # may be given that memory
        storage.resize_(size)
        self.state["b"].to_local().fill_(7.0)

    def reordered(self) -> None:
        self.state = dict(reversed(self.state.items()))

    def changes(self) -> list[Callable[[], None]]:
        rare = [self.sharded, self.plain, self.scale, self.data, self.local, self.freed, self.reordered]
        return [*rare, *[self.in_place] * len(rare)]

    def full(self, name: str) -> torch.Tensor:
        value = self.state[name]
        full = value.full_tensor() if isinstance(value, DTensor) else value
        return full.detach()


@pytest.mark.ranks(2)
def test_whatever_happens_between_calls(ranks: Ranks) -> None:
    trainer, rng, compared, functions = _Trainer(ranks), random.Random(4), 0, list[int]()
    turned = {"a": Shard(1), "b": Shard(0), "tied": Shard(1), "norm": Replicate(), "scale": Replicate()}

    def generator() -> dict[str, Any]:
        tensors = {name: distribute_tensor(trainer.full(name) * 0, trainer.mesh, [turned[name]]) for name in "ab"}
        tensors["tied"] = tensors["a"]
        return tensors | {name: torch.zeros_like(trainer.full(name)) for name in ("norm", "scale")}

    out = generator()
    layouts = {name: (trainer.mesh, (placement,)) for name, placement in turned.items()}
    resharder = StateDictResharder(trainer.state, layouts, out=out, check="first")
    for _ in range(STEPS):
        rng.choice(trainer.changes())()
        out = generator() if rng.random() < 0.15 else out
        atomic = rng.random() < 0.3
        results: list[Any] = []
        call = partial(resharder, trainer.state, out=out, atomic=atomic)
        entered = functions_entered(shard_reshard, lambda: results.append(call()))  # noqa: B023  # called at once
        functions.append(sum(entered.values()))
        (moved,) = results
        for name in trainer.state:
            value = moved[name]
            assert value is out[name]
            full = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(full, trainer.full(name)), name
            compared += 1
    assert compared == 5 * STEPS
    # Calls whose tensors are those of the last one are not checked again: they enter half as many functions.
    replays = sum(count <= max(functions) // 2 for count in functions)
    assert STEPS // 5 <= replays < STEPS, functions
    # Tensors of another dtype or layout in the memory of those before are refused, on both ranks.
    resharder(trainer.state, out=out, atomic=False)
    scale = trainer.state["scale"]
    scale.data = scale.data.view(torch.int32)
    with pytest.raises(PlanError, match="dtype-mismatch"):
        resharder(trainer.state, out=out, atomic=False)
    scale.data = scale.data.view(torch.float32)
    resharder(trainer.state, out=out, atomic=False)
    trainer.state["b"] = DTensor.from_local(trainer.state["b"].to_local().view(3, 4), trainer.mesh, [Shard(0)])
    with pytest.raises(PlanError, match=r"layout-mismatch|shape-mismatch"):
        resharder(trainer.state, out=out, atomic=False)


@pytest.mark.ranks(2)
def test_fresh_results_share_nothing(ranks: Ranks) -> None:
    mesh, generator = ranks.mesh((2,), ("dp",)), torch.Generator().manual_seed(5)
    # Of one shape, uneven, of a dtype that travels as integers, and complex: what is allocated is the result itself.
    shapes = [((6, 4), torch.float32)] * 3 + [((5, 3), torch.bfloat16), ((4, 6), torch.complex64), ((2, 2), torch.int8)]
    full = [torch.randn(shape, generator=generator).mul(9).to(ranks.device, dtype) for shape, dtype in shapes]
    state = {str(at): distribute_tensor(value, mesh, [Shard(0)]) for at, value in enumerate(full)}
    resharder, results = StateDictResharder(state, (mesh, (Shard(1),))), []
    for _ in range(3):
        results.append(resharder(state))
    locals_ = [value.to_local() for moved in results for value in moved.values()]
    assert len({local.untyped_storage().data_ptr() for local in locals_}) == 3 * len(full)
    for number, moved in enumerate(results):
        for value, expected in zip(moved.values(), full, strict=True):
            reference = distribute_tensor(expected, mesh, [Shard(1)])
            assert value._spec == reference._spec
            assert type(value) is DTensor
            assert (value.shape, value.stride(), value.requires_grad) == (reference.shape, reference.stride(), False)
            assert (value.dtype, value.is_leaf) == (reference.dtype, True)
            local = value.to_local()
            assert local.untyped_storage().nbytes() == local.numel() * local.element_size()
            assert torch.equal(value.full_tensor(), expected)
            value.to_local().zero_()  # reaches no other result
            assert not value.full_tensor().any(), number
            assert torch.equal(value.redistribute(placements=[Replicate()]).to_local(), torch.zeros_like(expected))


ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "no tensors": lambda call: call["state_dict"].clear(),
    "out of another shape": lambda call: call["out"].update(a=torch.zeros(3)),
    "tied out": lambda call: call["out"].update(b=call["out"]["a"]),
    "expanded out": lambda call: call["out"].update(b=torch.zeros(1, 1).expand(6, 2)),
    "another mode": lambda call: call.update(check="always"),
    "no such mode": lambda call: call.update(check="never"),
    "no mapping": lambda call: call.update(key_map=3),
    "shapes of no mapping": lambda call: call.update(shapes=3),
}


@pytest.mark.ranks(3)
def test_what_one_rank_refuses_at_a_later_one_shot_call_all_refuse(ranks: Ranks) -> None:
    size, full = ranks.world_size, {name: torch.randn(6, 6) for name in "ab"}

    def call(odd: Callable[[dict[str, Any]], object] | None = None) -> None:
        arguments: dict[str, Any] = {
            "state_dict": {name: value.chunk(size)[ranks.rank].clone() for name, value in full.items()},
            "src_layouts": dict.fromkeys(full, f"{size}: S(0)"),
            "shapes": dict.fromkeys(full, (6, 6)),
            "out": {name: torch.zeros(6, 2) for name in full},
        }
        if odd is not None:
            odd(arguments)
        moved = reshard_state_dict(dst_layouts=f"{size}: S(1)", atomic=False, **arguments)
        assert all(torch.equal(moved[name], value.chunk(size, 1)[ranks.rank]) for name, value in full.items())

    call()
    for number, (name, odd) in enumerate(ODD.items()):
        with pytest.raises(PlanError) as caught:
            call(odd if ranks.rank == number % size else None)
        assert len(set(ranks.gather(str(caught.value)))) == 1, name
        call()  # the group is as it was
