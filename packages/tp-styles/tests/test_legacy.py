"""The first styles: names, signatures, errors and meaning."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from tp_styles import legacy

EXACT = 1e-12

SEED_NAMES = [
    "ParallelStyle",
    "RowwiseParallel",
    "ColwiseParallel",
    "PairwiseParallel",
    "SequenceParallel",
    "make_input_replicate_1d",
    "make_input_reshard_replicate",
    "make_input_shard_1d",
    "make_input_shard_1d_last_dim",
    "make_sharded_output_tensor",
    "make_output_replicate_1d",
    "make_output_reshard_tensor",
    "make_output_tensor",
    "make_output_shard_1d",
]

TODAY = ("SequenceParallel", "ColwiseParallel", "RowwiseParallel")
"""Names that have another class at the top level."""


def test_names() -> None:
    for name in SEED_NAMES:
        assert name in legacy.__all__
        assert name in tp.__all__
        assert name in TODAY or getattr(legacy, name) is getattr(tp, name)
    for name in ("ColwiseParallel", "RowwiseParallel"):
        assert issubclass(getattr(legacy, name), getattr(tp, name))
    assert not issubclass(legacy.SequenceParallel, tp.SequenceParallel)
    assert issubclass(legacy.SequenceParallel, tp.PairwiseParallel)


def test_signatures() -> None:
    def names(function: object) -> list[str]:
        return list(inspect.signature(function).parameters)  # type: ignore[arg-type]

    assert names(tp.make_input_shard_1d) == ["input", "device_mesh", "dim"]
    assert names(tp.make_input_shard_1d_last_dim) == ["input", "device_mesh"]
    assert names(tp.make_output_shard_1d) == ["output", "device_mesh", "dim"]
    assert names(tp.make_sharded_output_tensor) == ["output", "_device_mesh"]
    for style in (legacy.ColwiseParallel, legacy.RowwiseParallel, tp.PairwiseParallel):
        assert names(style)[:2] == ["_prepare_input", "_prepare_output"]
    assert names(legacy.SequenceParallel) == []
    assert legacy.ColwiseParallel()._prepare_input is tp.make_input_replicate_1d
    assert legacy.ColwiseParallel()._prepare_output is tp.make_sharded_output_tensor
    assert legacy.RowwiseParallel()._prepare_input is tp.make_input_shard_1d_last_dim
    assert legacy.RowwiseParallel()._prepare_output is tp.make_output_tensor
    assert legacy.SequenceParallel()._prepare_output is tp.make_output_reshard_tensor


def test_arguments_of_two_eras_do_not_mix() -> None:
    with pytest.raises(TypeError):
        tp.ColwiseParallel(tp.make_input_shard_1d, input_layouts=Shard(0))  # type: ignore[misc,arg-type]
    with pytest.raises(TypeError):
        legacy.RowwiseParallel(_prepare_output=tp.make_output_shard_1d, use_local_output=False)  # type: ignore[call-arg]
    style = tp.ColwiseParallel()
    style._prepare_input = tp.make_input_shard_1d
    (problem,) = tp.plan_styles(nn.Linear(4, 4), style, 2).problems
    assert problem.code == "invalid-argument"


def test_the_base_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        tp.ParallelStyle(None, None)  # type: ignore[abstract]


@pytest.mark.ranks(2, 4)
def test_prepare_functions(ranks: Ranks) -> None:
    size, mesh = ranks.world_size, ranks.mesh((ranks.world_size,), ("tp",))
    torch.manual_seed(3)
    full = torch.randn(8, 16)
    local = full.chunk(size)[ranks.rank]
    sharded = tp.make_input_shard_1d(local, mesh)
    assert sharded.placements == (Shard(0),)
    assert torch.equal(sharded.full_tensor(), full)
    assert torch.equal(tp.make_input_reshard_replicate(local, mesh).to_local(), full)
    assert tp.make_input_shard_1d_last_dim(full, mesh).shape == (8, 16 * size)
    columns = tp.make_input_shard_1d_last_dim(sharded)  # a DTensor brings its mesh
    assert columns.placements == (Shard(1),)
    assert torch.equal(columns.to_local(), full.chunk(size, 1)[ranks.rank])
    assert torch.equal(tp.make_input_replicate_1d(sharded).to_local(), full)
    assert tp.make_input_shard_1d(input=local, device_mesh=mesh, dim=1).placements == (Shard(1),)  # by keyword

    partial = DTensor.from_local(full, mesh, [Partial()])
    assert tp.make_output_shard_1d(partial, dim=1).placements == (Shard(1),)
    torch.testing.assert_close(tp.make_output_tensor(partial, mesh), full * size)
    torch.testing.assert_close(tp.make_output_reshard_tensor(output=partial, device_mesh=mesh), local * size)
    assert tp.make_output_replicate_1d(partial).placements == (Replicate(),)
    assert torch.equal(tp.make_sharded_output_tensor(sharded, mesh), local)
    # The first version handed out this rank's unreduced summand.
    with pytest.raises(AssertionError, match="partial sum"):
        tp.make_sharded_output_tensor(partial, mesh)


@pytest.mark.ranks(4)
def test_errors_of_the_first_styles(ranks: Ranks) -> None:
    mesh, square = ranks.mesh((4,), ("tp",)), ranks.mesh((2, 2), ("dp", "tp"))
    x = torch.randn(4, 4)
    dtensor = tp.make_input_shard_1d(x, mesh)
    for function in (tp.make_input_shard_1d, tp.make_input_replicate_1d, tp.make_input_shard_1d_last_dim):
        with pytest.raises(RuntimeError, match="device_mesh is not passed nor can be inferred"):
            function(x)
        with pytest.raises(tp.PlanError, match="device_mesh has dims 2 but expected to be 1 for input"):
            function(x, square)
        with pytest.raises(RuntimeError, match=r"expects torch\.Tensor or DTensor input but received <class 'str'>"):
            function("x", mesh)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="mesh-mismatch"):  # redistribute would ignore the mesh
            function(dtensor, square["tp"])
    for output in (tp.make_output_shard_1d, tp.make_output_tensor, tp.make_output_reshard_tensor):
        with pytest.raises(AssertionError, match="Expect output of Tensor Parallel to be a DTensor, but found <class"):
            output(x, mesh)  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match="device_mesh has dims 2 but expected to be 1 for output"):
            output(dtensor, square)
        with pytest.raises(ValueError, match="mesh-mismatch"):
            output(dtensor, square["tp"])


def vectors(width: int = 8, count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(8, width, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.ranks(2, 4)
def test_pairwise(ranks: Ranks) -> None:
    """Linear layers two by two, an odd last one as it is; nested parents found."""
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    torch.manual_seed(0)
    layers = [nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 8)]
    model = nn.Sequential(nn.Sequential(*layers), nn.LayerNorm(8)).double()
    count = models.compare_training(
        model,
        lambda m: tp.parallelize_module(m, mesh, tp.PairwiseParallel()),
        vectors(),
        models.square_loss,
        mesh,
        atol=EXACT,
    )
    assert count == 5 + 2 * (12 * 9 + 8 * 13) + 72 + 16
    placements = [getattr(p, "placements", None) for _, p in model.named_parameters()]
    pair = [(Shard(0),), (Shard(0),), (Shard(1),), (Replicate(),)]
    assert placements == [*pair, *pair, None, None, None, None]


@pytest.mark.ranks(2)
def test_pairwise_sequence(ranks: Ranks) -> None:
    """Each rank has its rows; they are gathered before the pair and scattered after it."""
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(models.MLP).double()
    reference = copy.deepcopy(model)
    tp.parallelize_module(model, mesh, legacy.SequenceParallel())
    weight = torch.linspace(0, 1, 64, dtype=torch.float64).view(8, 8)
    model(models.rows(vectors()[0]))  # the first call is checked
    for x in vectors():
        with ranks.record() as log:
            out = model(models.rows(x))
        assert log.ops == ("all_gather", "reduce_scatter")
        assert type(out) is torch.Tensor
        torch.testing.assert_close(out, models.rows(reference(x)), atol=EXACT, rtol=0)
        torch.autograd.backward((out * models.rows(weight)).sum())
        (reference(x) * weight).sum().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert models.assert_close(models.full_gradients(model, mesh), gradients, atol=1e-11) == 12 * 9 + 8 * 13


@pytest.mark.ranks(2)
def test_prepare_functions_on_styles(ranks: Ranks) -> None:
    """Functions given to the constructor or set as attributes; keyword input; later inputs kept."""
    mesh = ranks.mesh((2,), ("tp",))
    kinds: list[str] = []

    def before(inputs: object, device_mesh: object) -> DTensor:
        kinds.append(type(inputs).__name__)
        return tp.make_input_replicate_1d(inputs, device_mesh)  # type: ignore[arg-type]

    model = models.seeded(models.MLP).double()
    reference = copy.deepcopy(model)
    up = legacy.ColwiseParallel()
    up._prepare_input = before
    up._prepare_output = None
    tp.parallelize_module(model, mesh, {"up": up, "down": legacy.RowwiseParallel(None, tp.make_output_tensor)})
    x = vectors()[0]
    torch.testing.assert_close(model(x=x), reference(x), atol=EXACT, rtol=0)
    torch.testing.assert_close(model.get_submodule("up")(input=x).full_tensor(), reference.up(x), atol=EXACT, rtol=0)  # type: ignore[operator]
    assert kinds == ["tuple", "tuple", "tuple"]  # once more in the check of the first call

    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
            return super().forward(input) * scale + shift

    torch.manual_seed(1)
    layer = Scaled(8, 8).double()
    alone = copy.deepcopy(layer)
    tp.parallelize_module(layer, mesh, legacy.ColwiseParallel(before, tp.make_output_tensor))
    torch.testing.assert_close(layer(x, 2.0, shift=1.0), alone(x, 2.0, shift=1.0), atol=EXACT, rtol=0)


@pytest.mark.ranks(2)
def test_styles_of_ones_own(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))

    class Gathered(legacy.RowwiseParallel):
        def __init__(self) -> None:
            super().__init__(tp.make_input_shard_1d_last_dim, tp.make_output_reshard_tensor)

    class Whole(tp.ParallelStyle):
        def __init__(self) -> None:
            super().__init__(tp.make_input_replicate_1d, tp.make_output_tensor)

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(12, 8)).double()
    reference = copy.deepcopy(model)
    tp.parallelize_module(model, mesh, {"0": Whole(), "1": tp.ColwiseParallel(), "2": Gathered()})
    x = vectors()[0]
    torch.testing.assert_close(model(x), models.rows(reference(x)), atol=EXACT, rtol=0)


@pytest.mark.ranks(4)
def test_a_mesh_with_several_dims(ranks: Ranks) -> None:
    x = vectors()[0]
    for dim in (0, 1):
        model = models.seeded(models.MLP).double()
        reference = copy.deepcopy(model)
        tp.parallelize_module(model, ranks.mesh((2, 2), ("a", "b")), tp.PairwiseParallel(), dim)
        assert model.get_parameter("up.weight").device_mesh.mesh_dim_names == ("ab"[dim],)  # type: ignore[attr-defined]
        torch.testing.assert_close(model(x), reference(x), atol=EXACT, rtol=0)
    with ranks.mesh((4,), ("tp",)):
        model = models.seeded(models.MLP).double()
        tp.parallelize_module(model, parallelize_plan=tp.PairwiseParallel())
    torch.testing.assert_close(model(x), reference(x), atol=EXACT, rtol=0)


@pytest.mark.ranks(2)
def test_wrong_plans(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.MLP()
    with pytest.warns(UserWarning, match="changes nothing"):
        assert tp.parallelize_module(model, mesh) is model
    with pytest.raises(TypeError, match="Expect Union"):
        tp.parallelize_module(model, mesh, 3)  # type: ignore[arg-type]
    with pytest.raises(tp.PlanError, match="missing-mesh"):
        tp.parallelize_module(model, None, tp.PairwiseParallel())
    with pytest.raises(tp.PlanError, match="module-kind"):
        tp.parallelize_module(nn.Linear(8, 8), mesh, tp.PairwiseParallel())
    with pytest.raises(NotImplementedError, match="MultiheadAttention"):
        tp.parallelize_module(nn.MultiheadAttention(8, 2), mesh, tp.PairwiseParallel())
    with pytest.raises(NotImplementedError, match="LayerNorm"):
        tp.parallelize_module(nn.LayerNorm(8), mesh, tp.ColwiseParallel())
