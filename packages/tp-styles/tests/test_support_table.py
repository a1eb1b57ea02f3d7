"""Every kind of module under every style that has a meaning for it: right, or refused. `SUPPORT.md` shows the outcome.

"right": output, gradients of inputs and of all parameters are those of the module alone, on 2 ranks, in float64.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from test_attention import Grouped
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

PAGE = Path(__file__).parent.parent / "SUPPORT.md"
MARKS = "<!-- support table: begin -->\n", "<!-- support table: end -->"


@dataclass(frozen=True)
class Row:
    """One module and its plan."""

    name: str
    make: Callable[[], nn.Module]
    plan: dict[str, tp.ParallelStyle]
    inputs: Callable[[], Any] = lambda: torch.randn(2, 6, 8, dtype=torch.float64)
    call: Callable[[nn.Module, Any], torch.Tensor] = lambda module, x: module(x)


def ids() -> torch.Tensor:
    return torch.tensor([[1, 4, 2, 6], [0, 3, 5, 2]])


def heads() -> torch.Tensor:
    return torch.randn(2, 3, 6, dtype=torch.float64)


def attend(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module(x, x, x, need_weights=False)[0]
    return out


def attention(**options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return nn.MultiheadAttention(8, 4, batch_first=True, **options)

    return make


WHOLE = Replicate()
MHA: dict[str, tp.ParallelStyle] = {"": tp.MultiheadAttentionParallel()}
LAYER: dict[str, tp.ParallelStyle] = {"": tp.TransformerLayerParallel()}
BY_ROWS: dict[str, tp.ParallelStyle] = {"": tp.RowwiseParallel()}
BY_COLUMNS: dict[str, tp.ParallelStyle] = {"": tp.ColwiseParallel(output_layouts=WHOLE)}
FROM_WHOLE: dict[str, tp.ParallelStyle] = {"": tp.RowwiseParallel(input_layouts=WHOLE)}
PAIR: dict[str, tp.ParallelStyle] = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
GQA: dict[str, tp.ParallelStyle] = {"": tp.GQAParallel(kv_replicate=True, norms=("q_norm", "k_norm"))}
FUSED_GQA: dict[str, tp.ParallelStyle] = {"": tp.GQAParallel(kv_replicate=True, qkv="qkv", norms=("q_norm", "k_norm"))}


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True)


def decoder() -> nn.Module:
    return nn.TransformerDecoderLayer(8, 4, 12, dropout=0.0, batch_first=True)


def weight_normed() -> nn.Module:
    normed: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(8, 12))
    return normed


ROWS = (
    Row("column and row pair", lambda: models.MLP(8, 12), PAIR),
    Row("the same, 5 hidden channels (uneven)", lambda: models.MLP(8, 5), PAIR),
    Row("the same, 1 hidden channel (a rank has none)", lambda: models.MLP(8, 1), PAIR),
    Row("the same, without bias", lambda: models.MLP(8, 12, bias=False), PAIR),
    Row("`nn.Linear`, `ColwiseParallel`, full output", lambda: nn.Linear(8, 7), BY_COLUMNS),
    Row("`nn.Linear`, `RowwiseParallel`, full input", lambda: nn.Linear(8, 7), FROM_WHOLE),
    Row("`nn.Bilinear`", lambda: nn.Bilinear(8, 8, 3), BY_COLUMNS, call=lambda m, x: m(x, x)),
    Row("`nn.Linear` with weight norm", weight_normed, BY_COLUMNS),
    Row(
        "`nn.Linear`, `FusedColwiseParallel`",
        lambda: nn.Linear(8, 12),
        {"": tp.FusedColwiseParallel((6, 4, 2), output_layouts=WHOLE)},
    ),
    Row("`nn.Embedding` by rows, 7 of them", lambda: nn.Embedding(7, 8, padding_idx=2), BY_ROWS, ids),
    Row("`nn.Embedding` by columns", lambda: nn.Embedding(7, 8, padding_idx=2), BY_COLUMNS, ids),
    Row(
        "`nn.Embedding(scale_grad_by_freq=True)` by columns",
        lambda: nn.Embedding(7, 8, scale_grad_by_freq=True),
        BY_COLUMNS,
        ids,
    ),
    Row(
        "`nn.Embedding(scale_grad_by_freq=True)` by rows",
        lambda: nn.Embedding(7, 8, scale_grad_by_freq=True),
        BY_ROWS,
        ids,
    ),
    Row("`nn.Embedding(max_norm=...)`", lambda: nn.Embedding(7, 8, max_norm=1.0), BY_ROWS, ids),
    Row("`nn.Embedding(sparse=True)`", lambda: nn.Embedding(7, 8, sparse=True), BY_ROWS, ids),
    Row("`nn.LayerNorm` on a sequence shard", lambda: nn.LayerNorm(8), {"": tp.SequenceParallel()}),
    Row("`nn.MultiheadAttention`", attention(), MHA, call=attend),
    Row("the same, `kdim`, `vdim`, no bias", attention(kdim=8, vdim=8, bias=False), MHA, call=attend),
    Row("the same, `add_bias_kv`", attention(add_bias_kv=True), MHA, call=attend),
    Row("the same, `add_zero_attn`", attention(add_zero_attn=True), MHA, call=attend),
    Row("the same, 3 heads", lambda: nn.MultiheadAttention(9, 3), MHA),
    Row("`nn.TransformerEncoderLayer`", encoder, LAYER),
    Row("`nn.TransformerDecoderLayer`", decoder, LAYER, call=lambda m, x: m(x, x)),
    Row("grouped queries, `GQAParallel`", lambda: Grouped(4, 2), GQA, heads),
    Row("the same, 1 key-value head on 2 ranks", lambda: Grouped(4, 1), GQA, heads),
    Row("the same, fused projection", lambda: Grouped(4, 2, fused=True), FUSED_GQA, heads),
    Row("the same, 3 query heads", lambda: Grouped(3, 1), GQA, heads),
    Row("tied embedding and head", lambda: models.GPT(tied=True), models.gpt_plan(), ids),
    Row(
        "an embedding that is tied to an unstyled head",
        lambda: models.GPT(tied=True),
        {"embed": tp.RowwiseParallel()},
        ids,
    ),
    Row("a pattern that means nothing", lambda: models.MLP(8, 12), {"upp": tp.ColwiseParallel()}),
)


def outcome(row: Row, mesh: DeviceMesh) -> str:
    torch.manual_seed(3)
    module = models.roughen(row.make().double())
    alone = copy.deepcopy(module)
    try:
        tp.apply_plan(module, mesh, row.plan, check="never")
    except tp.PlanError as error:
        return error.problems[0].code
    x = row.inputs()
    own, theirs = (x.clone().requires_grad_(x.is_floating_point()) for _ in range(2))
    expected = row.call(alone, theirs)
    weight = torch.linspace(0.5, 1.5, expected.numel(), dtype=expected.dtype).view(expected.shape)
    if "sequence" in row.name:  # this rank's positions
        out = row.call(module, models.rows(own, 1))
        assert isinstance(out, DTensor)
        torch.autograd.backward((out.to_local() * models.rows(weight, 1)).sum())
        good = torch.allclose(out.full_tensor(), expected, atol=1e-12)
        torch.autograd.backward((expected * weight).sum())
    else:
        result = row.call(module, own)
        torch.autograd.backward((result * weight).sum())
        torch.autograd.backward((expected * weight).sum())
        good = torch.allclose(result, expected, atol=1e-12)
        if x.is_floating_point():
            assert own.grad is not None
            assert theirs.grad is not None
            good = good and torch.allclose(own.grad, theirs.grad, atol=1e-11)
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    compared = models.full_gradients(module, mesh)
    good = good and compared.keys() == gradients.keys() and len(gradients) > 0
    return (
        "right" if good and all(torch.allclose(compared[n], gradients[n], atol=1e-11) for n in gradients) else "WRONG"
    )


@pytest.mark.ranks(2)
def test_the_readme_shows_what_is_right_and_what_is_refused(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    lines = ["| module | outcome |", "|---|---|"]
    outcomes = []
    for row in ROWS:
        word = outcome(row, mesh)
        outcomes.append(word)
        lines.append(f"| {row.name} | {word if word == 'right' else f'refused: `{word}`'} |")
    assert "WRONG" not in outcomes, lines
    if ranks.rank:
        return
    text = PAGE.read_text()
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    expected = before + MARKS[0] + "\n".join(lines) + "\n" + MARKS[1] + after
    if os.environ.get("UPDATE_SUPPORT"):
        PAGE.write_text(expected)
    assert text == expected or os.environ.get("UPDATE_SUPPORT"), "run this test with UPDATE_SUPPORT=1"
