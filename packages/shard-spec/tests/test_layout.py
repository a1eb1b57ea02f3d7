"""Laws of layouts: reassembly, ownership, canonical forms, text, pickling; all ranks in one process."""

import math
import pickle
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from shard_spec import (
    BlockShard,
    Box,
    InterleavedShard,
    Layout,
    MeshSpec,
    Partial,
    PlanError,
    Replicate,
    Shard,
    UnevenShard,
)
from shard_spec.layout.placements import REPLICATE, PlacementSpec, ShardSpec

MESH = MeshSpec({"dp": 2, "tp": 4})
NOT_A_PLACEMENT: Any = 0


def local_tensor(layout: Any, rank: Any, tensor: Any) -> Any:
    """What the rank's local tensor is to hold: the boxes, concatenated as the docstring of `boxes` says."""
    pieces = layout.intervals(rank, tensor.shape)
    for dim, intervals in enumerate(pieces):
        index = [i for offset, size in intervals for i in range(offset, offset + size)]
        tensor = tensor.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return tensor


def random_sizes(rng: Any, total: Any, count: Any) -> Any:
    cuts = sorted(rng.randint(0, total) for _ in range(count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))


def random_layout(rng: Any, shape: Any) -> Any:
    """A layout with any placement on the first axis that cuts a dim, plain and interleaved ones after it."""
    mesh = MeshSpec({f"a{i}": rng.choice((1, 2, 3, 4)) for i in range(rng.randint(1, 3))})
    specs: list[PlacementSpec] = []
    used = set()
    for size in mesh.shape:
        dim = rng.randrange(len(shape))
        signed = dim - rng.choice((0, len(shape)))
        kinds = ["R", "S", "B", "C"] if dim in used else ["R", "S", "U", "B", "C", "I", "J"]
        kind = rng.choice(kinds)
        used.add(dim)
        choices: dict[str, PlacementSpec] = {
            "R": REPLICATE,
            "S": ShardSpec(signed),
            "U": UnevenShard(signed, random_sizes(rng, shape[dim], size)),
            "B": BlockShard(signed, rng.randint(1, 4)),
            "C": BlockShard(signed, rng.randint(1, 4), cyclic=True),
            "I": InterleavedShard(signed, random_sizes(rng, shape[dim], rng.randint(1, 3))),
            "J": InterleavedShard(signed, rng.randint(1, 3)),
        }
        specs.append(choices[kind])
    return Layout(mesh, specs)


def test_every_layout_reassembles_every_element_as_often_as_it_is_replicated() -> None:
    rng = random.Random(3)
    cases = boxes_seen = multi = 0
    for _ in range(400):
        shape = tuple(rng.choice((1, 2, 5, 8, 9, 12)) for _ in range(rng.randint(1, 3)))
        layout = random_layout(rng, shape)
        count = torch.zeros(shape, dtype=torch.int64)
        full = torch.arange(count.numel()).view(shape)
        for rank in layout.mesh.ranks:
            boxes = layout.boxes(rank, shape)
            for box in boxes:
                count[box.slices()] += 1
            local = local_tensor(layout, rank, full)
            assert tuple(local.shape) == layout.local_shape(rank, shape)
            assert sum(box.numel for box in boxes) == local.numel()
            if sum(len(pieces) > 1 for pieces in layout.intervals(rank, shape)) <= 1 and boxes:
                dim = next((d for d, p in enumerate(layout.intervals(rank, shape)) if len(p) > 1), 0)
                assert torch.equal(torch.cat([full[box.slices()] for box in boxes], dim), local)
                multi += len(boxes) > 1
            boxes_seen += len(boxes)
        assert layout.local_shapes(shape) == [layout.local_shape(rank, shape) for rank in layout.mesh.ranks]
        axes = zip(layout.mesh.shape, layout.specs, strict=True)
        replicas = math.prod(size for size, spec in axes if spec.dim is None)
        assert bool((count == replicas).all()), (layout, shape)
        cases += 1
    assert cases == 400
    assert boxes_seen > 1_500
    assert multi > 150


def test_canonical_keeps_the_bytes_and_is_idempotent_and_text_round_trips() -> None:
    rng = random.Random(5)
    for _ in range(400):
        shape = tuple(rng.choice((1, 3, 8, 12)) for _ in range(rng.randint(1, 3)))
        layout = random_layout(rng, shape)
        plain = layout.canonical(shape)
        assert all(plain.boxes(rank, shape) == layout.boxes(rank, shape) for rank in layout.mesh.ranks)
        assert plain.canonical(shape) == plain
        assert layout.equivalent_to(plain, shape)
        assert Layout.parse(str(layout), layout.mesh) == layout
        assert eval(repr(layout), {"Layout": Layout, "MeshSpec": MeshSpec}) == layout
        assert pickle.loads(pickle.dumps(layout)) == layout
        assert hash(pickle.loads(pickle.dumps(layout))) == hash(layout)


def test_equivalence_compares_bytes_not_syntax() -> None:
    # 8 rows: two halves of whole blocks of 2 are a plain shard; -2 is dim 0; an axis of one rank cuts nothing.
    assert Layout(MESH, {"tp": BlockShard(0, 2)}).equivalent_to(Layout(MESH, {"tp": Shard(-2)}), (8, 3))
    assert not Layout(MESH, {"tp": BlockShard(0, 3)}).equivalent_to(Layout(MESH, {"tp": Shard(0)}), (8, 3))
    one = MeshSpec({"dp": 2, "x": 1, "tp": 4})
    assert Layout(one, "dp:R, x:S(1), tp:S(0)").equivalent_to(Layout(MESH, "dp:R, tp:S(0)"), (8, 3))
    # The same ranks on one axis of 8 as on two of 2 and 4.
    flat = MeshSpec({"all": 8})
    assert Layout(flat, "S(0)").equivalent_to(Layout(MESH, "S(0), S(0)"), (16,))
    assert not Layout(flat, "S(0)").equivalent_to(Layout(MESH, "dp:S(0), tp:S(0); order=tp>dp"), (16,))
    permuted = MeshSpec({"all": 8}, ranks=[0, 2, 4, 6, 1, 3, 5, 7])
    assert not Layout(permuted, "S(0)").equivalent_to(Layout(flat, "S(0)"), (16,))
    assert Layout(permuted, "R").equivalent_to(Layout(flat, "R"), (16,))
    assert not Layout(MESH, "dp:P, tp:R").equivalent_to(Layout(MESH, "dp:R, tp:R"), (16,))
    assert Layout(MESH, "dp:P, tp:P").equivalent_to(Layout(flat, "P"), (16,))
    assert not Layout(MESH, "dp:P(max), tp:P").equivalent_to(Layout(flat, "P"), (16,))
    trainer, generator = MeshSpec({"tp": 4}, ranks=range(4)), MeshSpec({"tp": 4}, ranks=range(4, 8))
    assert not Layout(trainer, "S(0)").equivalent_to(Layout(generator, "S(0)"), (16,))


def test_order_says_which_axis_cuts_first_as_dtensors_strided_shard_does() -> None:
    mesh = MeshSpec({"dp": 2, "tp": 2})
    first = Layout(mesh, "dp:S(0), tp:S(0); order=tp>dp")
    assert [first.offsets(rank, (8,)) for rank in range(4)] == [(0,), (4,), (2,), (6,)]
    strided = Layout(mesh, [InterleavedShard(0, 2), Shard(0)])
    assert first.equivalent_to(strided, (8,))
    for rows in range(1, 30):  # uneven rows: as equal as their boxes are
        same = all(first.boxes(rank, (rows,)) == strided.boxes(rank, (rows,)) for rank in range(4))
        assert first.equivalent_to(strided, (rows,)) == same
    assert Layout(mesh, [Shard(0), Shard(0)], order=("dp", "tp")) == Layout(mesh, "S(0), S(0)")
    assert Layout(mesh, "dp:S(0), tp:S(1); order=tp>dp").canonical((4, 4)) == Layout(mesh, "dp:S(0), tp:S(1)")


def test_fused_qkv_gives_each_rank_its_piece_of_every_section() -> None:
    layout = Layout(MeshSpec({"tp": 2}), [InterleavedShard(0, (4, 2, 2))])
    assert layout.boxes(1, (8, 3)) == (Box((2, 0), (2, 3)), Box((5, 0), (1, 3)), Box((7, 0), (1, 3)))
    with pytest.raises(PlanError, match="not-a-grid"):
        layout.offsets(1, (8, 3))


def test_sections_of_many_sections_take_no_product_of_their_numbers() -> None:
    layout = Layout(MeshSpec({"a": 2, "b": 2}), "a:I(0,60000), b:I(0,60000)")
    assert [layout.local_shape(rank, (12_000_000,)) for rank in (0, 3)] == [(3_000_000,)] * 2


def test_replicas_contributors_and_primary() -> None:
    layout = Layout(MESH, "dp:P, tp:R")
    assert layout.contributors(5) == (1, 5)
    assert layout.partial == {"dp": "sum"}
    assert [rank for rank in MESH.ranks if layout.is_primary(rank)] == [0, 4]


def test_sub_groups_and_other_rank_sets() -> None:
    mesh = MeshSpec({"tp": 4}, ranks=[7, 5, 6, 4])
    layout = Layout(mesh, "S(0)")
    assert layout.offsets(5, (8,)) == (2,)
    assert layout.boxes(0, (8,)) == ()
    with pytest.raises(PlanError, match="rank-outside-mesh"):
        layout.local_shape(0, (8,))
    assert mesh.axis_groups("tp") == ((7, 5, 6, 4),)
    assert MESH.axis_groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_a_scalar_has_a_shape_on_every_rank() -> None:
    assert Layout(MeshSpec({"dp": 2, "tp": 2}), {}).local_shapes(()) == [()] * 4


def test_a_million_ranks_cost_nothing() -> None:
    mesh = MeshSpec({"pp": 16, "dp": 4096, "tp": 16})
    layout = Layout(mesh, "dp:S(0), tp:S(1)")
    assert layout.boxes(1_000_000, (53248, 16384))[0].sizes == (13, 1024)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: MeshSpec({}), "invalid-mesh"),
        (lambda: MeshSpec({"dp": 0}), "invalid-mesh"),
        (lambda: MeshSpec({"d p": 2}), "invalid-mesh"),
        (lambda: MeshSpec({"dp": 2}, ranks=[0]), "invalid-mesh"),
        (lambda: MeshSpec({"dp": 2}, ranks=[1, 1]), "invalid-mesh"),
        (lambda: MeshSpec({"dp": 2}, ranks=[-1, 1]), "invalid-mesh"),
        (lambda: MeshSpec({"dp": 2}, ranks=[0, 1.7]), "invalid-mesh"),  # type: ignore[list-item]  # on purpose
        (lambda: MeshSpec({"dp": 200_000}, ranks=[0] * 200_000), "invalid-mesh"),
        (lambda: MeshSpec({"dp": 10**6, "tp": 10**6}), "mesh-too-large"),
        (lambda: MeshSpec.parse("dp=2,dp=2"), "invalid-mesh"),
        (lambda: MESH.axis_size("pp"), "unknown-axis"),
        (lambda: MESH.rank_at((2, 0)), "index-out-of-range"),
        (lambda: Layout(MESH, [Shard(0)]), "argument-count"),
        (lambda: Layout(MESH, {"pp": Shard(0)}), "unknown-axis"),
        (lambda: Layout(MESH, {"tp": "X(0)"}), "invalid-layout"),
        (lambda: Layout(MESH, {"tp": NOT_A_PLACEMENT}), "wrong-type"),
        (lambda: Layout(MESH, {"tp": UnevenShard(0, (1, 2))}), "argument-count"),
        (lambda: Layout(MESH, "dp:S(0), tp:S(0); order=pp>tp"), "unknown-axis"),
        (lambda: Layout(MESH, "dp:S(0), tp:R; order=tp>dp"), "conflicting-arguments"),
        (lambda: Layout(MESH, "dp:S(0), dp:R"), "duplicate-name"),
        (lambda: Layout(MESH, "dp:S(0), tp:S(0); order=dp>dp"), "duplicate-name"),
        (lambda: Layout(MESH, "dp:S(0), tp:R; reversed"), "invalid-layout"),
        (lambda: Layout(MESH, {"tp": Partial("no-such-op")}), "invalid-argument"),
        (lambda: UnevenShard(0, ()), "invalid-layout"),
        (lambda: UnevenShard(0, (1, -1)), "invalid-layout"),
        (lambda: BlockShard(0, 0), "invalid-layout"),
        (lambda: InterleavedShard(0, 0), "invalid-layout"),
        (lambda: Box((0, 0), (1,)), "shape-mismatch"),
        (lambda: Box((-1,), (1,)), "box-out-of-range"),
        (lambda: Layout(MESH, {"tp": Shard(2)}).local_shape(0, (4, 4)), "dim-out-of-range"),
        (lambda: Layout(MESH, {"tp": Shard(0)}).boxes(0, ()), "dim-out-of-range"),
        (lambda: Layout(MESH, {"tp": UnevenShard(0, (1, 2, 3, 4))}).boxes(0, (9,)), "shape-mismatch"),
        (lambda: Layout(MESH, {"tp": InterleavedShard(0, (4, 4))}).boxes(0, (9,)), "invalid-sections"),
    ],
)
def test_what_is_wrong_is_said(make: Any, code: Any) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert code in [problem.code for problem in caught.value.problems]
    unpickled = pickle.loads(pickle.dumps(caught.value))
    assert unpickled.problems == caught.value.problems
    assert str(unpickled) == str(caught.value)


def test_all_wrong_axes_are_named_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        Layout(MESH, {"pp": "S(0)", "tp": "nonsense", "dp": "Q"})
    assert len(caught.value.problems) == 2  # both texts; names are checked on placements that could be read
    with pytest.raises(PlanError) as caught:
        Layout(MESH, {"pp": "S(0)", "cp": "R"})
    assert [problem.axis for problem in caught.value.problems] == ["pp", "cp"]


def test_placements_are_torchs_own_and_round_trip() -> None:
    import torch.distributed.tensor as dtensor

    assert (Shard, Replicate, Partial) == (dtensor.Shard, dtensor.Replicate, dtensor.Partial)
    layout = Layout(MESH, [Partial("avg"), Shard(1)])
    assert layout.placements == (Partial("avg"), Shard(1))
    special = (UnevenShard(0, (1, 3)), BlockShard(-1, 128, cyclic=True))
    assert Layout(MeshSpec({"a": 2, "b": 3}), special).placements == special


def test_values_need_neither_torch_nor_dtensor() -> None:
    code = """
import sys
from shard_spec import Box, InterleavedShard, Layout, MeshSpec
layout = Layout(MeshSpec({"dp": 2, "tp": 2}), {"tp": InterleavedShard(0, 2), "dp": "S(1)"})
assert len(layout.boxes(1, (8, 8))) == 2 and layout.equivalent_to(Layout.parse(str(layout), layout.mesh), (8, 8))
assert "torch" not in sys.modules, "values imported torch"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_boxes() -> None:
    box = Box((2, 0), (4, 6))
    assert box.intersect(Box((4, 3), (9, 9))) == Box((4, 3), (2, 3))
    assert box.intersect(Box((6, 0), (1, 1))) is None
    assert box.ends == (6, 6)
    assert box.numel == 24


@pytest.mark.parametrize("text", ["S(0)", "S(-1)", "U(0, [2, 1])", "B(0, 2)", "I(0, 2)", "R", "P"])
def test_chunks_are_known_by_their_type(text: str) -> None:
    (spec,) = Layout(MeshSpec({"x": 2}), text).specs
    assert getattr(spec, "is_chunked", False) == text.startswith("S(")
