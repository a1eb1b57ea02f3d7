"""One trace for batches of several lengths, bit for bit what a trace for each length gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import dp_matrix_models as matrix
import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.api import runner_of
from dp_partition.capture import tracer
from dp_partition.capture.fakes import use_first_sizes
from ranktest import Ranks
from torch import fx, nn

LENGTHS = (8, 12, 8, 17, 1)  # 1 has a trace of its own: torch broadcasts that size


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "replicate": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "fully_shard": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),  # traced in half the time
}


def trained(ranks: Ranks, make: Callable[[], nn.Module], style: Any, marked: bool) -> tuple[dp.CompiledStep, list[Any]]:
    """Losses and final parameters of a run over batches of all lengths; the ranks' lengths differ."""
    model = models.seeded(make).to(ranks.device)
    optim = OPTIMIZERS[style](model.parameters())
    dims: Any = {"mark_dynamic": 1} if marked else {}
    step = dp.compile(models.token_step, mesh=ranks.mesh((ranks.world_size,), ("dp",)), style=style, **dims)
    generator = torch.Generator().manual_seed(ranks.rank)
    torch.manual_seed(ranks.rank)
    results = []
    first = ranks.rank % 3
    for length in (*LENGTHS[first:], *LENGTHS[:first]):
        (batch,) = models.tokens(generator, rows=4, length=length)
        results.append(step(model, optim, tuple(one.to(ranks.device) for one in batch)))
    with step.unsharded():
        return step, [*results, *(param.detach().clone() for param in model.parameters())]


def equal(ranks: Ranks, make: Callable[[], nn.Module], style: Any, traces: tuple[int, ...] = (2,)) -> dp.CompiledStep:
    step, results = trained(ranks, make, style, marked=True)
    plain, expected = trained(ranks, make, style, marked=False)
    assert len(results) == len(expected) > len(LENGTHS)
    assert [torch.equal(a, b) for a, b in zip(results, expected, strict=True)] == [True] * len(expected)
    # One with symbols, one for length 1; else one for each length.
    assert step.num_traces in traces and plain.num_traces == 4
    assert runner_of(step).schedule.num_checked >= 2
    return step


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_one_trace_serves_all_lengths(ranks: Ranks, style: str) -> None:
    # The fake attention kernel of older releases takes a decision on the length: a trace for either side.
    is_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equal(ranks, lambda: models.GPT(length=32), style, traces=(4, 5) if is_old else (2,))


@pytest.mark.ranks(4, timeout=300)
def test_four_ranks_with_other_lengths(ranks: Ranks) -> None:
    equal(ranks, lambda: nn.Sequential(nn.Embedding(31, 5), nn.Linear(5, 31)), "fully_shard")


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.extra("transformers")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_transformers(ranks: Ranks, name: str) -> None:
    equal(ranks, lambda: matrix.hugging_face(name, positions=32), "fully_shard")


class Scaled(nn.Module):
    """A layer whose result is scaled by a number made of the length."""

    def __init__(self, number: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(4, 4), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.number(x.shape[1])
        return out


def scaled(ranks: Ranks, number: Callable[[Any], Any], **settings: Any) -> tuple[int, list[str]]:
    """Train over four lengths beside eager code; how many traces it took, and the warnings."""
    model, reference = (models.seeded(lambda: Scaled(number)).to(ranks.device) for _ in range(2))
    optim, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))

    def mean_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        return models.mean_step(model, optim, x), x.shape[1]

    step = dp.compile(mean_step, mesh=ranks.mesh((1,), ("dp",)), mark_dynamic=1, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (8, 12, 9, 30, 12):
            x = torch.arange(2.0 * length * 4, device=ranks.device).view(2, length, 4) / length
            loss, size = step(model, optim, x)
            assert torch.equal(loss, models.mean_step(reference, other, x)) and size == length and type(size) is int
    return step.num_traces, [str(one.message) for one in caught]


@pytest.mark.ranks(1)
def test_a_decision_on_a_length_takes_another_trace(ranks: Ranks) -> None:
    assert scaled(ranks, lambda length: 1 / length) == (1, [])
    assert scaled(ranks, lambda length: 2 if length > 10 else 3) == (2, [])
    for number in (lambda length: 1.0 / int(length), lambda length: len(str(length))):  # its text is that of its value
        assert scaled(ranks, number) == scaled(ranks, number, check="never") == (4, [])


@pytest.mark.ranks(1)
def test_a_number_of_the_first_batch_is_found_at_the_second_length(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burnt(graph: fx.Graph, mode: Any) -> None:
        use_first_sizes(graph, mode)
        for node in graph.nodes:
            if node.target is torch.ops.aten.sym_size.int:
                node.replace_all_uses_with(node.meta["val"])  # as a pass would that reads a size

    monkeypatch.setattr(tracer, "use_first_sizes", burnt)
    with pytest.raises((dp.PlanError, RuntimeError)) as caught:
        scaled(ranks, lambda length: 1 / length)
    by_kernel = any("raised by node" in note for note in getattr(caught.value, "__notes__", ()))
    assert by_kernel or "check-mismatch" in str(caught.value)


@pytest.mark.ranks(1)
def test_what_cannot_have_symbols(ranks: Ranks) -> None:
    traces, (warning,) = scaled(ranks, lambda length: {8: 1, 9: 2, 12: 3, 30: 4}[length])
    assert traces == 5 and "in spite of mark_dynamic" in warning
    mesh = ranks.mesh((1,), ("dp",))
    for settings in ({"semantics": "global"}, {"accumulate": 2}):
        with pytest.raises(dp.PlanError, match="mark_dynamic"):
            dp.compile(models.mean_step, mesh=mesh, mark_dynamic=1, **settings)
