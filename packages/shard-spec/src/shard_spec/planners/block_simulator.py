"""Simulate a block's ranks in one process to detect channels needed from other ranks.

A block may be sharded if row inputs of slice ``r`` depend on column outputs of slice ``r`` and of no other slice. The
test is an intervention: compute a rank's result, replace the other ranks' channels by other values, and compare.
`BlockSimulator` does so for anything that can be run. `simulate_block` runs one block without its weights, so meta
modules of any size take milliseconds: in a shallow copy column linears return prepared values, other linears mix all
their inputs, and the row linear ends the run.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shard_spec.planners.megatron.linear import LinearView, as_linear

_BATCH, _SEQUENCE = 2, 4
_TOLERANCE = 1e-5  # relative; modules may compute softmax or norms in float32 inside. Real mixing is of order 1.

Slices = Sequence[Tensor]  # for each rank the indices of its channels


@dataclass(frozen=True, eq=False)
class Channels:
    """A tensor of column outputs or weights, with the mask of each rank's entries."""

    value: Tensor
    owned: Sequence[Tensor]


class BlockSimulator:
    """Simulator of the ranks of some blocks, one at a time.

    Args:
        run: returns a rank's result for the current values of the columns.
        columns: for each block the tensors of its columns; they are changed and restored.
        tolerance: relative; a smaller change of a result is rounding.
    """

    def __init__(
        self, run: Callable[[int], Tensor], columns: Mapping[str, Sequence[Channels]], tolerance: float
    ) -> None:
        self._run, self._columns, self._tolerance = run, columns, tolerance

    def mixing(self, rank: int) -> dict[str, float]:
        """Return blocks of `rank` that depend on other ranks' channels, with the relative change."""
        alone = self._run(rank)
        if self.displacement(alone, rank, self._columns, others=True) <= self._tolerance:
            return {}
        moved = {name: self.displacement(alone, rank, (name,), others=True) for name in self._columns}
        # Several blocks may move the result only jointly: then all of them are named.
        return {name: by for name, by in moved.items() if by > self._tolerance} or moved

    def idle(self, rank: int) -> list[str]:
        """Return blocks with channels on `rank` that do not reach the result."""
        alone = self._run(rank)
        return [
            name
            for name, columns in self._columns.items()
            if any(bool(one.owned[rank].any()) for one in columns)  # an empty slice cannot reach anything
            and self.displacement(alone, rank, (name,), others=False) <= self._tolerance
        ]

    def displacement(self, alone: Tensor, rank: int, blocks: Iterable[str], *, others: bool) -> float:
        """Measure the result's change under new values of other ranks' channels (or its own)."""
        columns = [one for name in blocks for one in self._columns[name]]
        originals = [one.value.clone() for one in columns]
        try:
            for seed, one in enumerate(columns):
                mask = ~one.owned[rank] if others else one.owned[rank]
                one.value.copy_(torch.where(mask, _other_values(one.value, seed), one.value))
            changed = self._run(rank)
        finally:
            for one, value in zip(columns, originals, strict=True):
                one.value.copy_(value)  # also after an error in the caller's forward
        if changed.shape != alone.shape:  # shapes depend on values
            return float("inf")
        return float((changed - alone).abs().max() / alone.abs().max().clamp_min(1e-30)) if alone.numel() else 0.0


def _other_values(value: Tensor, seed: int) -> Tensor:
    if not value.is_floating_point():
        return value + 1
    scale = float(value.abs().mean()) or 0.02  # same magnitude: no overflow, no lost bits
    return value + (_random(tuple(value.shape), 500 + 31 * seed) * 3 * scale).to(value)


@dataclass(frozen=True)
class Verdict:
    """Result of a simulation without weights.

    Attributes:
        separate: True if no slice depends on another; ``None`` if the forward could not be run.
        reason: reason of a failure or a refusal.
        between: the doubted parameters that change the row's input: they act between the columns and the row, not
            before or after them.
    """

    separate: bool | None
    reason: str = ""
    between: frozenset[str] = frozenset()


class _Captured(Exception):
    """Carry the row linear's input out of the forward."""

    def __init__(self, value: Tensor) -> None:
        super().__init__("captured")
        self.value = value


class _FakeLinear(nn.Module):
    """A linear of rank one without its weight: every output depends on every input."""

    def __init__(self, view: LinearView, seed: int) -> None:
        super().__init__()
        self.in_features, self.out_features = view.in_features, view.out_features
        self.nf, self.nx = view.out_features, view.in_features  # attribute names of GPT-2's Conv1D
        self.reads = _random((view.in_features,), seed) / view.in_features**0.5
        self.writes, self.adds = _random((view.out_features,), seed + 1), _random((view.out_features,), seed + 2)

    def forward(self, x: Tensor) -> Tensor:
        read = torch.matmul(x.double(), self.reads)
        return read.unsqueeze(-1) * self.writes + self.adds


class _FakeColumn(_FakeLinear):
    """Return prepared channels for every token, independent of the input."""

    def __init__(self, view: LinearView, seed: int) -> None:
        super().__init__(view, seed)
        self.values = _random((_BATCH * _SEQUENCE, view.out_features), seed)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"expected {self.in_features} channels, got {x.shape[-1]}")
        num_tokens = x.shape[:-1].numel()
        if num_tokens > self.values.shape[0]:
            raise ValueError(f"{num_tokens} tokens where at most {self.values.shape[0]} were expected")
        return self.values[:num_tokens].reshape(*x.shape[:-1], self.out_features).clone()


class _FakeRow(_FakeLinear):
    """Raise with its input, which ends the run."""

    def forward(self, x: Tensor) -> Tensor:
        raise _Captured(x)


def simulate_block(
    module: nn.Module,
    columns: Mapping[LinearView, Slices],
    row: LinearView,
    row_slices: Slices,
    head_dim: int | None = None,
    doubted: Iterable[str] = (),
) -> Verdict:
    """Compare the row inputs of each rank with and without other ranks' channels.

    Args:
        module: the smallest module that holds the columns and the row.
        columns: each column linear and, for each rank, the indices of its output channels.
        row: the row linear.
        row_slices: for each rank, the indices of its input channels.
        head_dim: channels of an attention head, for the rotary embeddings of some forwards.
        doubted: names of other parameters that may act inside the region.
    """
    fake_columns = {view: _FakeColumn(view, seed) for seed, view in enumerate(columns)}
    fakes: dict[nn.Module, nn.Module] = {view.module: fake for view, fake in fake_columns.items()}
    fakes[row.module] = _FakeRow(row, 999)
    try:
        clone = _without_weights(module, fakes)
    except Exception as error:  # a foreign module: copying it may fail in any way
        return Verdict(None, f"it could not be copied ({type(error).__name__}: {str(error)[:120]})")
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # the forward may draw random numbers
        run, reason = _first_call_that_reaches_the_row(clone, row, head_dim)
        if run is None:
            return Verdict(None, reason)
        baseline = run()
        if baseline.shape[-1] != row.in_features or not bool(torch.isfinite(baseline).all()):
            return Verdict(None, "the row linear's input has another size, or is not finite")
        channels = [Channels(fake.values, _index_masks(fake, columns[view])) for view, fake in fake_columns.items()]
        simulator = BlockSimulator(lambda rank: run()[..., row_slices[rank]], {"": channels}, _TOLERANCE)
        for rank in range(len(row_slices)):
            if simulator.mixing(rank):
                return Verdict(False, f"what rank {rank} would read depends on other ranks' channels")
            if simulator.idle(rank):  # a test that moves nothing proves nothing
                return Verdict(None, "the row linear does not read what the columns write")
        values = {name: value for name in doubted if (value := _value_of(clone, name)) is not None}
        entries = {name: [Channels(value, [torch.ones((), dtype=torch.bool)])] for name, value in values.items()}
        idle = BlockSimulator(lambda _: run(), entries, _TOLERANCE).idle(0)
    return Verdict(True, between=frozenset(values) - frozenset(idle))


def _index_masks(fake: _FakeColumn, slices: Slices) -> list[Tensor]:
    masks = [torch.zeros(fake.out_features, dtype=torch.bool) for _ in slices]
    for mask, own in zip(masks, slices, strict=True):
        mask[own] = True
    return masks


def _value_of(clone: nn.Module, name: str) -> Tensor | None:
    """Return the values that stand for a parameter; ``None`` for replaced columns and rows."""
    path, _, leaf = name.rpartition(".")
    owner = clone.get_submodule(path)
    if isinstance(owner, _FakeColumn | _FakeRow):
        return None
    return owner.adds if isinstance(owner, _FakeLinear) else owner._parameters[leaf]


def _without_weights(module: nn.Module, fakes: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy the module tree without weights: fake linears, other tensors on the CPU in float64."""
    if module in fakes:
        return fakes[module]
    view = as_linear("", module)
    if view is not None:
        fakes[module] = _FakeLinear(view, 1000 + 3 * len(fakes))
        return fakes[module]
    twin = copy.copy(module)
    fakes[module] = twin  # before the recursion: shared modules stay shared
    twin.__dict__["training"] = False  # directly: train() would recurse, and classes override it
    twin.__dict__["_modules"] = {
        name: None if child is None else _without_weights(child, fakes) for name, child in module._modules.items()
    }
    twin.__dict__["_parameters"] = {
        name: None if value is None else nn.Parameter(_filled(value), requires_grad=False)
        for name, value in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        name: None if value is None else _cpu(value) for name, value in module._buffers.items()
    }
    for hooks in ("_forward_pre_hooks", "_forward_hooks"):
        twin.__dict__[hooks] = type(module.__dict__[hooks])()  # hooks of wrappers expect the real module
    return twin


def _filled(value: Tensor) -> Tensor:
    """Fill with ones and a little noise: norms, gates and scales of any shape block no flow."""
    if not value.is_floating_point():
        return torch.ones(value.shape, dtype=value.dtype)
    if value.numel() > 2**24:
        raise ValueError("a parameter inside the region is too large to stand in for")
    return 1 + 0.1 * _random(tuple(value.shape), 77)


def _cpu(value: Tensor) -> Tensor:
    if value.device.type == "meta":
        return torch.ones(value.shape, dtype=torch.float64 if value.is_floating_point() else value.dtype)
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value


def _first_call_that_reaches_the_row(
    clone: nn.Module, row: LinearView, head_dim: int | None
) -> tuple[Callable[[], Tensor] | None, str]:
    """Try common argument lists until one reaches the row linear."""
    reason = "no way was found to call it"
    for arguments, keywords in itertools.islice(_calls(clone, _width(clone, row), head_dim), 48):

        def run(arguments: tuple[Any, ...] = arguments, keywords: dict[str, Any] = keywords) -> Tensor:
            try:
                clone(*arguments, **keywords)
            except _Captured as captured:
                return captured.value
            raise ValueError("the row linear was not called")

        try:
            run()
        except Exception as error:  # a foreign forward: it may fail in any way
            reason = f"its forward could not be run on its own ({type(error).__name__}: {str(error)[:120]})"
            continue
        return run, ""
    return None, reason


def _width(clone: nn.Module, row: LinearView) -> int:
    """Return the width of the stream: the input size of the first fake linear."""
    for module in clone.modules():
        if isinstance(module, _FakeLinear) and not isinstance(module, _FakeRow):
            return module.in_features
    return row.out_features


def _calls(clone: nn.Module, width: int, head_dim: int | None) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield argument lists: the stream for the first argument, then guesses by name."""
    try:
        parameters = list(inspect.signature(clone.forward).parameters.values())
    except (TypeError, ValueError):
        return
    stream = _random((_BATCH, _SEQUENCE, width), 5)
    needed = [p for p in parameters if p.default is p.empty]
    required = [p for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keyword_only = [p for p in needed if p.kind is p.KEYWORD_ONLY]
    choices = [[stream], *(_guesses(parameter.name, stream, head_dim) for parameter in required[1:])]
    named = [_guesses(parameter.name, stream, head_dim) for parameter in keyword_only]
    for values in itertools.product(*(choices if required else [])):
        for extra in itertools.product(*named):
            yield values, dict(zip((parameter.name for parameter in keyword_only), extra, strict=True))


def _guesses(name: str, stream: Tensor, head_dim: int | None) -> list[Any]:
    lowered = name.lower()
    if head_dim and any(word in lowered for word in ("rope", "rotary", "freq", "cos", "sin", "position_emb")):
        return _rotary(head_dim, single=lowered in ("cos", "sin"))
    if "start" in lowered or "offset" in lowered:
        return [0]
    if "mask" in lowered or "cache" in lowered or "past" in lowered or "bias" in lowered:
        return [None]
    streams = ("x", "hidden", "query", "key", "value", "context", "memory", "input", "stream")
    if any(word in lowered for word in streams):
        return [stream, None]
    return [None, stream]


def _rotary(head_dim: int, single: bool) -> list[Any]:
    """Return rotary embeddings in common forms: complex, or cosine and sine of all or half of the channels."""
    angles = _random((_SEQUENCE, head_dim // 2), 9)
    full = torch.cat([angles, angles], dim=-1)
    if single:
        return [full.cos(), full.cos()[None], angles.cos(), angles.cos()[None]]
    pairs = [(angle.cos(), angle.sin()) for angle in (full, full[None], angles, angles[None])]
    return [torch.polar(torch.ones_like(angles), angles), *pairs, None]


def even_slices(num_channels: int, tp_size: int) -> Slices:
    """Return the channels of each rank, split like ``torch.chunk``."""
    step = -(-num_channels // tp_size)
    return [torch.arange(min(r * step, num_channels), min((r + 1) * step, num_channels)) for r in range(tp_size)]


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
