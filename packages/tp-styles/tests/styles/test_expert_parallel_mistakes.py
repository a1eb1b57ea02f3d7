"""Ten planted mistakes of expert parallelism: the check of the first call refuses each, and says where."""

from __future__ import annotations

from typing import Any

import moe_models as moe
import pytest
import torch
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Shard
from tp_styles.problems import CheckError
from tp_styles.runtime.experts import AllToAllDispatcher, ExpertForward, RoutedTokens
from tp_styles.values import ModuleInfo, StyleSpec

COUNT = 4


class Dispatcher(AllToAllDispatcher):
    """The exchanges, with one mistake."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake
        self.kept: torch.Tensor | None = None

    def dispatch(self, hidden: Any, experts: Any, weights: Any, *, num_experts: int, group: Any) -> RoutedTokens:
        if self.mistake == "lost router gradient":
            weights = weights.detach()
        if self.mistake == "wrong divisor":
            hidden = hidden / 2 + (hidden / 2).detach()  # half of the gradient
        routed = super().dispatch(hidden, experts, weights, num_experts=num_experts, group=group)
        local = routed.experts
        if self.mistake == "wrong expert offset":
            local = (local + 1) % 2
        if self.mistake == "stale counts":  # of the layer before
            kept, self.kept = self.kept, local
            if kept is not None and len(kept):
                local = kept.repeat(len(local) // len(kept) + 1)[: len(local)]
        return RoutedTokens(routed.hidden, local, routed.weights, routed.state)

    def combine(self, outputs: torch.Tensor, state: Any) -> torch.Tensor:
        if self.mistake == "permuted return":
            outputs = outputs.flip(0)
        if self.mistake == "dropped token":
            outputs = torch.cat([outputs[:-1], torch.zeros_like(outputs[-1:])])
        return super().combine(outputs, state)

    def __repr__(self) -> str:
        return f"Dispatcher({self.mistake!r})"


class WeightsBefore(ExpertForward):
    """Weighs the tokens instead of the experts' outputs."""

    def run_experts(self, routed: RoutedTokens, given: dict[str, Any]) -> torch.Tensor:
        assert routed.weights is not None
        weighed, ones = routed.hidden * routed.weights[:, None], torch.ones_like(routed.weights)
        return super().run_experts(RoutedTokens(weighed, routed.experts, ones + 0 * routed.weights, None), given)


class DoubledBias(ExpertForward):
    """Adds the last bias again to the rows that return, as each rank of a sum would."""

    def run_experts(self, routed: RoutedTokens, given: dict[str, Any]) -> torch.Tensor:
        bias = self.parameter("down_bias")
        assert bias is not None
        return super().run_experts(routed, given) + bias[routed.experts]


class With(tp.ExpertParallel):
    """The style with another forward."""

    def __init__(self, forward: type[ExpertForward]) -> None:
        super().__init__()
        self.forward = forward

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        spec = super().spec(info, tp_size)
        object.__setattr__(spec, "compute", self.forward)
        return spec


class SharedInside(moe.Stacked):
    """Experts that add a shared expert to each token they are given: once here, once for each selected expert apart."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.always = nn.Linear(moe.WIDTH, moe.WIDTH)

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(hidden, experts, weights) + self.always(hidden)
        return result


class WithStatistics(moe.Mixture):
    """A mixture that returns the loss of its tokens."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, logits = super().forward(x)
        return output, moe.router_loss(logits[None])


@pytest.mark.ranks(2)
def test_ten_planted_mistakes_are_refused_with_their_place(ranks: Ranks) -> None:
    mesh, place = ranks.mesh((2,), ("ep",)), r"layers\.\d\.moe\.experts"
    refused = 0
    kinds = ("lost router gradient", "wrong divisor", "stale counts", "permuted return", "dropped token")
    styles: dict[str, Any] = {
        kind: tp.ExpertParallel(dispatcher=Dispatcher(kind)) for kind in (*kinds, "wrong expert offset")
    }
    styles |= {"weights before": With(WeightsBefore), "doubled bias": With(DoubledBias)}
    for kind, style in styles.items():
        model = moe.language_model(COUNT)
        tp.apply_plan(model, mesh, {"layers.*.moe.experts": style})
        with pytest.raises(CheckError, match=place) as caught:
            model(moe.batches(1, 4)[0])
        assert caught.value.problems[0].code == "check-mismatch", kind
        assert any("ExpertParallel" in each.hint or "dispatcher" in each.hint for each in caught.value.problems), kind
        refused += 1
    model = moe.language_model(COUNT, SharedInside)
    tp.apply_plan(model, mesh, {"layers.*.moe.experts": tp.ExpertParallel()})
    with pytest.raises(CheckError, match=rf"{place}.*a shared expert.*ExpertParallel"):
        model(moe.batches(1, 4)[0])
    torch.manual_seed(0)
    block = WithStatistics(COUNT).double()
    own = tp.PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Shard(0),), use_local_output=True)
    tp.apply_plan(block, mesh, {"": own, "experts": tp.ExpertParallel("sharded")})
    x = torch.randn(3, 2, moe.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(ranks.rank))
    with pytest.raises(CheckError, match=r"WithStatistics -> output\[1\]"):
        block(x)
    refused += 2
    assert refused == 10


@pytest.mark.ranks(2)
def test_the_right_twins_pass(ranks: Ranks) -> None:
    """The same classes without a mistake are equal to the original, in every layer."""
    mesh = ranks.mesh((2,), ("ep",))
    for style in (tp.ExpertParallel(dispatcher=Dispatcher("none")), With(ExpertForward)):
        model = moe.language_model(COUNT)
        handle = tp.apply_plan(model, mesh, {"layers.*.moe.experts": style})
        model(moe.batches(1, 4)[0])
        lines = [line for line in handle.report().splitlines() if line.startswith("check of layers")]
        assert len(lines) == 2
        assert all("equal to the original (1 tensors and 7 gradients" in line for line in lines)
