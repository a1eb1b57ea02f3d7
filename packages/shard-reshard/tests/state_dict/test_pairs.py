"""Quantised weights never lose their scales: pairs move bit for bit, and their arithmetic is that of one process."""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_pairs import as_listed, local_tensors, random_layout
from ranktest import Ranks
from shard_reshard import (
    Pair,
    Part,
    PlanError,
    StateDictResharder,
    load_safetensors,
    reshard,
    reshard_state_dict,
    save_safetensors,
    simulate,
)
from shard_reshard.state_dict.pairs import quantised_in_blocks
from shard_reshard.state_dict.plan import RankMeta, StateDictPlan, TensorMeta, plan_state_dict
from stored_files import write
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

E4M3 = torch.float8_e4m3fn
DEEPSEEK = Pair("*.weight", "*.weight_scale_inv", (4, 4))


def spread(scale: torch.Tensor, block: tuple[int | None, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of every element of a weight, element by element."""
    grid = scale.reshape([1 if size is None else -(-n // size) for n, size in zip(shape, block, strict=True)])
    result = torch.empty(shape)
    for index in product(*map(range, shape)):
        place = tuple(0 if size is None else at // size for at, size in zip(index, block, strict=True))
        result[index] = grid[place].float()
    return result


def quantised(
    weight: torch.Tensor, block: tuple[int | None, ...], dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise in a loop over blocks: the reference of this file."""
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    sizes = [max(1, n if size is None else size) for n, size in zip(weight.shape, block, strict=True)]
    grid = [-(-n // size) for n, size in zip(weight.shape, sizes, strict=True)]
    numbers, scales = torch.empty_like(weight), torch.empty(grid)
    for place in product(*map(range, grid)):
        window = tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, sizes, strict=True))
        scale = weight[window].abs().max() / largest
        scales[place] = scale if scale > 0 else 1.0
        ratio = weight[window] / scales[place]
        numbers[window] = (ratio if dtype.is_floating_point else ratio.round()).clamp(-largest, largest)
    return numbers.to(dtype), scales


def _simulated(plan: StateDictPlan, full: dict[str, torch.Tensor], world_size: int) -> list[dict[str, Any]]:
    """Return every rank's results: moves and conversions, in this process."""
    arrived: dict[str, list[list[torch.Tensor]]] = {}
    for move in plan.moves:
        shards = [local_tensors(move.plan.src, rank, full[move.source]) for rank in range(world_size)]
        moved = simulate(move.plan, [[move.view(shard) for shard in own] for own in shards])
        arrived[move.target] = [as_listed(tensors) for tensors in moved]
        assert move.plan.wire_bytes == move.plan.lower_bound
    results = []
    for rank in range(world_size):
        here = {name: tensors[rank] for name, tensors in arrived.items()}
        for name, conversion in plan.conversions.items():
            scales = [None] * len(here[name]) if conversion.quantize else here.pop(conversion.scale)
            values = [
                conversion.apply(rank, at, w, s) for at, (w, s) in enumerate(zip(here[name], scales, strict=True))
            ]
            here[name] = [value[0] for value in values]
            if conversion.quantize:
                here[conversion.scale] = [value[1] for value in values]
        results.append(here)
    return results


def _same(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    return actual.shape == wanted.shape and torch.equal(
        actual.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    )


BLOCKS: list[tuple[int | None, ...]] = [(2, 3), (4, 4), (1, None), (None, 1), (None, None), (3, None), (1, 1)]


def _check_pair(seed: int) -> str:
    """Move a random pair between random layouts: as it is, dequantised, quantised; return what came of it."""
    rng = random.Random(seed)
    world_size, shape, block = rng.randint(1, 4), (rng.randint(1, 11), rng.randint(1, 9)), rng.choice(BLOCKS)
    src, dst = (random_layout(rng, shape, world_size) for _ in range(2))
    twice = any(len(dst.local_shapes(r)) > 1 for r in dst.ranks)  # two boxes of a rank may share a scale
    mode = rng.choice(["move", "dequantize", "move" if twice else "quantize"])
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    dtype = rng.choice([E4M3, torch.int8])
    numbers, scale = quantised(weight, block, dtype)
    names = str(dtype).removeprefix("torch."), str(scale.dtype).removeprefix("torch.")
    scale_src = random_layout(rng, tuple(scale.shape), world_size)
    pair = Pair("*.weight", "*.scale", block, torch.float32 if mode == "dequantize" else False, mode == "quantize")
    source = {"a.weight": TensorMeta(shape, names[0], src, "a.weight")}
    source["a.scale"] = TensorMeta(tuple(scale.shape), "float32", scale_src, "a.scale")
    metas = [RankMeta(source if rank == 0 else {}, {}) for rank in range(world_size)]
    if mode == "quantize":
        source = {"a.weight": TensorMeta(shape, "float32", src, "a.weight")}
        for rank in range(world_size):
            outs: dict[str, TensorMeta] = {}
            for local in dst.local_shapes(rank):
                outs["a.weight"] = TensorMeta(local, names[0], None, "a.weight")
                grid = [(p.start, p.stop) for p in dst.local_pieces(rank)]
                size = tuple(int(part is None) for part in block)
                if grid:
                    size = tuple(part.stop - part.start for part in _in_blocks(*grid[0], block))
                outs["a.scale"] = TensorMeta(size, "float32", None, "a.scale")
            metas[rank] = RankMeta(source if rank == 0 else {}, outs)
    joined = any(len({piece.tensor for piece in dst.local_pieces(r)}) < len(dst.pieces(r)) for r in dst.ranks)
    try:
        plan = plan_state_dict(metas, {"a.weight": dst}, pairs=[pair])
    except PlanError as error:
        codes = {problem.code for problem in error.problems}
        if (joined or twice) and codes <= {"does-not-divide", "boxes-overlap", "missing-argument"}:
            return "refused"
        raise
    full = {"a.weight": weight if mode == "quantize" else numbers, "a.scale": scale}
    results = _simulated(plan, full, world_size)
    values = numbers.float() * spread(scale, block, shape)
    wanted = {"move": numbers, "dequantize": values, "quantize": numbers}[mode]
    for rank in range(world_size):
        for tensor, expected in zip(results[rank]["a.weight"], local_tensors(dst, rank, wanted), strict=True):
            assert _same(tensor, expected), (src, dst, block)
        if mode != "dequantize" and not joined:
            for at, tensor in enumerate(results[rank]["a.scale"]):
                pieces = [piece for piece in dst.local_pieces(rank) if piece.tensor == at]
                if pieces:
                    assert _same(tensor, scale[_in_blocks(pieces[0].start, pieces[0].stop, block)]), (dst, block)
    return mode


def _in_blocks(start: tuple[int, ...], stop: tuple[int, ...], block: tuple[int | None, ...]) -> tuple[slice, ...]:
    spans = zip(start, stop, block, strict=True)
    return tuple(slice(0, 1) if size is None else slice(low // size, -(-high // size)) for low, high, size in spans)


@pytest.mark.extra("hypothesis")
def test_pairs_between_any_layouts_are_those_of_one_process() -> None:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    seen: dict[str, int] = {}

    @settings(max_examples=300, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 10**6))
    def check(seed: int) -> None:
        result = _check_pair(seed)
        seen[result] = seen.get(result, 0) + 1

    check()
    assert min(seen[mode] for mode in ("move", "dequantize", "quantize")) > 30, seen
    assert seen.get("refused", 0) < 120, seen


def test_quantising_is_the_loop_over_blocks() -> None:
    for block, dtype in product(BLOCKS, [E4M3, torch.int8, torch.float8_e5m2]):
        weight = torch.randn((7, 5), generator=torch.Generator().manual_seed(len(BLOCKS)))
        weight[0:2, 0:3] = 0  # a block of zeros has the scale 1
        numbers, scale = quantised_in_blocks(weight, block, dtype, torch.float32)
        wanted, wanted_scale = quantised(weight, block, dtype)
        assert _same(numbers, wanted)
        assert torch.equal(scale, wanted_scale.view(scale.shape))
    powers = quantised_in_blocks(torch.randn(8, 8), (4, 4), E4M3, torch.float8_e8m0fnu)[1].float()
    assert torch.equal(powers.log2(), powers.log2().round())


# ---- on ranks -------------------------------------------------------------------------------------------------


def _pair(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    numbers, scale = quantised(weight, (4, 4))
    return weight, numbers, scale


class _Up(nn.Module):
    up: Any

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, scale: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.up, self.norm = nn.Module(), nn.LayerNorm(3, bias=False)
        self.up.weight = nn.Parameter(torch.zeros(rows, columns).to(dtype), requires_grad=False)
        if scale is not None:
            self.up.weight_scale_inv = nn.Parameter(torch.zeros(scale), requires_grad=False)


@pytest.mark.extra("safetensors")
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("meta", [False, True])
def test_a_scaled_file_into_plain_weights(ranks: Ranks, tmp_path: Path, meta: bool) -> None:
    """A cast alone gave weights thousands of times too large; with the pair they are those of one process."""
    folder = Path(ranks.gather(str(tmp_path))[0])
    _, numbers, scale = _pair(18, 10)
    if ranks.rank == 0:
        write(folder / "f", {"up.weight": numbers, "up.weight_scale_inv": scale, "norm.weight": torch.ones(3)})
    ranks.gather(None)
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    wanted = (numbers.float() * spread(scale, (4, 4), (18, 10))).bfloat16()
    pair = Pair("*.weight", "*.weight_scale_inv", (4, 4), dequantize=True)
    for dim in (0, 1):
        with torch.device("meta" if meta else "cpu"):
            model = _Up(18, 10, torch.bfloat16)
        model.up.weight = nn.Parameter(distribute_tensor(model.up.weight, mesh, [Shard(dim)]), requires_grad=False)
        loaded = load_safetensors(folder / "f", out=model, pairs=pair)
        assert isinstance(model.up.weight, DTensor)
        assert _same(model.up.weight.full_tensor(), wanted)
        assert sorted(loaded) == ["norm.weight", "up.weight"]
        # Of each tensor the fewest bytes; dtypes of one message are padded.
        assert all(move.plan.wire_bytes == move.plan.lower_bound for move in loaded.plan.moves.moves)
    # Whatever else the caller writes, all ranks refuse with the way on, and nothing is written.
    model = _Up(18, 10, torch.bfloat16)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("dtype-mismatch.*Pair", {}),
        ("dtype-mismatch.*Pair", {"key_map": {"up.weight_scale_inv": None}}),
        ("dtype-mismatch.*Pair", {"unexpected": "ignore"}),
        ("dtype-mismatch.*Pair", {"dst_layouts": "2: R"}),
        ("shape-mismatch.*block", {"pairs": Pair("*.weight", "*.weight_scale_inv", (8, 8), dequantize=True)}),
        ("dtype-mismatch.*dequantize", {"pairs": DEEPSEEK}),
        ("unknown-name.*no weight with a scale", {"pairs": [pair, Pair("*.qweight", "*.scales")]}),
        ("missing-tensor", {"pairs": Pair("*.weight", "*.wrong", (4, 4), dequantize=True), "unexpected": "*"}),
    ]
    for match, options in calls:
        with pytest.raises(PlanError, match=match) as caught:
            load_safetensors(folder / "f", out=model, **options)
        assert len(set(ranks.gather(str(caught.value)))) == 1
        assert not bool(model.up.weight.any())
    load_safetensors(folder / "f", out=model, casts="values", unexpected="*_scale_inv")  # for those who mean it
    assert _same(model.up.weight, numbers.bfloat16())


@pytest.mark.extra("safetensors")
@pytest.mark.ranks(2)
def test_a_trainer_quantises_for_an_engine_and_the_pair_moves_on(ranks: Ranks, tmp_path: Path) -> None:
    weight, numbers, scale = _pair(18, 10)
    mesh, rank = ranks.mesh((2,), ("tp",)), ranks.rank
    source = {"up.weight": distribute_tensor(weight, mesh, [Shard(1)]), "norm.weight": torch.ones(3)}
    local_rows = slice(9 * rank, 9 * rank + 9)  # 9 rows: both ranks need the scales of rows 8 to 11
    local_scale = scale[2 * rank : 3 + 2 * rank]
    out = _Up(9, 10, E4M3, (3, 3))
    pair = Pair("*.weight", "*.weight_scale_inv", (4, 4), quantize=True)
    layouts = {"up.weight": "2: S(0)"}
    sync = StateDictResharder(source, layouts, out=out, pairs=pair)
    for factor in (1.0, 1.0, 2.0):
        scaled = {name: value * factor for name, value in source.items()}
        sync(scaled, out=out)
        assert _same(out.up.weight, numbers[local_rows])
        assert torch.equal(out.up.weight_scale_inv, local_scale * factor)
    # The pair as it is: from local shards, whose scale's layout follows, into rows of one rank, and into files.
    state = {"up.weight": out.up.weight, "up.weight_scale_inv": local_scale.clone()}
    options: Any = {"src_layouts": {"up.weight": "2: S(0)"}, "shapes": {"up.weight": (18, 10)}, "pairs": DEEPSEEK}
    moved = reshard_state_dict(state, "rank 1", **options)
    assert sorted(moved) == (["up.weight", "up.weight_scale_inv"] if rank == 1 else [])
    assert all(_same(value, {"up.weight": numbers}.get(name, scale)) for name, value in moved.items())
    folder = Path(ranks.gather(str(tmp_path))[0]) / "saved"
    save_safetensors(state, folder, **options)
    again = load_safetensors(folder, "2: S(1)", pairs=DEEPSEEK)
    assert _same(again["up.weight"], numbers[:, 5 * rank : 5 * rank + 5])
    assert torch.equal(again["up.weight_scale_inv"], scale[:, rank : rank + 2])
    with pytest.raises(PlanError, match=r"conflicting-arguments.*reshard_state_dict"):
        save_safetensors(state, folder, pairs=Pair("*.weight", "*.weight_scale_inv", (4, 4), dequantize=True))


@pytest.mark.ranks(2)
def test_a_tied_weight_with_two_scales_is_two_tensors(ranks: Ranks) -> None:
    """It moved once, and both names got the values of the first scale."""
    _, numbers, scale = _pair(10, 8)
    pair = Pair("*.weight", "*.weight_scale_inv", (4, 4), dequantize=torch.float32)
    values = numbers.float() * spread(scale, (4, 4), (10, 8))
    for factor in (1.0, 2.0):
        other = scale if factor == 1 else scale * factor
        state = {"a.weight": numbers, "a.weight_scale_inv": scale, "b.weight": numbers, "b.weight_scale_inv": other}
        moved = reshard_state_dict(state, "2: S(0)", pairs=pair)
        assert torch.equal(moved["a.weight"], values.chunk(2)[ranks.rank])
        assert torch.equal(moved["b.weight"], (values * factor).chunk(2)[ranks.rank])
        assert len(moved.plan.moves) == (2 if factor == 1 else 4)
    alone = {"a.weight": numbers, "a.weight_scale_inv": scale, "b.weight": numbers}  # the second one is no pair's
    moved = reshard_state_dict(alone, "2: S(0)", pairs=Pair("a.weight", "a.weight_scale_inv", (4, 4), torch.float32))
    assert torch.equal(moved["a.weight"], values.chunk(2)[ranks.rank])
    assert _same(moved["b.weight"], numbers.chunk(2)[ranks.rank])
    plain = torch.randn(10, 8, generator=torch.Generator().manual_seed(0)) * 0.02
    out = {f"{name}.weight": torch.zeros(10, 8).to(E4M3) for name in "ab"}
    out |= {f"{name}.weight_scale_inv": torch.zeros(3, 2) for name in "ab"}
    pair = Pair("*.weight", "*.weight_scale_inv", (4, 4), quantize=True)
    reshard_state_dict({"a.weight": plain, "b.weight": plain}, out=out, pairs=pair)
    assert all(_same(out[f"{name}.weight"], numbers) for name in "ab")
    assert all(torch.equal(out[f"{name}.weight_scale_inv"], scale) for name in "ab")
    with pytest.raises(PlanError, match=r"missing-argument\] pairs.*quantises no weight"):  # it has no effect
        reshard_state_dict({"a.weight": plain}, "2: R", pairs=pair)


@pytest.mark.ranks(2)
def test_experts_and_fused_weights_take_their_scales_along(ranks: Ranks, tmp_path: Path) -> None:
    pairs, keys = [_pair(8, 12, seed) for seed in range(4)], dict[str, Any]()
    state: dict[str, torch.Tensor] = {}
    for number, (_, numbers, scale) in enumerate(pairs):
        name = f"experts.{number // 2}.{'gate' if number % 2 == 0 else 'up'}.weight"
        state |= {name: numbers, f"{name}_scale_inv": scale}
        keys[name] = Part("experts.gate_up", stack=number // 2, start=8 * (number % 2))
    moved = reshard_state_dict(state, "2: S(1)", key_map=keys, pairs=DEEPSEEK)
    half = 8 * ranks.rank
    fused = torch.stack([torch.cat([pairs[at][1].view(torch.uint8) for at in both]) for both in ((0, 1), (2, 3))])
    assert torch.equal(moved["experts.gate_up"].view(torch.uint8), fused[:, half : half + 8])
    scales = torch.stack([torch.cat([pairs[at][2] for at in both]) for both in ((0, 1), (2, 3))])
    assert torch.equal(moved["experts.gate_up_scale_inv"], scales[:, half // 4 : half // 4 + 2])
    # The way back: one expert's half of the rows, with its scales.
    back = {
        "experts.gate_up": [
            Part(f"experts.{at // 2}.{at % 2}.weight", dim=1, source_start=8 * (at % 2), size=8, unstack=at // 2)
            for at in range(4)
        ]
    }
    layouts = {"experts.gate_up": "2: S(1)"}
    shapes = {"experts.gate_up": (2, 16, 12)}
    pair = Pair("*gate_up", "*gate_up_scale_inv", (4, 4))
    result = reshard_state_dict(moved, "rank 0", src_layouts=layouts, shapes=shapes, key_map=back, pairs=pair)
    for number, (_, numbers, scale) in enumerate(pairs if ranks.rank == 0 else []):
        name = f"experts.{number // 2}.{number % 2}.weight"
        assert _same(result[name], numbers)
        assert _same(result[f"{name}_scale_inv"], scale)
    assert len(result) == (8 if ranks.rank == 0 else 0)
    with pytest.raises(PlanError, match="does-not-divide"):
        reshard_state_dict(
            state, "2: R", pairs=DEEPSEEK, key_map={"experts.0.up.weight": Part("x.weight", start=3, fill=0)}
        )


@pytest.mark.ranks(2)
def test_bytes_of_mxfp4_move_and_are_not_multiplied(ranks: Ranks) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (4, 6, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (4, 6, 2), dtype=torch.uint8, generator=generator)
    mesh = ranks.mesh((2,), ("ep",))
    state = {"gate_up_blocks": distribute_tensor(blocks, mesh, [Shard(0)]), "gate_up_scales": scales}
    pair = Pair("*_blocks", "*_scales", (1, 1, 1, None))
    moved = reshard_state_dict(state, "2: S(1)", pairs=pair)
    assert torch.equal(moved["gate_up_blocks"], blocks.chunk(2, 1)[ranks.rank])
    assert torch.equal(moved["gate_up_scales"], scales.chunk(2, 1)[ranks.rank])
    with pytest.raises(PlanError, match=r"unsupported-dtype.*own library"):
        reshard_state_dict(state, "2: S(1)", pairs=Pair("*_blocks", "*_scales", (1, 1, 1, None), torch.bfloat16))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, E4M3])
def test_casts_of_floats_that_lose_most_values(ranks: Ranks, dtype: torch.dtype) -> None:
    """A matrix of 0.02s became zeros without a word."""
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)) * 0.02
    out = {"w": torch.ones(6, 4).to(dtype)}
    for call in (reshard_state_dict, StateDictResharder):
        with pytest.raises(PlanError, match=r"dtype-mismatch.*quantize=True.*casts='values'"):
            call({"w": weight}, "2: R", out=out)
    assert bool((out["w"].float() == 1).all())
    with pytest.raises(PlanError, match=r"dtype-mismatch.*dtype="):
        reshard(weight.chunk(2)[ranks.rank], "2: S(0)", "2: R", shape=(6, 4), out=out["w"])
    reshard_state_dict({"w": weight}, "2: R", out=out, casts="values")
    assert _same(out["w"], weight.to(dtype))
    by_name = reshard(weight.chunk(2)[ranks.rank], "2: S(0)", "2: R", shape=(6, 4), dtype=dtype)
    assert _same(by_name, weight.to(dtype))
    numbers = torch.arange(24).view(6, 4)  # integers to floats keep their values
    assert torch.equal(reshard_state_dict({"w": numbers}, "2: R", out={"w": torch.zeros(6, 4)})["w"], numbers.float())


def test_a_pair_is_checked_when_it_is_written() -> None:
    for code, arguments in (
        ("invalid-argument", ("*.weight", "scale")),
        ("invalid-argument", ("*.*", "*.scale_*")),
        ("invalid-argument", ("*.weight", "*.scale", (0, 4))),
        ("conflicting-arguments", ("*.weight", "*.scale", (4, 4), True, True)),
        ("unsupported-dtype", ("*.weight", "*.scale", (4, 4), torch.int32)),
    ):
        with pytest.raises(PlanError, match=code):
            Pair(*arguments)
    assert Pair("*.weight", "*.scale", (4,)).block_of((2, 3, 5)) == (1, 1, 4)
    assert Pair("*.weight", "*.scale").scale_of("a.b.weight") == "a.b.scale"
    assert Pair("*.weight", "*.scale").scale_of("a.b.bias") is None


@pytest.mark.ranks(2)
def test_scales_of_every_format_keep_a_weight_from_a_cast(ranks: Ranks) -> None:
    out, weight = {"up.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}, torch.ones(4, 4).to(E4M3)
    scales = ("scale_weight", "weight_quantizer._scale", "_weight_scale", "weight.absmax", "scales", "weight_scale_inv")
    for scale in scales:
        state = {"up.weight": weight, f"up.{scale}": torch.full((1,), 0.5)}
        with pytest.raises(PlanError, match=f"without the scale up.{scale}"):
            reshard_state_dict(state, "2: R", out=out, key_map={f"up.{scale}": None})
    assert not out["up.weight"].any()
    state = {"up.weight": weight, "down.weight_scale": torch.ones(1)}  # the scale of another module
    reshard_state_dict(state, "2: R", out=out, key_map={"down.weight_scale": None})
    assert (out["up.weight"] == 1).all()


@pytest.mark.extra("safetensors")
@pytest.mark.ranks(2)
def test_unexpected_tensors_leave_scales_with_their_weights(ranks: Ranks, tmp_path: Path) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0])
    weight = torch.arange(-8, 8, dtype=torch.int8).view(4, 4)
    scale = torch.tensor([[0.5], [2.0], [3.0], [0.25]])
    stored = {"up.weight": weight, "up.scale": scale, "mtp.weight": weight, "mtp.scale": scale}
    zero = {"up.zero_point": torch.ones(4, 1, dtype=torch.int8)}
    if ranks.rank == 0:
        write(folder / "m.safetensors", stored)
        write(folder / "z.safetensors", stored | zero)
    ranks.gather(None)
    out = {"up.weight": torch.zeros(4, 4)}
    options: Any = {
        "out": out,
        "pairs": Pair("*.weight", "*.scale", (1, None), dequantize=True),
        "unexpected": "ignore",
    }
    assert list(load_safetensors(folder / "m.safetensors", **options)) == ["up.weight"]
    assert torch.equal(out["up.weight"], weight * scale)
    with pytest.raises(PlanError, match=r"the zero point up\.zero_point, which a Pair lacks"):
        load_safetensors(folder / "z.safetensors", **options)
    load_safetensors(folder / "z.safetensors", **options, key_map={"up.zero_point": None})


# What stands beside ``up.weight`` or ``up.qweight`` in the formats of checkpoints and engines.
FACTORS = ("weight_scale_inv", "weight_scale", "weight.absmax", "scales", "SCB", "weight_zero_point", "g_idx", "qzeros")


def _moved_alone(ranks: Ranks, folder: Path, seed: int) -> str:
    """Move a quantised tensor of one format into a model of another; return what became of its value."""
    rng = random.Random(seed)
    stored_factor, factor = rng.choice(FACTORS), rng.choice((*FACTORS, None))
    weight = rng.choice(("up.weight", "up.qweight"))
    dtype = rng.choice((E4M3, torch.int8, torch.int32))
    numbers, by_file = torch.arange(1, 17).view(4, 4).to(dtype), rng.random() < 0.5
    stored = {weight: numbers, f"up.{stored_factor}": torch.full((4, 1), 3.0)}
    if not by_file and rng.random() < 0.3:
        del stored[f"up.{stored_factor}"]  # another call moves it
    out = {weight: torch.zeros(4, 4, dtype=dtype)}
    out |= {} if factor is None else {f"up.{factor}": torch.full((4, 1), 7.0)}
    options: dict[str, Any] = {"out": out, "strict": False}
    if factor is not None and rng.random() < 0.3:
        options["key_map"] = {f"up.{stored_factor}": f"up.{factor}"} if len(stored) > 1 else {}
    elif len(stored) > 1 and not by_file:
        options["key_map"] = {} if factor == stored_factor else {f"up.{stored_factor}": None}
    path = folder / f"{seed}.safetensors"
    if ranks.rank == 0 and by_file:
        write(path, stored)
    ranks.gather(None)
    call: Any = partial(load_safetensors, path, unexpected="ignore") if by_file else partial(reshard_state_dict, stored)
    before = {name: value.clone() for name, value in out.items()}
    error = ""
    try:
        call(**options)
    except PlanError as caught:
        error = str(caught)
    assert len(set(ranks.gather(error))) == 1
    values = [] if factor is None else [out[f"up.{factor}"]]
    if error:
        assert "missing-tensor" in error and "casts='values'" in error, error
        assert all(_same(out[name], value) for name, value in before.items())
        call(**options, casts="values")
        assert _same(out[weight], numbers)
        return "refused"
    # The weight with all that stands beside it in the model, or without any of it where the caller has said so.
    assert _same(out[weight], numbers)
    assert all((value == 3).all() for value in values), (seed, stored_factor, factor)
    return "whole" if values else "alone"


@pytest.mark.extra("safetensors")
@pytest.mark.ranks(2)
def test_numbers_of_a_checkpoint_never_meet_other_scales(ranks: Ranks, tmp_path: Path) -> None:
    """With ``unexpected="ignore"`` and ``strict=False`` float8 numbers arrived, and the model kept its own scale."""
    folder, seen = Path(ranks.gather(str(tmp_path))[0]), dict[str, int]()
    for seed in range(40):
        result = _moved_alone(ranks, folder, seed)
        seen[result] = seen.get(result, 0) + 1
    assert min(seen[result] for result in ("refused", "whole", "alone")) >= 3, seen
    # A kept resharder meets its `out` in a later call; a part of a scale is not the scale; nor is a weight without it.
    numbers, scale = torch.arange(1, 17).view(4, 4).to(E4M3), torch.full((4, 1), 3.0)
    out = {"up.weight": torch.zeros(4, 4, dtype=E4M3), "up.weight_scale": torch.full((4, 1), 7.0)}
    kept = StateDictResharder({"up.weight": numbers}, "2: R", strict=False)
    with pytest.raises(PlanError, match=r"missing-tensor\] up.weight\b.*moved without up.weight_scale"):
        kept({"up.weight": numbers}, out=out)
    state, half = {"up.weight": numbers, "up.weight_scale": scale}, Part("up.weight_scale", size=2)
    with pytest.raises(PlanError, match=r"moved without up\.weight_scale"):
        reshard_state_dict(state, out=out, key_map={"up.weight_scale": half}, strict=False)
    with pytest.raises(PlanError, match=r"missing-tensor\] up.weight_scale.*moved without up.weight\b"):
        reshard_state_dict(state, out=out, key_map={"up.weight": None}, strict=False)
    assert not out["up.weight"].float().any() and (out["up.weight_scale"] == 7).all()
    packed = {"up.W_q": torch.zeros(2, dtype=torch.uint8), "up.scale": torch.ones(1), "up.zero": torch.ones(1)}
    for lost in ("up.scale", "up.zero"):
        given = {name: value for name, value in packed.items() if name != lost}
        with pytest.raises(PlanError, match=f"up.W_q.*moved without {lost}"):
            reshard_state_dict(given, out=packed, strict=False)
    # A mask beside a factor of attention is no quantised weight.
    mask = {"attn.mask": torch.ones(2, dtype=torch.uint8), "attn.scale": torch.zeros(1)}
    reshard_state_dict({"attn.scale": scale[:1, 0]}, out=mask, strict=False)
    assert mask["attn.scale"] == 3


@pytest.mark.ranks(2)
def test_casts_of_integers_that_wrap_around(ranks: Ranks) -> None:
    names = ["bool", "uint8", "int8", "int16", "int32", "int64"]
    held = {name: {0, 1} for name in names[:1]}
    for name in names[1:]:
        info = torch.iinfo(getattr(torch, name))
        held[name] = {info.min, info.max}
    refused = 0
    for source, target in product(names, names):
        values = sorted(held[source])
        tensor = torch.tensor(values, dtype=getattr(torch, source))
        out = {"a": torch.zeros(2, dtype=getattr(torch, target))}
        wraps = tensor.to(out["a"].dtype).tolist() != [int(value) for value in values] or (target == "bool" != source)
        if wraps:
            refused += 1
            with pytest.raises(PlanError, match="loses most values"):
                reshard_state_dict({"a": tensor}, "2: R", out=out)
        reshard_state_dict({"a": tensor}, "2: R", out=out, casts="values" if wraps else "exact")
        assert torch.equal(out["a"], tensor.to(out["a"].dtype)), (source, target)
    assert refused == 16
