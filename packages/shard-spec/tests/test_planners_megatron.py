"""MegatronPlanner on hand-written models: what is cut, how, and on what evidence."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shard_spec import InterleavedShard, MeshSpec, PlanError, ShardingPlan
from shard_spec.planners import MegatronPlanner, PlannedSharding, ShardingPlanner
from shard_spec.planners.megatron import Analysis, Evidence, TPBlockKind
from torch import Tensor, nn
from units_referee import verify_units

MESH = MeshSpec({"dp": 2, "tp": 2})

# ---- models as people write them ------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Separate or fused q, k, v in several orders; grouped-query if there are fewer key-value heads."""

    def __init__(self, width: int, num_heads: int, qkv: str = "separate", num_kv_heads: int | None = None) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = num_heads, num_kv_heads or num_heads
        self.order = qkv
        head_dim = width // num_heads
        if qkv == "separate":
            self.q = nn.Linear(width, width)
            self.k = nn.Linear(width, self.n_kv_head * head_dim)
            self.v = nn.Linear(width, self.n_kv_head * head_dim)
        else:
            self.qkv = nn.Linear(width, width + 2 * self.n_kv_head * head_dim)
        self.proj = nn.Linear(width, width)
        self.head_dim = head_dim

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as ``[batch, heads, sequence, head_dim]``."""
        batch, length, _ = x.shape
        heads, groups, dim = self.n_head, self.n_kv_head, self.head_dim
        if self.order == "separate":
            q, k, v = self.q(x), self.k(x), self.v(x)
        elif self.order == "sections":
            q, k, v = self.qkv(x).split([heads * dim, groups * dim, groups * dim], dim=-1)
        elif self.order == "heads":
            q, k, v = self.qkv(x).view(batch, length, heads, 3, dim).unbind(3)
        else:  # groups: query heads of a group, then its k and v
            parts = self.qkv(x).view(batch, length, groups, heads // groups + 2, dim)
            q, k, v = parts.split([heads // groups, 1, 1], dim=3)
        q, k, v = (t.reshape(batch, length, -1, dim).transpose(1, 2) for t in (q, k, v))
        return q, k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """`kind`: plain, gated, fused (gate then up), pairs (gate and up alternate), normed (a norm in the middle)."""

    def __init__(self, width: int, kind: str = "plain", hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        self.kind = kind
        if kind in ("fused", "pairs"):
            self.w12 = nn.Linear(width, 2 * hidden)
            self.proj = nn.Linear(hidden, width)
            return
        self.fc = nn.Linear(width, hidden)
        if kind == "gated":
            self.gate = nn.Linear(width, hidden)
        self.proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        if self.kind == "fused":
            gate, up = self.w12(x).chunk(2, dim=-1)
            out = self.proj(F.silu(gate) * up)
        elif self.kind == "pairs":
            both = self.w12(x)
            out = self.proj(F.silu(both[..., ::2]) * both[..., 1::2])
        elif self.kind == "gated":
            out = self.proj(F.silu(self.gate(x)) * self.fc(x))
        elif self.kind == "normed":
            hidden = F.gelu(self.fc(x))
            out = self.proj(F.layer_norm(hidden, hidden.shape[-1:]))
        else:
            out = self.proj(F.gelu(self.fc(x)))
        return out


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), attention
        self.ln2, self.mlp = nn.LayerNorm(width), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class GPT(nn.Module):
    """Token and position embeddings, blocks, a final norm and a head, tied or not."""

    def __init__(
        self,
        num_tokens: int = 96,
        width: int = 32,
        num_heads: int = 4,
        num_layers: int = 3,
        tied: bool = False,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(num_tokens, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(
            Block(Attention(width, num_heads, **attention), MLP(width), width) for _ in range(num_layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_tokens, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# ---- helpers --------------------------------------------------------------------------------------------------------


def rules(module: nn.Module, mesh: MeshSpec = MESH, **options: Any) -> dict[str, str]:
    plan = MegatronPlanner(mesh, **options).build_plan(module).plan
    return {pattern: str(value).removeprefix("dp:R, ") for pattern, value in plan.items()}


def analysed(module: nn.Module, tp_size: int = 2, **options: Any) -> Analysis:
    return MegatronPlanner({"tp": tp_size}, **options).analyse(module)


def assert_right(module: nn.Module, analysis: Analysis, tp_size: int, *inputs: Tensor) -> int:
    """Executes the model: every unit's summands need nothing but the rank's own slices. Returns the number of units."""

    def call(twin: nn.Module) -> Tensor:
        out: Tensor = twin(*inputs)
        return out

    units = tuple(unit for unit in analysis.units if unit.rows and unit.columns)
    assert verify_units(module.double().eval(), units, tp_size, call) == ()
    return len(units)


def codes(analysis: Analysis) -> set[str]:
    return {problem.code for problem in (*analysis.left_whole.values(), *analysis.unrecognised.values())}


# ---- a GPT ----------------------------------------------------------------------------------------------------------


def test_gpt_with_separate_qkv() -> None:
    plan = MegatronPlanner(MESH).build_plan(GPT())
    assert rules(GPT()) == {
        "tok.weight": "tp:S(0)",
        **{f"blocks.*.attn.{name}.{part}": "tp:S(0)" for name in "qkv" for part in ("weight", "bias")},
        "blocks.*.attn.proj.weight": "tp:S(1)",
        "blocks.*.mlp.fc.weight": "tp:S(0)",
        "blocks.*.mlp.fc.bias": "tp:S(0)",
        "blocks.*.mlp.proj.weight": "tp:S(1)",
        "head.weight": "tp:S(0)",
    }
    assert plan.validate(GPT()) == ()
    layouts = plan.resolve(GPT())
    assert str(layouts["blocks.1.attn.q.weight"]) == "dp:R, tp:S(0)"
    assert layouts["blocks.1.attn.proj.bias"].is_replicated
    assert layouts["pos.weight"].is_replicated
    assert layouts["blocks.2.ln1.weight"].is_replicated
    assert not plan.notes
    assert not plan.unrecognised


def test_gpt_with_fused_qkv_is_cut_in_sections() -> None:
    gpt_rules = rules(GPT(qkv="sections"))
    assert gpt_rules["blocks.*.attn.qkv.weight"] == "tp:I(0,[32,32,32])"
    assert gpt_rules["blocks.*.attn.qkv.bias"] == "tp:I(0,[32,32,32])"


def test_tied_head_and_embedding_are_one_rule() -> None:
    gpt_rules = rules(GPT(tied=True))
    assert gpt_rules["tok.weight"] == "tp:S(0)"
    assert "head.weight" not in gpt_rules
    assert MegatronPlanner(MESH).build_plan(GPT(tied=True)).validate(GPT(tied=True)) == ()


def test_same_plan_on_the_meta_device_and_every_time() -> None:
    with torch.device("meta"):
        meta = GPT(qkv="sections")
    plans = [MegatronPlanner(MESH).build_plan(model) for model in (meta, meta, GPT(qkv="sections"))]
    assert plans[0] == plans[1] == plans[2]
    assert len({plan.digest for plan in plans}) == 1


def test_the_module_and_the_random_state_are_not_touched() -> None:
    model = GPT(qkv="sections").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules, state = dict(model.named_modules()), torch.get_rng_state()
    MegatronPlanner(MESH).build_plan(model)
    assert model.training
    assert dict(model.named_modules()) == modules
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not module._forward_hooks and "forward" not in vars(module) for module in model.modules())


def test_the_plan_is_a_sharding_plan_that_remembers_and_pickles() -> None:
    planner = MegatronPlanner(MESH)
    assert isinstance(planner, ShardingPlanner)
    plan = planner.build_plan(GPT(width=30, num_heads=3))  # 3 heads on 2 ranks
    assert isinstance(plan, PlannedSharding)
    assert plan.axis_roles == {"tp": "model"}
    plain = ShardingPlan(dict(plan.plan), mesh=MESH, axis_roles=plan.axis_roles)
    assert plan == plain
    assert plain == plan
    assert plan != ShardingPlan(dict(plan.plan), mesh=MESH)  # nothing says what the axis is for
    assert plan != ShardingPlan({}, mesh=MESH)
    twin = pickle.loads(pickle.dumps(plan))
    assert twin == plan
    assert twin.notes == plan.notes != ()


# ---- the evidence ---------------------------------------------------------------------------------------------------

ATTENTIONS = [("separate", 8), ("separate", 4), ("sections", 8), ("sections", 4), ("heads", 8), ("groups", 4)]


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(("order", "num_kv_heads"), ATTENTIONS)
def test_attention_is_cut_by_heads(order: str, num_kv_heads: int, tp_size: int) -> None:
    torch.manual_seed(0)
    model = Attention(48, 8, order, num_kv_heads)
    analysis = analysed(model, tp_size)
    assert [unit.evidence for unit in analysis.units] == [Evidence.PROBED]
    assert analysis.sharded_share == 1.0
    placement = analysis.cuts["q.weight" if order == "separate" else "qkv.weight"].placement
    kv = num_kv_heads * 6
    assert str(placement) == (f"I(0,[48,{kv},{kv}])" if order == "sections" else "S(0)")
    assert assert_right(model, analysis, tp_size, torch.randn(2, 5, 48, dtype=torch.float64)) == 1


@pytest.mark.parametrize("kind", ["plain", "gated", "fused", "pairs"])
def test_feed_forward_blocks_are_cut_by_channels(kind: str) -> None:
    torch.manual_seed(0)
    model = MLP(12, kind)
    for tp_size in (2, 3):
        analysis = analysed(model, tp_size)
        assert [unit.evidence for unit in analysis.units] == [Evidence.PROBED]
        assert analysis.sharded_share == 1.0
        assert assert_right(model, analysis, tp_size, torch.randn(4, 12, dtype=torch.float64)) == 1


def test_a_norm_without_parameters_between_the_linears_is_found_by_probing() -> None:
    # By names and shapes alone this is an ordinary MLP; cut by channels it would train wrongly.
    analysis = analysed(MLP(12, "normed"))
    assert analysis.units == ()
    assert codes(analysis) == {"slices-mix"}
    assert analysis.sharded_share == 0.0


class MixingHeads(Attention):
    """Attention that mixes its heads (talking heads)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q, k, v)
        y = y + y.roll(1, dims=1)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


def test_heads_that_talk_to_each_other_are_not_cut() -> None:
    for order in ("separate", "sections"):
        analysis = analysed(MixingHeads(16, 4, order))
        assert analysis.units == ()
        assert codes(analysis) == {"slices-mix"}


class NormedHeads(Attention):
    """Norms of q and k: over each head, or over all heads."""

    def __init__(self, width: int, num_heads: int, over_all: bool) -> None:
        super().__init__(width, num_heads)
        size = width if over_all else width // num_heads
        self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.over_all = over_all

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        if self.over_all:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in (q, k, self.v(x)))
        if not self.over_all:
            q, k = self.q_norm(q), self.k_norm(k)
        y = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize("probe", [True, False])
def test_norms_of_q_and_k(probe: bool) -> None:
    over_all = analysed(NormedHeads(24, 4, over_all=True), probe=probe)
    assert over_all.units == ()
    assert codes(over_all) == {"slices-mix" if probe else "partial-gradient"}
    torch.manual_seed(0)
    model = NormedHeads(24, 4, over_all=False)
    per_head = analysed(model, probe=probe)
    assert per_head.sharded_share == 1.0
    assert per_head.units[0].replicated == ("q_norm.weight", "k_norm.weight")
    assert {note.name for note in per_head.notes if note.code == "partial-gradient"} == {
        "q_norm.weight",
        "k_norm.weight",
    }
    assert_right(model, per_head, 2, torch.randn(2, 3, 24, dtype=torch.float64))


class GatedHeads(Attention):
    """One more projection beside q, k and v, with as many outputs as there are heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.gate = nn.Linear(width // num_heads, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out: Tensor = self.proj((y * self.gate(y.mean(2)).unsqueeze(-1)).flatten(2))
        return out


def test_another_projection_beside_q_k_and_v() -> None:
    assert codes(analysed(GatedHeads(32, 4))) >= {"slices-mix"}
    assert codes(analysed(GatedHeads(32, 4), probe=False)) >= {"partial-gradient"}
    assert analysed(GatedHeads(32, 4), probe=False).units == ()


class ScaledHeads(Attention):
    """A number for all heads, or one for each channel of all of them."""

    def __init__(self, width: int, num_heads: int, size: int) -> None:
        super().__init__(width, num_heads)
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.proj(y * self.scale)
        return out


def test_parameters_between_the_linears_that_nobody_says_how_to_cut() -> None:
    """A probe finds the heads apart; yet ranks have parts of the gradient of a number, and need parts of a vector."""
    number = analysed(ScaledHeads(32, 4, 1))
    assert number.units[0].replicated == ("scale",)
    assert [note.name for note in number.notes if note.code == "partial-gradient"] == ["scale"]
    assert analysed(ScaledHeads(32, 4, 1), probe=False).units == ()
    vector = analysed(ScaledHeads(32, 4, 32))
    assert vector.units == ()
    assert codes(vector) == {"partial-gradient"}


class WholeBlock(Attention):
    """A block that keeps its norms and its feed-forward beside its projections; norms are as wide as all heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + super().forward(self.attn_norm(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


def test_parameters_before_and_after_the_heads_do_not_keep_them_whole() -> None:
    analysis = analysed(WholeBlock(32, 4))
    assert {unit.kind for unit in analysis.units} == {TPBlockKind.ATTENTION, TPBlockKind.MLP}
    assert "partial-gradient" not in codes(analysis)


class Rotary(Attention):
    """Asks for rotary embeddings, complex as in Meta's Llama or as a pair of cosine and sine."""

    def __init__(self, width: int, num_heads: int, kind: str, qkv: str) -> None:
        super().__init__(width, num_heads, qkv)
        self.kind = kind

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Any, mask: Tensor | None) -> Tensor:  # type: ignore[override]  # on purpose
        q, k, v = self.split(x)
        if self.kind == "complex":
            q, k = (self.turned(t, freqs_cis[start_pos:]) for t in (q, k))
        else:
            cos, sin = freqs_cis
            q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out

    @staticmethod
    def turned(x: Tensor, freqs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * freqs).flatten(-2)


@pytest.mark.parametrize("qkv", ["separate", "sections", "heads"])
@pytest.mark.parametrize("kind", ["complex", "pair"])
def test_blocks_that_ask_for_rotary_embeddings_are_probed(kind: str, qkv: str) -> None:
    analysis = analysed(Rotary(32, 4, kind, qkv))
    assert [unit.evidence for unit in analysis.units] == [Evidence.PROBED]


class Uncallable(Attention):
    """Needs an argument nobody can guess."""

    def forward(self, x: Tensor, table: dict[str, Tensor]) -> Tensor:  # type: ignore[override]  # on purpose
        return super().forward(x + table["bias"])


def test_what_cannot_be_probed_is_accepted_by_clear_names_only() -> None:
    separate = analysed(Uncallable(16, 4))
    assert [unit.evidence for unit in separate.units] == [Evidence.NAMED]
    assert [note.code for note in separate.notes] == ["unverified"]
    fused = analysed(Uncallable(16, 4, "sections"))
    assert fused.units == ()
    assert codes(fused) == {"heads-not-recognised"}
    specified = analysed(Uncallable(16, 4, "sections"), fused="sections")
    assert [unit.evidence for unit in specified.units] == [Evidence.USER_SPECIFIED]
    # Told wrongly where the truth can be seen: refused.
    lied = analysed(Attention(16, 4, "sections"), fused="heads")
    assert codes(lied) == {"slices-mix"}


# ---- head counts ----------------------------------------------------------------------------------------------------


def test_heads_that_do_not_divide_stay_whole_and_the_valid_sizes_are_said() -> None:
    analysis = analysed(Attention(48, 6), tp_size=4)
    (problem,) = set(analysis.left_whole.values())
    assert problem.code == "does-not-divide"
    assert problem.found == "num_heads=6 with tp=4"
    assert problem.hint == "valid tp sizes: 1, 2, 3, 6"
    assert len(analysis.left_whole) == 8


def test_fewer_kv_heads_than_ranks() -> None:
    analysis = analysed(Attention(64, 8, num_kv_heads=2), tp_size=4)
    (problem,) = set(analysis.left_whole.values())
    assert problem.found == "num_key_value_heads=2 with tp=4"
    assert problem.hint == "valid tp sizes: 1, 2, or kv_replicate=True"
    replicated = analysed(Attention(64, 8, num_kv_heads=2), tp_size=4, kv_replicate=True)
    assert set(replicated.cuts) == {"q.weight", "q.bias", "proj.weight"}
    assert "kv-replicated" in {note.code for note in replicated.notes}
    assert replicated.units[0].replicated == ("k.weight", "k.bias", "v.weight", "v.bias")
    fused = analysed(Attention(64, 8, "sections", 2), tp_size=4, kv_replicate=True)
    assert fused.units == ()


class Headless(nn.Module):
    """Attention that does not say how many heads it has."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def test_unknown_head_count_is_left_whole() -> None:
    analysis = analysed(Headless())
    assert analysis.units == ()
    assert codes(analysis) == {"missing-argument"}
    model = Headless()
    model.num_heads = 3  # type: ignore[assignment]  # an attribute that does not fit
    assert codes(analysed(model)) == {"heads-not-recognised"}


# ---- other structures -----------------------------------------------------------------------------------------------


def test_sequential_linears_are_paired() -> None:
    model = nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    analysis = analysed(model)
    assert {name: str(cut.placement) for name, cut in analysis.cuts.items() if name.endswith("weight")} == {
        "0.weight": "S(0)",
        "3.weight": "S(1)",
        "4.weight": "S(0)",
        "6.weight": "S(1)",
    }
    assert assert_right(model, analysis, 2, torch.randn(3, 8, dtype=torch.float64)) == 2
    mixed = analysed(nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)))
    assert mixed.units == ()
    assert codes(mixed) == {"heads-not-recognised"}


class SequentialWithSoftmax(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self[0](x).softmax(-1)
        out: Tensor = self[2](hidden)
        return out


class ResidualSequential(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self[2](self[1](self[0](x)))
        return out


class OwnAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # one input, on purpose
        mixed = (x @ self.in_proj_weight.T).softmax(-1)[..., : x.shape[-1]]
        out: Tensor = self.out_proj(mixed)
        return out


class OwnTable(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).softmax(-1)


def test_a_subclass_with_a_forward_of_its_own_is_not_taken_for_torchs() -> None:
    layers = (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = nn.ModuleDict(
        {"softmax": SequentialWithSoftmax(*layers), "attn": OwnAttention(16, 4), "tok_embed": OwnTable(64, 16)}
    )
    plan = MegatronPlanner(MESH).build_plan(model)
    assert dict(plan.plan) == {}
    assert {"slices-mix", "left-replicated"} <= {note.code for note in plan.notes}
    assert "attn.in_proj_weight" in plan.unrecognised
    residual = nn.ModuleDict({"mlp": ResidualSequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))})
    assert (
        str(MegatronPlanner(MESH).build_plan(residual).plan["mlp.0.weight"]) == "dp:R, tp:S(0)"
    )  # its forward was probed


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # of no concern here
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_transformer(batch_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(24, 4, 2, 2, 48, dropout=0.0, batch_first=batch_first)
    analysis = analysed(model)
    assert analysis.sharded_share == 1.0
    assert analysis.rest == {}
    kinds = [unit.kind for unit in analysis.units]
    assert (kinds.count(TPBlockKind.ATTENTION), kinds.count(TPBlockKind.MLP)) == (6, 4)
    assert analysis.cuts["encoder.layers.0.self_attn.in_proj_weight"].placement == InterleavedShard(0, (24, 24, 24))
    source, target = torch.randn(3, 5, 24, dtype=torch.float64), torch.randn(3, 5, 24, dtype=torch.float64)
    with torch.no_grad():
        assert assert_right(model.train(), analysis, 2, source, target) == 10


def test_multihead_attention_with_other_widths_and_key_biases() -> None:
    analysis = analysed(nn.MultiheadAttention(24, 4, kdim=8, vdim=16, add_bias_kv=True))
    assert {name: str(cut.placement) for name, cut in analysis.cuts.items()} == {
        "q_proj_weight": "S(0)",
        "k_proj_weight": "S(0)",
        "v_proj_weight": "S(0)",
        "in_proj_bias": "I(0,[24,24,24])",
        "bias_k": "S(2)",
        "bias_v": "S(2)",
        "out_proj.weight": "S(1)",
    }
    assert codes(analysed(nn.MultiheadAttention(24, 3))) == {"does-not-divide"}


def test_embeddings_that_cannot_be_cut() -> None:
    class Embeds(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.tok_embed, self.position_embed = nn.Embedding(10, 4, **options), nn.Embedding(10, 4)

    assert rules(Embeds()) == {"tok_embed.weight": "tp:S(0)"}
    assert rules(Embeds(max_norm=1.0)) == {}
    assert rules(Embeds(), vocabulary=False) == {}
    plan = MegatronPlanner({"tp": 4}).build_plan(Embeds())
    assert [note.code for note in plan.notes] == ["uneven-shards"]


def test_what_is_not_understood_is_listed_with_a_reason() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = MLP(8)
            self.adapter = nn.Linear(8, 8)

    plan = MegatronPlanner(MESH).build_plan(Odd())
    assert list(plan.unrecognised) == ["adapter.weight"]
    assert plan.unrecognised["adapter.weight"].code == "heads-not-recognised"


def test_lora_and_other_linears_with_more_in_them_are_not_linears() -> None:
    class Lora(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.lora_a = nn.Parameter(torch.zeros(2, 8))

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight / self.weight.norm(), self.bias)

    for kind in (Lora, Scaled):
        model = MLP(8)
        model.fc = kind() if kind is Lora else Scaled(8, 32)
        analysis = analysed(model)
        assert analysis.units == ()
        assert set(analysis.unrecognised) == {"fc.weight", "proj.weight"}


def test_wrong_axes_are_refused() -> None:
    with pytest.raises(PlanError, match="unknown-axis"):
        MegatronPlanner({"dp": 2})


def test_verify_finds_a_wrong_arrangement() -> None:
    # The way fused weights go wrong everywhere: plain rows of [q; k; v].
    torch.manual_seed(0)
    model = Attention(16, 4, "sections").double()
    wrong = MegatronPlanner({"tp": 2}, fused="heads", probe=False).analyse(model)
    assert [unit.evidence for unit in wrong.units] == [Evidence.USER_SPECIFIED]
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    problems = verify_units(model, wrong.units, 2, lambda twin: twin(x))
    assert {problem.code for problem in problems} == {"slices-mix"}
    idle = verify_units(model, analysed(model).units, 2, lambda twin: x)
    assert {problem.code for problem in idle} == {"unverified"}
