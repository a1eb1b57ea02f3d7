"""Plans of megatron-core's resharding planner, of awex's and ours for the same models on the same ranks.

    pip install --no-deps megatron-core==0.16.1 awex==0.9.0   # in an environment of their own
    python packages/shard-reshard/benchmarks/planners.py [--markdown FILE]

Thirty topologies: pipeline x tensor x data parallel trainers, to tensor x data parallel generators on the same ranks or
on others. Nothing is sent: the planners' own functions run in one process. A planner that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

LAYERS, HIDDEN, INNER, VOCAB = 8, 512, 1536, 4096


class Tensor(NamedTuple):
    """A parameter and the dim that tensor parallelism cuts."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    layer: int


class Topology(NamedTuple):
    """Ranks of both sides, by pipeline stage, data-parallel replica and tensor-parallel rank."""

    pp: int
    src_tp: int
    src_dp: int
    dst_tp: int
    dst_dp: int
    apart: bool  # generators have ranks of their own, before the trainers'

    @property
    def num_dst(self) -> int:
        return self.dst_tp * self.dst_dp

    @property
    def first_src(self) -> int:
        return self.num_dst if self.apart else 0

    @property
    def world(self) -> int:
        return max(self.num_dst, self.first_src + self.pp * self.src_tp * self.src_dp)

    def src_ranks(self, tensor: Tensor) -> list[list[int]]:
        """Ranks that hold a tensor: for each replica, by tensor-parallel rank."""
        stage = tensor.layer * self.pp // LAYERS
        first = self.first_src + stage * self.src_tp * self.src_dp
        return [[first + dp * self.src_tp + tp for tp in range(self.src_tp)] for dp in range(self.src_dp)]

    def dst_ranks(self) -> list[list[int]]:
        return [[dp * self.dst_tp + tp for tp in range(self.dst_tp)] for dp in range(self.dst_dp)]

    def __str__(self) -> str:
        where = "apart" if self.apart else "same ranks"
        return f"PP{self.pp} TP{self.src_tp} DP{self.src_dp} -> TP{self.dst_tp} DP{self.dst_dp}, {where}"


class Result(NamedTuple):
    """Bytes between ranks, the most that a rank sends, messages, and seconds that a rank plans."""

    wire: int
    busiest: int
    messages: int
    seconds: float


def model() -> list[Tensor]:
    """A Llama in bfloat16."""
    tensors = [Tensor("embed", (VOCAB, HIDDEN), 0, 0), Tensor("head", (VOCAB, HIDDEN), 0, LAYERS - 1)]
    for layer in range(LAYERS):
        shapes = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 0, "up": 0, "down": 1, "norm1": None, "norm2": None}
        for name, dim in shapes.items():
            rows, columns = (INNER if name in ("gate", "up") else HIDDEN), (INNER if name == "down" else HIDDEN)
            shape = (HIDDEN,) if dim is None else (rows, columns)
            tensors.append(Tensor(f"layers.{layer}.{name}", shape, dim, layer))
    return tensors


def topologies() -> Iterator[Topology]:
    """Thirty of them."""
    for apart in (False, True):
        for pp, src_tp, src_dp in ((1, 1, 8), (1, 2, 4), (1, 8, 1), (2, 2, 2), (4, 2, 1)):
            for dst_tp, dst_dp in ((8, 1), (4, 2), (2, 4)):
                yield Topology(pp, src_tp, src_dp, dst_tp, dst_dp, apart)


def _result(world: int, moves: list[tuple[int, int, int]], messages: int, seconds: float) -> Result:
    sent = [0] * world
    for source, target, size in moves:
        sent[source] += size if source != target else 0
    return Result(sum(sent), max(sent), messages, seconds)


def ours(topology: Topology) -> tuple[Result, int]:
    """Our plan, and the lower bound of its bytes."""
    from shard_reshard.layout.shard_map import MeshShardMap
    from shard_reshard.state_dict.plan import RankMeta, TensorMeta, plan_state_dict
    from shard_spec import Layout, MeshSpec

    metas: list[dict[str, TensorMeta]] = [{} for _ in range(topology.world)]
    dims = {}
    for tensor in model():
        ranks = [rank for replica in topology.src_ranks(tensor) for rank in replica]
        mesh = MeshSpec({"dp": topology.src_dp, "tp": topology.src_tp}, ranks)
        layout = Layout(mesh, f"R, {'R' if tensor.dim is None else f'S({tensor.dim})'}")
        placed = MeshShardMap(layout, tensor.shape)
        dims[tensor.name] = tensor.dim
        for rank in ranks:
            metas[rank][tensor.name] = TensorMeta(tensor.shape, "bfloat16", placed, tensor.name)
    mesh = MeshSpec({"dp": topology.dst_dp, "tp": topology.dst_tp})
    layouts = {dim: Layout(mesh, f"R, {'R' if dim is None else f'S({dim})'}") for dim in (None, 0, 1)}
    begin = time.perf_counter()
    plan = plan_state_dict([RankMeta(meta, {}) for meta in metas], lambda name, _: layouts[dims[name]])
    for move in plan.moves:
        move.plan.rank_schedule(topology.world - 1)
    seconds = time.perf_counter() - begin
    moves, pairs = [], set()
    for number, bucket in enumerate(plan.buckets):
        for at in bucket:
            for source, row in enumerate(plan.moves[at].plan.bytes_matrix):
                for target, size in enumerate(row):
                    if size:
                        moves.append((source, target, size))
                        pairs.add((number, source, target))
    return _result(topology.world, moves, len(pairs), seconds), plan.lower_bound


def megatron(topology: Topology) -> Result:
    """The plan that rank 0 makes for all ranks."""
    from megatron.core.resharding import planner, utils

    sources: dict[str, list[Any]] = {}
    targets: list[list[Any]] = [[] for _ in range(topology.world)]
    for tensor in model():
        for replicas, is_source in ((topology.src_ranks(tensor), True), (topology.dst_ranks(), False)):
            for replica in replicas:
                for place, rank in enumerate(replica):
                    shape = list(tensor.shape)
                    if tensor.dim is not None:
                        shape[tensor.dim] //= len(replica)
                    meta = utils.ParameterMetadata(
                        tensor.name, tuple(shape), torch.bfloat16, 2, is_tp=tensor.dim is not None,
                        partition_dim=tensor.dim or 0, owner_rank=rank, resolved_name=tensor.name,
                        tensor_parallel_group_ranks=replica if tensor.dim is not None else None,
                        data_parallel_group_ranks=[other[place] for other in replicas],
                    )  # fmt: skip
                    if is_source:
                        sources.setdefault(tensor.name, []).append(meta)
                    else:
                        targets[rank].append(meta)
    begin = time.perf_counter()
    transfers = []
    for rank, metas in enumerate(targets):  # as build_centralized_reshard_plan does
        for meta in metas:
            source = utils.select_src_metadata_balanced(sources[meta.resolved_name], meta, rank)
            for sender, _, part in planner._determine_source_ranks_for_dst_param(meta.name, source, meta, rank):
                transfers.append((sender, rank, part, meta))
    seconds = time.perf_counter() - begin
    moves = []
    for sender, rank, part, meta in transfers:
        size = 2
        for extent, cut in zip(meta.shape, part, strict=True):
            size *= len(range(*cut.indices(extent)))
        moves.append((sender, rank, size))
    messages = sum(sender != rank for sender, rank, _ in moves)
    return _result(topology.world, moves, messages, seconds)


def awex(topology: Topology) -> Result:
    """The plan of all ranks, whose trainers and generators are apart."""
    from awex.meta.weight_meta import ParameterMeta, ParameterReplicaMeta, ParameterShardMeta
    from awex.transfer.transfer_plan import TransferPlanBuilder

    def meta(tensor: Tensor, replicas: list[list[int]], first: int, world: int) -> Any:
        metas = []
        for replica in replicas:
            shards = []
            cut = tensor.dim is not None
            for place, rank in enumerate(replica):
                shape, offset = list(tensor.shape), [0] * len(tensor.shape)
                if tensor.dim is not None:
                    shape[tensor.dim] //= len(replica)
                    offset[tensor.dim] = place * shape[tensor.dim]
                shards.append(
                    ParameterShardMeta(
                        place, place, 0, 0, 0, rank - first, world, 0, tensor.name, tuple(shape),
                        int(torch.Size(shape).numel()), torch.bfloat16, tuple(offset),
                    )
                )  # fmt: skip
            # What every rank has is a replica on each.
            metas += [ParameterReplicaMeta(shards)] if cut else [ParameterReplicaMeta([shard]) for shard in shards]
        every = [shard for replica in metas for shard in replica.shards]
        return ParameterMeta(
            tensor.name, int(torch.Size(tensor.shape).numel()), tensor.shape, torch.bfloat16, every, metas
        )

    train = topology.world - topology.num_dst
    sources = [meta(tensor, topology.src_ranks(tensor), topology.first_src, train) for tensor in model()]
    targets = [meta(tensor, topology.dst_ranks(), 0, topology.num_dst) for tensor in model()]
    builder = TransferPlanBuilder(topology.num_dst, train)
    begin = time.perf_counter()
    operations = builder.build_weights_mapping_operations(targets, sources)
    seconds = time.perf_counter() - begin
    moves = [(op.send_rank, op.recv_rank, 2 * int(torch.Size(op.overlap_shape).numel())) for op in operations]
    return _result(topology.world, moves, len(moves), seconds)


def _cell(result: Result | str) -> str:
    if isinstance(result, str):
        return f"{result} | | |"
    mib = f"{result.wire / 2**20:.2f} ({result.busiest / 2**20:.2f})"
    return f"{mib} | {result.messages} | {1e3 * result.seconds:.0f} |"


def large() -> str:
    """Seconds that a rank plans a model of DeepSeek-V3's size."""
    from shard_reshard.layout.shard_map import MeshShardMap
    from shard_reshard.state_dict.plan import RankMeta, TensorMeta, plan_state_dict
    from shard_spec import Layout, MeshSpec

    layers, experts, hidden, inner, ranks = 61, 256, 7168, 2048, 256
    metas: list[dict[str, TensorMeta]] = [{} for _ in range(ranks)]
    dims: dict[str, int | None] = {}

    @cache  # as metadata arrives: equal layouts of a rank are one object
    def placed(owners: tuple[int, ...], shape: tuple[int, ...]) -> MeshShardMap:
        return MeshShardMap(Layout(MeshSpec({"ep": len(owners)}, owners), "R"), shape)

    def add(name: str, shape: tuple[int, ...], dtype: str, owners: tuple[int, ...], dim: int | None) -> None:
        layout = placed(owners, shape)
        dims[name] = dim
        for rank in owners:
            metas[rank][name] = TensorMeta(shape, dtype, layout, name)

    for layer in range(layers):
        first = layer * 16 // layers * 16
        stage = tuple(range(first, first + 16))
        for expert in range(experts if layer >= 3 else 0):
            owner = (first + expert // 16,)
            for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                dim, scales = int(name == "down"), (-(-shape[0] // 128), -(-shape[1] // 128))
                add(f"{layer}.{expert}.{name}", shape, "float8_e4m3fn", owner, dim)
                add(f"{layer}.{expert}.{name}.scale", scales, "float32", owner, dim)
        dense = {"q_a": (1536, hidden), "kv_a": (576, hidden), "norm1": (hidden,), "norm2": (hidden,)}
        for name, shape in {**dense, "q_norm": (1536,), "kv_norm": (512,)}.items():
            add(f"{layer}.{name}", shape, "bfloat16", stage, None)
        for name, shape, dim in (("q_b", (24576, 1536), 0), ("kv_b", (32768, 512), 0), ("o", (hidden, 16384), 1)):
            add(f"{layer}.{name}", shape, "bfloat16", stage, dim)
    mesh = MeshSpec({"dp": 8, "tp": 32})
    layouts = {dim: Layout(mesh, f"R, {'R' if dim is None else f'S({dim})'}") for dim in (None, 0, 1)}
    begin = time.process_time()
    plan = plan_state_dict([RankMeta(meta, {}) for meta in metas], lambda name, _: layouts[dims[name]])
    assert plan.digest
    planned = time.process_time() - begin
    for move in plan.moves:
        move.plan.rank_schedule(3)
    scheduled = time.process_time() - begin - planned
    kinds = len({id(move.plan) for move in plan.moves})
    return (
        f"A plan of DeepSeek-V3's size ({len(plan.moves):,} tensors, {kinds:,} kinds of move, PP16 x EP16 -> TP32 x "
        f"DP8, 256 ranks): {planned:.2f} s of CPU time on a rank, {scheduled:.2f} s for what it sends and receives; "
        f"{len(plan.buckets):,} exchanges."
    )


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", metavar="FILE")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    peers: dict[str, Callable[[Topology], Result]] = {}
    for name, package, call in (("megatron-core", "megatron.core", megatron), ("awex", "awex", awex)):
        try:
            importlib.import_module(package)
            peers[f"{name} {importlib.metadata.version(name)}"] = call
        except ImportError:
            print(f"{name} is not installed")
    lines = [
        "# shard-reshard: plans compared with other planners",
        "",
        "`python packages/shard-reshard/benchmarks/planners.py --markdown FILE`: a Llama of 74 tensors in",
        "bfloat16, from trainers to generators. MiB on the wire (of the rank that sends most), messages between ranks",
        "(ours are fused into all-to-alls, theirs are point-to-point), planning time of a rank in milliseconds: in",
        "megatron-core rank 0 plans for all ranks, in awex every rank plans the full exchange, in ours its own share.",
        "awex has no rank that both trains and generates.",
        "",
        "| topology | bound, MiB | "
        + " | ".join(f"{name} | messages | ms" for name in ("shard-reshard", *peers))
        + " |",
        "|---" * (5 + 3 * len(peers)) + "|",
    ]
    worse, times = 0, []
    for topology in topologies():
        mine, bound = ours(topology)
        assert mine.wire == bound, topology
        row = f"| {topology} | {bound / 2**20:.2f} | {_cell(mine)}"
        times.append(mine.seconds)
        for call in peers.values():
            if call is awex and not topology.apart:
                row += f" {_cell('-')}"
                continue
            theirs = call(topology)
            assert mine.wire <= theirs.wire, topology
            worse += mine.wire < theirs.wire
            row += f" {_cell(theirs)}"
        lines.append(row)
    median = 1e3 * statistics.median(times)
    total = f"Ours is the bound in all {len(times)} and less than a peer's {worse} times; median planning time"
    lines += ["", f"{total} {median:.0f} ms.", "", large()]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.markdown:
        Path(arguments.markdown).write_text(text)


if __name__ == "__main__":
    main()
