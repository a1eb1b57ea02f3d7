"""Column-wise layers that read one tensor bring it in once: one reduction of its gradient, one gather of its rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from tp_styles.runtime.redistribute import BlockInput, TPGroup

X64 = {"dtype": torch.float64}


class Siblings(nn.Module):
    """Three column-wise layers, one row-wise; how the three read the input is what a case says."""

    def __init__(self, case: str = "one") -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 12, bias=False) for _ in range(3))
        self.o = nn.Linear(12, 8)
        self.case = case

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x) * 1.5
        a = self.a(h)
        match self.case:
            case "other tensors":
                b, c = self.b(h * 2), self.c(h)
            case "views":
                b, c = self.b(h.view_as(h)), self.c(h[:])
            case "no gradient of one":
                with torch.no_grad():
                    b = self.b(h)
                c = self.c(h)
            case "detached":
                b, c = self.b(h).detach(), self.c(h.detach())
            case "not used":
                self.b(h)
                b, c = torch.ones_like(a), self.c(h)
            case "written to":
                b = self.b(h)
                h.mul_(2)
                c = self.c(h)
            case "raises":
                if len(x) == 1:
                    raise KeyError("an odd call")
                b, c = self.b(h), self.c(h)
            case "checkpoint of one":
                b, c = checkpoint(self.b, h, use_reentrant=False), checkpoint(self.c, h, use_reentrant=True)
            case _:
                b, c = self.b(h), self.c(h)
        out: torch.Tensor = self.o(F.silu(a) * b + c)
        return out


class Twice(nn.Module):
    """Two such blocks, behind checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = Siblings(), Siblings(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(self.first, x * 1, use_reentrant=self.reentrant)
        result: torch.Tensor = x + checkpoint(self.second, x, use_reentrant=self.reentrant)
        return result


PLAN: dict[str, tp.ParallelStyle] = {"**.[abc]": tp.ColwiseParallel(), "**.o": tp.RowwiseParallel()}
BACKWARD = {
    "one": 1,
    "other tensors": 3,
    "views": 3,
    "no gradient of one": 1,
    "detached": 1,
    "not used": 1,
    "written to": 2,
    "raises": 1,
    "checkpoint of one": 2,
}
"""Case -> all-reduces of a backward. A re-entrant checkpoint is a graph of its own."""


def batches(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 4, 8, generator=generator, **X64).requires_grad_() for _ in range(count)]  # type: ignore[call-overload]


def shared(model: nn.Module) -> list[BlockInput]:
    forwards = [vars(module).get("forward") for module in model.modules()]
    by_id = {id(one): one for f in forwards if f is not None for one in f.moves.values() if isinstance(one, BlockInput)}
    return [*by_id.values()]


@pytest.mark.filterwarnings("ignore:.*gradients of the sharded model are not checked.*When use_reentrant=True")
@pytest.mark.ranks(2, 3)
def test_every_way_to_read_the_input(ranks: Ranks) -> None:
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    for case, count in BACKWARD.items():
        model: Any = models.seeded(lambda case=case: Siblings(case)).double()  # type: ignore[misc]
        if case == "written to":  # torch refuses to differentiate a weight by what was written to
            for layer in (model.a, model.b, model.c):
                layer.requires_grad_(False)
        models.compare_training(
            model, lambda m: tp.apply_plan(m, mesh, PLAN), batches(), models.square_loss, mesh, atol=1e-11
        )
        if case == "raises":
            with pytest.raises(KeyError, match="an odd call"):
                model(batches()[0][:1])
            assert any(one.entered is not None for one in shared(model))
            copy.deepcopy(model)
        x = batches()[0]
        out = model(x)
        assert all(one.source is one.entered is None for one in shared(model))
        with ranks.record() as log:
            out.square().sum().backward()
        assert log.ops == ("all_reduce",) * count, case
        assert all(one.source is one.entered is None for one in shared(model))  # also what checkpoints brought in


@pytest.mark.filterwarnings("ignore:.*gradients of the sharded model are not checked.*When use_reentrant=True")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpoints(ranks: Ranks, reentrant: bool) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model: Any = models.seeded(lambda: Twice(reentrant)).double()
    models.compare_training(
        model, lambda m: tp.apply_plan(m, mesh, PLAN), batches(), models.square_loss, mesh, atol=1e-11
    )
    out = model(batches()[0])
    with ranks.record() as log:
        out.square().sum().backward()
    # Of each block the input's gradient; the recomputed row-wise sum where the checkpoint runs to its end.
    assert log.ops == ("all_reduce",) * (4 if reentrant else len(log.ops))
    assert len(log.ops) in ((4,) if reentrant else (2, 4))
    assert all(one.source is one.entered is None for one in shared(model))


@pytest.mark.ranks(2)
def test_gradients_of_gradients(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(Siblings).double()
    alone = copy.deepcopy(model)
    tp.apply_plan(model, mesh, PLAN)
    x = batches()[0]
    results = []
    for one in (model, alone):
        (first,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        results.append(second)
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.ranks(2)
def test_between_sequence_shards(ranks: Ranks) -> None:
    """Rows are gathered once and their gradient is scattered once; also without gradients."""
    mesh = ranks.mesh((2,), ("tp",))
    plan = {
        "**.[abc]": tp.ColwiseParallel(input_layouts=Shard(1)),
        "**.o": tp.RowwiseParallel(output_layouts=Shard(1)),
    }

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.detach().chunk(2, 1)[ranks.rank].requires_grad_()

    def summed(out: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return out.square().sum()

    for case in ("one", "written to", "no gradient of one"):
        model: Any = models.seeded(lambda case=case: Siblings(case)).double()  # type: ignore[misc]
        for layer in (model.a, model.b, model.c):
            layer.requires_grad_(case != "written to")
        alone = copy.deepcopy(model)
        tp.apply_plan(model, mesh, plan, check="never")
        x = batches()[0]
        mine = part(x)
        alone(x).square().sum().backward()
        model(mine).square().sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(mine.grad, x.grad.chunk(2, 1)[ranks.rank])
        gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        models.assert_close(models.full_gradients(model, mesh), gradients, 1e-11)
    model = models.seeded(Siblings).double()
    tp.apply_plan(model, mesh, plan, check="never")
    model(part(batches()[0]))
    with ranks.record() as log:
        out = model(part(batches()[0]))
    assert log.ops == ("all_gather", "reduce_scatter")
    with ranks.record() as log:
        out.sum().backward()
    assert log.ops.count("reduce_scatter") == 1
    assert log.ops.count("all_gather") == 1
    with torch.no_grad(), ranks.record() as log:
        model(part(batches()[0]))
    assert log.ops == ("all_gather", "reduce_scatter")
    with torch.inference_mode():
        model(part(batches()[0]))


class TwoBlocks(nn.Module):
    """Attention and feed-forward block that read one tensor, as Cohere's layers do; or as a case says."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.attn, self.mlp, self.case = models.Attention(8, 4), models.MLP(8, 12), case

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)
        result: torch.Tensor
        if self.case == "feed-forward first":
            result = x + self.mlp(h) + self.attn(h)
        elif self.case == "checkpoint":
            attended = checkpoint(self.attn, h, use_reentrant=False)
            result = x + attended + checkpoint(self.mlp, h, use_reentrant=False)
        else:
            result = x + self.attn(h) + self.mlp(h * 2 if self.case == "one each" else h)
        return result


@pytest.mark.ranks(2)
def test_two_blocks_that_read_one_tensor(ranks: Ranks) -> None:
    """One reduction for both; the second block of the model lets go of the tensor."""
    mesh = ranks.mesh((2,), ("tp",))
    plan: dict[str, tp.ParallelStyle] = {"attn.[qkv]": tp.ColwiseParallel(), "mlp.up": tp.ColwiseParallel()}
    plan |= {"attn.proj": tp.RowwiseParallel(), "mlp.down": tp.RowwiseParallel()}
    counts = {"one": 1, "one each": 2, "feed-forward first": 2, "checkpoint": 1}
    for case, count in counts.items():
        model: Any = models.seeded(lambda case=case: TwoBlocks(case)).double()  # type: ignore[misc]
        models.compare_training(
            model, lambda m: tp.apply_plan(m, mesh, plan), batches(), models.square_loss, mesh, atol=1e-11
        )
        (block,) = shared(model)
        out = model(batches()[0])
        assert case == "feed-forward first" or block.source is None
        with ranks.record() as log:
            out.sum().backward()
        assert log.count("all_reduce") == count, case
        assert block.source is None


@pytest.mark.ranks(2)
def test_beside_low_rank_updates(ranks: Ranks) -> None:
    class Adapted(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer = layer.requires_grad_(False)
            self.lora_A, self.lora_B = nn.Linear(8, 3, bias=False), nn.Linear(3, 12, bias=False)
            self.lora_dropout = nn.Dropout(0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.base_layer(x) + self.lora_B(self.lora_A(self.lora_dropout(x)))
            return result

    mesh = ranks.mesh((2,), ("tp",))

    model: Any = models.seeded(Siblings)
    model.a, model.b, model.c = Adapted(model.a), Adapted(model.b), Adapted(model.c)
    model.double()
    plan = {"[abc]": tp.LoRAParallel("column"), "o": tp.RowwiseParallel()}
    models.compare_training(
        model, lambda m: tp.apply_plan(m, mesh, plan), batches(), models.square_loss, mesh, atol=1e-11
    )
    out = model(batches()[0])
    with ranks.record() as log:
        out.square().sum().backward()
    assert log.ops == ("all_reduce",) * 4  # of three small products, and of the input
    assert log.bytes_sent() == (3 * (2 * 4 * 3) + 2 * 4 * 8) * 8


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(4, timeout=300)
def test_mistral_beside_torchs_plan_with_prepared_inputs(ranks: Ranks) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    mesh = ranks.mesh((4,), ("tp",))
    config = MistralConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16,
    )  # fmt: skip
    ids = torch.arange(64).view(4, 16) % 31
    prepared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    named = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Replicate()}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    theirs: Any = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn": named,
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.mlp": prepared,
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    ways: dict[str, Callable[[nn.Module], object]] = {
        "tp_styles": lambda m: tp.apply_plan(m, mesh, tp.from_hf_tp_plan(m)),
        "torch": lambda m: parallelize_module(m, mesh, theirs),
    }
    sums, gradients = {}, {}
    for name, apply in ways.items():
        model: Any = models.seeded(lambda: MistralForCausalLM(config))
        apply(model)
        model(ids, use_cache=False)  # checked
        with ranks.record() as log:
            model(ids, use_cache=False).logits.square().sum().backward()
        sums[name] = log.count("all_reduce"), log.bytes_sent("all_reduce")
        gradients[name] = model.model.layers[0].self_attn.q_proj.weight.grad.full_tensor()
    assert sums["tp_styles"] == sums["torch"] == (14, 14 * 64 * 64 * 4)
    torch.testing.assert_close(gradients["tp_styles"], gradients["torch"], rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_one_element_may_have_any_stride(ranks: Ranks) -> None:
    """Torch calls it contiguous, and yet refuses to view it as bytes."""
    one = torch.arange(8.0)[2 * ranks.rank :: 2][:1]
    assert one.is_contiguous() and one.stride() == (2,)
    gathered = TPGroup(ranks.mesh((2,), ("tp",))).all_gather(one, 0)
    assert gathered.tolist() == [0.0, 2.0]
