"""Recorded loaders: a reshard by the recorded layouts fills a model bit for bit as its own loader does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import Part, PlanError, StateDictResharder, record_layouts, reshard_state_dict
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

Weights = dict[str, torch.Tensor]
HIDDEN, HEADS, KV, DIM, INNER, EXPERTS, VOCAB = 12, 8, 2, 4, 8, 3, 13


class Weight(nn.Parameter):
    """A parameter class, whose views are of that class."""


class Engine(nn.Module):
    """Tensor-parallel parameters with loaders of their own, in the manner of an inference engine's stacked ones."""

    def __init__(self, rank: int, size: int, device: str = "cpu") -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.kv_here, self.copies = max(1, KV // size), max(1, size // KV)
        heads, inner = HEADS // size, INNER // size
        self.rows = -(-VOCAB // size)

        def new(*shape: int, loader: Any = None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            weight = Weight(torch.full(shape, -7.0, dtype=dtype, device=device), requires_grad=False)
            weight.weight_loader = loader or self._default  # type: ignore[attr-defined]
            return weight

        self.embed = new(self.rows, HIDDEN, loader=self._vocab)
        self.head = new(self.rows, HIDDEN, loader=self._vocab, dtype=torch.bfloat16)
        self.qkv_proj = new((heads + 2 * self.kv_here) * DIM, HIDDEN, loader=self._qkv)
        self.gate_up_proj = new(2 * inner, HIDDEN, loader=self._gate_up)
        self.down_proj = new(HIDDEN, inner, loader=self._row)
        self.disk_gate_up = new(2 * inner, HIDDEN, loader=self._fused_on_disk)
        self.w13 = new(EXPERTS, 2 * inner, HIDDEN, loader=self._expert)
        self.w2 = new(EXPERTS, inner, HIDDEN, loader=self._expert)  # transposed against the checkpoint's
        self.norm = new(HIDDEN)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))

    def _default(self, param: nn.Parameter, loaded: torch.Tensor, *_: Any) -> None:
        assert param.shape == loaded.shape
        param.data.copy_(loaded)

    def _vocab(self, param: nn.Parameter, loaded: torch.Tensor, *_: Any) -> None:
        start = min(self.rank * self.rows, VOCAB)
        loaded = loaded.narrow(0, start, min(self.rows, VOCAB - start))
        param[: loaded.shape[0]].data.copy_(loaded)
        param[loaded.shape[0] :].data.fill_(0)

    def _qkv(self, param: nn.Parameter, loaded: torch.Tensor, shard: str) -> None:
        heads = HEADS // self.size
        offset = {"q": 0, "k": heads * DIM, "v": (heads + self.kv_here) * DIM}[shard]
        count, place = (heads, self.rank) if shard == "q" else (self.kv_here, self.rank // self.copies)
        param.data.narrow(0, offset, count * DIM).copy_(loaded.narrow(0, place * count * DIM, count * DIM))

    def _gate_up(self, param: nn.Parameter, loaded: torch.Tensor, shard: int) -> None:
        inner = INNER // self.size
        param.data[shard * inner : (shard + 1) * inner] = loaded.chunk(self.size, 0)[self.rank]

    def _fused_on_disk(self, param: nn.Parameter, loaded: torch.Tensor, *_: Any) -> None:
        for shard, part in enumerate(loaded.split([INNER, INNER])):
            self._gate_up(param, part, shard)

    def _row(self, param: nn.Parameter, loaded: torch.Tensor, *_: Any) -> None:
        inner = INNER // self.size
        param.data.copy_(loaded[:, self.rank * inner : (self.rank + 1) * inner])

    def _expert(self, param: nn.Parameter, loaded: torch.Tensor, shard: str, expert: int) -> None:
        inner = INNER // self.size
        into = param.data[expert]
        if shard == "w2":
            into.copy_(loaded.t().contiguous().narrow(0, self.rank * inner, inner))
        else:
            into = into.narrow(0, inner * (shard == "w3"), inner)
            into.copy_(loaded.narrow(0, self.rank * inner, inner))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        stacked = [("qkv_proj", f"{at}_proj", (at,)) for at in "qkv"]
        stacked += [("gate_up_proj", "gate_proj", (0,)), ("gate_up_proj", "up_proj", (1,))]  # type: ignore[list-item]
        for at in range(EXPERTS):
            for shard in ("w1", "w2", "w3"):
                stacked.append(("w2" if shard == "w2" else "w13", f"experts.{at}.{shard}", (shard, at)))  # type: ignore[arg-type]
        params = dict(self.named_parameters())
        names = set()
        for name, loaded in weights:
            if "rotary" in name:
                continue
            if name == "steps":
                self.steps.copy_(loaded)
                continue
            target, args = next(((to, rest) for to, of, rest in stacked if of == name), (name, ()))
            param: Any = params[target]
            param.weight_loader(param, loaded, *args)
            names.add(target)
        return names


def checkpoint(seed: int, device: str = "cpu") -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (VOCAB, HIDDEN), "head": (VOCAB, HIDDEN), "q_proj": (HEADS * DIM, HIDDEN),
        "k_proj": (KV * DIM, HIDDEN), "v_proj": (KV * DIM, HIDDEN), "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER), "disk_gate_up": (2 * INNER, HIDDEN), "norm": (HIDDEN,), "rotary.inv_freq": (4,),
    }  # fmt: skip
    for at in range(EXPERTS):
        shapes |= {f"experts.{at}.w1": (INNER, HIDDEN), f"experts.{at}.w3": (INNER, HIDDEN)}
        shapes[f"experts.{at}.w2"] = (HIDDEN, INNER)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights["steps"] = torch.tensor(seed)
    return weights


def _compare(model: nn.Module, reference: nn.Module) -> int:
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    return sum(value.numel() for value in reference.state_dict().values())


@pytest.mark.ranks(1, 2, 4)
def test_an_engines_loader(ranks: Ranks) -> None:
    model, reference = (Engine(ranks.rank, ranks.world_size) for _ in range(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recorded = record_layouts(model, checkpoint(0))
    for name, value in model.state_dict().items():  # nothing but padding was written
        unchanged = value == before[name]
        assert bool((unchanged | (value == 0)).all()), name
    assert recorded.unfilled == ()
    # Two boxes of a tensor that is fused on disk are two destinations.
    fused = {"disk_gate_up": [Part("disk_gate_up"), Part("disk_gate_up (2)")]} if ranks.world_size > 1 else {}
    assert recorded.key_map == {"rotary.inv_freq": None, **fused}
    size, compared = ranks.world_size, 0
    # The trainer has uneven rows of everything.
    layouts = {name: f"{size}: S(0)" for name, value in checkpoint(0).items() if value.dim()}
    shapes = {name: tuple(value.shape) for name, value in checkpoint(0).items() if value.dim()}

    def rows(full: torch.Tensor) -> torch.Tensor:
        step = -(-full.shape[0] // size) if full.dim() else 0
        return full[min(ranks.rank * step, len(full)) : (ranks.rank + 1) * step].clone() if step else full

    sync = None
    for step in range(5):
        full = checkpoint(step)
        state = {name: rows(value) for name, value in full.items()}
        if sync is None:
            sync = StateDictResharder(
                state, recorded.layouts, src_layouts=layouts, shapes=shapes, out=recorded.out, key_map=recorded.key_map
            )
        with ranks.record() as log:
            sync(state, out=recorded.out, atomic=step % 2 == 0)
        reference.load_weights(full.items())
        compared += _compare(model, reference)
    assert compared == 5 * sum(value.numel() for value in reference.state_dict().values())
    assert sync is not None
    # Messages of several dtypes are padded.
    assert sum(move.plan.wire_bytes for move in sync.plan.moves) == sync.plan.lower_bound
    assert sync.plan.lower_bound <= sync.plan.wire_bytes <= sync.plan.lower_bound + 8 * size * size
    sent = [event.bytes_sent for event in log.events if event.op == "all_to_all"]
    assert sum(ranks.gather(sum(map(sum, sent)))) == sync.plan.wire_bytes
    needed = sum(value.numel() * value.element_size() for value in recorded.out.values())
    assert size > 1 or sync.plan.wire_bytes == 0 < needed
    # A plain tensor that all ranks have is enough: receivers take it from themselves.
    reshard_state_dict(checkpoint(9), recorded.layouts, out=recorded.out, key_map=recorded.key_map)
    reference.load_weights(checkpoint(9).items())
    _compare(model, reference)


@pytest.mark.ranks(2)
def test_an_engine_on_other_ranks_and_on_meta(ranks: Ranks) -> None:
    # Rank 0 trains, rank 1 serves alone.
    model = Engine(0, 1) if ranks.rank else None
    recorded = record_layouts(model, checkpoint(0) if ranks.rank else {})
    state = {} if ranks.rank else checkpoint(3)
    moved = reshard_state_dict(state, recorded.layouts, out=recorded.out or None, key_map=recorded.key_map)
    assert moved.plan.wire_bytes == moved.plan.lower_bound > 0
    if model is not None:
        reference = Engine(0, 1)
        reference.load_weights(checkpoint(3).items())
        assert _compare(model, reference) > 1000
    # Layouts of a model without memory are those of one with memory.
    bare = record_layouts(Engine(ranks.rank, 2, "meta"), checkpoint(0))
    assert bare.layouts == record_layouts(Engine(ranks.rank, 2), checkpoint(0)).layouts
    assert all(value.is_meta for value in bare.out.values())
    # What no rank's loader takes is left out, or refused.
    extra = {**checkpoint(0), "rotary.cos": torch.zeros(2)}
    assert record_layouts(Engine(ranks.rank, 2), extra).key_map["rotary.cos"] is None
    with pytest.raises(PlanError, match=r"rotary\.cos"):
        record_layouts(
            Engine(ranks.rank, 2) if ranks.rank else None, extra, strict=ranks.rank == 1
        )  # asked by one is asked
    # Given memory later, it is filled with constants and what moves, and nothing else.
    late = Engine(ranks.rank, 2, "meta")
    recorded = record_layouts(late, checkpoint(0))
    late.to_empty(device="cpu")
    reference = Engine(ranks.rank, 2)
    with torch.no_grad():
        for tensor in (*late.state_dict().values(), *reference.state_dict().values()):
            tensor.fill_(77)
    recorded.fill_constants()
    reshard_state_dict(checkpoint(5), recorded.layouts, out=recorded.out, key_map=recorded.key_map)
    reference.load_weights(checkpoint(5).items())
    _compare(late, reference)
    assert set(recorded.filled) == {n for n, tensor in late.state_dict().items() if bool((tensor != 77).any())}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.a.weight
        self.bn = nn.BatchNorm1d(7)


@pytest.mark.ranks(2)
def test_load_state_dict_and_its_hooks(ranks: Ranks) -> None:
    def cut(state: Weights, prefix: str, *_: Any) -> None:  # a hook that takes this rank's rows
        state[f"{prefix}weight"] = state[f"{prefix}weight"].chunk(2, 0)[ranks.rank]

    models = [Plain() for _ in range(2)]
    for model in models:
        model.b = nn.Linear(7, 3 - ranks.rank, bias=False)  # 5 rows, uneven
        model.b._register_load_state_dict_pre_hook(cut)
    torch.manual_seed(0)
    state = Plain().double().state_dict()
    recorded = record_layouts(models[0], state)
    assert recorded.unfilled == ()
    reshard_state_dict(state, recorded.layouts, out=recorded.out, key_map=recorded.key_map)
    models[1].load_state_dict(state)
    assert _compare(models[0], models[1]) > 70


def _cat(p: Any, w: Weights) -> None:
    p["x"].copy_(torch.cat([w["a"], w["b"].t()], 1))


def _stack(p: Any, w: Weights) -> None:
    p["y"].copy_(torch.stack([w["a"].flatten(), w["b"].t().reshape(-1)], 1))


def _views(p: Any, w: Weights) -> None:
    p["x"][:, :6].copy_(w["a"].view(2, 2, 6).transpose(0, 1).reshape(4, 6))
    p["x"][:, 6:].copy_(w["b"].t())


def _flat(p: Any, w: Weights) -> None:
    p["y"].view(-1)[3:27].copy_(w["a"].reshape(-1))
    p["y"].view(-1)[27:44].copy_(w["b"].reshape(-1)[5:22])


def _halves(p: Any, w: Weights) -> None:  # the permutation of rotary embeddings
    p["x"][:, :6].copy_(w["a"].view(2, 2, 6).transpose(0, 1).reshape(4, 6))
    p["x"][:, 6:].copy_(w["a"][::2].repeat_interleave(2, 0))


def _buffered(p: Any, w: Weights) -> None:
    buffer = torch.empty(4, 12)
    buffer[:, :6] = w["a"].to(torch.float64)
    buffer[:, 6:].copy_(w["b"].t().to(torch.float32).clone())
    p["x"].copy_(torch.cat([buffer.split(6, 1)[0]] * 2, 1))
    p["y"].copy_(buffer.reshape(24, 2))


def _twice(p: Any, w: Weights) -> None:
    p["x"][:, :6].copy_(w["b"].t())
    p["x"][:, :6].copy_(w["a"])  # the last one counts
    p["x"][:, 6:].copy_(w["a"])


def _fill(recorded: Any, weights: Weights) -> int:
    """Copy what the layouts name, as a reshard would; returns how many elements."""
    compared = 0
    for name, view in recorded.out.items():
        layout, full = recorded.layouts[name], weights[name.split(" ")[0]]
        (local,) = layout.local_shapes(0)
        assert view.shape == local
        for piece in layout.local_pieces(0):
            sizes = tuple(b - a for a, b in zip(piece.start, piece.stop, strict=True))
            into, source = view, full
            for dim, size in enumerate(sizes):
                into = into.narrow(dim, piece.local_start[dim], size)
                source = source.narrow(dim, piece.start[dim], size)
            into.copy_(source)
            compared += into.numel()
    return compared


@pytest.mark.parametrize("load", [_cat, _stack, _views, _flat, _halves, _buffered, _twice])
def test_views_copies_and_concatenations(load: Callable[[Any, Weights], None]) -> None:
    def new() -> nn.ParameterDict:
        shapes = {"x": (4, 12), "y": (24, 2)}
        return nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})

    weights = {"a": torch.randn(4, 6), "b": torch.randn(6, 4)}
    model, reference = new(), new()
    with torch.no_grad():
        load(reference, weights)
        recorded = record_layouts(model, weights, load=lambda pairs: load(model, dict(pairs)))
        compared = _fill(recorded, weights)
    assert _compare(model, reference) == 96
    assert compared >= 41
    assert set(recorded.unfilled) == {name for name, value in reference.items() if bool((value == 0).any())}


def _pad(p: Any, w: Weights) -> None:
    p["x"].copy_(nn.functional.pad(w["a"], (2, 4), value=5.0))
    p["y"][:6, :1].copy_(nn.functional.pad(w["b"], (-3, 0, 1, -1), value=2.0))


def _flip(p: Any, w: Weights) -> None:
    p["x"][:, :6].copy_(w["a"].view(2, 2, 6).flip(0).reshape(4, 6))
    p["x"][:, 6:].copy_(w["b"].t().flip(0, 1))


def _bytes(p: Any, w: Weights) -> None:
    p["x"].view(torch.uint8)[:, :24].copy_(w["a"].view(torch.uint8))
    p["x"].view(torch.int32)[:, 6:].copy_(w["b"].t().contiguous().view(torch.int32))
    p["y"].fill_(0.1)


def _zeros(p: Any, w: Weights) -> None:
    buffer = w["a"].new_zeros(4, 12)
    buffer[1:, 2:8] = w["a"][:3]
    p["x"].copy_(buffer)
    plain = torch.zeros(24, 2)
    plain[3:9].copy_(w["a"].view(12, 2)[:6])
    p["y"].copy_(plain)


def _filled_later(p: Any, w: Weights) -> None:
    p["x"][:, :6].copy_(w["a"])
    p["x"][:, 6:].copy_(w["b"].t())
    p["x"][1:3, 4:9].fill_(7)
    p["x"][2, ::2].zero_()
    p["y"].fill_(3)
    p["y"][:12].copy_(w["a"].view(12, 2))
    p["y"][4:6] = w["b"].view(12, 2)[:2]
    buffer = torch.zeros_like(w["a"])
    buffer[1].fill_(4)
    buffer[1:, 3:].copy_(w["a"][1:, 3:])
    p["y"][12:].copy_(buffer.view(12, 2))


@pytest.mark.parametrize("load", [_pad, _flip, _zeros, _filled_later, _bytes])
def test_values_beside_what_is_copied_and_later_writes(load: Callable[[Any, Weights], None]) -> None:
    def new(value: float) -> nn.ParameterDict:
        shapes = {"x": (4, 12), "y": (24, 2)}
        return nn.ParameterDict({name: nn.Parameter(torch.full(shape, value)) for name, shape in shapes.items()})

    weights = {"a": torch.randn(4, 6), "b": torch.randn(6, 4)}
    model, reference = new(-77.0), new(-77.0)
    with torch.no_grad():
        load(reference, weights)
        recorded = record_layouts(model, weights, load=lambda pairs: load(model, dict(pairs)))
        assert _fill(recorded, weights) > 0
        assert _compare(model, reference) == 96
        for value in model.values():
            value.fill_(-77.0)
        _fill(recorded, weights)
        recorded.fill_constants()
    assert _compare(model, reference) == 96
    assert set(recorded.unfilled) == {name for name, value in reference.items() if bool((value == -77.0).any())}


def _replace(model: Any, w: Weights) -> None:
    model.weight = nn.Parameter(w["a"])


def _half_written(model: Any, w: Weights) -> None:
    buffer = torch.arange(16.0).view(4, 4)
    buffer[:2] = w["a"][:2]
    model.weight.copy_(buffer)


def _read_back(model: Any, w: Weights) -> None:
    model.weight[:2].copy_(w["a"][:2])
    if float(model.weight.sum()):  # of what was there before
        model.weight[2:].copy_(w["b"][2:])


def _caught(call: Callable[[Any, Weights], object]) -> Callable[[Any, Weights], object]:
    """A loader that goes on after an error."""

    def load(model: Any, weights: Weights) -> None:
        model.weight.copy_(weights["a"])
        with suppress(Exception):
            call(model, weights)

    return load


def _by_address(model: Any, w: Weights) -> None:
    seen: set[int] = set()  # of tied weights, each is loaded once
    for value in (w["a"], w["b"]):
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            model.weight.copy_(value)


def _in_a_thread(model: Any, w: Weights) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model.weight.data.copy_, w["a"].t().contiguous()).result()


REFUSED: dict[str, tuple[Callable[[Any, Weights], object], str]] = {
    "arithmetic": (lambda m, w: m.weight.copy_(w["a"] + 1), "aten.add"),
    "scaled": (lambda m, w: m.weight.copy_(w["a"] * w["b"]), "aten.mul"),
    "norm of a weight": (lambda m, w: m.weight.copy_(w["a"].softmax(0)), "softmax"),
    "a value": (lambda m, w: m.weight.fill_(w["a"][0, 0].item()), "item()"),
    "added in place": (lambda m, w: m.weight.add_(w["a"]), "aten.add_"),
    "changed after loading": (lambda m, w: m.weight.copy_(w["a"]).mul_(2), "aten.mul_"),
    "indexed": (lambda m, w: m.weight.copy_(w["a"][torch.tensor([True, True, True, True])]), "aten.index"),
    "an indexed write": (lambda m, w: m.weight.index_copy_(0, torch.tensor([1, 1]), w["a"][:2]), "index_copy"),
    "bits": (lambda m, w: m.weight.copy_(w["a"].view(torch.int32)), "int32"),
    "bits of another dtype": (
        lambda m, w: m.weight.view(torch.uint8).copy_(w["c"].view(torch.uint8)[:, :16]),
        "uint8 or negated",
    ),
    "another constant": (lambda m, w: m.weight.copy_(torch.full_like(w["a"], 9)), "aten.full_like"),
    "rounded twice": (lambda m, w: m.weight.copy_(w["a"].half()), "float16"),
    "other values": (lambda m, w: m.weight.copy_(torch.ones(4, 4)), "aten.copy_"),
    "a half-filled copy": (lambda m, w: m.weight.copy_(w["a"].new_empty(4, 4)), "no checkpoint tensor"),
    "a half-written copy": (_half_written, "no checkpoint tensor"),
    "read back": (_read_back, "aten.sum"),
    "rounded integers": (lambda m, w: m.weight.copy_(w["c"].bfloat16()), "bfloat16"),
    "rounded small floats": (lambda m, w: m.weight.copy_(w["a"].to(torch.float8_e5m2)), "float8_e5m2"),
    "replaced": (_replace, "replaces"),
    "by address": (_by_address, "data_ptr"),
    "by the storage's address": (lambda m, w: m.weight.fill_(w["a"].untyped_storage().data_ptr()), "data pointer"),
    "by address, caught": (_caught(lambda m, w: w["b"][1:].clone().data_ptr()), "data_ptr"),
    "in a thread": (_in_a_thread, "copy_ in another thread"),
    "in a thread, caught": (_caught(_in_a_thread), "copy_ in another thread"),
    "into the checkpoint": (lambda m, w: w["b"].copy_(w["a"]), "aten.copy_"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_copy_is_refused_by_name(name: str) -> None:
    call, reason = REFUSED[name]
    model = nn.Linear(4, 4, bias=False).requires_grad_(False)
    before = model.weight.clone()
    weights = {"a": torch.randn(4, 4), "b": torch.randn(4, 4), "c": torch.full((4, 4), 2**24 + 1)}
    with pytest.raises(PlanError, match="not-recordable") as caught:
        record_layouts(model, weights, load=lambda pairs: call(model, dict(pairs)))
    assert reason in str(caught.value), caught.value
    assert name == "replaced" or torch.equal(model.weight, before)
    meta = nn.Linear(4, 4, bias=False, device="meta").requires_grad_(False)  # there nothing fails by itself
    with pytest.raises(PlanError, match="not-recordable"):
        record_layouts(meta, weights, load=lambda pairs: call(meta, dict(pairs)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.float64, torch.complex128])
def test_constants_and_exact_casts_of_every_dtype(dtype: torch.dtype) -> None:
    model: Any = nn.Module()
    model.register_buffer("x", torch.zeros(4, 6).to(dtype))
    weights = {"a": torch.arange(12).view(2, 6).to(torch.float8_e4m3fn if dtype.is_floating_point else torch.uint8)}

    def load(pairs: Any) -> None:
        model.x.fill_(1)
        model.x[:2].copy_(dict(pairs)["a"].to(torch.float32))

    recorded = record_layouts(model, weights, load=load)
    expected = torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None].expand(4, 6).to(dtype)
    assert torch.equal(model.x.to(torch.complex128), expected.to(torch.complex128))
    assert recorded.unfilled == ()
    assert list(recorded.out) == ["a"]


def _set(name: str, new: Callable[[], torch.Tensor]) -> Callable[[Any], None]:
    return lambda model: setattr(getattr(model, name), "data", new())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_set("b", lambda: torch.zeros(6, 4).t()), "b"),
        (_set("b", lambda: torch.zeros(8, 6)[::2]), "b"),
        (_set("b", lambda: torch.zeros(6, 4)), "b"),
        (_set("b", lambda: torch.zeros(2, 6)), "b"),
        (lambda model: setattr(model, "tied", nn.Parameter(torch.zeros(4, 6))), "tied"),
        (lambda model: delattr(model, "b"), "b"),
        (_set("b", lambda: torch.zeros(48)[24:].view(4, 6)), ""),  # other memory alone is no change
        (lambda model: model.bfloat16(), ""),
    ],
)
def test_a_model_that_changed_since_it_was_recorded(change: Callable[[Any], None], name: str) -> None:
    model: Any = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(4, 6))
    model.tied = model.a
    model.load_weights = lambda pairs: [getattr(model, name).data.copy_(value) for name, value in pairs]
    weights = {name: torch.arange(24.0).view(4, 6) for name in "ab"}
    recorded = record_layouts(model, weights)
    change(model)
    if name:
        with pytest.raises(PlanError, match=rf"\[layout-mismatch\] {name}: .*no longer tied") as caught:
            list(recorded.out)
        assert len(caught.value.problems) == 1
        return
    for key, view in recorded.out.items():
        with torch.no_grad():
            view.copy_(weights[key])
    assert all(torch.equal(getattr(model, key).float(), weights[key[0]]) for key in "ab")


@pytest.mark.ranks(2)
def test_a_rank_that_cannot_record_stops_all(ranks: Ranks) -> None:
    model = nn.Linear(4, 4, bias=False).requires_grad_(False)

    def load(pairs: Any) -> None:
        weights = dict(pairs)
        model.weight.copy_(weights["weight"] + 1 if ranks.rank else weights["weight"])

    with pytest.raises(PlanError, match=r"aten\.add"):
        record_layouts(model, {"weight": torch.randn(4, 4)}, load=load)
    with pytest.raises(PlanError, match="ranks-disagree"):
        record_layouts(model, {"weight": torch.randn(4, 4 + ranks.rank)}, load=lambda pairs: None)
    weights: Any = {"weight": 3 if ranks.rank else torch.randn(4, 4)}
    with pytest.raises(PlanError, match="rank-failed"):
        record_layouts(model, weights, load=lambda pairs: None)


@pytest.mark.ranks(2)
def test_copies_into_local_tensors_of_dtensors(ranks: Ranks) -> None:
    """They were no memory of the model's: the record was empty, and nothing was loaded."""
    mesh, full = ranks.mesh((2,), ("tp",)), {"weight": torch.arange(24.0).view(6, 4), "bias": torch.arange(6.0)}
    model = nn.Linear(4, 6)
    for name, tensor in full.items():
        sharded = distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)])
        setattr(model, name, nn.Parameter(sharded, requires_grad=False))

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            model.get_parameter(name).to_local().copy_(tensor.chunk(2)[ranks.rank])  # type: ignore[attr-defined]  # a DTensor

    recorded = record_layouts(model, full, load=load)
    sources = full if ranks.rank == 0 else {}
    reshard_state_dict(sources, recorded.layouts, out=recorded.out)
    for name, tensor in full.items():
        assert torch.equal(model.get_parameter(name).full_tensor(), tensor)  # type: ignore[attr-defined]  # the same


class Padded(torch.nn.Module):
    """Fills a parameter, then copies the rows that the checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((6, 4), 77.0), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, value in weights:
            self.weight.fill_(3.0)
            self.weight[: value.shape[0]].copy_(value)


@pytest.mark.ranks(1)
def test_constants_leave_what_was_loaded(ranks: Ranks) -> None:
    weights, model = {"w": torch.arange(16.0).view(4, 4)}, Padded()
    recorded = record_layouts(model, weights)
    reshard_state_dict(weights, recorded.layouts, out=recorded.out, key_map=recorded.key_map)
    model.weight[4:] = 77
    for _ in range(2):
        recorded.fill_constants()
        assert torch.equal(model.weight, torch.cat([weights["w"], torch.full((2, 4), 3.0)]))


_PICK = torch.tensor([2, 0, 3, 1])
_STACKED: dict[str, tuple[int, ...]] = {"w": (4, 12, 8)}
# How loaders of stacked experts move elements: weights and their shapes, and what is done with them.
_MOVES: dict[str, tuple[dict[str, tuple[int, ...]], Callable[[torch.Tensor, Weights], object]]] = {
    "transposed": ({"w": (4, 8, 12)}, lambda to, w: to.copy_(w["w"].transpose(1, 2).contiguous())),
    "one by one": (_STACKED, lambda to, w: [to[at].copy_(w["w"][at]) for at in (2, 0, 3, 1)]),
    "taken apart in pairs": (
        _STACKED,
        lambda to, w: (to[:, :6].copy_(w["w"][:, ::2]), to[:, 6:].copy_(w["w"][:, 1::2])),
    ),
    "permuted": (_STACKED, lambda to, w: to.copy_(w["w"].view(4, 6, 2, 8).permute(0, 2, 1, 3).reshape(4, 12, 8))),
    "index": (_STACKED, lambda to, w: to.copy_(w["w"][_PICK])),
    "index of dim 1": ({"w": (4, 4, 8)}, lambda to, w: to[:, :4].copy_(w["w"][:, -_PICK])),
    "index_select": (_STACKED, lambda to, w: to.copy_(w["w"].index_select(0, _PICK))),
    "index_copy_": (_STACKED, lambda to, w: to.index_copy_(0, _PICK, w["w"])),
    "index_put_": (_STACKED, lambda to, w: to.__setitem__([2, 0, 3, 1], w["w"])),
    "part of index_put_": ({"w": (2, 12, 8)}, lambda to, w: to.__setitem__([3, 1], w["w"])),
    "cat with zeros": (
        {"w": (4, 6, 8)},
        lambda to, w: to.copy_(torch.cat([w["w"], torch.zeros(4, 5, 8), torch.ones(4, 1, 8)], 1)),
    ),
    "repeat": ({"w": (6, 8)}, lambda to, w: to.copy_(w["w"].repeat(4, 2, 1))),
    "repeat_interleave": ({"w": (2, 12, 8)}, lambda to, w: to.copy_(w["w"].repeat_interleave(2, 0))),
    "roll": (_STACKED, lambda to, w: to.copy_(w["w"].roll(-1, 0).roll(14, 1))),
    "flip": (_STACKED, lambda to, w: to.copy_(w["w"].flip(0))),
    "stacked": ({"w": (12, 8), "v": (12, 8)}, lambda to, w: to[:2].copy_(torch.stack([w["v"], w["w"]]))),
}


class _Stacked(nn.Module):
    def __init__(self, device: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 12, 8), -7.0, device=device), requires_grad=False)


@pytest.mark.ranks(2)
def test_loaders_that_only_move_elements(ranks: Ranks) -> None:
    """The table of docs/design/shard-reshard.md: what is recorded fills a model as the loader itself does."""
    compared = 0
    for name, (shapes, move) in _MOVES.items():
        weights = {key: torch.randn(shape, device=ranks.device) for key, shape in shapes.items()}
        sent: Any = ranks.gather([value.cpu() for value in weights.values()])[0]
        weights = {key: value.to(ranks.device) for key, value in zip(shapes, sent, strict=True)}
        expected, model = torch.full((4, 12, 8), -7.0, device=ranks.device), _Stacked(ranks.device)
        move(expected, weights)
        recorded = record_layouts(model, weights, load=lambda pairs: move(model.w.data, dict(pairs)))  # noqa: B023
        state = weights if ranks.rank == 0 else {}
        reshard_state_dict(state, recorded.layouts, out=recorded.out, key_map=recorded.key_map)
        assert torch.equal(model.w.data, expected), name
        compared += 1
    assert compared == len(_MOVES) == 16


@pytest.mark.parametrize(
    "move",
    [
        lambda to, w: to.copy_(w["w"] + 1),
        lambda to, w: to.copy_(torch.gather(w["w"], 0, _PICK.view(4, 1, 1).expand(4, 12, 8))),
        lambda to, w: to.copy_(w["w"][w["i"]]),  # numbers of a checkpoint
        lambda to, w: to.index_copy_(0, torch.tensor([0, 0, 1, 2]), w["w"]),  # two values for one place
        lambda to, w: to.index_put_([_PICK], w["w"], accumulate=True),
        lambda to, w: to.copy_(torch.cat([w["w"][:3], torch.arange(96.0).view(1, 12, 8)])),
        lambda to, w: to.copy_(w["w"].roll(3)),  # over the ends of rows
    ],
)
def test_loaders_that_do_more_are_refused(move: Callable[[torch.Tensor, Weights], object]) -> None:
    model = _Stacked("cpu")
    weights = {"w": torch.randn(4, 12, 8), "i": torch.tensor([0, 1, 2, 3])}
    with pytest.raises(PlanError, match="not-recordable"):
        record_layouts(model, weights, load=lambda pairs: move(model.w.data, dict(pairs)))
    assert bool((model.w.data == -7).all())
