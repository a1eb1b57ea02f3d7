"""Context parallelism against one process: models of transformers and own ones, masks, losses, other axes beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from context_models import Deep, Own, saved_bytes
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint
from tp_styles.losses import sharded_mean
from tp_styles.runtime.sequence import Kind

EXACT = 1e-12
LAYOUTS = Replicate(), Shard(1)
KINDS: tuple[Kind, ...] = ("ulysses", "gather")
Batch = dict[str, Any]
LENGTH = 16
before_ranks = partial(models.preload, *hf_models.code_of("llama", "mistral", "bloom", "mamba"))


def llama(kind: str = "llama", attention: str = "sdpa", **sizes: Any) -> Any:
    """A tiny random model of transformers in float64, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    extra = {**hf_models.SMALL, **hf_models.FAMILIES.get(kind, {}), "use_cache": False, **sizes}
    config = AutoConfig.for_model(kind, **extra)
    config._attn_implementation = attention
    return AutoModelForCausalLM.from_config(config).double()


def tokens(length: int = LENGTH, rows: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 48, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits_of(output: Any) -> torch.Tensor:
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return logits


def next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean loss of the next token, in the type of the logits."""
    ids = batch["input_ids"]
    logits = logits_of(model(**batch))
    target = ids if "attention_mask" not in batch else ids.masked_fill(batch["attention_mask"] == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def distance(one: torch.Tensor, other: Any) -> float:
    """The largest difference; infinity for NaN."""
    return float((one - other).abs().max().nan_to_num(torch.inf))


def trained_apart(
    model: nn.Module,
    alone: nn.Module,
    batches: list[Batch],
    loss: Callable[[nn.Module, Batch], torch.Tensor] = next_token,
    rows: Any = None,
) -> tuple[float, int]:
    """Train both; return the largest difference of losses and gradients, and the number of gradients compared."""
    pairs = [(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (model, alone)]
    worst, count = 0.0, 0
    for batch in batches:
        losses = []
        for (each, optimizer), function in zip(pairs, (loss, next_token), strict=True):
            optimizer.zero_grad()
            losses.append(function(each, batch))
            losses[-1].backward()
        if rows is not None:  # each rank's loss is of its rows
            torch.distributed.all_reduce(losses[0].detach(), group=rows)
        size = 1 if rows is None else rows.size()
        worst = max(worst, distance(losses[0].detach() / size, losses[1].detach()))
        wanted = {name: p.grad for name, p in alone.named_parameters()}
        for name, p in model.named_parameters():
            name = name.removeprefix("module.")
            assert (p.grad is None) == (wanted[name] is None), name
            if p.grad is not None:
                grad: Any = p.grad
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                worst = max(worst, distance(grad, wanted[name]))
                count += 1
        for _, optimizer in pairs:
            optimizer.step()
    return worst, count


def check_line(handle: tp.TPHandle) -> str:
    return next(line for line in handle.report().splitlines() if line.startswith("check of"))


def cell(mesh: Any, style: tp.ContextParallel, build: Callable[[], Any], batches: list[Batch]) -> None:
    """Apply a style to a model, train it beside a copy of one process, and undo it."""
    model, alone = build(), build()
    before = [p for _, p in model.named_parameters()]
    config = getattr(model, "config", None)
    handle = tp.apply_plan(model, mesh, style)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))  # an optimizer of before stays right
    worst, count = trained_apart(model, alone, batches)
    assert worst < EXACT, (style, worst)
    assert count >= len(batches) * len([p for p in alone.parameters() if p.grad is not None])
    assert "equal to the original" in check_line(handle), handle.report()
    handle.undo()
    assert getattr(model, "config", None) is config
    assert not any("forward" in vars(m) or "_context_parallel" in vars(m) for m in model.modules())
    batch = batches[0]
    torch.testing.assert_close(logits_of(model(**batch)), logits_of(alone(**batch)), rtol=0, atol=EXACT)


def batches(count: int = 3, /, **more: Any) -> list[Batch]:
    return [{"input_ids": tokens(seed=1 + i), **more} for i in range(count)]


STYLES = {
    "ulysses": tp.ContextParallel(),
    "gather": tp.ContextParallel("gather"),
    "zigzag": tp.ContextParallel("gather", order="zigzag"),
}


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, 4, timeout=300)
def test_ways_and_heads(ranks: Ranks) -> None:
    """Each way with 1, 2 and 4 key-value heads, by both attentions of transformers: 3 steps equal one process."""
    mesh = ranks.mesh((ranks.world_size,), ("cp",))
    cells = (("ulysses", 1, "eager"), ("ulysses", 2, "sdpa"), ("ulysses", 4, "sdpa"), ("gather", 1, "sdpa"))
    for name, heads, attention in (*cells, ("gather", 2, "eager"), ("zigzag", 2, "sdpa")):
        cell(mesh, STYLES[name], lambda: llama(num_key_value_heads=heads, attention=attention), batches())  # noqa: B023


def left_padded() -> Batch:
    """Rows with 9 and 3 padded tokens: all of rank 0's tokens of the first row are masked."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :9] = mask[1, :3] = 0
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def packed() -> Batch:
    """Documents that end inside a shard, and at the border of two."""
    position = torch.arange(LENGTH).repeat(2, 1)
    position[0, 5:] -= 5
    position[1, 8:] -= 8
    position[1, 12:] -= 4
    return {"position_ids": position}


def right_padded() -> Batch:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 6:] = 0
    return {"attention_mask": mask}


def full_mask() -> Batch:
    return {"attention_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, 1, -1, -1)}


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_masks(ranks: Ranks) -> None:
    """Padding, packed documents, sliding windows, a mask of the caller: right in each way, and never NaN."""
    mesh = ranks.mesh((2,), ("cp",))
    for name, style in STYLES.items():
        for attention in ("sdpa", "eager"):
            for kind, more, sizes in (
                ("llama", left_padded(), {}),
                ("llama", right_padded(), {}),
                ("mistral", packed(), {"sliding_window": 3}),
                ("mistral", {}, {"sliding_window": 5}),
            ):
                if attention == "eager" and (name == "zigzag" or "sliding_window" not in sizes):
                    continue  # its softmax in float32 makes NaN of float64's lowest number, in one process too
                model = llama(kind, attention, num_hidden_layers=1, **sizes)
                cell(mesh, style, lambda: copy.deepcopy(model), batches(2, **more))  # noqa: B023
    for style in (STYLES["ulysses"], STYLES["gather"]):
        model, alone = llama(), llama()
        tp.apply_plan(model, mesh, style)
        batch = {**batches(1)[0], **full_mask()}
        torch.testing.assert_close(model(**batch).logits, alone(**batch).logits, rtol=0, atol=EXACT)
    lost = llama()
    tp.apply_plan(lost, mesh, tp.ContextParallel(), check="never")
    out = lost(input_ids=tokens(), attention_mask=torch.zeros(2, LENGTH, dtype=torch.long)).logits
    assert bool(out.isfinite().all())


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_cumulative_lengths_of_packed_documents(ranks: Ranks) -> None:
    """As transformers' collator gives them: one row, positions that restart, and the lengths for other kernels."""
    from transformers import DataCollatorWithFlattening

    documents = [{"input_ids": tokens(length, rows=1)[0].tolist()} for length in (5, 8, 3)]
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(documents)
    batch = {key: value for key, value in flat.items() if key not in ("labels", "attention_mask")}
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 13, 16]
    alone = {key: batch[key] for key in ("input_ids", "position_ids")}
    for style in STYLES.values():
        model = llama()
        handle = tp.apply_plan(model, ranks.mesh((2,), ("cp",)), style)
        torch.testing.assert_close(model(**batch).logits, llama()(**alone).logits, rtol=0, atol=EXACT)
        assert "equal to the original" in check_line(handle)


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(3, timeout=300)
def test_lengths_that_do_not_divide(ranks: Ranks) -> None:
    """Added tokens change nothing, with masks, documents and embeddings too; without `pad` the length is refused."""
    mesh = ranks.mesh((3,), ("cp",))

    def three(**sizes: Any) -> Any:
        return llama(num_attention_heads=6, hidden_size=48, num_key_value_heads=2, num_hidden_layers=1, **sizes)

    for name, style in STYLES.items():
        padded = tp.ContextParallel(style.kind, pad=0, order=style.order)
        for more in ({}, left_padded(), packed()):
            cell(mesh, padded, three, batches(2, **more))
        model = three()
        tp.apply_plan(model, mesh, style)
        with pytest.raises(tp.PlanError, match=r"uneven-shards.*16 tokens over .* -> ContextParallel\(pad=token\)"):
            model(input_ids=tokens())
        assert name


def sharded_batch(mesh: Any, batch: Batch) -> Batch:
    n, rank = mesh.size(), mesh.get_local_rank()
    return {key: x.chunk(n, 1)[rank] for key, x in batch.items()}


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_shards_in_and_out(ranks: Ranks) -> None:
    """Inputs that are shards already, logits that stay shards, labels in every combination, gradients of embeddings."""
    mesh = ranks.mesh((2,), ("cp",))
    for kind in KINDS:
        for into in (False, True):
            for more in ({}, packed(), right_padded()):
                model, alone = (llama(num_hidden_layers=1) for _ in range(2))
                style = tp.ContextParallel(kind, output_layouts=Shard(1), input_layouts=LAYOUTS[into])
                handle = tp.apply_plan(model, mesh, style)

                def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
                    mine = sharded_batch(mesh, batch)
                    logits = logits_of(model(**(mine if into else batch)))  # noqa: B023
                    target = mine["input_ids"]
                    if "attention_mask" in mine:
                        target = target.masked_fill(mine["attention_mask"] == 0, -100)
                    return tp.sharded_cross_entropy(logits, target, mesh=mesh, shift=True)

                worst, count = trained_apart(model, alone, batches(**more), loss)
                assert worst < EXACT, (kind, into, worst)
                assert count == 3 * len([*alone.parameters()])
                assert "equal to the original" in check_line(handle)
    labels = tokens().masked_fill(torch.arange(LENGTH) < 9, -100)  # rank 0 predicts nothing, but for the border
    for into in (False, True):
        model, alone = llama(), llama()
        tp.apply_plan(model, mesh, tp.ContextParallel(input_layouts=LAYOUTS[into]))
        batch = {"input_ids": tokens(), "labels": labels}
        one = model(**(sharded_batch(mesh, batch) if into else batch))
        other = alone(**batch)
        one.loss.backward()
        other.loss.backward()
        torch.testing.assert_close(one.loss, other.loss)
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)  # a float32 loss of transformers
    model, alone = llama(), llama()
    tp.apply_plan(model, mesh, tp.ContextParallel("gather", order="zigzag"))
    gradients = []
    for each in (model, alone):
        embeds = torch.randn(2, LENGTH, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        embeds.requires_grad_()
        each(inputs_embeds=embeds).logits.square().sum().backward()
        gradients.append(embeds.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------- own models


def own(repeat: str = "") -> Any:
    return models.seeded(lambda: Own(repeat)).double()


def alibi() -> torch.Tensor:
    """A bias of each head, and a causal mask in it."""
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    return (-distance * slopes[:, None, None]).masked_fill(distance < 0, -torch.inf)[None]


@pytest.mark.ranks(2, timeout=300)
def test_own_models(ranks: Ranks) -> None:
    """A mode on torch's attention: checkpoints, a bias of each head, an expert without tokens, unused weights."""
    mesh = ranks.mesh((2,), ("cp",))
    position = {"position_ids": torch.arange(LENGTH)[None]}
    for name, way in STYLES.items():
        style = tp.ContextParallel(way.kind, order=way.order, inputs={"mask": None})
        for repeat in ("", "yes"):
            cell(mesh, style, lambda: own(repeat), batches(**position))  # noqa: B023
        model = own("reentrant")  # torch refuses to check one
        tp.apply_plan(model, mesh, style, check="never")
        assert trained_apart(model, own(), batches(**position))[0] < EXACT
        cell(mesh, style, own, batches(mask=alibi(), **position))
        assert name
    model = own()
    tp.apply_plan(model, mesh, tp.ContextParallel(inputs={"mask": None}), check="never")
    x = torch.randn(1, LENGTH, 16, dtype=torch.float64)
    torch.testing.assert_close(model.blocks[0](x, None), own().blocks[0](x, None))  # by itself: as in one process


class Numbered(nn.Module):
    """A mixture of numbered experts, chosen by token: one without a token takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.experts = nn.Embedding(8, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(input_ids)
        for index, expert in enumerate(self.experts):
            if bool((chosen := input_ids % 4 == index).any()):
                x = x + torch.zeros_like(x).masked_scatter(chosen[..., None].expand_as(x), expert(x[chosen]))
        return x


@pytest.mark.ranks(2)
def test_parameters_that_no_rank_uses_in_later_steps_have_no_gradient(ranks: Ranks) -> None:
    """Zeros in place of None would let weight decay and momentum move them; expert 3 has tokens of one rank alone."""
    mesh = ranks.mesh((2,), ("cp",))
    model, alone = (models.seeded(Numbered).double() for _ in range(2))
    tp.apply_plan(model, mesh, tp.ContextParallel(inputs={"input_ids": 1}))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (model, alone)]
    steps = [torch.arange(8).repeat(2, 1), *[torch.tensor([[0, 4, 0, 4, 0, 4, 0, 3]])] * 4, torch.zeros(1, 8).long()]
    for step, ids in enumerate(steps):
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.zero_grad()
            m(ids).square().mean().backward()
            optimizer.step()
        present = [[p.grad is not None for p in m.parameters()] for m in (model, alone)]
        assert present[0] == present[1] and len(present[0]) == 9, step
        for own_value, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own_value, other, rtol=0, atol=1e-14)
    assert sum(present[0]) == 3


@pytest.mark.ranks(2, 4, timeout=300)
def test_bytes(ranks: Ranks) -> None:
    """Bytes of one forward and backward equal the formula of the how-to, for both ways."""
    n, layers, rows, size, item = ranks.world_size, 2, 2, 4, 8
    shard = LENGTH // n
    mesh = ranks.mesh((n,), ("cp",))
    position = torch.arange(LENGTH)[None]
    heads, groups = 4, max(2, n)  # key-value heads are copied up to one a rank
    cells: tuple[tuple[Kind, str, float], ...] = (
        ("ulysses", "all_to_all", (2 * heads + 2 * groups) * shard * size * (n - 1) / n),
        ("gather", "all_gather", 2 * 2 * shard * size * (n - 1)),
    )
    for kind, op, amount in cells:
        model = own()
        style = tp.ContextParallel(kind, output_layouts=Shard(1), inputs={"mask": None})
        tp.apply_plan(model, mesh, style, check="never")
        with ranks.record() as log:
            logits = model(tokens(), position)
        assert log.bytes_sent(op) == amount * layers * rows * item
        with ranks.record() as log:
            logits.sum().backward()
        back = {"all_gather": "reduce_scatter"}.get(op, op)
        assert log.bytes_sent(back) == amount * layers * rows * item
        summed = sum(p.numel() for p in model.parameters()) * item
        assert log.bytes_sent("all_reduce") == summed + item * len([*model.parameters()])  # and a count for each


@pytest.mark.ranks(2, 4)
def test_activations(ranks: Ranks) -> None:
    """A rank keeps its share of what one process keeps for backward; gathered keys and values come on top."""
    n, tokens = ranks.world_size, 256
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    alone = saved_bytes(Deep(), ids)
    layers, kv, mask = 4, 2 * 2 * 8 * 4 * tokens, 4 * tokens * tokens // n  # bytes of all keys and values, of a mask
    for kind, more in zip(KINDS, (0, layers * kv + mask), strict=True):
        model = Deep()
        tp.apply_plan(
            model, ranks.mesh((n,), ("cp",)), tp.ContextParallel(kind, output_layouts=Shard(1)), check="never"
        )
        assert alone / n * 0.9 < saved_bytes(model, ids) <= alone * (1 / n + 0.05) + more, kind


def test_the_balance_of_causal_attention_is_explained() -> None:
    """Of four ranks in order the last has 7/16 of the pairs; zigzag and shares of heads are even."""
    texts = {name: tp.explain(Own(), style, 4) for name, style in STYLES.items()}
    assert (
        "work of causal attention by rank: 6.3%, 18.8%, 31.2%, 43.7%; the slowest has 1.75x of the mean"
        in (texts["gather"])
    )
    assert 'order="zigzag" makes it equal' in texts["gather"]
    assert "by rank: 25.0%, 25.0%, 25.0%, 25.0%; the slowest has 1.00x of the mean" in texts["zigzag"]
    assert "makes it equal" not in texts["zigzag"]
    assert "equal on all ranks" in texts["ulysses"]


# ---------------------------------------------------------------------------------------------- other axes beside it


def adapters(model: Any) -> Any:
    """LoRA by hand on queries and values: frozen weights, two small ones beside each."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.a = nn.Linear(base.in_features, 2, bias=False, dtype=torch.float64)
            self.b = nn.Linear(2, base.out_features, bias=False, dtype=torch.float64)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.base(x) + self.b(self.a(x))
            return result

    model.requires_grad_(False)
    torch.manual_seed(7)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = (
            Adapted(one) for one in (layer.self_attn.q_proj, layer.self_attn.v_proj)
        )
    return model


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_adapters_checkpoints_and_graphs(ranks: Ranks) -> None:
    """LoRA, transformers' gradient checkpointing in both ways, and torch.compile after the check."""
    mesh = ranks.mesh((2,), ("cp",))
    cell(mesh, tp.ContextParallel(), lambda: adapters(llama()), batches())
    for kind in KINDS:
        model, alone = llama(), llama()
        model.train()
        alone.train()
        tp.apply_plan(model, mesh, tp.ContextParallel(kind))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert trained_apart(model, alone, batches())[0] < EXACT
        model.gradient_checkpointing_enable({"use_reentrant": True})
        with pytest.raises(tp.PlanError, match=r"unsupported-option\] gradient_checkpointing.*use_reentrant"):
            model(input_ids=tokens())
    for kind, backend in zip(KINDS, ("aot_eager", "eager"), strict=True):
        model, alone = (llama(num_hidden_layers=1) for _ in range(2))
        handle = tp.apply_plan(model, mesh, tp.ContextParallel(kind))
        model(input_ids=tokens()).logits.sum().backward()
        model.zero_grad()
        assert "equal to the original" in check_line(handle)
        for layer in model.model.layers:
            layer.compile(backend=backend)
        assert trained_apart(model, alone, batches())[0] < EXACT


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(4, timeout=300)
def test_other_axes(ranks: Ranks) -> None:
    """FSDP2 and DDP over data and sequence, DDP over data alone, tensor parallelism on another axis: 3 steps each."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = ranks.mesh((2, 2), ("dp", "cp"))
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    row = mesh["dp"].get_local_rank()

    def local(model: nn.Module, batch: Batch) -> torch.Tensor:
        return next_token(model, {key: x.chunk(2)[row] for key, x in batch.items()})

    four = [{"input_ids": tokens(rows=4, seed=i)} for i in range(3)]
    model, alone = llama(), llama()
    tp.apply_plan(model, mesh["cp"], tp.ContextParallel(gradients="mean"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=flat)
    fully_shard(model, mesh=flat)
    assert trained_apart(model, alone, four, local, mesh["dp"].get_group())[0] < EXACT
    found = tp.compare(model, lambda: copy.deepcopy(alone), four[0], data_mesh=mesh["dp"])
    assert found.compared.gradients == len([*alone.parameters()])

    ways: Any = (("mean", flat.get_group()), ("sum", mesh["dp"].get_group()))
    for gradients, group in ways:
        model, alone = (llama(num_hidden_layers=1) for _ in range(2))
        style = tp.ContextParallel("gather", gradients=gradients)
        handle = tp.apply_plan(model, mesh["cp"], style)
        wrapped = DistributedDataParallel(model, process_group=group)
        assert trained_apart(wrapped, alone, four, local, mesh["dp"].get_group())[0] < EXACT
        assert "equal to the original" in check_line(handle)

    both = ranks.mesh((2, 2), ("cp", "tp"))
    for kind in KINDS:
        model, alone = (llama(num_hidden_layers=1) for _ in range(2))
        tp.apply_plan(model, both["tp"], tp.from_hf_tp_plan(model))
        model(input_ids=tokens()).logits.sum().backward()  # tensor parallelism is checked by itself
        model.zero_grad()
        handle = tp.apply_plan(model, both["cp"], tp.ContextParallel(kind))
        assert trained_apart(model, alone, batches())[0] < EXACT
        assert "equal to the original" in check_line(handle)

    # Logits that stay shards of tokens and of the vocabulary: tensor parallelism is checked before the sequence is cut.
    model, alone = (llama(num_hidden_layers=1) for _ in range(2))
    plan = {**tp.from_hf_tp_plan(model), "lm_head": tp.ColwiseParallel(output_layouts=Shard(-1))}
    tp.apply_plan(model, both["tp"], plan)
    model(input_ids=tokens())
    model.zero_grad()
    tp.apply_plan(model, both["cp"], tp.ContextParallel(output_layouts=Shard(1)))

    def vocabulary_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        ids, cp = batch["input_ids"], both["cp"]
        target = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1).chunk(2, 1)[cp.get_local_rank()]
        losses = tp.vocab_parallel_cross_entropy(
            logits_of(model(**batch)), target, mesh=both["tp"], num_classes=48, reduction="none"
        )
        return sharded_mean(losses, target != -100, mesh=cp)

    assert trained_apart(model, alone, batches(), vocabulary_loss)[0] < EXACT


# ---------------------------------------------------------------------------------------------- refusals


class Convolution(nn.Module):
    """A short convolution over the tokens before each: a rank lacks those of the rank before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)
        self.mix = nn.Conv1d(16, 16, 3, padding=2, groups=16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids).transpose(1, 2)
        result: torch.Tensor = self.head(self.mix(x)[..., : x.shape[-1]].transpose(1, 2))
        return result


class Shift(Convolution):
    """RWKV's token shift."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        result: torch.Tensor = self.head(x + F.pad(x, (0, 0, 1, -1)))
        return result


class Scan(Convolution):
    """A linear recurrence."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.embed(input_ids).cumsum(1))
        return result


class Recurrent(Convolution):
    """A recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(16, 16, batch_first=True)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.rnn(self.embed(input_ids))[0])
        return result


class Torchs(nn.Module):
    """Attention by torch's module, and positions of the local length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(48, 16), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        result: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


class VariableLengths(Torchs):
    """Packed documents by torch's attention of cumulative lengths."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        x = self.embed(input_ids).flatten(0, 1).unflatten(-1, (4, 4))
        ends = torch.tensor([0, x.shape[0]], dtype=torch.int32)
        result: Any = varlen_attn(x, x, x, ends, ends, x.shape[0], x.shape[0])
        return result  # type: ignore[no-any-return]  # a tuple only where more is asked for


@pytest.mark.ranks(2, timeout=300)
def test_models_that_mix_tokens_elsewhere(ranks: Ranks) -> None:
    """Convolutions, token shifts, scans, local positions: refused by the check, or by name before it."""
    mesh = ranks.mesh((2,), ("cp",))
    for kind in (Convolution, Shift, Scan, models.GPT):
        model = models.seeded(kind).double()
        inputs = {"ids": 1} if kind is models.GPT else {}
        tp.apply_plan(model, mesh, tp.ContextParallel(inputs=inputs))
        with pytest.raises(tp.PlanError, match=r"check-mismatch.*output"):
            model(tokens().clamp(max=16))
    model = models.seeded(Recurrent).double()
    with pytest.raises(tp.PlanError, match=r"module-kind\] rnn: GRU"):
        tp.apply_plan(model, mesh, tp.ContextParallel())
    for attends, name in ((Torchs, r"nn\.MultiheadAttention"), (VariableLengths, "varlen_attn")):
        model = models.seeded(attends).double()
        tp.apply_plan(model, mesh, tp.ContextParallel())
        with pytest.raises(tp.PlanError, match=name):
            model(tokens())


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_refusals(ranks: Ranks) -> None:
    """What has no meaning for shards is refused by name, on every rank, with the way on."""
    mesh = ranks.mesh((2,), ("cp",))
    for options in (
        {"kind": "ring"},
        {"order": "zigzag"},
        {"kind": "gather", "order": "zigzag", "input_layouts": Shard(1)},
        {"pad": 0, "input_layouts": Shard(1)},
        {"gradients": "none"},
        {"pad": 0, "output_layouts": Shard(1)},
        {"kind": "gather", "order": "zigzag", "output_layouts": Shard(1)},
        {"output_layouts": Shard(2)},
    ):
        with pytest.raises(tp.PlanError):
            tp.ContextParallel(**options)
    plans: tuple[tuple[Any, str, str], ...] = (
        (lambda: llama("bloom", "eager"), "", r"AttentionInterface"),
        (lambda: llama("mamba", "eager"), "", r"Mamba"),
        (lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "", r"dynamic"),
        (lambda: llama(attention="flex_attention"), "", r"flex_attention"),
        (llama, "model.layers.0", r"inside of a model"),
    )
    for build, place, text in plans:
        with pytest.raises(tp.PlanError, match=text):
            tp.apply_plan(build(), mesh, {place: tp.ContextParallel()})
    model = llama()
    tp.apply_plan(model, mesh, tp.ContextParallel())
    ids = tokens()
    cache: Any = model(input_ids=ids, use_cache=True).past_key_values
    calls: tuple[tuple[dict[str, Any], str], ...] = (
        ({"past_key_values": cache}, r"key-value cache"),
        ({"output_attentions": True}, r"output_attentions"),
        ({"logits_to_keep": 1}, r"logits_to_keep"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 16])}, r"position_ids that start"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 16]), **packed()}, r"position_ids that start"),
        ({"use_cache": True, **packed()}, r"documents beside a cache"),
        ({"attention_mask": torch.ones(2, 9)}, r"attention_mask: 9 tokens of 16"),
        ({"memory": torch.zeros(2, 16, 4)}, r"inputs=\{'memory': dim\}"),
    )
    for more, text in calls:
        with pytest.raises(tp.PlanError, match=text):
            model(input_ids=ids, **more)
    with pytest.raises(tp.PlanError, match=r"undo\(\)"):
        model.generate(ids, max_new_tokens=2)
    odd = llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    tp.apply_plan(odd, mesh, tp.ContextParallel())
    with pytest.raises(tp.PlanError, match=r"3 heads over 2 ranks.*gather"):
        odd(input_ids=ids)
    sliding = llama("mistral", sliding_window=4)
    tp.apply_plan(sliding, mesh, tp.ContextParallel())
    with pytest.raises(tp.PlanError, match=r"use_cache.*sliding window"):
        sliding(input_ids=ids, use_cache=True)
    lone = llama()
    tp.apply_plan(lone, mesh, tp.ContextParallel(gradients="mean"))
    with pytest.raises(tp.PlanError, match=r"nothing averages them"):
        lone(input_ids=ids)


@pytest.mark.ranks(2, timeout=300)
def test_dropout(ranks: Ranks) -> None:
    """Each rank drops other places of its tokens; a checkpoint drops the same ones again."""
    mesh = ranks.mesh((2,), ("cp",))

    class Dropping(Own):
        def __init__(self) -> None:
            super().__init__("yes")
            self.drop = nn.Dropout(0.5)

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: Any = None) -> torch.Tensor:
            x = checkpoint(self.drop, self.embed(input_ids), use_reentrant=False)
            return torch.cat([x, x + self.place(position_ids)], -1)

    model: Any = models.seeded(Dropping).double()
    tp.apply_plan(model, mesh, tp.ContextParallel(inputs={"mask": None}))
    ids = torch.full((2, LENGTH), 5)
    torch.manual_seed(4)
    out = model(ids, torch.arange(LENGTH)[None])
    kept = out[..., :16] != 0
    assert not torch.equal(kept[:, :8], kept[:, 8:])  # one mask on both ranks would be equal
    assert 0.3 < float(kept.double().mean()) < 0.7
    out[..., :16].sum().backward()
    wanted = torch.zeros_like(model.embed.weight)
    wanted[5] = kept.sum((0, 1)) * 2.0
    torch.testing.assert_close(model.embed.weight.grad, wanted)
