"""A check counts its comparisons; the rest is unchecked, with a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from tp_styles.check import checker

PAIR = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}


@dataclass
class Batch:
    x: torch.Tensor
    name: str = "train"


class Plain:
    """An object of no library."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


class Net(nn.Module):
    """A pair with something between; its output in some form."""

    def __init__(self, form: str = "tensor", between: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.form, self.between = form, between
        self.kept: Any = None
        self.losses: list[torch.Tensor] = []

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.between(self.up(x)))
        return result

    def forward(self, batch: Any) -> Any:
        y = self.encode(batch.x if isinstance(batch, Batch) else batch)
        match self.form:
            case "dataclass":
                return Batch(y)
            case "object":
                return Plain(y)
            case "kept":
                self.kept = y
                return None
            case "generator":
                return self.rows(y)
            case "cache":
                return y, ((self.up(batch),), (self.up(batch),))
        return y

    @staticmethod
    def rows(y: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from y


def mixed(h: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = h / (h.norm(dim=-1, keepdim=True) + 1e-3)
    return result


def slightly_mixed(h: torch.Tensor) -> torch.Tensor:
    return h * (1 + 0.1 * torch.tanh(h.mean(dim=-1, keepdim=True)))


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(shape or (3, 8)), generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def parallel(ranks: Ranks, *args: Any, **options: Any) -> tuple[Any, tp.TPHandle]:
    model: Any = models.seeded(lambda: Net(*args))
    return model, tp.apply_plan(model, ranks.mesh((2,), ("tp",)), PAIR, **options)


@pytest.mark.ranks(2)
def test_outputs_of_any_form_are_compared(ranks: Ranks) -> None:
    for form in ("tensor", "dataclass", "object", "kept"):
        model, handle = parallel(ranks, form)
        model(x())
        # One output, three weights and a bias of 4 * 2 elements more than the weights, all in one comparison.
        assert "equal to the original (1 tensors and 4 gradients, 304 elements)" in handle.report(), handle.report()
        wrong, _ = parallel(ranks, form, mixed)
        with pytest.raises(tp.PlanError, match="check-mismatch"):
            wrong(x())


@pytest.mark.ranks(2)
def test_what_cannot_be_compared_is_unchecked(ranks: Ranks) -> None:
    model, handle = parallel(ranks, "generator")
    with pytest.warns(UserWarning, match="no tensors that could be compared"):
        model(x())
    assert "unchecked: its forward returns and keeps no tensors" in handle.report()


@pytest.mark.ranks(2)
def test_batches_of_any_form_are_compared_between_ranks(ranks: Ranks) -> None:
    for batch in (Batch(x() + ranks.rank), x() + ranks.rank):
        model, _ = parallel(ranks)
        with pytest.raises(tp.PlanError, match="ranks-disagree"):
            model(batch)
    model, handle = parallel(ranks)
    model(Batch(x()))
    assert "equal to the original (1 tensors" in handle.report()
    model.train(ranks.rank == 0)
    other, _ = parallel(ranks)
    other.train(ranks.rank == 0)
    with pytest.raises(tp.PlanError, match=r"ranks-disagree.*training=True.*training=False"):
        other(x())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_in_half_precision_are_compared_exactly(ranks: Ranks, dtype: torch.dtype) -> None:
    """A mistake of 1 % is below the rounding of bfloat16, and far above that of float64."""
    model: Any = models.seeded(lambda: Net("tensor", slightly_mixed)).to(dtype)
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), PAIR)
    with pytest.raises(tp.PlanError, match="check-mismatch"):
        model(x(dtype=dtype))
    right: Any = models.seeded(Net).to(dtype)
    tp.apply_plan(right, ranks.mesh((2,), ("tp",)), PAIR)
    right(x(dtype=dtype)).float().sum().backward()


class Routed(nn.Module):
    """A pair, then the best of four experts for each token, which takes no float64, as torch's grouped products."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.up, self.down, self.router = nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 4)
        self.experts, self.between = nn.Parameter(torch.randn(4, 8, 8)), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("expected float32 or bfloat16")
        x = x + self.down(self.between(self.up(x)))
        best = self.router(x).argmax(-1)
        return torch.einsum("bti,btij->btj", x, self.experts[best])


@pytest.mark.ranks(2)
def test_routers_of_models_in_half_precision(ranks: Ranks) -> None:
    """Two roundings of one right model choose other experts, which is no mistake; channels that mix are one."""
    batch = torch.randn(2, 256, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    for seed in range(4):
        model: Any = models.seeded(Routed, seed).bfloat16()
        handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), PAIR)
        model(batch)
        assert "check of Routed (training, with gradients): equal to the original" in handle.report()
        wrong: Any = models.seeded(lambda: Routed(lambda y: y - y.mean(-1, keepdim=True)), seed).bfloat16()
        tp.apply_plan(wrong, ranks.mesh((2,), ("tp",)), PAIR)
        with pytest.raises(tp.PlanError, match="check-mismatch"):
            wrong(batch)


class Stack(nn.Module):
    """Three pairs with norms and a gain of their own; the middle one with something between."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.blocks = nn.ModuleList(Net("tensor", between if i == 1 else torch.tanh) for i in range(3))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x)) * self.gain
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_regions_of_a_large_model_in_half_precision(
    ranks: Ranks, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each region is compared exactly: 1 % off, a sum left out, and a gradient of one rank are found."""
    monkeypatch.setattr(checker, "FLOAT64_LIMIT", 500)  # of 889 elements; a region has 280
    plan = {"blocks.*.up": tp.ColwiseParallel(), "blocks.*.down": tp.RowwiseParallel()}
    scale = nn.Parameter(torch.ones((), dtype=dtype))

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return h * self.scale

    mistakes: list[Callable[[torch.Tensor], torch.Tensor]] = [slightly_mixed, lambda h: h - h.mean(-1, keepdim=True)]
    wanted = (*["check-mismatch.*region 'blocks.1'.*output differs"] * 2, "check-mismatch.*gradient differs")
    for seed in range(2):
        for between, text in zip([*mistakes, Gain()], wanted, strict=True):
            model: Any = models.seeded(lambda between=between: Stack(between), seed).to(dtype)  # type: ignore[misc]
            tp.apply_plan(model, ranks.mesh((2,), ("tp",)), plan)
            with pytest.raises(tp.PlanError, match=text):
                model(x(3, 5, 8, dtype=dtype))
        right: Any = models.seeded(lambda: Stack(torch.tanh), seed).to(dtype)
        handle = tp.apply_plan(right, ranks.mesh((2,), ("tp",)), plan)
        right(x(3, 5, 8, dtype=dtype)).float().sum().backward()
        # The output, the input's gradient of as many elements (the root's input has none), and all parameters.
        counts = {f"blocks.{index}": f"5 gradients, {120 + 120 + 280}" for index in range(3)}
        for name, count in {**counts, "Stack": "19 gradients, 1,009"}.items():
            line = f"check of {name} (training, with gradients): equal to the original (1 tensors and {count} elements)"
            assert line in handle.report(), handle.report()


@pytest.mark.ranks(2)
def test_a_first_call_that_shows_nothing(ranks: Ranks) -> None:
    """Constant floats give way to noise; constant ids are unchecked; a longer input is checked once more."""
    model, _ = parallel(ranks, "tensor", mixed)
    for value in (torch.zeros(3, 8), torch.ones(3, 8)):
        with pytest.raises(tp.PlanError, match="check-mismatch"):
            model(value)

    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.net = nn.Embedding(9, 8), Net()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(self.embed(ids))
            return out

    lookup: Any = models.seeded(Ids)
    handle = tp.apply_plan(lookup, ranks.mesh((2,), ("tp",)), {f"net.{name}": style for name, style in PAIR.items()})
    with pytest.warns(UserWarning, match="input values are equal"):
        lookup(torch.ones(2, 3, dtype=torch.long))
    lookup(torch.arange(6).view(2, 3))
    assert "check of Ids (training, with gradients): equal to the original" in handle.report()

    class Window(Net):
        """Looks at other channels from the fourth position on."""

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.up(x))
            result: torch.Tensor = self.down(hidden if x.shape[1] < 4 else mixed(hidden))
            return result

    window: Any = models.seeded(Window)
    handle = tp.apply_plan(window, ranks.mesh((2,), ("tp",)), PAIR)
    window(x(2, 2, 8))
    assert "equal to the original" in handle.report()
    window(x(2, 3, 8))
    with pytest.raises(tp.PlanError, match="check-mismatch"):
        window(x(2, 5, 8))


class Reference(nn.Module):
    """A block of which `encode` may be called alone."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.block, self.other = Net("tensor", between), Net()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.other(self.block(x))
        return out


@pytest.mark.ranks(2)
def test_regions_that_are_entered_without_the_root(ranks: Ranks) -> None:
    plan = {f"{block}.{name}": style for block in ("block", "other") for name, style in PAIR.items()}
    for between in (torch.tanh, mixed):
        model: Any = models.seeded(lambda between=between: Reference(between))  # type: ignore[misc]
        handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), plan)
        for training in (True, False):
            model.train(training)
            if between is mixed:
                with pytest.raises(tp.PlanError, match=r"check-mismatch.*region 'block'"):
                    model.encode(x())
            else:
                model.encode(x())
        if between is torch.tanh:
            report = handle.report()
            assert report.count("check of block (") == 2, report
            assert "check of other: unchecked: never entered" in report
            assert "check of Reference: unchecked: never entered" in report


@pytest.mark.ranks(2)
def test_values_that_leave_by_attributes_and_lists(ranks: Ranks) -> None:
    def penalised(net: Net, where: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def between(h: torch.Tensor) -> torch.Tensor:
            if where == "attribute":
                net.kept = h.square().mean()
            elif where == "list":
                net.losses.append(h.square().mean())
            return torch.tanh(h)

        return between

    for where in ("attribute", "list"):
        model, _ = parallel(ranks)
        model.between = penalised(model, where)
        with pytest.raises(tp.PlanError, match=r"check-mismatch.*attribute differs"):
            model(x())
        assert not model.losses
    model, _ = parallel(ranks)
    squares: list[torch.Tensor] = []
    model.up.register_forward_hook(lambda module, args, output: squares.append(output.square().mean()))
    with pytest.raises(tp.PlanError, match=r"check-mismatch.*attribute differs"):
        model(x())
    assert not squares


@pytest.mark.ranks(2)
def test_generators_in_other_states(ranks: Ranks) -> None:
    model: Any = models.seeded(lambda: nn.Sequential(Net(), nn.Dropout(0.5)))
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {f"0.{name}": style for name, style in PAIR.items()})
    torch.manual_seed(ranks.rank)
    with pytest.raises(tp.PlanError, match=r"ranks-disagree.*generators.*data_parallel_rank"):
        model(x())
    torch.manual_seed(3)
    model(x()).sum().backward()


@pytest.mark.ranks(2)
def test_an_error_of_one_rank_reaches_all(ranks: Ranks) -> None:
    def odd(h: torch.Tensor) -> torch.Tensor:
        if ranks.rank:
            raise KeyError("only here")
        return h

    model, _ = parallel(ranks, "tensor", odd)
    with pytest.raises(tp.PlanError, match=r"check-raises.*the original on rank 1: KeyError: 'only here'"):
        model(x())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("check", ["first", "never"])
def test_plain_ddp_around_shards_is_refused(ranks: Ranks, check: Any) -> None:
    gated: Any = models.seeded(models.Gated)
    tp.apply_plan(gated, ranks.mesh((2,), ("tp",)), {"both": tp.FusedColwiseParallel(2)}, check=check)
    model, _ = parallel(ranks, check=check)
    for module in (gated, model):
        with pytest.raises(tp.PlanError, match=r"mesh-mismatch.*tp_ddp_bridge"):
            DistributedDataParallel(module)


@pytest.mark.ranks(2)
def test_caches_as_tuples(ranks: Ranks) -> None:
    """Each rank's heads of a cache leave the model, and come in again."""
    model, handle = parallel(ranks, "cache")
    _, cache = model(x())
    assert cache[0][0].shape == (3, 8)
    assert "equal to the original (3 tensors" in handle.report()

    class Cached(Net):
        def forward(self, batch: Any, past: Any = ()) -> Any:
            h = self.up(batch)
            return self.down(torch.tanh(h + past[0][0] if past else h)), ((h,),)

    cached: Any = models.seeded(Cached)
    alone = models.seeded(Cached)
    handle = tp.apply_plan(cached, ranks.mesh((2,), ("tp",)), PAIR)
    past: Any = ()
    past_alone: Any = ()
    for step in range(3):
        out, past = cached(x() * (step + 1), past)
        expected, past_alone = alone(x() * (step + 1), past_alone)
        torch.testing.assert_close(out, expected)


@pytest.mark.ranks(2)
def test_the_rest_as_replicated_dtensors(ranks: Ranks) -> None:
    """Fused and foreach steps, torch's clip and a norm of one's own see one kind of tensor, as in one process."""

    class Rest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.ones(8))
            self.norm, self.net, self.head = nn.LayerNorm(8), Net(), nn.Linear(8, 3)
            self.tied = nn.Linear(8, 8, bias=False)
            self.again = nn.Linear(8, 8, bias=False)
            self.again.weight = self.tied.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.again(self.tied(self.net(self.norm(x * self.token)))))
            return out

    mesh = ranks.mesh((2,), ("tp",))
    plan = {f"net.{name}": style for name, style in PAIR.items()}
    for kernels in ("fused", "foreach", ""):
        model: Any = models.seeded(Rest)
        alone = models.seeded(Rest)
        tp.apply_plan(model, mesh, plan, rest="replicated")
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert model.again.weight is model.tied.weight
        optimizers = [
            torch.optim.AdamW(m.parameters(), 0.01, fused=kernels == "fused", foreach=kernels == "foreach")
            for m in (model, alone)
        ]
        for step in range(5):
            norms = []
            for one, optimizer in zip((model, alone), optimizers, strict=True):
                optimizer.zero_grad()
                one(x() + step).square().sum().backward()
                total = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
                norms.append(total.full_tensor() if isinstance(total, DTensor) else total)
                optimizer.step()
            torch.testing.assert_close(norms[0], norms[1])
        compared = tp.full_state_dict(model)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(compared[name], value, rtol=1e-4, atol=1e-5)
        assert len(compared) == 11


class Scan(nn.Module):
    """A channel-wise recurrence as Mamba's: fused columns, a depthwise convolution, B and C from all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = 16
        self.columns, self.rows = nn.Linear(8, 32), nn.Linear(16, 8)
        self.conv = nn.Conv1d(16, 16, 3, groups=16, padding=2)
        self.mix = nn.Linear(16, 4, bias=False)
        self.decay, self.gain = nn.Parameter(torch.linspace(0.1, 1, 16)), nn.Parameter(torch.ones(()))
        self.slopes: torch.Tensor
        self.register_buffer("slopes", torch.linspace(1, 2, 16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, gate = self.columns(x).split(self.channels, -1)
        h = torch.nn.functional.silu(self.conv(h.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        b, c = self.mix(h).chunk(2, -1)
        state = h * torch.exp(-self.decay) * self.slopes + (b * c).sum(-1, keepdim=True)
        out: torch.Tensor = self.rows(state.cumsum(1) * gate * self.gain)
        return out


SCAN: dict[str, Any] = {
    "": tp.BlockParallel(
        shard={"decay": 0, "conv.weight": 0, "conv.bias": 0},
        sum_gradient=["gain"],
        buffers={"slopes": 0},
        attributes=["channels", "conv.groups", "conv.in_channels", "conv.out_channels"],
    ),
    "columns": tp.FusedColwiseParallel(2),
    "mix": tp.RowwiseParallel(sum_gradient=True),
    "rows": tp.RowwiseParallel(),
}


@pytest.mark.ranks(2, 4)
def test_a_blocks_own_parameters_and_buffers(ranks: Ranks) -> None:
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randn(2, 5, 8, generator=generator, dtype=torch.float64) for _ in range(5)]
    compared = models.compare_training(
        models.seeded(Scan).double(),
        lambda m: tp.apply_plan(m, mesh, SCAN),
        batches,
        models.square_loss,
        mesh,
        atol=1e-11,
    )
    assert compared > 500
    model: Any = models.seeded(Scan).double()
    handle = tp.apply_plan(model, mesh, SCAN)
    assert (model.channels, len(model.slopes)) == (16 // ranks.world_size,) * 2
    model(batches[0])
    assert "equal to the original" in handle.report()
    handle.undo()
    assert (model.channels, len(model.slopes), model.conv.groups) == (16, 16, 16)
    wrong = {**SCAN, "": tp.BlockParallel(buffers={"rows": 0}, attributes=["rows"], shard={"no": 0}, tp_size=3)}
    codes = {problem.code for problem in tp.plan_styles(models.seeded(Scan), wrong, ranks.world_size).problems}
    assert codes == {"mesh-mismatch", "unknown-name", "does-not-divide"}


@pytest.mark.ranks(2)
def test_declared_shards_are_compared_as_one(ranks: Ranks) -> None:
    """Declared on the model, or by one layer inside; of two layouts inside none is taken, with a warning."""
    inner = {"0.up": tp.ColwiseParallel(input_layouts=Shard(1)), "0.down": tp.RowwiseParallel(output_layouts=Shard(1))}
    prepare = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True)
    rows = x(2, 4, 8).chunk(2, 1)[ranks.rank]
    for more in ({"": prepare}, {}):
        model: Any = models.seeded(lambda: nn.Sequential(Net()))
        handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {**inner, **more})
        model(rows)
        assert "check of Sequential (training, with gradients): equal to the original" in handle.report()
    model = models.seeded(lambda: nn.Sequential(Net(), nn.Linear(8, 8)))
    other = tp.ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(-1))
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {**inner, "1": other})
    with pytest.warns(UserWarning, match="no style on the module declares how"):
        model(rows)
