"""Linear layers under one view, and a simulator of a block's ranks that detects channels needed from other ranks.

A linear layer has one view for either orientation of its weight.

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
from typing import Any, cast

import torch
from torch import Tensor, nn

NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_q_heads")
HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_head", "d_kv", "head_size")
VOCAB_SIZE = ("vocab_size", "n_vocab", "vocabulary_size", "num_embeddings")


def words(text: str) -> frozenset[str]:
    """Return the words of ``text``: names of submodules."""
    return frozenset(text.split())


@dataclass(frozen=True, eq=False)
class LinearView:
    """A linear layer ``y = x W + b``, with the orientation of its weight."""

    name: str  # FQN of the module
    module: nn.Module
    out_features: int  # size of the last dimension of its output
    in_features: int  # size of the last dimension of its input
    out_dim: int  # weight dimension of the outputs: 0 in ``nn.Linear``, 1 in the ``Conv1D`` of GPT-2
    in_dim: int  # weight dimension of the inputs

    @property
    def weight_name(self) -> str:
        """FQN of the weight."""
        return f"{self.name}.weight" if self.name else "weight"

    @property
    def biases(self) -> tuple[str, ...]:
        """FQN of the bias of ``[out_features]``, if there is one."""
        return () if self.module._parameters.get("bias") is None else (f"{self.name}.bias" if self.name else "bias",)

    @property
    def parameters(self) -> tuple[str, ...]:
        """FQNs of weight and bias."""
        return self.weight_name, *self.biases


def as_linear(name: str, module: nn.Module) -> LinearView | None:
    """Return the view of `module`, or ``None`` if it is not a plain linear layer.

    Not plain: further parameters or submodules (LoRA, quantisation, parametrisations), a lazy weight, or a custom
    ``forward``, which may use the weight in any way.
    """
    weight = module._parameters.get("weight")
    if weight is None or getattr(weight, "shape", None) is None or isinstance(weight, nn.UninitializedParameter):
        return None
    if weight.dim() != 2 or set(module._parameters) - {"weight", "bias"} or module._modules:
        return None
    if not weight.is_floating_point():  # quantised weights come with scales of their own
        return None
    if isinstance(module, nn.Linear) and (type(module).forward is nn.Linear.forward or from_library(module)):
        return LinearView(name, module, weight.shape[0], weight.shape[1], out_dim=0, in_dim=1)
    if type(module).__name__ == "Conv1D" and from_library(module):
        return LinearView(name, module, weight.shape[1], weight.shape[0], out_dim=1, in_dim=0)
    return None


def linear_children(name: str, module: nn.Module) -> dict[str, LinearView]:
    """Return the direct children that are plain linear layers, by child name, in order."""
    views = ((child_name, as_linear(join(name, child_name), child)) for child_name, child in module.named_children())
    return {child_name: view for child_name, view in views if view is not None}


def join(*parts: str) -> str:
    """Join nested names to an FQN; empty ones are left out."""
    return ".".join(part for part in parts if part)


def from_library(module: nn.Module) -> bool:
    """Return True for classes of torch or transformers, of known and tested arrangement."""
    return type(module).__module__.split(".")[0] in ("torch", "transformers")


@dataclass(frozen=True)
class Heads:
    """Head counts of an attention that match its shapes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def declared_vocab_sizes(modules: Iterable[nn.Module]) -> set[int]:
    """Return every vocabulary size declared by a config or attribute of `modules`."""
    places = (place for place in places_of(modules) if not isinstance(place, nn.Embedding))
    return {size for place in places if (size := first_declared([place], VOCAB_SIZE)) is not None}


def places_of(modules: Iterable[nn.Module]) -> list[object]:
    """Return each module and its config, the places of declared attributes."""
    both = (place for module in modules for place in (module, getattr(module, "config", None)))
    return [place for place in both if place is not None]


def first_declared(places: Iterable[object], attributes: Sequence[str]) -> int | None:
    """Return the first positive integer among the attributes, place by place."""
    for place in places:
        for attribute in attributes:
            try:
                value = getattr(place, attribute, None)
            except Exception:  # configs of transformers raise their own errors if layers differ in a value
                continue
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


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

    ``run`` returns a rank's result for the current values of the blocks' columns, which are changed and restored. A
    relative change of a result below ``tolerance`` is rounding.
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
            if any(bool(column.owned[rank].any()) for column in columns)  # an empty slice cannot reach anything
            and self.displacement(alone, rank, (name,), others=False) <= self._tolerance
        ]

    def displacement(self, alone: Tensor, rank: int, blocks: Iterable[str], *, others: bool) -> float:
        """Measure the result's change under new values of other ranks' channels (or its own)."""
        columns = [column for name in blocks for column in self._columns[name]]
        originals = [column.value.clone() for column in columns]
        try:
            for seed, column in enumerate(columns):
                mask = ~column.owned[rank] if others else column.owned[rank]
                moved = column.value + 1
                if column.value.is_floating_point():  # by the same magnitude: no overflow, no lost bits
                    scale = float(column.value.abs().mean()) or 0.02
                    noise = _random(tuple(column.value.shape), 500 + 31 * seed) * 3 * scale
                    moved = column.value + noise.to(column.value)
                column.value.copy_(torch.where(mask, moved, column.value))
            changed = self._run(rank)
        finally:
            for column, value in zip(columns, originals, strict=True):
                column.value.copy_(value)  # also after an error in the caller's forward
        if changed.shape != alone.shape:  # shapes depend on values
            return float("inf")
        return float((changed - alone).abs().max() / alone.abs().max().clamp_min(1e-30)) if alone.numel() else 0.0


@dataclass(frozen=True)
class Verdict:
    """Result of a simulation without weights."""

    separate: bool | None  # True if no slice depends on another; None if the forward could not be run
    reason: str = ""  # of a failure or a refusal
    between: frozenset[str] = frozenset()  # doubted parameters that act between columns and row: they change its input


class _Captured(Exception):
    """Carry the row linear's input out of the forward, as the only argument."""


class _FakeLinear(nn.Module):
    """A linear of rank one without its weight: every output depends on every input."""

    def __init__(self, view: LinearView, seed: int) -> None:
        super().__init__()
        self.in_features, self.out_features = view.in_features, view.out_features
        self.nf, self.nx = view.out_features, view.in_features  # attribute names of GPT-2's Conv1D
        self.reads = _random((view.in_features,), seed) / view.in_features**0.5
        self.writes, self.adds = _random((view.out_features,), seed + 1), _random((view.out_features,), seed + 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x.double(), self.reads).unsqueeze(-1) * self.writes + self.adds


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

    ``module`` is the smallest that holds the columns (with each rank's output channels) and the row (with its input
    channels). Some forwards need rotary embeddings of ``head_dim`` channels. ``doubted`` parameters may act inside.
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
        channels = []
        for view, fake in fake_columns.items():
            masks = [torch.zeros(fake.out_features, dtype=torch.bool, device="cpu") for _ in columns[view]]
            for mask, own in zip(masks, columns[view], strict=True):
                mask[own] = True
            channels.append(Channels(fake.values, masks))
        simulator = BlockSimulator(lambda rank: run()[..., row_slices[rank]], {"": channels}, _TOLERANCE)
        for rank in range(len(row_slices)):
            if simulator.mixing(rank):
                return Verdict(False, f"what rank {rank} would read depends on other ranks' channels")
            if simulator.idle(rank):  # a test that moves nothing proves nothing
                return Verdict(None, "the row linear does not read what the columns write")
        values = {}  # that stand for parameters; replaced columns and rows have none
        for name in doubted:
            path, _, leaf = name.rpartition(".")
            owner = clone.get_submodule(path)
            value = owner.adds if isinstance(owner, _FakeLinear) else owner._parameters[leaf]
            if value is not None and not isinstance(owner, _FakeColumn | _FakeRow):
                values[name] = value
        entries = {
            name: [Channels(value, [torch.ones((), dtype=torch.bool, device="cpu")])] for name, value in values.items()
        }
        idle = BlockSimulator(lambda _: run(), entries, _TOLERANCE).idle(0)
    return Verdict(True, between=frozenset(values) - frozenset(idle))


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
    twin.__dict__["_parameters"] = dict(module._parameters)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            if parameter.numel() > 2**24:
                raise ValueError("a parameter inside the region is too large to stand in for")
            # Ones and a little noise: norms, gates and scales of any shape block no flow.
            ones = torch.ones(parameter.shape, dtype=parameter.dtype, device="cpu")
            filled = 1 + 0.1 * _random(tuple(ones.shape), 77) if parameter.is_floating_point() else ones
            twin.__dict__["_parameters"][name] = nn.Parameter(filled, requires_grad=False)
    twin.__dict__["_buffers"] = dict(module._buffers)
    for name, value in module._buffers.items():
        if value is not None:
            full = torch.ones(value.shape, dtype=value.dtype, device="cpu") if value.is_meta else value.detach().cpu()
            twin.__dict__["_buffers"][name] = full.double() if full.is_floating_point() else full
    for hooks in ("_forward_pre_hooks", "_forward_hooks"):
        twin.__dict__[hooks] = type(module.__dict__[hooks])()  # hooks of wrappers expect the real module
    return twin


def _first_call_that_reaches_the_row(
    clone: nn.Module, row: LinearView, head_dim: int | None
) -> tuple[Callable[[], Tensor] | None, str]:
    """Try common argument lists until one reaches the row linear."""
    reason = "no way was found to call it"
    inputs = (m.in_features for m in clone.modules() if isinstance(m, _FakeLinear) and not isinstance(m, _FakeRow))
    width = next(inputs, row.out_features)  # of the stream: the input size of the first fake linear
    for arguments, keywords in itertools.islice(_calls(clone, width, head_dim), 48):

        def run(arguments: tuple[Any, ...] = arguments, keywords: dict[str, Any] = keywords) -> Tensor:
            try:
                clone(*arguments, **keywords)
            except _Captured as captured:
                return cast(Tensor, captured.args[0])
            raise ValueError("the row linear was not called")

        try:
            run()
        except Exception as error:  # a foreign forward: it may fail in any way
            reason = f"its forward could not be run on its own ({type(error).__name__}: {str(error)[:120]})"
            continue
        return run, ""
    return None, reason


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
        # Rotary embeddings in common forms: complex, or cosine and sine of all or half of the channels.
        angles = _random((_SEQUENCE, head_dim // 2), 9)
        full = torch.cat([angles, angles], dim=-1)
        forms = (full, full[None], angles, angles[None])
        if lowered in ("cos", "sin"):
            return [angle.cos() for angle in forms]
        pairs = [(angle.cos(), angle.sin()) for angle in forms]
        return [torch.polar(torch.ones_like(angles), angles), *pairs, None]
    if "start" in lowered or "offset" in lowered:
        return [0]
    if "mask" in lowered or "cache" in lowered or "past" in lowered or "bias" in lowered:
        return [None]
    streams = ("x", "hidden", "query", "key", "value", "context", "memory", "input", "stream")
    if any(word in lowered for word in streams):
        return [stream, None]
    return [None, stream]


def even_slices(num_channels: int, tp_size: int) -> Slices:
    """Return the channels of each rank, split like ``torch.chunk``."""
    step = -(-num_channels // tp_size)
    return [
        torch.arange(min(r * step, num_channels), min((r + 1) * step, num_channels), device="cpu")
        for r in range(tp_size)
    ]


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
