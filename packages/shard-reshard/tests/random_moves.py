"""Random programs with odd tensors, moved in one process and compared byte for byte with plain indexing.

What `random_pairs` leaves out: every dtype, sources that are strided, expanded, negated or conjugated views, strided
destinations with guards around them, partial sources and destinations, casts, and several plans fused into one
exchange. Sampled by a test, in full by a script.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from layout_pairs import local_tensors, random_layout, random_shape
from shard_reshard import ReshardPlan
from shard_reshard.execution.exchange import Exchange
from shard_reshard.layout.shard_map import ITEMSIZES, MeshShardMap, ShardMap, torch_dtype
from shard_reshard.lowering import build_program
from shard_reshard.planning import make_plan
from shard_reshard.testing import deliver
from shard_spec import Layout, MeshSpec

# Where a cast or a sum of small whole numbers is exact, so that the reference need not know in which order it is done.
_EXACT = ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128")
_GUARD = 0xA5


@dataclass
class Counts:
    """How much was compared, and how often what is odd came up."""

    programs: int = 0
    plans: int = 0
    elements: int = 0
    guards: int = 0  # bytes beside strided destinations
    odd: dict[str, int] = field(default_factory=dict)

    def note(self, what: str) -> None:
        self.odd[what] = self.odd.get(what, 0) + 1


@dataclass
class _Case:
    """One plan, every rank's source tensors, and what has to come out."""

    plan: ReshardPlan
    sources: list[list[torch.Tensor]]
    wanted: torch.Tensor  # the global value, in the destination's dtype
    pending: list[tuple[int, ...]]  # groups of ranks whose tensors add up to the value; empty where each has it


def check_programs(count: int, seed: int) -> Counts:
    """Move `count` random programs; raises at the first wrong byte."""
    rng, counts = random.Random(seed), Counts()
    torch.manual_seed(seed)
    for _ in range(count):
        world_size = rng.randint(1, 5)
        limit = rng.choice([None, None, 256, 1024])
        cases = [_case(rng, world_size, limit, counts) for _ in range(1 if limit else rng.choice([1, 1, 2, 3]))]
        if len(cases) > 1:
            counts.note("fused")
        _check(rng, cases, world_size, counts)
        counts.programs += 1
        counts.plans += len(cases)
    return counts


def _check(rng: random.Random, cases: list[_Case], world_size: int, counts: Counts) -> None:
    plans = [case.plan for case in cases]
    running, outs, frames = [], [], []
    posted: list[list[Any]] = [[] for _ in range(world_size)]
    for rank in range(world_size):
        exchange = Exchange(build_program(plans, rank, world_size))
        sources = [tensor for case in cases for tensor in case.sources[rank]]
        targets = exchange.allocate(torch.device("cpu"))
        framed = [_framed(rng, tensor, counts) for tensor in targets]
        outs.append([inside for inside, _ in framed])
        frames.append(framed)
        call = exchange.prepare(sources, outs[rank], torch.device("cpu"))
        running.append(call.steps(lambda *message, own=posted[rank]: own.append(message)))
    with torch.no_grad():
        waiting = running
        while waiting:
            waiting = [steps for steps in waiting if next(steps, None) is not None]
            deliver(posted)
    for rank in range(world_size):
        at = 0
        for case in cases:
            number = len(case.plan.dst.local_shapes(rank))
            if not case.pending:
                expected = _held(case.plan.dst, rank, case.wanted)
                assert len(expected) == number
                for actual, reference in zip(outs[rank][at : at + number], expected, strict=True):
                    assert _same(actual, reference), (case.plan, rank)
                    counts.elements += actual.numel()
            at += number
        for inside, frame in frames[rank]:
            counts.guards += _check_guard(inside, frame)
    _check_pending(cases, outs, counts)


def _check_pending(cases: list[_Case], outs: list[list[torch.Tensor]], counts: Counts) -> None:
    """Tensors of a partial destination add up to the value."""
    at = [0] * len(outs)
    for case in cases:
        numbers = [len(case.plan.dst.local_shapes(rank)) for rank in range(len(outs))]
        for ranks in case.pending:
            (expected,) = _held(case.plan.dst, ranks[0], case.wanted)
            total = sum((outs[rank][at[rank]] for rank in ranks[1:]), outs[ranks[0]][at[ranks[0]]].clone())
            assert _same(total, expected), (case.plan, ranks)
            counts.elements += expected.numel()
        at = [a + b for a, b in zip(at, numbers, strict=True)]


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Byte for byte."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return torch.equal(_bytes(actual), _bytes(expected))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1)).view(torch.uint8)


# ---- cases ----------------------------------------------------------------------------------------------------


def _case(rng: random.Random, world_size: int, limit: int | None, counts: Counts) -> _Case:
    shape = random_shape(rng, 9)
    if not prod(shape):
        counts.note("no elements")
    elif not shape:
        counts.note("0-dim")
    kind = rng.choice(["bytes", "bytes", "cast", "partial", "pending"])
    counts.note(kind)
    src, dst = random_layout(rng, shape, world_size), random_layout(rng, shape, world_size)
    pending: list[tuple[int, ...]] = []
    dtype = rng.choice(list(ITEMSIZES) if kind == "bytes" else _EXACT)
    counts.note(dtype)
    out_dtype = rng.choice(_EXACT) if kind == "cast" or (kind == "partial" and rng.random() < 0.3) else dtype
    if dtype.startswith("complex") and not out_dtype.startswith("complex"):
        out_dtype = dtype
    full = _values(rng, shape, dtype)
    if kind == "partial":
        return _partial_case(rng, shape, dtype, out_dtype, dst, world_size, limit, counts)
    if kind == "pending":
        dst, pending = _pending_layout(rng, shape, world_size)
    # A plan between equal layouts with a pending sum hands tensors through as they are; there is nothing to add.
    plan = make_plan(src, dst, dtype, out_dtype, _roomy(limit, world_size))
    sources = [_viewed(rng, _held(src, rank, full), counts) for rank in range(world_size)]
    return _Case(plan, sources, full.to(torch_dtype(out_dtype)), pending)


def _roomy(limit: int | None, world_size: int) -> int | None:
    """A bound that single elements of every message fit into."""
    return None if limit is None else max(limit, 2 * 16 * (2 * world_size + 1))


def _values(rng: random.Random, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Whole numbers that every exact dtype can hold; all bit patterns for the others."""
    kind = torch_dtype(dtype)
    if dtype in _EXACT and rng.random() < 0.8:
        full = torch.randint(-4, 5, shape).to(kind)
        if full.is_complex():
            full = torch.complex(full.real, torch.randint(-4, 5, shape).to(full.real.dtype)).to(kind)
        full = full + torch.zeros((), dtype=kind)  # no -0
    else:
        itemsize = ITEMSIZES[dtype]
        full = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, itemsize), dtype=torch.uint8)
        full = full.view(kind).squeeze(-1) if itemsize > 1 else full.squeeze(-1).view(kind)
        if dtype in _EXACT:  # casts of NaN and of large numbers are no matter of moving
            full = torch.randint(-4, 5, shape).to(kind)
    if shape and full.numel() and rng.random() < 0.15:
        return full.narrow(rng.randrange(len(shape)), 0, 1).expand(shape)
    return full


def _partial_case(
    rng: random.Random,
    shape: tuple[int, ...],
    dtype: str,
    out_dtype: str,
    dst: ShardMap,
    world_size: int,
    limit: int | None,
    counts: Counts,
) -> _Case:
    ops = ["sum", "sum", "avg", "max", "min", "product"]
    op = rng.choice([op for op in ops if _has(op, dtype)])
    counts.note(f"partial {op}")
    src, coordinates, sizes = _partial_layout(rng, shape, world_size, op)
    kind = torch_dtype(dtype)
    low, high = (1, 3) if op == "product" else (-4, 5)
    addends, count = {}, prod(sizes)
    for number in range(count):
        addends[number] = torch.randint(low, high, shape).to(kind) * (count if op == "avg" else 1)
    stacked = torch.stack(
        [addends[number].to(torch.complex128 if kind.is_complex else torch.float64) for number in addends]
    )
    value = {
        "sum": lambda: stacked.sum(0),
        "avg": lambda: stacked.sum(0) / count,
        "max": lambda: stacked.amax(0),
        "min": lambda: stacked.amin(0),
        "product": lambda: stacked.prod(0),
    }[op]()
    plan = make_plan(src, dst, dtype, out_dtype, _roomy(limit, world_size))
    sources = []
    for rank in range(world_size):
        shards = _held(src, rank, addends[coordinates[rank]]) if rank in coordinates else []
        sources.append(_viewed(rng, shards, counts))
    return _Case(plan, sources, value.to(kind).to(torch_dtype(out_dtype)), [])


def _has(op: str, dtype: str) -> bool:
    floating = dtype.startswith(("float", "bfloat", "complex"))
    return not (op == "avg" and not floating) and not (op in ("max", "min") and dtype.startswith("complex"))


def _partial_layout(
    rng: random.Random, shape: tuple[int, ...], world_size: int, op: str
) -> tuple[ShardMap, dict[int, int], tuple[int, ...]]:
    """A partial layout, which addend each rank has, and the sizes of the axes that are reduced."""
    count = rng.randint(1, world_size)
    ranks = rng.sample(range(world_size), count)
    sizes = rng.choice([(count,), *[(a, count // a) for a in range(2, count) if count % a == 0]])
    terms = [f"P({op})" if at == 0 or rng.random() < 0.3 else _term(rng, shape) for at in range(len(sizes))]
    if len(terms) > 1 and rng.random() < 0.5:
        sizes, terms = sizes[::-1], terms[::-1]
    layout = Layout(MeshSpec({f"axis{at}": size for at, size in enumerate(sizes)}, ranks), ", ".join(terms))
    reduced = [at for at, term in enumerate(terms) if term.startswith("P")]
    coordinates = {}
    for position, rank in enumerate(ranks):
        at = [position // prod(sizes[axis + 1 :]) % sizes[axis] for axis in range(len(sizes))]
        number = 0
        for axis in reduced:
            number = number * sizes[axis] + at[axis]
        coordinates[rank] = number
    return MeshShardMap(layout, shape), coordinates, tuple(sizes[axis] for axis in reduced)


def _pending_layout(
    rng: random.Random, shape: tuple[int, ...], world_size: int
) -> tuple[ShardMap, list[tuple[int, ...]]]:
    """A destination with a pending sum over one axis, and the ranks along that axis."""
    count = rng.randint(1, world_size)
    ranks = rng.sample(range(world_size), count)
    pairs = [(a, count // a) for a in range(1, count + 1) if count % a == 0]
    size, other = rng.choice(pairs)
    mesh = MeshSpec({"axis0": size, "axis1": other}, ranks)
    layout = MeshShardMap(Layout(mesh, f"P, {_term(rng, shape)}"), shape)
    return layout, [tuple(ranks[column::other]) for column in range(other)]


def _term(rng: random.Random, shape: tuple[int, ...]) -> str:
    if not shape:
        return "R"
    return rng.choice(["R", "S({d})", "I({d},2)", "B({d},2,cyclic)"]).format(d=rng.randrange(-len(shape), len(shape)))


def _held(layout: ShardMap, rank: int, full: torch.Tensor) -> list[torch.Tensor]:
    """What `rank` holds of `full`, for dtypes that torch cannot concatenate too."""
    plain = full.resolve_conj().resolve_neg().contiguous()
    return [tensor.view(full.dtype) for tensor in local_tensors(layout, rank, _as_integers(plain))]


# ---- views ----------------------------------------------------------------------------------------------------


def _viewed(rng: random.Random, tensors: list[torch.Tensor], counts: Counts) -> list[torch.Tensor]:
    """The same values as views: turned, with gaps, shifted in their memory, negated or conjugated on reading."""
    return [_view(rng, tensor, counts) for tensor in tensors]


def _view(rng: random.Random, tensor: torch.Tensor, counts: Counts) -> torch.Tensor:
    for dim, size in enumerate(tensor.shape):
        row = tensor.narrow(dim, 0, 1) if size > 1 and tensor.numel() else tensor
        if row is not tensor and _same(tensor, row.expand(tensor.shape)):
            counts.note("expanded")
            return row.expand(tensor.shape)
    what = rng.choice(["as it is", "turned", "gaps", "shifted", "lazy"])
    if what == "lazy" and tensor.is_complex() and tensor.dtype != torch.complex32:
        counts.note("conjugated")
        return tensor.conj().resolve_conj().conj()
    if (
        what == "lazy"
        and tensor.dtype in (torch.float32, torch.float64, torch.int32)
        and str(tensor.dtype)[6:] in _EXACT
    ):
        counts.note("negated")
        return torch._neg_view(torch.neg(tensor)) if not _has_zeros(tensor) else tensor
    if what in ("turned", "gaps", "shifted") and tensor.numel():
        counts.note(what)
        inside, _ = _placed(rng, tensor, what)
        carrier = _as_integers(inside)
        carrier.copy_(_as_integers(tensor))
        return inside
    return tensor


def _has_zeros(tensor: torch.Tensor) -> bool:
    """Negating zero twice on the way gives -0 once: the same number, another byte."""
    return bool((tensor == 0).any())


def _framed(rng: random.Random, tensor: torch.Tensor, counts: Counts) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A place for a destination tensor, and the memory around it."""
    what = rng.choice(["plain", "turned", "gaps", "shifted"])
    if what == "plain" or not tensor.numel():
        return tensor, None
    counts.note(f"{what} destination")
    return _placed(rng, tensor, what)


def _placed(rng: random.Random, tensor: torch.Tensor, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of the shape and dtype of ``tensor`` inside of guarded memory."""
    shape = tuple(tensor.shape)
    order = list(range(len(shape)))
    if what == "turned":
        rng.shuffle(order)
    gaps = [rng.choice([1, 1, 2, 3]) if what == "gaps" else 1 for _ in shape]
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        step *= gaps[dim]
        strides[dim] = step
        step *= max(1, shape[dim])
    start = rng.randint(0, 3)
    itemsize = tensor.element_size()
    frame = torch.full(((start + step + 3) * itemsize,), _GUARD, dtype=torch.uint8)
    typed = frame.view(tensor.dtype) if tensor.dtype != torch.bool else frame.view(torch.bool)
    return typed.as_strided(shape, strides, start), frame


def _check_guard(inside: torch.Tensor, frame: torch.Tensor | None) -> int:
    """Nothing was written beside a destination; returns how many bytes were looked at."""
    if frame is None:
        return 0
    used = torch.zeros(frame.numel(), dtype=torch.bool)
    size = inside.element_size()
    starts = size * inside.storage_offset()
    used.as_strided((*inside.shape, size), (*(size * step for step in inside.stride()), 1), starts).fill_(True)
    around = frame[~used]
    assert bool((around == _GUARD).all())
    return int(around.numel())


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers; 16 byte elements as pairs of floats."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()]) if tensor.element_size() in kinds else tensor
