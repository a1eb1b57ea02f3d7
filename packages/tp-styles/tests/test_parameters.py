"""What users do to a parallel model by hand, between and around the calls that tests of styles make.

Written down next to one process: what the parts cannot follow is refused, the rest is what the whole model does.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from tp_styles._shared.consensus import capture_errors
from tp_styles.runtime.parameters import split_of

EXACT = 1e-12
PLAN = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
GATED = {"both": tp.FusedColwiseParallel(2), "down": tp.RowwiseParallel()}


def x64(*shape: int) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randn(*shape, dtype=torch.float64)


def pair(mesh: DeviceMesh) -> tuple[models.MLP, models.MLP]:
    """A parallel MLP, and the same one alone."""
    model = models.seeded(lambda: models.MLP().double())
    alone = copy.deepcopy(model)
    tp.apply_plan(model, mesh, PLAN)
    assert isinstance(model, models.MLP)
    assert isinstance(alone, models.MLP)
    return model, alone


def assert_same_gradients(model: nn.Module, alone: nn.Module, mesh: DeviceMesh) -> None:
    gradients = models.full_gradients(model, mesh)
    expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    assert expected
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=EXACT, rtol=1e-10)


@pytest.mark.ranks(2)
def test_whole_weights_in_place_of_parts(ranks: Ranks) -> None:
    """Shapes fit from column to row: both ranks would compute everything, and the sum would be doubled."""
    mesh = ranks.mesh((2,), ("tp",))
    model, alone = pair(mesh)
    state = {name: value.clone() for name, value in alone.state_dict().items()}
    with pytest.raises(tp.PlanError, match=r"shape-mismatch.*up\.weight, dim 0: 12 .* has 6"):
        torch.func.functional_call(model, state, (x64(3, 8),))
    replicated = {
        name: DTensor.from_local(2 * value, mesh, [Replicate()], run_check=False) for name, value in state.items()
    }
    model.load_state_dict(replicated, assign=True)
    alone.load_state_dict({name: 2 * value for name, value in state.items()})
    torch.testing.assert_close(model(x64(3, 8)), alone(x64(3, 8)), atol=EXACT, rtol=1e-12)
    for layer in (model.up, model.down):
        layer.weight = nn.Parameter(torch.ones(layer.out_features, layer.in_features, dtype=torch.float64))
    with pytest.raises(tp.PlanError, match="shape-mismatch"):
        model(x64(3, 8))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp
@pytest.mark.ranks(2)
def test_transforms_of_torch_func(ranks: Ranks) -> None:
    """Shards through `functional_call` are right; every transform is refused by name, on every rank."""
    model, alone = pair(ranks.mesh((2,), ("tp",)))
    x = x64(3, 8)
    shards: dict[str, torch.Tensor] = dict(model.named_parameters())
    torch.testing.assert_close(torch.func.functional_call(model, shards, (x,)), alone(x), atol=EXACT, rtol=1e-12)
    detached = {name: parameter.detach() for name, parameter in shards.items()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(model, parameters, (x,)).square().sum()
        return result

    calls: dict[str, Callable[[], Any]] = {
        "grad of parameters": lambda: torch.func.grad(loss)(detached, x),
        "gradients of samples": lambda: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(detached, x),
        "grad of inputs": lambda: torch.func.grad(lambda x: model(x).sum())(x),
        "vmap": lambda: torch.func.vmap(model)(x),
        "jacrev": lambda: torch.func.jacrev(model)(x),
        "jvp": lambda: torch.func.jvp(model, (x,), (x,)),
    }
    for name, call in calls.items():
        with pytest.raises(tp.PlanError, match=r"unsupported-option.*undo\(\) gives the full model"):
            call()
        assert ranks.gather(name) == [name] * 2
    torch.testing.assert_close(model(x), alone(x), atol=EXACT, rtol=1e-12)


@pytest.mark.ranks(2)
def test_gradients_of_gradients(ranks: Ranks) -> None:
    """A gradient penalty goes through the collectives of the backward pass; as no operation, they gave a part."""
    mesh = ranks.mesh((2,), ("tp",))
    model, alone = pair(mesh)
    results = []
    for one in (model, alone):
        x = x64(2, 4, 8).requires_grad_()
        (slope,) = torch.autograd.grad(one(x).pow(3).sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        curve.square().sum().backward()
        results.append((slope, curve, x.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=0, rtol=1e-9)
    assert_same_gradients(model, alone, mesh)
    with torch.no_grad(), pytest.raises(RuntimeError, match="unsupported-option"):  # no collective behind its back
        torch.func.vmap(model)(x64(2, 4, 8))
    # On sequence shards: gather, scatter, and the row-wise bias, whose gradient is summed.
    torch.manual_seed(0)
    model = models.MLP().double()
    alone = copy.deepcopy(model)
    rows = tp.RowwiseParallel(output_layouts=Shard(1))
    tp.apply_plan(model, mesh, {"up": tp.ColwiseParallel(input_layouts=Shard(1)), "down": rows})
    batch = x64(2, 4, 8)
    for one, part in ((model, batch[:, 2 * ranks.rank :][:, :2]), (alone, batch)):
        x = part.clone().requires_grad_()
        (slope,) = torch.autograd.grad(one(x).pow(3).sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert_same_gradients(model, alone, mesh)
    logits, target = x64(3, 8), torch.tensor([1, 0, 5])
    local, full = (logits.chunk(2, -1)[ranks.rank].clone().requires_grad_(), logits.clone().requires_grad_())
    for x, loss in (
        (local, tp.vocab_parallel_cross_entropy(local, target, mesh=mesh, label_smoothing=0.1)),
        (full, nn.functional.cross_entropy(full, target, label_smoothing=0.1)),
    ):
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.pow(3).sum().backward()
    assert local.grad is not None
    assert full.grad is not None
    torch.testing.assert_close(local.grad, full.grad.chunk(2, -1)[ranks.rank])


@pytest.mark.ranks(2)
def test_new_values_of_sharded_parameters(ranks: Ranks) -> None:
    """A module resets its weights as the full ones; `nn.init` refuses a fused shard."""
    mesh = ranks.mesh((2,), ("tp",))
    model: Any = models.seeded(lambda: models.Gated().double())
    alone = copy.deepcopy(model)
    tp.apply_plan(model, mesh, GATED)
    for one in (model, alone):
        torch.manual_seed(3)
        one.both.reset_parameters()
        one.down.reset_parameters()
    for name, value in tp.full_state_dict(model).items():
        assert torch.equal(value, alone.state_dict()[name]), name
    draws: list[Callable[[Any], Any]] = [nn.init.normal_, nn.init.uniform_, nn.init.xavier_uniform_]
    draws += [nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.trunc_normal_]
    draws += [nn.init.eye_, lambda weight: nn.init.sparse_(weight, 0.5)]
    before = model.both.weight.detach().clone()
    for draw in draws:
        with pytest.raises(tp.PlanError, match="local-shard-as-full"):
            draw(model.both.weight)
    assert torch.equal(model.both.weight, before)
    nn.init.zeros_(model.both.bias), nn.init.constant_(model.both.bias, 2.0)  # the same on any shard
    assert torch.equal(tp.full_state_dict(model)["both.bias"], torch.full((24,), 2.0, dtype=torch.float64))
    with torch.device("meta"):
        later: Any = models.Gated()
    tp.apply_plan(later, mesh, GATED)
    later.to_empty(device="cpu")
    torch.manual_seed(3)
    later.both.reset_parameters()
    torch.manual_seed(3)
    assert torch.equal(tp.full_state_dict(later)["both.weight"], type(later)().both.weight)
    model.float().double()
    model.load_state_dict(alone.state_dict())
    for one in (model, alone):
        one(x64(3, 8)).sum().backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    torch.testing.assert_close(tp.clip_grad_norm_(model.parameters(), 1.0), norm, atol=EXACT, rtol=0)
    with pytest.raises(tp.PlanError, match="invalid-argument"):
        tp.clip_grad_norm_(model.parameters(), 1.0, -math.inf)


@pytest.mark.ranks(2)
def test_optimizers_that_need_full_matrices_or_one_kind_of_tensor(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model: Any = models.seeded(lambda: nn.Sequential(models.Gated(), nn.LayerNorm(8)).double())
    tp.apply_plan(model, mesh, {f"0.{name}": style for name, style in GATED.items()})
    model(x64(3, 8)).square().sum().backward()
    weight = model[0].both.weight
    values = weight.detach().clone()
    optimizers: list[Callable[[], object]] = [
        torch.optim.Muon([weight]).step,
        torch.optim.Adafactor([weight]).step,
        lambda: torch.optim.LBFGS([weight]).step(lambda: model(x64(3, 8)).sum()),
    ]
    for call in optimizers:
        with pytest.raises(tp.PlanError, match="not-elementwise"):
            call()
    assert torch.equal(weight, values)
    torch.optim.AdamW(model.parameters()).step()
    norm, down = model[1].weight, model[0].down.weight
    with pytest.raises(tp.PlanError, match=r"mixed-parameters.*LBFGS: one vector on DTensors.*rest=\"replicated\""):
        torch.optim.LBFGS([down, norm]).step(lambda: model(x64(3, 8)).sum())
    for kernels in ("fused", "foreach"):
        for params, remedy in (([down, norm], r"rest=\"replicated\""), ([down, weight], "a group of their own")):
            optimizer = torch.optim.AdamW(params, fused=kernels == "fused", foreach=kernels == "foreach")
            for _ in range(2):
                with pytest.raises(tp.PlanError, match=f"mixed-parameters.*{kernels}=True.*{remedy}"):
                    optimizer.step()
    torch.optim.AdamW([down], foreach=True).step()
    nn.utils.parametrizations.spectral_norm(model[0].both)
    with pytest.raises(tp.PlanError, match=r"local-shard-as-full.*weight.*ParametrizedLinear"):
        model(x64(3, 8))


FULL_READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda w: w.norm(),
    "torch.norm": torch.norm,
    "vector_norm": torch.linalg.vector_norm,
    "norm of columns": lambda w: w.norm(dim=0),
    "std": lambda w: w.std(),
    "mean": lambda w: w.mean(),
    "mean of columns": lambda w: w.mean(0),
    "sum": torch.sum,
    "largest": lambda w: w.max(),
    "argmax": lambda w: w.argmax(),
    "svdvals": torch.linalg.svdvals,
    "svd": lambda w: torch.svd(w)[1],
    "matrix norm": lambda w: torch.linalg.matrix_norm(w, 2),
    "normalised columns": lambda w: torch.nn.functional.normalize(w, dim=0),
    "softmax of columns": lambda w: w.softmax(0),
    "softmax by keyword": lambda w: torch.softmax(w, dim=-2),
    "all": lambda w: (w == w) & w.all(),
    "sorted": lambda w: w.sort(dim=0)[0],
    "quantile": lambda w: w.quantile(0.5),
    "squares of a penalty": lambda w: w.square().sum(),
    "products of a penalty": lambda w: (w * w).mean(),
    "powers of a penalty": lambda w: ((w - 1).abs() ** 1.5).norm(),
    "reshaped": lambda w: w.clone().t().flatten().norm(),
    "a loss of the weight": lambda w: torch.nn.functional.mse_loss(w, torch.zeros_like(w)),
}
ROW_READS: dict[str, Callable[[Any], Any]] = {
    "norm of rows": lambda w: w.norm(dim=1),
    "norm of rows by place": lambda w: w.norm(2, 1),
    "normalised rows": torch.nn.functional.normalize,
    "mean of rows": lambda w: w.mean(-1),
    "largest of rows": lambda w: w.amax((1,)),
    "softmax of rows": lambda w: w.softmax(-1),
    "the larger of two": lambda w: torch.max(w, w * 2),
    "a function of each element": lambda w: w.abs().exp() * 2,
}


@pytest.mark.ranks(2)
def test_reads_of_a_full_weight_are_refused_on_sections_and_right_through_full_tensor(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model, alone = (models.seeded(lambda: models.Gated().double()) for _ in range(2))
    tp.apply_plan(model, mesh, GATED)
    shard, full = model.get_parameter("both.weight"), alone.get_parameter("both.weight")
    split = split_of(shard._sharding_info)  # type: ignore[attr-defined]
    for name, read in FULL_READS.items():
        with pytest.raises(tp.PlanError, match=r"local-shard-as-full.*\[24, 8\].*full_tensor"):
            read(shard)
        torch.testing.assert_close(read(shard.full_tensor()), read(full), msg=name)  # type: ignore[attr-defined]
    for initialise in (nn.init.orthogonal_, nn.init.eye_):  # these reach a weight past the functions above
        with pytest.raises(tp.PlanError, match=r"local-shard-as-full.*orthogonal_.*\[24, 8\]"):
            initialise(shard)
    with torch.no_grad():
        for copied in (shard.tolist, shard.numpy, (shard * 2).tolist, lambda: shard.__array__()):
            with pytest.raises(tp.PlanError, match=r"local-shard-as-full.*\[24, 8\].*full_tensor"):
                copied()
        assert len(shard.detach().tolist()) == 12
        # torch gives a mapped function plain tensors without a hook: vmap over a shard is over this rank's rows.
        torch.testing.assert_close(torch.func.vmap(torch.sum)(shard), split.take(full.sum(1), ranks.rank, 2))
    for name, read in ROW_READS.items():
        wanted = split.take(read(full), ranks.rank, 2)
        torch.testing.assert_close(read(shard), wanted, msg=name)
        with pytest.raises(tp.PlanError, match="local-shard-as-full"):  # of this rank's rows alone
            read(shard).sum()
    for weight in (shard.full_tensor(), full):  # type: ignore[attr-defined]
        (weight.norm() + torch.linalg.svdvals(weight)[0] + (weight.T @ weight - 1).square().sum()).backward()
    assert shard.grad is not None and full.grad is not None
    torch.testing.assert_close(shard.grad, split.take(full.grad, ranks.rank, 2))
    assert len(FULL_READS) == 24 and len(ROW_READS) == 8


Function = Callable[[Any], Any]
STEPS: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("abs", "square", "tanh", "clone", "ravel", "isnan", "tril", "erf")},
    **{name: getattr(F, name) for name in ("relu", "gelu", "silu", "softplus")},
    "to": lambda w: w.to(torch.float32),
    "affine": lambda w: 1 - w * 2.5,
    "power": lambda w: w**2,
    "mask": lambda w: w > 0.1,
    "selected": lambda w: w[w > 0],
    "kept": lambda w: torch.where(w > 0, w, torch.zeros_like(w)),
    "row": lambda w: w[0],
    "rows": lambda w: w[:2],
    "columns": lambda w: w[..., 1:],
    "some": lambda w: w.index_select(0, torch.tensor([0, 1])),
    "parts": lambda w: w.chunk(2)[0],
    "both": lambda w: torch.cat([w, w]),
    "list": lambda w: torch.stack(list(w)),
    "turned": lambda w: w.transpose(0, -1),
    "padded": lambda w: F.pad(w, (1, 1)),
    "repeated": lambda w: w.tile(2),
    "gram": lambda w: w @ w.T,
    "pooled": lambda w: F.avg_pool1d(w[None], 2)[0],
    "normed": lambda w: F.layer_norm(w, w.shape),
    "sum of rows": lambda w: w.sum(-1),
    "written": lambda w: torch.zeros_like(w).add_(w),
    "looked up": lambda w: F.embedding(torch.tensor([0, 1]), w),
    "added up": lambda w: torch.zeros(1, *w.shape[1:]).to(w).index_add(0, torch.zeros(len(w), dtype=torch.long), w),
    "foreach": lambda w: torch._foreach_mul([w], 2.0)[0],
}
ENDS: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("sum", "mean", "norm", "std", "amax", "count_nonzero", "argmax")},
    "element": lambda w: w.flatten()[0].item(),
    "comparison": lambda w: bool(w.flatten()[0] > 0),
    "element of a mask": lambda w: bool((w > 0).flatten()[0]),
    "text": lambda w: f"{w.flatten()[0]}",
    "sum by Python": lambda w: float(sum(x for x in w.flatten())),
    "loss": lambda w: F.mse_loss(w, torch.zeros_like(w)),
    "over rows": lambda w: w.sum(0).tolist(),
    "list": lambda w: w.tolist(),
    "array": lambda w: w.numpy().sum().item(),
}


@torch.no_grad()
def results_of(chain: list[Function], weight: torch.Tensor) -> tuple[Any, Exception | None]:
    return capture_errors(lambda: functools.reduce(lambda value, step: step(value), chain, weight))


@pytest.mark.filterwarnings("ignore")  # of functions that are drawn
@pytest.mark.ranks(2)
def test_no_drawn_chain_of_functions_passes_as_the_full_weight(ranks: Ranks) -> None:
    """Whatever functions stand before a read, it is refused, or what it gives is the full weight's."""
    model, alone = (models.seeded(lambda: models.Gated().double()) for _ in range(2))
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), GATED)
    shard, full = model.get_parameter("both.weight"), alone.get_parameter("both.weight")
    draws, refused, right = random.Random(5), 0, 0
    values = shard.detach().clone()
    while refused + right < 400:
        names = [*draws.choices([*STEPS], k=draws.randint(0, 3)), draws.choice([*ENDS])]
        chain = [*(STEPS[name] for name in names[:-1]), ENDS[names[-1]]]
        wanted, fault = results_of(chain, full.detach().clone())
        if fault is not None:
            continue  # not a chain
        ours, fault = results_of(chain, shard)
        refused += isinstance(fault, tp.PlanError) and "local-shard-as-full" in str(fault)
        if fault is None:
            right += 1
            assert type(ours) is type(wanted), names
            assert torch.equal(ours, wanted) if isinstance(ours, torch.Tensor) else ours == wanted, names
        assert fault is None or isinstance(fault, tp.PlanError), (names, fault)
    assert torch.equal(shard.detach(), values)
    assert refused > 300


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_an_optimizers_file_of_one_process_goes_on_in_shards(ranks: Ranks, kind: str) -> None:
    """Its moments are full: each rank takes its rows of them, of DTensors and of sections, at any time."""
    settings = {"lr": 1e-2} | ({"momentum": 0.9} if kind == "SGD" else {})
    model, alone = (models.seeded(lambda: models.Gated().double()) for _ in range(2))
    reference = getattr(torch.optim, kind)(alone.parameters(), **settings)
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), GATED)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **settings)
    for step in range(6):
        if step in (2, 4):
            model.load_state_dict(alone.state_dict())
            optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        for each, one in ((model, optimizer), (alone, reference)):
            if each is model and step < 2:
                continue
            one.zero_grad()
            each(x64(3, 8)).square().sum().backward()
            one.step()
    state = tp.full_state_dict(model)
    assert models.assert_close(state, dict(alone.state_dict()), atol=1e-12) == sum(
        p.numel() for p in alone.parameters()
    )


@pytest.mark.ranks(2)
def test_clipped_values_and_averaged_weights(ranks: Ranks) -> None:
    """One tensor after the other they are those of one process; torch's lists of DTensors and sections raise."""
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

    model, alone = (models.seeded(lambda: models.Gated().double()) for _ in range(2))
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), GATED)
    averages: list[Any] = [AveragedModel(each, avg_fn=get_ema_avg_fn(0.9)) for each in (model, alone)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for _ in range(3):
        for each, average, optimizer in zip((model, alone), averages, optimizers, strict=True):
            optimizer.zero_grad()
            each(x64(3, 8)).square().sum().backward()
            nn.utils.clip_grad_value_(each.parameters(), 0.05, foreach=False)
            optimizer.step()
            average.update_parameters(each)
    for each, other in ((model, alone), (averages[0].module, averages[1].module)):
        assert models.assert_close(tp.full_state_dict(each), dict(other.state_dict()), atol=1e-12) > 300
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=True)
    lists = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    lists.update_parameters(model)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        lists.update_parameters(model)


class Weight(nn.Parameter):
    """A class of a user's own."""


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("check", ["first", "never"])
def test_ordinary_parameters_in_place_of_shards(ranks: Ranks, check: Literal["first", "never"]) -> None:
    """Outputs stay right, and norms go wrong without a word: at any call, however they came there."""

    def replaced(layer: nn.Module, values: torch.Tensor) -> None:
        layer.weight = nn.Parameter(values * 0.5)

    def written(layer: nn.Module, values: torch.Tensor) -> None:
        layer._parameters["weight"] = nn.Parameter(values)  # as FSDP2 does

    def of_another_class(layer: nn.Module, values: torch.Tensor) -> None:
        layer.weight = Weight(values)

    def normed(layer: nn.Module, values: torch.Tensor) -> None:
        replaced(layer, values)
        nn.utils.weight_norm(layer)

    mesh = ranks.mesh((2,), ("tp",))
    for calls in (0, 3):
        for act in (replaced, written, of_another_class, normed):
            model = models.seeded(lambda: models.MLP().double())
            tp.apply_plan(model, mesh, PLAN, check=check)
            assert isinstance(model, models.MLP)
            for _ in range(calls):
                model(x64(3, 8))
            model.down.bias = nn.Parameter(torch.ones(8).double())  # a replica: right
            model(x64(3, 8)).sum().backward()
            tp.full_state_dict(model)
            values = model.down.weight.detach()
            act(model.down, values.to_local() if isinstance(values, DTensor) else values)
            for _ in range(2):
                with pytest.raises(tp.PlanError, match=r"local-shard-as-full.* (down\.)?weight: "):
                    model(x64(3, 8))


class _Failing(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("out of memory")
        return super().step(closure)


@pytest.mark.ranks(2)
def test_layers_as_torch_has_them(ranks: Ranks) -> None:
    """Types under autocast, a padding index that is set later, and masks that torch refuses."""
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(models.MLP)
    tp.apply_plan(model, mesh, PLAN)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(2, 8)).dtype == torch.bfloat16
        loss = tp.vocab_parallel_cross_entropy(torch.ones(2, 4).bfloat16(), torch.tensor([1, 5]), mesh=mesh)
        assert loss.dtype == torch.float32
    embedding = models.seeded(lambda: nn.Embedding(7, 4))
    tp.apply_plan(embedding, mesh, tp.RowwiseParallel())
    assert isinstance(embedding, nn.Embedding)
    embedding.padding_idx = 5
    embedding(torch.tensor([1, 5])).sum().backward()
    assert models.full_gradients(embedding, mesh)["weight"].sum(1).tolist() == [0, 4, 0, 0, 0, 0, 0]
    attention = nn.MultiheadAttention(8, 4, batch_first=True)
    tp.apply_plan(attention, mesh, tp.MultiheadAttentionParallel())
    x = torch.ones(2, 5, 8)
    with pytest.raises(tp.PlanError, match=r"unsupported-dtype.*attn_mask.*int64"):
        attention(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.long))
    with pytest.raises(tp.PlanError, match=r"shape-mismatch.*key_padding_mask.*\(1, 5\) -> \(2, 5\)"):
        attention(x, x, x, key_padding_mask=torch.zeros(1, 5, dtype=torch.bool))
    with pytest.raises(tp.PlanError, match=r"\(4, 5, 5\) -> \(5, 5\) or \(8, 5, 5\)"):
        attention(x, x, x, attn_mask=torch.zeros(4, 5, 5))


@pytest.mark.ranks(2)
def test_masked_classes_and_batches_of_which_nothing_counts(ranks: Ranks) -> None:
    """A class at -inf on a rank that has not the target gave nan; so did a batch of ignored targets, as gradients."""
    mesh = ranks.mesh((2,), ("tp",))
    logits = x64(2, 3, 8)
    logits[..., 0] = logits[..., 5:] = logits[0, 0, 4] = -math.inf
    ignored = torch.full((2, 3), -100)
    counted = torch.tensor([[1, 3, 4], [-100, 2, 3]])
    for target in (counted, ignored):
        local = logits.chunk(2, -1)[ranks.rank].clone().requires_grad_()
        alone = logits.clone().requires_grad_()
        loss = tp.vocab_parallel_cross_entropy(local, target, mesh=mesh, num_classes=8)
        expected = F.cross_entropy(alone.movedim(-1, 1), target)
        torch.testing.assert_close(loss, expected, atol=EXACT, rtol=0, equal_nan=True)
        torch.autograd.backward([loss])
        torch.autograd.backward([expected])
        assert alone.grad is not None
        torch.testing.assert_close(local.grad, alone.grad.chunk(2, -1)[ranks.rank], atol=EXACT, rtol=0)
    with pytest.raises(tp.PlanError, match="invalid-argument"):
        tp.vocab_parallel_cross_entropy(local, target, mesh=mesh, label_smoothing=1.5)
