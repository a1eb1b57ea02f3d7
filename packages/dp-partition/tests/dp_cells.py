"""The cells of the coverage matrix: models, optimizers and styles, and what one cell must prove.

A cell trains a model for five steps with `compile` and with its reference, and compares every loss, parameter and
buffer: under local semantics the reference is DistributedDataParallel, under global semantics one device on all rows.
It also asserts what a rank holds and what was sent, so that one style cannot pass for another.

Two ranks under local semantics run in float32, and most are equal bit for bit: a sum of two has one order. Where sums
have several, all run in float64: a gradient that is 0 but for rounding (a key's bias, a bias before a batch norm)
becomes, divided by its own root of squares + 1e-8, an update of noise as large as the learning rate in float32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import torch
import torch.nn.functional as F
from dp_partition.messages import messages_of
from ranktest import Ranks
from torch import nn
from torch.utils import _pytree as pytree

STYLES = ("replicate", "zero1", "zero2", "fully_shard", "default")
COMPILED = ("replicate", "fully_shard")  # styles that are also compiled by inductor
STEPS = 5
CLOSE = 1e-5  # float32 sums in another order, after five steps
CLOSE_IN_DOUBLE = 1e-7  # rounding of 1e-17 over 1e-8, or over Adagrad's 1e-10
UPDATE = 1e-2  # about what a step changes an element by


@dataclass(frozen=True)
class Cell:
    """One combination."""

    model: str
    style: str
    optimizer: str
    world: int
    backend: str = "eager"


# ---- models -----------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout: both sides draw the same numbers from generators that are seeded alike."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


class Residual(nn.Module):
    """Convolutions with batch statistics and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = F.relu(x + self.norm(self.conv(F.relu(x))))
        out: torch.Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 5, 4, 2, 1), nn.ConvTranspose2d(5, 3, 4, 2, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale * self.up(F.silu(self.down(x))) - x
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = (
            nn.Embedding(31, 16),
            nn.MultiheadAttention(16, 2, batch_first=True),
            nn.Linear(16, 31),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        out: torch.Tensor = self.head(x + self.mix(x, x, x, need_weights=False)[0])
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(self.tokens(ids)))
        return out


class SoftMoE(nn.Module):
    """Every expert sees every token, weighted."""

    def __init__(self, top: int = 0) -> None:
        super().__init__()
        self.tokens, self.gate, self.top = nn.Embedding(31, 8), nn.Linear(8, 4, bias=False), top
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12) / 4), nn.Parameter(torch.randn(4, 12, 8) / 4)
        self.head = nn.Linear(8, 31)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        weights = self.gate(x).softmax(-1)
        if self.top:
            best = weights.topk(self.top, dim=-1)
            weights = torch.zeros_like(weights).scatter(-1, best.indices, best.values)
            weights = weights / weights.sum(-1, keepdim=True)
        hidden = F.gelu(torch.einsum("bld,edh->bleh", x, self.up))
        mixed = torch.einsum("bleh,ehd,ble->bld", hidden, self.down, weights)
        out: torch.Tensor = self.head(x + mixed)
        return out


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.cell = nn.GRUCell(8, 8) if kind == "cell" else nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        if isinstance(self.cell, nn.LSTM):
            hidden = self.cell(x)[0]
        else:
            state, states = torch.zeros_like(x[:, 0]), []
            for step in x.unbind(1):
                state = self.cell(step, state)
                states.append(state)
            hidden = torch.stack(states, 1)
        out: torch.Tensor = self.head(hidden)
        return out


class Contrast(nn.Module):
    """Every row against every other row: only global semantics sees the rows of other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, v = F.normalize(self.left(x), dim=1), F.normalize(self.right(x), dim=1)
        return F.cross_entropy(3 * u @ v.T, torch.arange(x.shape[0], device=x.device))


def frozen_gpt() -> nn.Module:
    model = models.GPT()
    model.tokens.weight.requires_grad_(False)
    return model


class Logits(nn.Module):
    """A transformers model that returns its logits alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(*inputs).logits
        return out


def hugging_face(name: str) -> nn.Module:
    """A random-weight model of transformers, as small as it gets."""
    import transformers as hf

    small: dict[str, Any] = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    wide: dict[str, Any] = {**small, "intermediate_size": 32, "max_position_embeddings": 16}
    if name == "gpt2":
        return Logits(
            hf.GPT2LMHeadModel(
                hf.GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=16, use_cache=False)
            )
        )
    if name == "llama":
        return Logits(hf.LlamaForCausalLM(hf.LlamaConfig(**wide, num_key_value_heads=1, use_cache=False)))
    if name == "bert":
        return Logits(hf.BertForMaskedLM(hf.BertConfig(**wide)))
    if name == "vit":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        return Logits(hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5)))
    raise KeyError(name)


def rows_mean(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss: Any = model(x).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def value_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    loss: Any = model(x)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def vectors(generator: torch.Generator, rows: int) -> tuple[Any, ...]:
    return torch.randn(rows, 8, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def images(generator: torch.Generator, rows: int) -> tuple[Any, ...]:
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def tokens(generator: torch.Generator, rows: int) -> tuple[Any, ...]:
    return models.tokens(generator, rows=rows)


def alone(generator: torch.Generator, rows: int) -> tuple[Any, ...]:
    return (torch.randn(rows, 8, generator=generator),)


Made = tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[torch.Generator, int], tuple[Any, ...]], str]

MODELS: dict[str, Made] = {
    "MLP": (partial(models.mlp, 8, 5), models.class_step, vectors, "local"),
    "MLP, LayerNorm, dropout": (Noisy, models.class_step, vectors, "local"),
    "GPT, SDPA": (models.GPT, models.token_step, tokens, "local"),
    "GPT, tied": (partial(models.GPT, tied=True), models.token_step, tokens, "local"),
    "GPT, frozen embedding": (frozen_gpt, models.token_step, tokens, "local"),
    "Conv, BatchNorm, GroupNorm": (models.Conv, models.class_step, images, "local"),
    "residual Conv, BatchNorm": (Residual, models.class_step, images, "local"),
    "Conv autoencoder, scalar": (Autoencoder, rows_mean, images, "local"),
    "MultiheadAttention": (Attention, models.token_step, tokens, "local"),
    "TransformerEncoderLayer, dropout": (Encoder, models.token_step, tokens, "local"),
    "MoE, soft": (SoftMoE, models.token_step, tokens, "local"),
    "MoE, top 2": (partial(SoftMoE, 2), models.token_step, tokens, "local"),
    "GRU cell, unrolled": (partial(Recurrent, "cell"), models.token_step, tokens, "local"),
    "LSTM": (partial(Recurrent, "lstm"), models.token_step, tokens, "local"),
    "contrastive loss (global)": (Contrast, value_step, alone, "global"),
    "Conv, BatchNorm (global)": (models.Conv, models.class_step, images, "global"),
    "transformers GPT-2": (partial(hugging_face, "gpt2"), models.token_step, tokens, "local"),
    "transformers Llama": (partial(hugging_face, "llama"), models.token_step, tokens, "local"),
    "transformers BERT": (partial(hugging_face, "bert"), models.token_step, tokens, "local"),
    "transformers ViT": (partial(hugging_face, "vit"), models.class_step, images, "local"),
}

# These under global semantics as well: no dropout, whose numbers one device would draw otherwise.
ALSO_GLOBAL = ("MLP", "GPT, tied", "GPT, frozen embedding", "residual Conv, BatchNorm", "Conv autoencoder, scalar",
               "MultiheadAttention", "MoE, soft", "MoE, top 2", "GRU cell, unrolled", "transformers Llama",
               "transformers ViT")  # fmt: skip
UNDER_GLOBAL: dict[str, Made] = {f"{name} (global)": (*MODELS[name][:3], "global") for name in ALSO_GLOBAL}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "Adam amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD Nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
}

# How many tensors of a parameter's shape an optimizer keeps.
KEEPS = {"AdamW": 2, "AdamW foreach": 2, "AdamW fused": 2, "Adam amsgrad": 3, "SGD": 0, "SGD Nesterov": 1, "RMSprop": 2,
         "Adagrad": 1, "NAdam": 2, "Adadelta": 2}  # fmt: skip


def cells() -> list[Cell]:
    """Models by styles, under global semantics too; optimizers by styles; pairs at 3 and 4 ranks; models compiled."""
    found = [Cell(model, style, "AdamW", 2) for model in (*MODELS, *UNDER_GLOBAL) for style in STYLES]
    found += [Cell("GPT, SDPA", style, optim, 2) for optim in OPTIMIZERS if optim != "AdamW" for style in STYLES]
    found += list(pairs())
    return found + [Cell(model, style, "AdamW", 2, "inductor") for model in MODELS for style in COMPILED]


def pairs() -> Iterator[Cell]:
    """Every pair of (model, style), (model, world), (style, world), (optimizer, style) and (optimizer, world)."""
    optims = list(OPTIMIZERS)
    for i, model in enumerate(MODELS):
        for j, style in enumerate(STYLES):
            yield Cell(model, style, optims[(3 * i + 7 * j) % len(optims)], 3 + (i + i // 10 + j) % 2)


# ---- what a cell proves ---------------------------------------------------------------------------------------------


def run_cell(ranks: Ranks, cell: Cell) -> str:
    """``bitwise``, ``close`` (how close) or ``refused`` (which error); anything else raises.

    Raises:
        AssertionError: When results, held bytes or messages are not what the style promises.
    """
    make, function, data, semantics = (MODELS | UNDER_GLOBAL)[cell.model]
    mesh = ranks.mesh((ranks.world_size,), ("dp",))
    double = semantics == "global" or cell.world > 2 or cell.backend == "inductor"
    model = models.seeded(make).to(ranks.device, torch.float64 if double else torch.float32)
    reference = copy.deepcopy(model)
    own = optimizer(cell, model)
    bucket_mb = 25 if cell.backend == "eager" else 2 / 1024  # a graph of several pieces
    settings: dict[str, Any] = {"semantics": semantics, "backend": cell.backend, "bucket_mb": bucket_mb}
    step = dp.compile(function, mesh=mesh, style=cell.style, **settings)
    generator = torch.Generator().manual_seed(3)
    batches: list[Any] = [data(generator, 4 * ranks.world_size) for _ in range(STEPS)]
    if double:
        batches = pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batches)
    losses = []
    try:
        for number, batch in enumerate(batches[:-1]):
            torch.manual_seed(100 * number + ranks.rank)
            losses.append(step(model, own, *models.rows_of(ranks, batch)).detach().clone())
    except dp.PlanError as error:
        codes = sorted({problem.code for problem in error.problems})
        everywhere = set(map(tuple, ranks.gather(codes)))
        assert len(everywhere) == 1, f"ranks disagree about what is wrong: {everywhere}"
        return f"refused: {', '.join(codes)}"
    torch.manual_seed(100 * (STEPS - 1) + ranks.rank)
    with ranks.record() as log:
        losses.append(step(model, own, *models.rows_of(ranks, batches[-1])).detach().clone())
    check_held(step, ranks, model, own, KEEPS[cell.optimizer])
    check_sent(step, log, semantics)
    expected = train_reference(ranks, cell, reference, function, batches, semantics)
    assert step.num_traces <= 2  # an optimizer that makes its state in the first step has a graph for that
    step.release()
    exact = double and cell.backend == "eager"  # fused kernels round where a model computes in float32 by itself
    return compare(ranks, losses, expected, model, reference, double, CLOSE_IN_DOUBLE if exact else CLOSE)


def optimizer(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[cell.optimizer]([p for p in model.parameters() if p.requires_grad])


def train_reference(
    ranks: Ranks, cell: Cell, model: nn.Module, function: Any, batches: list[Any], semantics: str
) -> list[torch.Tensor]:
    """Losses of the reference, whose model is trained in place."""
    trained: nn.Module = model
    if semantics == "local":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the name that torch 2.13 wants is not in 2.11
            trained = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optim = optimizer(cell, model)
    losses = []
    for number, batch in enumerate(batches):
        torch.manual_seed(100 * number + ranks.rank)
        rows = models.rows_of(ranks, batch) if semantics == "local" else batch
        losses.append(function(trained, optim, *rows).detach().clone())
    return losses


def compare(
    ranks: Ranks,
    losses: list[torch.Tensor],
    expected: list[torch.Tensor],
    model: nn.Module,
    reference: nn.Module,
    double: bool,
    limit: float,
) -> str:
    """Every loss, parameter and buffer against the reference's."""
    buffers = dict(reference.named_buffers())
    ours = [*losses, *(p.detach() for p in model.parameters()), *(b for b in dict(model.named_buffers()).values())]
    theirs = [*expected, *(p.detach() for p in reference.parameters()), *buffers.values()]
    assert len(ours) == len(theirs) > STEPS
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape, f"{one.shape} is not {other.shape}"
        if not torch.equal(one, other):
            # What starts at 0 and has no gradient but rounding (a key's bias) is compared with the size of an update.
            scale = max(other.abs().max().double().item(), UPDATE if double else 0.0) or 1.0
            worst = max(worst, (one.double() - other.double()).abs().max().item() / scale)
            assert not one.isnan().any()
    worst = max(ranks.gather(worst))
    assert worst <= limit, f"differs from the reference by {worst:.1e}"
    return "bitwise" if worst == 0.0 else f"close: {worst:.0e}"


def check_held(step: dp.Step, ranks: Ranks, model: nn.Module, optim: torch.optim.Optimizer, kept: int) -> None:
    """Bytes of parameters and state that live on this rank are those of the style; ``kept`` tensors for a parameter."""
    from torch.distributed.tensor import DTensor

    held = {"param": 0, "state": 0}
    for param in dict.fromkeys(model.parameters()):
        assert isinstance(param, DTensor)
        held["param"] += param.to_local().numel() * param.element_size()
        for value in optim.state.get(param, {}).values():
            if isinstance(value, DTensor):
                held["state"] += value.to_local().numel() * value.element_size()
    plan, world = step.plan, step.plan.world
    wanted = sum(p.local_numel(p.param, world, ranks.rank) * p.info.dtype.itemsize for p in plan.params)
    assert held["param"] == wanted, f"{held['param']} bytes of parameters instead of {wanted}"
    one = sum(
        p.local_numel(p.state, world, ranks.rank) * p.info.dtype.itemsize
        for p in plan.params
        if p.info.requires_grad and p.info.shape
    )
    assert held["state"] == kept * one, f"{held['state']} bytes of state, {kept} times {one} expected"


def check_sent(step: dp.Step, log: Any, semantics: str) -> None:
    """Gradients travel once and the way the style says; parameters are gathered at most twice."""
    needed = gradient_bytes(step.plan)
    gathered = gathered_bytes(step.plan)
    kinds = models.kinds_of(log)
    sent = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), 0)
    for kind, event in zip(kinds, log.events, strict=True):
        sent[kind] += sum(event.bytes_sent)
    if semantics == "global":
        check_sent_globally(step, log, needed)
    else:
        assert {op: sent[op] for op in needed} == needed, f"sent {sent}, gradients are {needed}"
        assert sent["all_gather"] <= 2 * gathered, f"gathered {sent['all_gather']}, parameters are {gathered}"
        assert set(kinds) <= {op for op, size in {**needed, "all_gather": gathered}.items() if size}
    assert sent["all_gather"] >= gathered, f"gathered {sent['all_gather']}, parameters are {gathered}"


def check_sent_globally(step: dp.Step, log: Any, needed: dict[str, int]) -> None:
    """Under global semantics activations travel as well: what travels as a gradient does so once and in one way.

    A gradient of what was reduced or gathered before does not travel at all: it is whole on every rank already.
    """
    messages = messages_of(step.graph.graph, step.plan.world)
    assert tuple(m.kind for m in messages) == models.kinds_of(log)
    assert [m.sent_bytes for m in messages] == [sum(event.bytes_sent) for event in log.events]
    reductions = [m for m in messages if m.kind in needed and m.carries]
    carried = [name for m in reductions for name in m.carries]
    assert len(set(carried)) == len(carried) > 0, "a gradient is reduced once"
    sent = {kind: sum(m.sent_bytes for m in reductions if m.kind == kind) for kind in needed}
    # What two parameters' gradients are cut from (a class token among positions) is reduced whole, in any style.
    assert sent["all_reduce"] <= (needed["all_reduce"] or sum(needed.values()) // 4), f"{sent}, gradients are {needed}"
    assert sent["reduce_scatter"] <= needed["reduce_scatter"], f"{sent}, gradients are {needed}"


def gradient_bytes(plan: dp.PartitionPlan) -> dict[str, int]:
    """Bytes that a rank sends to reduce all gradients, by kind of collective; shards travel padded."""
    sent = {"all_reduce": 0, "reduce_scatter": 0}
    for param in plan.params:
        if param.info.requires_grad:
            whole = param.grad.is_replicate()
            size = param.info.num_bytes if whole else others_bytes(param, plan.world)
            sent["all_reduce" if whole else "reduce_scatter"] += size
    return sent


def gathered_bytes(plan: dp.PartitionPlan) -> int:
    """Bytes that a rank sends to gather all parameters once: for compute, or after the update."""
    return sum(
        others_bytes(param, plan.world)
        for param in plan.params
        if not param.param.is_replicate() or (param.info.requires_grad and not param.state.is_replicate())
    )


def others_bytes(param: dp.ParamPlan, world: int) -> int:
    """Bytes of a padded chunk, once for each other rank."""
    rows = param.info.shape[0]
    return -(-rows // world) * (param.info.num_bytes // rows) * (world - 1)
