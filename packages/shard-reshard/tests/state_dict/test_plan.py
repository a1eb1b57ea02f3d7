"""The law of destinations: each element has one source, or a declared value, or stays; else all ranks refuse."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranktest import Ranks
from shard_reshard import Part, PlanError, StateDictResharder, load_safetensors, reshard_state_dict
from shard_reshard.layout.parse import resolve_layout
from shard_reshard.layout.shard_map import ShardMap
from shard_reshard.state_dict.plan import RankMeta, TensorMeta, plan_state_dict
from stored_files import write
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


class _Case(NamedTuple):
    sources: dict[str, torch.Tensor]
    key_map: dict[str, Any]
    shape: tuple[int, ...]
    wanted: torch.Tensor  # NaN where no source arrives
    counts: torch.Tensor  # sources of each element
    fill: float | None


def _case(rng: random.Random) -> _Case:
    """Parts of one destination: along a dim, in another order of dims, stacked; often one is left out, or too large."""
    stacked, fill = rng.random() < 0.4, rng.choice([None, None, 7.0])
    rest = (rng.randint(1, 4), rng.randint(1, 4))
    shape = (rng.randint(1, 3), *rest) if stacked else rest
    dims = rng.choice([None, (0, 1), (1, 0)])
    sources: dict[str, torch.Tensor] = {}
    key_map: dict[str, Any] = {}
    expected, counts = torch.full(shape, float("nan")), torch.zeros(shape, dtype=torch.int)
    for number in range(shape[0]) if stacked else [None]:
        if number is not None and rng.random() < 0.15:
            continue  # a forgotten layer
        at = rng.randrange(2)  # the dim of the destination that is cut
        mark = rng.randint(0, rest[at])
        for start, stop in ((0, mark), (mark, rest[at])):
            if start == stop or (sources and rng.random() < 0.25):
                continue
            if rng.random() < 0.1:
                start = max(0, start - 1)  # two sources for some elements
            name = f"s{len(sources)}"
            sizes = tuple(stop - start if dim == at else size for dim, size in enumerate(rest))
            value = torch.rand(sizes) + len(sources)
            place = tuple(slice(start, stop) if dim == at else slice(None) for dim in range(2))
            window = place if number is None else (number, *place)
            expected[window] = value
            counts[window] += 1
            turned = dims == (1, 0)
            sources[name] = value.t().contiguous() if turned else value
            key_map[name] = Part("w", start, 1 - at if turned else at, fill=fill, stack=number, dims=dims)
    if rng.random() < 0.15:
        shape = (shape[0] + 1, *shape[1:])  # a destination that is larger than all sources
        expected = torch.cat([expected, torch.full((1, *shape[1:]), float("nan"))])
        counts = torch.cat([counts, torch.zeros((1, *shape[1:]), dtype=torch.int)])
    return _Case(sources, key_map, shape, expected, counts, fill)


def _expected(case: _Case, keeps: bool) -> torch.Tensor | None:
    """Return what has to come out, from 5s; None where the call has to be refused."""
    missing = case.counts == 0
    if bool((case.counts > 1).any()) or (bool(missing.any()) and case.fill is None and not keeps):
        return None
    return torch.where(missing, torch.tensor(5.0 if case.fill is None else case.fill), case.wanted)


class _Holder(nn.Module):
    def __init__(self, shape: tuple[int, ...], device: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full(shape, 5.0, device=device))


@pytest.mark.extra("safetensors")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("path", ["one-shot", "kept", "load", "load onto meta", "fsdp"])
def test_each_element_has_one_source_or_the_call_is_refused(ranks: Ranks, tmp_path: Path, path: str) -> None:
    rng = random.Random(f"fill {path}")
    torch.manual_seed(0)
    mesh = ranks.mesh((2,), ("x",))
    right = refused = filled = 0
    for number in range(40):
        case, strict, atomic = _case(rng), rng.random() < 0.5, rng.random() < 0.5
        if not case.sources:
            continue
        layouts = [rng.choice([Shard(0), Shard(1), Replicate()]) for _ in range(2)]
        sources: dict[str, Any] = {
            name: distribute_tensor(value, mesh, [layouts[0]]) for name, value in case.sources.items()
        }
        out: Any = {"w": distribute_tensor(torch.full(case.shape, 5.0), mesh, [layouts[1]])}
        if path == "fsdp":
            out = _Holder(case.shape, "cpu")
            fully_shard(out, mesh=mesh)
        if path == "load onto meta":
            out = _Holder(case.shape, "meta")
            out.w = nn.Parameter(distribute_tensor(out.w.detach(), mesh, [layouts[1]]))
        expected = _expected(case, not strict and path != "load onto meta")
        options: Any = {"key_map": case.key_map, "strict": strict}
        problems: Any = ()
        try:
            if path.startswith("load"):
                file = Path(ranks.gather(str(tmp_path))[0]) / f"{number}.safetensors"
                if ranks.rank == 0:
                    write(file, case.sources)
                ranks.gather(0)  # the file is there
                load_safetensors(file, out=out, atomic=atomic, **options)
            elif path == "kept":
                resharder = StateDictResharder(sources, out=out, **options)
                for _ in range(2):
                    resharder(sources, out=out, atomic=atomic)
            else:
                reshard_state_dict(sources, out=out, atomic=atomic, **options)
        except PlanError as error:
            problems = error.problems
        if problems:
            assert expected is None, (number, case, problems)
            assert {problem.name for problem in problems} == {"w"}
            assert {problem.code for problem in problems} <= {"boxes-incomplete", "boxes-overlap"}
            refused += 1
            continue
        value = out.w if isinstance(out, nn.Module) else out["w"]
        assert expected is not None, (number, case)
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), expected), (number, case)
        right, filled = right + 1, filled + bool((case.counts == 0).any())
    assert right >= 10
    assert refused >= 5
    assert filled >= 2


@pytest.mark.ranks(2)
def test_what_no_source_fills_stays_only_where_every_rank_has_values(ranks: Ranks) -> None:
    source = {"w": torch.ones(4)}
    out = {"w": torch.zeros(6)} if ranks.rank == 0 else {}
    reshard_state_dict(source, out=out, strict=False)  # rank 1 has no part of it
    assert not out or out["w"].tolist() == [1, 1, 1, 1, 0, 0]
    with pytest.raises(PlanError, match=r"\[boxes-incomplete\] w: no source has Box\(offsets=\(4,\), sizes=\(2,\)\)"):
        reshard_state_dict(source, out={"w": torch.zeros(6)})
    with pytest.raises(PlanError, match="the destination is of"):
        reshard_state_dict(source, out={"w": torch.zeros(3)}, strict=False)


def test_a_bucket_is_as_full_as_its_fullest_rank() -> None:
    """Tensors of several ranks share an exchange; layouts of many ranks count on all, of ranks apart once."""
    size, layouts = 64 * 64 * 4, {f"w{at}": f"rank {4 + at}" for at in range(4)}
    metas = [RankMeta({f"w{at}": TensorMeta((64, 64), "float32", _on(f"rank {at}"), f"w{at}")}, {}) for at in range(4)]
    assert [len(bucket) for bucket in plan_state_dict(metas, layouts, bucket_bytes=2 * size).buckets] == [4]
    onto_one = plan_state_dict(metas, "rank 4", bucket_bytes=2 * size)
    assert [len(bucket) for bucket in onto_one.buckets] == [2, 2]
    meta = TensorMeta((64, 64), "float32", _on("64: S(0)"), "")
    spread = [RankMeta({name: meta._replace(tied_to=name) for name in ("a", "b", "c", "d")}, {})]
    for target, count in (("64: S(1)", 2), ("64: S(1) on ranks 64..127", 4)):
        plan = plan_state_dict(spread, target, bucket_bytes=4 * size // 64)
        assert {len(bucket) for bucket in plan.buckets} == {count}, target


def _on(layout: str) -> ShardMap:
    return resolve_layout(layout, (64, 64))
