"""The forward of `nn.MultiheadAttention` on some of its heads."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.dropout import tp_rng
from tp_styles.runtime.forwards import RowLinear
from tp_styles.runtime.redistribute import Redistribute, TPGroup
from tp_styles.values import Redistribution, StyleSpec


class AttentionForward(RowLinear):
    """Compute local heads, then one sum over the ranks.

    Shapes: B batch, L target length, S source length, H heads of this rank, D head size.
    """

    is_checked_alone = True

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        super().__init__(module, spec, axis, name)
        attention = cast(nn.MultiheadAttention, module)
        self.all_heads, self.size = attention.num_heads, attention.head_dim
        self.heads = attention.num_heads // axis.size
        self.average = Redistribute(Redistribution(Partial(), Replicate()), axis, f"{name} -> weights", inplace_ok=True)
        self.gather = Redistribute(Redistribution(Shard(-3), Replicate(), split=None), axis, f"{name} -> weights")
        self.mask = Redistribute(
            Redistribution(Replicate(), Replicate(), gradient=Partial()), axis, f"{name}(attn_mask)"
        )

    def __call__(  # type: ignore[override]  # the arguments of nn.MultiheadAttention
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Take and return the same as `nn.MultiheadAttention.forward`."""
        self._check(query, is_causal, attn_mask)
        module = cast(nn.MultiheadAttention, self.module)
        query, key, value = self._enter(query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not module.batch_first:  # [L, B, E] to [B, L, E]
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        self._check_masks(query, key, value, attn_mask, key_padding_mask)
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = self._merged_mask(None if causal else attn_mask, key_padding_mask, query)
        projected = self._project(query, key, value)
        q, k, v = (x.unflatten(-1, (self.heads, self.size)).transpose(1, 2) for x in projected)  # [B, H, L or S, D]
        out, weights = self._attend(q, k, v, mask, causal, need_weights)
        produced = self._out(out.transpose(1, 2).flatten(2), batched)
        return produced, None if weights is None else self._weights(weights, average_attn_weights, batched)

    # ------------------------------------------------------------------ steps

    def _check(self, query: torch.Tensor, is_causal: bool, attn_mask: torch.Tensor | None) -> None:
        if query.is_nested:
            raise StyleInputError(
                Problem(
                    "unsupported-tensor",
                    f"{self.name}(query)",
                    found="a nested tensor",
                    hint="apply the plan to the full model, or build nn.TransformerEncoder(enable_nested_tensor=False)",
                )
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # torch's message

    def _check_masks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
    ) -> None:
        """Refuse shapes that torch refuses, but broadcasting accepts; inputs are [B, L or S, features]."""
        batch, length, source = query.shape[0], query.shape[1], key.shape[1]
        shapes: list[tuple[str, torch.Tensor | None, set[tuple[int, ...]]]] = [
            ("key", key, {(batch, source, key.shape[-1])}),
            ("value", value, {(batch, source, value.shape[-1])}),
            ("attn_mask", attn_mask, {(length, source), (batch * self.all_heads, length, source)}),
            ("key_padding_mask", key_padding_mask, {(batch, source)}),
        ]
        problems = []
        for name, x, wanted in shapes:
            if x is None:
                continue
            where = f"{self.name}({name})"
            if name.endswith("mask") and not (x.dtype == torch.bool or x.is_floating_point()):
                problems.append(
                    Problem(
                        "unsupported-dtype",
                        where,
                        found=str(x.dtype),
                        hint="True for what is left out, or numbers to add to the scores: .bool() or .float()",
                    )
                )
            if tuple(x.shape) not in wanted:
                problems.append(
                    Problem(
                        "shape-mismatch",
                        where,
                        found=str(tuple(x.shape)),
                        hint=" or ".join(str(shape) for shape in sorted(wanted, key=len)),
                    )
                )
        if problems:
            raise StyleInputError(problems)

    def _enter(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Redistribute each different tensor once: self-attention has one input, and one sum of its gradient."""
        q = self.moves["query"](query)
        k = q if key is query else self.moves["key"](key)
        v = q if value is query else k if value is key else self.moves["value"](value)
        return q, k, v

    def _project(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed, bias = self.parameter("in_proj_weight"), self.parameter("in_proj_bias")
        if packed is not None and query is key is value:
            return F.linear(query, packed, bias).chunk(3, dim=-1)  # self-attention: one product
        if packed is not None:
            weights = packed.chunk(3)
        else:
            projections = [self.parameter(f"{name}_proj_weight") for name in "qkv"]
            weights = tuple(weight for weight in projections if weight is not None)
        biases = bias.chunk(3) if bias is not None else (None, None, None)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _merged_mask(
        self, attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, query: torch.Tensor
    ) -> torch.Tensor | None:
        """Merge both masks into an additive one, broadcastable to [B, H, L, S]."""
        merged = None
        if attn_mask is not None:
            merged = self.mask(_additive(attn_mask, query.dtype))
            if merged.dim() == 3:  # [B * all heads, L, S]
                merged = merged.view(-1, self.all_heads, *merged.shape[1:])
                merged = merged.narrow(1, self.axis.rank * self.heads, self.heads)  # this rank's heads
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, query.dtype)[:, None, None, :]
            merged = padding if merged is None else merged + padding
        return merged

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        need_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        module = cast(nn.MultiheadAttention, self.module)
        dropout = module.dropout if module.training else 0.0
        random: AbstractContextManager[None] = tp_rng(self.axis.mesh) if dropout > 0 else nullcontext()
        with random:  # dropout on shards of heads: other draws on each rank
            if not need_weights:
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
            scores = (q * math.sqrt(1.0 / self.size)) @ k.transpose(-2, -1)
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout) if dropout > 0 else weights
            return weights @ v, weights

    def _out(self, x: torch.Tensor, batched: bool) -> torch.Tensor:
        module = cast(nn.MultiheadAttention, self.module)
        if not batched:
            x = x.squeeze(0)
        elif not module.batch_first:
            x = x.transpose(0, 1)
        weight = self.parameter_of(module.out_proj, "weight", "out_proj.weight")
        assert weight is not None
        return self.finish(F.linear(x, weight), self.parameter_of(module.out_proj, "bias", "out_proj.bias"))

    def _weights(self, weights: torch.Tensor, average: bool, batched: bool) -> torch.Tensor:
        """Return the weights of all heads, or their mean, on every rank."""
        # The mean of this rank's heads is a partial one, then summed.
        averaged = self.average(weights.sum(dim=1) / self.all_heads) if average else self.gather(weights)
        return averaged if batched else averaged.squeeze(0)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
