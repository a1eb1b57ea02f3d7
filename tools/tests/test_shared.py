"""The sources that packages share: consensus, stale parameters, sharding info, patterns, lazy names and pages."""

from __future__ import annotations

import datetime
import fnmatch
import itertools
import pickle
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import repo  # noqa: E402
import sync_shared  # noqa: E402
from shared import consensus, page  # noqa: E402
from shared.lazy_exports import lazy_exports  # noqa: E402
from shared.patterns import Pattern, most_specific  # noqa: E402
from shared.problems import PlanError, Problem  # noqa: E402
from shared.sharding_info import Section, ShardingInfo, sharding_info_of  # noqa: E402
from shared.stale_parameters import current_parameter, is_stale, mark_current, mark_stale  # noqa: E402


def test_problem_text_and_pickle() -> None:
    problem = Problem("uneven-shards", "fc.weight", dim=0, axis="tp", found="10 rows on 4 ranks", hint="pad it")
    assert str(problem) == "[uneven-shards] fc.weight, dim 0, axis 'tp': 10 rows on 4 ranks -> pad it"
    error = PlanError([problem, Problem("other")])
    assert str(error).splitlines() == ["2 problems", str(problem), "[other]"]
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.problems, str(copied)) == (error.problems, str(error))


@pytest.mark.ranks(4)
def test_equal_ranks_exchange_one_header(ranks: Ranks) -> None:
    with ranks.record() as log:
        consensus.assert_consistent(dist.group.WORLD, "apply", ["a", "b"])
    assert log.ops == ("all_gather",)
    assert sum(log.events[0].bytes_sent) == 3 * consensus.HEADER_BYTES


@pytest.mark.ranks(4)
def test_a_mesh_is_gathered_in_its_own_order(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = consensus.all_gather_header(mesh, bytes([dist.get_rank()]), "test")
    assert [row[0] for row in rows] == consensus.ranks_of(mesh) == [0, 1, 2, 3]
    assert consensus.all_gather_objects(mesh, f"r{dist.get_rank()}", "test") == ["r0", "r1", "r2", "r3"]


@pytest.mark.ranks(4)
def test_one_error_on_a_mesh_reaches_every_rank(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    _, error = consensus.capture_errors(lambda: 1 / (rank != 2))
    with pytest.raises(ZeroDivisionError if rank == 2 else PlanError) as caught:
        consensus.assert_consistent(mesh, "apply", ["same"], error)
    if rank != 2:
        (problem,) = caught.value.problems  # type: ignore[attr-defined]  # a PlanError
        assert problem.code == "rank-failed"
        assert "rank 2: ZeroDivisionError" in problem.found


@pytest.mark.ranks(2)
def test_differing_lines_are_named_with_their_ranks(ranks: Ranks) -> None:
    with pytest.raises(PlanError, match=r"rank 0: weight 0; rank 1: weight 1") as caught:
        consensus.assert_consistent(dist.group.WORLD, "apply", ["mesh", f"weight {dist.get_rank()}"])
    assert [problem.code for problem in caught.value.problems] == ["ranks-disagree"]
    with pytest.raises(PlanError, match=r"rank 0: load; rank 1: save"):  # ranks in different calls
        consensus.assert_consistent(dist.group.WORLD, ("load", "save")[dist.get_rank()], ["same"])


@pytest.mark.ranks(2)
def test_a_peer_that_never_comes_is_an_error_with_the_call(ranks: Ranks) -> None:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"load weights: rank 0 got no answer .* another rank died"):
            consensus.assert_consistent(group, "load weights", ["same"])


def test_a_stale_parameter_raises_where_optimizers_look() -> None:
    old, new = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([old], lr=0.1)
    mark_stale(old, Problem("parameter-replaced", "fc.weight", found="sharded", hint="build it later"), new)
    assert is_stale(old)
    assert current_parameter(old) is new
    assert old.tolist() == [1.0, 1.0, 1.0]
    for work in (optimizer.step, optimizer.zero_grad, lambda: torch.nn.utils.clip_grad_norm_([old], 1.0)):
        with pytest.raises(PlanError, match=r"parameter-replaced\] fc.weight"):
            work()
    mark_current(old)
    assert type(old) is torch.nn.Parameter
    assert not is_stale(old)
    optimizer.step()


def test_sections_cover_every_row_as_often_as_they_are_copied() -> None:
    compared = 0
    for unit, units, copies, ranks in itertools.product((1, 2, 3), range(6), (1, 2, 4), (1, 2, 4, 8)):
        section = Section(unit * units, unit, copies)
        if ranks % copies:
            with pytest.raises(ValueError, match="copies"):
                section.bounds(0, ranks)
            continue
        rows = [row for rank in range(ranks) for row in range(*section.bounds(rank, ranks))]
        assert sorted(rows) == sorted(list(range(section.size)) * copies)
        if unit == copies == 1:
            chunks = torch.arange(section.size).chunk(ranks)
            lengths = [stop - start for start, stop in (section.bounds(rank, ranks) for rank in range(ranks))]
            assert lengths[: len(chunks)] == [len(chunk) for chunk in chunks] or not section.size
        compared += 1
    assert compared == 162


@pytest.mark.ranks(2)
def test_sharding_info_reads_any_tuple_and_travels_as_one(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    local = torch.nn.Parameter(torch.zeros(6, 4))
    assert sharding_info_of(local) is None
    local._sharding_info = (mesh, (Shard(0),), (12, 4), (4, 1), ((8, 2, 1), 4))  # type: ignore[attr-defined]  # ours
    info = sharding_info_of(local)
    assert info == ShardingInfo(mesh, (Shard(0),), torch.Size((12, 4)), (4, 1), (Section(8, 2), Section(4)))
    assert info is not None
    assert info.needs_sections
    assert info.section_axis() == (0, 0)
    assert [info.ranges(rank) for rank in range(2)] == [((0, 4), (8, 10)), ((4, 8), (10, 12))]
    assert type(pickle.loads(pickle.dumps(info._replace(mesh=None)))) is tuple  # type: ignore[arg-type]  # no mesh in a pickle here
    assert not ShardingInfo(mesh, (Replicate(),), torch.Size((2,)), (1,)).needs_sections
    local._sharding_info = (mesh,)  # type: ignore[attr-defined]  # ours
    with pytest.raises(ValueError, match="has to be"):
        sharding_info_of(local)


def test_patterns_match_as_segments_do() -> None:
    names = [".".join(parts) for n in range(1, 5) for parts in itertools.product(("a", "b", "ab", "0"), repeat=n)]
    for glob in ("a", "*.b", "a.*", "?.ab", "{a,0}.b", "[ab].b", "[!a].b.*"):
        for name in names:
            by_segment = len(glob.split(".")) == name.count(".") + 1 and any(
                all(map(fnmatch.fnmatchcase, name.split("."), one.split("."))) for one in Pattern(glob).alternatives
            )
            assert Pattern(glob).matches(name) == by_segment, (glob, name)
    assert [n for n in ("", "a", "a.b", "b", "b.a") if Pattern("a.**").matches(n)] == ["a", "a.b"]
    assert [n for n in ("", "a", "a.b") if Pattern("**").matches(n)] == ["a", "a.b"]
    assert [n for n in ("a", "b.a", "a.b") if Pattern("**.a").matches(n)] == ["a", "b.a"]
    assert Pattern(r"re:l\.\d+").matches("l.12")


def test_within_is_never_wrong() -> None:
    """What a pattern within another matches, the other matches: 2,000 random pairs on all names of three segments."""
    draw = random.Random(0)
    names = [".".join(p) for n in (1, 2, 3) for p in itertools.product(("a", "ab", "b"), repeat=n)]
    segments = ("a", "*", "a*", "?", "**", "b", "[ab]", "{a,b}")
    compared = 0
    for _ in range(2000):
        one, other = (Pattern(".".join(draw.choices(segments, k=draw.randint(1, 3)))) for _ in range(2))
        if one.within(other):
            compared += 1
            assert all(other.matches(name) for name in names if one.matches(name)), (one, other)
    assert compared > 200


@pytest.mark.parametrize("text", ["a..b", "a**", "{a", "[a", "re:(", "re:(a+)+", "re:" + "a*" * 5, "x" * 1001])
def test_bad_patterns_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="invalid-argument"):
        Pattern(text)


def test_the_most_specific_pattern_decides() -> None:
    def decided(*texts: str) -> list[str]:
        return [pattern.text for pattern in most_specific(map(Pattern, texts))]

    assert decided("**", "layers.**", "layers.0.*") == ["layers.0.*"]
    assert decided("**.weight", "fc.weight", "fc.*") == ["fc.weight"]
    assert decided("**", "layers.0.**", "**.bias") == ["layers.0.**", "**.bias"]
    assert decided() == []


def test_lazy_names_are_listed_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("lazy_sample")
    home: Any = types.ModuleType("lazy_sample.home")
    home.thing = object()
    monkeypatch.setitem(sys.modules, "lazy_sample", module)
    monkeypatch.setitem(sys.modules, "lazy_sample.home", home)
    module.__getattr__, module.__dir__ = lazy_exports("lazy_sample", {"home": ("thing",)}, ("home",))
    assert dir(module) == ["__version__", "home", "thing"]
    assert module.thing is home.thing
    assert "thing" in vars(module)
    with pytest.raises(AttributeError, match="'lazy_sample' has no attribute 'other'"):
        _ = module.other


def test_a_page_escapes_and_scrolls() -> None:
    bars = page.stacked_bars("memory", [("rank <0>", [("weights", 2048), ("none", 0)])], {"weights": "#123456"})
    text = page.page("<plan>", [page.note("a & b"), page.cards([("1", "x")]), page.table(["n"], [["1"]], [0]), bars])
    assert "&lt;plan&gt;" in text
    assert "a &amp; b" in text
    assert "rank &lt;0&gt;" in text
    assert text.count('class="scroll"') == 2
    assert "2.00 KiB" in text
    assert "http" not in text.replace("http-equiv", "")


def test_copies_are_equal_byte_for_byte() -> None:
    compared = 0
    for package in repo.packages().values():
        for path, text in sync_shared.expected(package).items():
            assert path.read_text() == text, f"{path}: run tools/sync_shared.py"
            compared += 1
    assert compared >= 0
