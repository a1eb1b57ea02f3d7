"""Runs a module's forward without its weights, to see which slices depend on which.

The module's linear layers are replaced by stand-ins in a shallow copy (the module itself is not touched): column
linears return prepared random values, other linears mix all they are given, the row linear hands back what it is given
and stops the run. Two runs differ
only in the columns' slices of *other* ranks; if the row linear's slice differs, the region mixes slices and must not
be cut that way. Weights are not needed, so this works on meta modules of any size and takes milliseconds.
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


@dataclass(frozen=True)
class Verdict:
    """Result of a probe.

    Attributes:
        separate: ``None`` if the forward could not be run.
        reason: why it could not, or what mixes.
        between: which of the doubted parameters change what the row reads: they act between the columns and the row,
            not before or after them.
    """

    separate: bool | None
    reason: str = ""
    between: frozenset[str] = frozenset()


class _Captured(Exception):
    """Carries the row linear's input out of the forward."""

    def __init__(self, value: Tensor) -> None:
        super().__init__("captured")
        self.value = value


class _Source(nn.Module):
    """Stands in for a linear layer: returns prepared channels for every token."""

    def __init__(self, view: LinearView, seed: int) -> None:
        super().__init__()
        self.in_features, self.out_features = view.in_features, view.out_features
        self.nf, self.nx = view.out_features, view.in_features
        self.values = _random((_BATCH * _SEQUENCE, view.out_features), seed)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"expected {self.in_features} channels, got {x.shape[-1]}")
        num_tokens = x.shape[:-1].numel()
        if num_tokens > self.values.shape[0]:
            raise ValueError(f"{num_tokens} tokens where at most {self.values.shape[0]} were expected")
        return self.values[:num_tokens].reshape(*x.shape[:-1], self.out_features).clone()


class _Other(nn.Module):
    """Stands in for any other linear: a weight of rank one, so that every output depends on every input."""

    def __init__(self, view: LinearView, seed: int) -> None:
        super().__init__()
        self.in_features, self.out_features = view.in_features, view.out_features
        self.nf, self.nx = view.out_features, view.in_features
        self.reads = _random((view.in_features,), seed) / view.in_features**0.5
        self.writes, self.adds = _random((view.out_features,), seed + 1), _random((view.out_features,), seed + 2)

    def forward(self, x: Tensor) -> Tensor:
        read = torch.matmul(x.double(), self.reads)
        return read.unsqueeze(-1) * self.writes + self.adds


class _Sink(nn.Module):
    """Stands in for the row linear."""

    def __init__(self, view: LinearView) -> None:
        super().__init__()
        self.in_features, self.out_features = view.in_features, view.out_features
        self.nf, self.nx = view.out_features, view.in_features

    def forward(self, x: Tensor) -> Tensor:
        raise _Captured(x)


def probe(
    module: nn.Module,
    columns: Mapping[LinearView, Slices],
    row: LinearView,
    row_slices: Slices,
    head_dim: int | None = None,
    doubted: Iterable[str] = (),
) -> Verdict:
    """Return whether slice ``r`` of the row's input depends on nothing but slices ``r`` of the columns' outputs.

    Args:
        module: the smallest module that holds the columns and the row.
        columns: each column linear and, for each rank, the indices of its output channels.
        row: the row linear.
        row_slices: for each rank, the indices of its input channels.
        head_dim: channels of an attention head, to make up rotary embeddings that its forward may ask for.
        doubted: names of other parameters of the module that may act inside the region.
    """
    try:
        clone, sources = _stand_in(module, list(columns), row)
    except Exception as error:  # somebody else's module: copying it may fail in any way
        return Verdict(None, f"it could not be copied ({type(error).__name__}: {str(error)[:120]})")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        run, reason = _first_call_that_reaches_the_row(clone, row, head_dim)
        if run is None:
            return Verdict(None, reason)
        baseline = run()
        if baseline.shape[-1] != row.in_features or not bool(torch.isfinite(baseline).all()):
            return Verdict(None, "the row linear's input has another size, or is not finite")
        for rank, own in enumerate(row_slices):
            with _others_changed(columns, sources, rank):
                changed = run()
            if not _same(baseline[..., own], changed[..., own]):
                return Verdict(False, f"what rank {rank} would read depends on other ranks' channels")
            if own.numel() < row.in_features and _same(baseline, changed):
                return Verdict(None, "the row linear does not read what the columns write")
        between = {name for name in doubted if _acts(clone, name, run, baseline)}
    return Verdict(True, between=frozenset(between))


def _acts(clone: nn.Module, name: str, run: Callable[[], Tensor], baseline: Tensor) -> bool:
    """Return whether other values of a parameter change what the row reads; a replaced linear changes at once."""
    path, _, leaf = name.rpartition(".")
    owner = clone.get_submodule(path)
    if isinstance(owner, _Source | _Sink):
        return False
    if isinstance(owner, _Other):
        kept, owner.adds = owner.adds, owner.adds + 1
        changed = run()
        owner.adds = kept
        return not _same(baseline, changed)
    value = owner._parameters[leaf]
    if value is None or not value.is_floating_point():
        return value is not None
    kept = value.clone()
    value.add_(_random(tuple(value.shape), 79).to(value))
    changed = run()
    value.copy_(kept)
    return not _same(baseline, changed)


def _stand_in(
    module: nn.Module, columns: Sequence[LinearView], row: LinearView
) -> tuple[nn.Module, dict[LinearView, _Source]]:
    """A shallow copy of the module tree with stand-ins, other parameters and buffers on the CPU in float64."""
    sources = {view: _Source(view, seed) for seed, view in enumerate(columns)}
    replace: dict[nn.Module, nn.Module] = {view.module: source for view, source in sources.items()}
    replace[row.module] = _Sink(row)
    return _copied(module, replace), sources


def _copied(module: nn.Module, replace: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in replace:
        return replace[module]
    view = as_linear("", module)
    if view is not None:
        replace[module] = _Other(view, 1000 + 3 * len(replace))
        return replace[module]
    twin = copy.copy(module)
    replace[module] = twin
    twin.__dict__["training"] = False
    twin.__dict__["_modules"] = {
        name: None if child is None else _copied(child, replace) for name, child in module._modules.items()
    }
    twin.__dict__["_parameters"] = {
        name: None if value is None else nn.Parameter(_filled(value), requires_grad=False)
        for name, value in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        name: None if value is None else _cpu(value) for name, value in module._buffers.items()
    }
    for hooks in ("_forward_pre_hooks", "_forward_hooks"):
        twin.__dict__[hooks] = type(module.__dict__[hooks])()
    return twin


def _filled(value: Tensor) -> Tensor:
    """Something that blocks no flow: ones with a little noise, for norms, gates and scales of whatever shape."""
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
    """Tries the argument lists that such modules usually take until one gets to the row linear."""
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
        except Exception as error:  # somebody else's forward: anything can happen
            reason = f"its forward could not be run on its own ({type(error).__name__}: {str(error)[:120]})"
            continue
        return run, ""
    return None, reason


def _width(clone: nn.Module, row: LinearView) -> int:
    """Channels of the stream: what the first stand-in reads."""
    for module in clone.modules():
        if isinstance(module, _Source | _Other):
            return module.in_features
    return row.out_features


def _calls(clone: nn.Module, width: int, head_dim: int | None) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Argument lists: the stream for everything required, then common extras by name."""
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
    """Values worth trying for a required argument called `name`."""
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
    """Rotary embeddings as models pass them: complex, or cosine and sine for all or half of the channels."""
    angles = _random((_SEQUENCE, head_dim // 2), 9)
    full = torch.cat([angles, angles], dim=-1)
    if single:
        return [full.cos(), full.cos()[None], angles.cos(), angles.cos()[None]]
    pairs = [(angle.cos(), angle.sin()) for angle in (full, full[None], angles, angles[None])]
    return [torch.polar(torch.ones_like(angles), angles), *pairs, None]


class _others_changed:
    """For the time of one run, every channel that is not rank's own is replaced by other values."""

    def __init__(self, columns: Mapping[LinearView, Slices], sources: Mapping[LinearView, _Source], rank: int) -> None:
        self._columns, self._sources, self._rank = columns, sources, rank
        self._kept: list[tuple[_Source, Tensor]] = []

    def __enter__(self) -> None:
        for index, (view, slices) in enumerate(self._columns.items()):
            source = self._sources[view]
            self._kept.append((source, source.values))
            changed = _random(tuple(source.values.shape), 500 + 31 * index + self._rank) * 1.7 + 0.4
            changed[:, slices[self._rank]] = source.values[:, slices[self._rank]]
            source.values = changed

    def __exit__(self, *_: object) -> None:
        for source, values in self._kept:
            source.values = values


def _same(one: Tensor, other: Tensor) -> bool:
    scale = float(one.abs().max()) if one.numel() else 0.0
    return one.shape == other.shape and bool(((one - other).abs() <= _TOLERANCE * max(scale, 1e-12)).all())


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
