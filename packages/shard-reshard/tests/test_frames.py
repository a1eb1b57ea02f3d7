"""A repeated call of any kind enters few of our own functions: what was found out once is not found out again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shard_reshard
import torch
from ranktest import Ranks, functions_entered
from shard_reshard import (
    Resharder,
    StateDictResharder,
    load_safetensors,
    plan_reshard,
    redistribute,
    reshard,
    reshard_state_dict,
)
from stored_files import write
from torch.distributed.tensor import Shard, distribute_tensor

MOST, MOST_FILES = 30, 6


@pytest.mark.ranks(2)
def test_repeated_calls_enter_few_functions(ranks: Ranks) -> None:
    full = torch.arange(64.0).view(8, 8)
    local, columns = full.chunk(2)[ranks.rank].clone(), full.chunk(2, 1)[ranks.rank]
    mesh = ranks.mesh((2,), ("x",))
    dtensor = distribute_tensor(full, mesh, [Shard(0)])
    out = torch.zeros(8, 4)
    plan = plan_reshard((8, 8), torch.float32, "2: S(0)", "2: S(1)")
    resharder, into, handles = Resharder(plan), Resharder(plan), Resharder(plan)
    calls: dict[str, Callable[[], Any]] = {
        "reshard": lambda: reshard(local, "2: S(0)", "2: S(1)", shape=(8, 8)),
        "reshard(out=)": lambda: reshard(local, "2: S(0)", "2: S(1)", shape=(8, 8), out=out),
        "reshard of new memory": lambda: reshard(local.clone(), "2: S(0)", "2: S(1)", shape=(8, 8)),
        "redistribute": lambda: redistribute(dtensor, mesh, [Shard(1)]).to_local(),
        "Resharder": lambda: resharder(local),
        "Resharder of new memory": lambda: resharder(local.clone()),
        "Resharder(out=)": lambda: into(local, out=out),
        "Resharder, async": lambda: handles(local, async_op=True).wait(),
    }
    for name, call in calls.items():
        for number in range(4):
            moved: list[Any] = []
            entered = functions_entered(shard_reshard, lambda: moved.append(call()))  # noqa: B023  # called at once
            assert torch.equal(moved[0], columns), name
            if number:
                assert sum(entered.values()) <= MOST, (name, number, sum(entered.values()), entered)
                assert len({file for file, _ in entered}) <= MOST_FILES, (name, entered)


@pytest.mark.ranks(2)
def test_repeated_state_dicts_enter_few_functions_per_tensor(ranks: Ranks) -> None:
    mesh, count = ranks.mesh((2,), ("x",)), 40
    state = {f"w{at}": distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]) for at in range(count)}
    layouts = {name: (mesh, (Shard(1),)) for name in state}
    out = {name: distribute_tensor(torch.zeros(8, 8), mesh, [Shard(1)]) for name in state}
    fresh = StateDictResharder(state, layouts)
    into = StateDictResharder(state, layouts, out=out, check="first")
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "one-shot": (lambda: reshard_state_dict(state, layouts), 9),
        "one-shot(out=)": (lambda: reshard_state_dict(state, out=out, atomic=False), 9),
        "kept": (lambda: fresh(state), 6),
        "kept(out=)": (lambda: into(state, out=out, atomic=False), 6),
    }
    for name, (call, each) in calls.items():
        for number in range(4):
            entered = functions_entered(shard_reshard, call)
            if number:
                assert sum(entered.values()) <= 90 + each * count, (name, number, sum(entered.values()), entered)
    for name, value in state.items():
        assert torch.equal(out[name].full_tensor(), value.full_tensor())


# Functions and files that the first call of a kind enters.
FIRST = {
    "reshard": (88, 12),
    "reshard_state_dict": (142, 17),
    "load_safetensors": (135, 18),
}


@pytest.mark.extra("safetensors")
@pytest.mark.ranks(2)
def test_first_calls_enter_few_functions_and_files(ranks: Ranks, tmp_path: Path) -> None:
    full = torch.arange(80.0).view(8, 10)
    local = full.chunk(2)[ranks.rank].clone()
    state = {"a": distribute_tensor(full, ranks.mesh((2,), ("x",)), [Shard(0)]), "b": torch.ones(3)}
    file = Path(ranks.gather(str(tmp_path))[0]) / "f.safetensors"
    if ranks.rank == 0:
        write(file, {"a": full, "b": torch.ones(4, 2)})
    ranks.gather(None)
    calls: dict[str, Callable[[], Any]] = {
        "reshard": lambda: reshard(local, "2: S(0)", "2: S(1)", shape=(8, 10)),
        "reshard_state_dict": lambda: reshard_state_dict(state, "2: S(-1)"),
        "load_safetensors": lambda: load_safetensors(file, "2: S(0)"),
    }
    for name, call in calls.items():
        entered = functions_entered(shard_reshard, call)
        files = {file for file, _ in entered}
        assert 20 < len(entered) <= FIRST[name][0], (name, len(entered), sorted(entered))
        assert 5 < len(files) <= FIRST[name][1], (name, sorted(files))
