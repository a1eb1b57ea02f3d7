"""Shard attention by heads: projections of any kind, `nn.MultiheadAttention`, torch's transformer layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.blocks import LoRAParallel, NoParallel
from tp_styles.styles.linear import (
    ColwiseParallel,
    FusedColwiseParallel,
    RowwiseParallel,
    flow_problems,
    single,
    wrong_kind,
)
from tp_styles.values import ModuleInfo, ParameterInfo, ParameterSpec, Redistribution, Section, Split, StyleSpec


@dataclass(frozen=True)
class Heads:
    """Heads of one attention layer over the ranks.

    Attributes:
        queries: Number of query heads.
        keys: Number of key-value heads.
        tp_size: Number of ranks.
        copies: How many neighbouring ranks hold the same key-value heads.
    """

    queries: int
    keys: int
    tp_size: int
    copies: int = 1

    @property
    def local_queries(self) -> int:
        """Query heads on each rank."""
        return self.queries // self.tp_size

    @property
    def local_keys(self) -> int:
        """Key-value heads on each rank."""
        return self.keys * self.copies // self.tp_size

    @property
    def local_groups(self) -> int:
        """Query heads for each key-value head on a rank."""
        return self.local_queries // self.local_keys


def divide_heads(
    name: str, queries: int, keys: int, tp_size: int, *, kv_replicate: bool
) -> tuple[Heads | None, Problem | None]:
    """Divide heads evenly over ranks; copy key-value heads if there are fewer than ranks.

    Every rank gets full groups: the key-value heads of its query heads, and no others.
    """
    if queries < 1 or keys < 1 or queries % keys:
        return None, Problem(
            "does-not-divide",
            name,
            found=f"{queries} heads, {keys} key-value heads",
            hint="query heads are a multiple of key-value heads",
        )
    if queries % tp_size == 0 and keys % tp_size == 0:
        return Heads(queries, keys, tp_size), None
    if queries % tp_size == 0 and tp_size % keys == 0 and kv_replicate:
        return Heads(queries, keys, tp_size, copies=tp_size // keys), None
    divisors = [size for size in range(1, queries + 1) if queries % size == 0 and keys % size == 0]  # for the hint
    copied = [size for size in range(1, queries + 1) if queries % size == 0 and size % keys == 0]
    could = queries % tp_size == 0 and tp_size % keys == 0
    label = f"num_key_value_heads={keys}" if queries % tp_size == 0 else f"num_heads={queries}"
    if keys != queries and queries % tp_size:
        label += f", num_key_value_heads={keys}"
    hint = "valid " + ", ".join(str(size) for size in divisors)
    if could:
        hint += ", or kv_replicate=True"
    elif copied and keys != queries:
        hint += "; with kv_replicate=True also " + ", ".join(str(size) for size in copied if size not in divisors)
    return None, Problem("does-not-divide", name, found=f"{label} with tp={tp_size}", hint=hint)


QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "n_local_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads")
GROUPS = ("num_key_value_groups", "num_queries_per_kv", "n_rep")


class GQAParallel(ParallelStyle):
    """Shard attention by heads: projections in by rows, projection out by columns, local head counts.

    Attributes with a known name (`num_heads`, `n_kv_heads` ...) and the right value become local. A projection with a
    low-rank update of peft beside it is sharded by `LoRAParallel`.

    Args:
        num_heads: Query heads; by default the module's attribute (`num_heads`, `n_head` ...).
        num_kv_heads: Key-value heads; by default the module's attribute, else as many as query heads.
        kv_replicate: With fewer key-value heads than ranks, several ranks hold the same ones, and sum their gradients.
        q: Name of the query projection.
        k: Name of the key projection.
        v: Name of the value projection.
        o: Name of the projection out.
        qkv: Name of a fused projection (all of q, then k, then v) instead of the three.
        norms: Names of modules applied to the heads of a rank (`q_norm`, `k_norm`): their gradients are summed.
    """

    def __init__(
        self,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        kv_replicate: bool = False,
        q: str = "q_proj",
        k: str = "k_proj",
        v: str = "v_proj",
        o: str = "o_proj",
        qkv: str | None = None,
        norms: tuple[str, ...] = (),
    ) -> None:
        self.num_heads, self.num_kv_heads, self.kv_replicate = num_heads, num_kv_heads, kv_replicate
        self.q, self.k, self.v, self.o, self.qkv = q, k, v, o, qkv
        self.norms = tuple(norms)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return the styles of the projections; see `ParallelStyle.spec`."""
        queries = self.num_heads or _first(info, QUERY_HEADS)  # by usual names
        keys = self.num_kv_heads or _first(info, KEY_HEADS) or queries
        names = (self.qkv, self.o) if self.qkv else (self.q, self.k, self.v, self.o)
        missing = [name for name in names if name and _weight(info, name) is None]
        if queries is None or keys is None or missing:
            code = "unknown-name" if missing else "missing-argument"
            return StyleSpec(
                problems=(
                    Problem(
                        code,
                        info.where(),
                        found=f"no {', '.join(missing)}" if missing else "no attribute with the number of heads",
                        hint="pass the names and numbers: GQAParallel(q=..., num_heads=...)",
                    ),
                )
            )
        heads, problem = divide_heads(info.where(), queries, keys, tp_size, kv_replicate=self.kv_replicate)
        if heads is None or problem is not None:
            return StyleSpec(problems=(problem,) if problem is not None else ())
        out = _weight(info, self.o)
        assert out is not None
        if out.shape[1] % heads.queries:
            return StyleSpec(
                problems=(
                    Problem(
                        "does-not-divide",
                        info.where(self.o),
                        found=f"{out.shape[1]} input features for {heads.queries} heads",
                        hint="every head has the same size",
                    ),
                )
            )
        layers = self._projections(info, heads, out.shape[1] // heads.queries)
        has_adapter = {name: info.parameter(f"{name}.weight") is None for name in layers}
        children = [(name, LoRAParallel(style) if has_adapter[name] else style) for name, style in layers.items()]
        norms: list[tuple[str, object]] = [(name, NoParallel(sum_gradient=True)) for name in self.norms]
        return StyleSpec(
            compute="none",
            children=(*children, *norms),
            attributes=self._local(info, heads),
        )

    def _projections(self, info: ModuleInfo, heads: Heads, size: int) -> dict[str, ColwiseParallel | RowwiseParallel]:
        rows = (heads.queries * size, heads.keys * size, heads.keys * size)
        if self.qkv:
            fused = FusedColwiseParallel(rows, unit=size, copies=(1, heads.copies, heads.copies))
            return {self.qkv: fused, self.o: RowwiseParallel()}
        layers: dict[str, ColwiseParallel | RowwiseParallel] = {self.q: ColwiseParallel()}
        for name in (self.k, self.v):
            weight = _weight(info, name)
            assert weight is not None
            # A head of v may have another size than one of k.
            unit = weight.shape[0] // heads.keys
            layers[name] = FusedColwiseParallel((weight.shape[0],), unit=max(unit, 1), copies=heads.copies)
            if heads.copies == 1:  # plain shards, which a DTensor can express
                layers[name] = ColwiseParallel()
        return {**layers, self.o: RowwiseParallel()}

    def _local(self, info: ModuleInfo, heads: Heads) -> tuple[tuple[str, object], ...]:
        values = {"heads": heads.local_queries, "kv_heads": heads.local_keys, "groups": heads.local_groups}
        counts = dict.fromkeys(QUERY_HEADS, ("heads", heads.queries))  # name -> kind, global value
        counts |= dict.fromkeys(KEY_HEADS, ("kv_heads", heads.keys))
        counts |= dict.fromkeys(GROUPS, ("groups", heads.queries // heads.keys))
        return tuple((name, values[kind]) for name, (kind, value) in counts.items() if info.size(name) == value)


def _weight(info: ModuleInfo, name: str) -> ParameterInfo | None:
    """Return the weight of a projection, or of its base layer below an adapter of peft."""
    return info.parameter(f"{name}.weight") or info.parameter(f"{name}.base_layer.weight")


def _first(info: ModuleInfo, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := info.size(name), int) and value > 0), None)


INPUTS = ("query", "key", "value")


class MultiheadAttentionParallel(ParallelStyle):
    """Shard an `nn.MultiheadAttention` by heads; masks and options work as before.

    Keys of no token (`add_bias_kv`, `add_zero_attn`) are refused.

    Args:
        input_layouts: Layout of query, key and value if they are plain tensors; default `Replicate()`.
        output_layouts: Layout of the attention's output; default `Replicate()`. Attention weights are always full.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement, ...] | None = None,
        output_layouts: Placement | tuple[Placement, ...] | None = None,
    ) -> None:
        self.input_layouts = (single(input_layouts, Replicate(), "input_layouts"),)
        self.output_layouts = (single(output_layouts, Replicate(), "output_layouts"),)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return a spec with sharded heads; see `ParallelStyle.spec`."""
        if not issubclass(info.kind, nn.MultiheadAttention):
            return StyleSpec(
                problems=(
                    wrong_kind(
                        info,
                        "the style is for nn.MultiheadAttention; GQAParallel is for attention with projections of"
                        " its own",
                    ),
                )
            )
        width, count = int(info.size("embed_dim") or 0), int(info.size("num_heads") or 1)
        problems = []
        if info.kind.forward is not nn.MultiheadAttention.forward:
            problems.append(
                Problem(
                    "module-not-shardable",
                    info.where(),
                    found=info.kind.__name__,
                    hint="the style replaces the forward of nn.MultiheadAttention, which this class overrides",
                )
            )
        if info.parameter("bias_k") is not None or info.size("add_zero_attn"):
            problems.append(
                Problem(
                    "unsupported-option",
                    info.where(),
                    found="keys of no token",
                    hint="build it without add_bias_kv and add_zero_attn",
                )
            )
        _, problem = divide_heads(info.where(), count, count, tp_size, kv_replicate=False)
        if problem is not None:
            problems.append(problem)
        outer = self.input_layouts[0]
        enter = [Redistribution(outer, Replicate(), gradient=Partial(), width=width) for _ in INPUTS]
        leave = Redistribution(Partial(), self.output_layouts[0], split=Split.along(0, width), width=width)
        problems += flow_problems(info, [("input_layouts", enter[0]), ("output_layouts", leave)])
        return StyleSpec(
            compute="multihead-attention",
            parameters=_parameters(info, width, width // count, sharded=not isinstance(leave.dst, Replicate)),
            inputs=tuple(zip(INPUTS, enter, strict=True)),
            outputs=(leave, None),  # the forward gathers attention weights
            problems=tuple(problems),
        )


def _parameters(info: ModuleInfo, width: int, unit: int, *, sharded: bool) -> tuple[tuple[str, ParameterSpec], ...]:
    by_heads = Split.along(0, width, unit=unit)
    packed = Split(0, (Section(width, unit),) * 3)  # q, k and v rows in one weight
    splits = {
        "in_proj_weight": packed,
        "in_proj_bias": packed,
        "q_proj_weight": by_heads,
        "k_proj_weight": by_heads,
        "v_proj_weight": by_heads,
        "out_proj.weight": Split.along(1, width, unit=unit),
        "out_proj.bias": Split.replicated(),
    }
    return tuple(
        (name, ParameterSpec(split, sum_gradient=sharded and name == "out_proj.bias"))  # of this rank's output shard
        for name, split in splits.items()
        if info.parameter(name) is not None
    )


class TransformerLayerParallel(ParallelStyle):
    """Shard torch's transformer layers: attention by heads, feed-forward by columns and rows.

    Norms, and dropouts outside the feed-forward pair, are replicated.
    """

    def __init__(self) -> None:
        super().__init__(None, None)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return the styles of the layers below; see `ParallelStyle.spec`."""
        if not issubclass(info.kind, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            return StyleSpec(
                problems=(
                    wrong_kind(info, "the style is for nn.TransformerEncoderLayer and nn.TransformerDecoderLayer"),
                )
            )
        children: dict[str, object] = {
            "self_attn": MultiheadAttentionParallel(),
            "linear1": ColwiseParallel(),
            "linear2": RowwiseParallel(),
            "dropout": NoParallel(sum_gradient=True),  # on a shard: other draws on each rank
        }
        if issubclass(info.kind, nn.TransformerDecoderLayer):
            children["multihead_attn"] = MultiheadAttentionParallel()
        return StyleSpec(compute="none", children=tuple(children.items()))
