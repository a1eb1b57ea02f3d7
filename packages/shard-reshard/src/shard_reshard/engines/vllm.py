"""Weight transfer from a sharded trainer to vLLM. Each worker receives its own shards, in one exchange.

vLLM finds `register` by the entry point group ``vllm.general_plugins``; ``backend="shard_reshard"`` names both ends.
Trainer ranks come first in a group of their own, workers after them. Workers record their loader's destination of each
checkpoint tensor (fused and padded ones too): no model-specific rule is repeated here, nothing is gathered.
Written for vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard._torch_compat import register_group
from shard_reshard.engines.record import RecordedLayouts, record_layouts
from shard_reshard.group import group_info, raise_on_all_ranks
from shard_reshard.layout.parse import own_layout
from shard_reshard.state_dict.agreement import tensors_of
from shard_reshard.state_dict.resharder import StateDictResharder, SyncEnd

__all__ = ["ShardedSource", "TrainerInit", "TrainerEngine", "WorkerEngine", "register"]

BACKEND = "shard_reshard"


def register() -> None:
    """Register both ends with vLLM, once in each process."""
    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM may load plugins twice
        WeightTransferEngineFactory.register_engine(BACKEND, WorkerEngine)
        WeightTransferTrainerFactory.register_engine(BACKEND, TrainerEngine)


@dataclass
class WorkerInit(base.WeightTransferInitInfo):  # type: ignore[misc]  # untyped in vLLM
    """Rendezvous of workers and trainer, and the tensors to come; JSON, for vLLM's control plane."""

    address: str
    port: int
    num_trainer_ranks: int
    world_size: int
    timeout_seconds: float
    device: str  # type of device on both ends
    tensors: list[tuple[str, str, list[int]]]  # name, dtype and global shape

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint tensors without storage."""
        return {n: torch.empty(shape, dtype=getattr(torch, t), device="meta") for n, t, shape in self.tensors}

    def join(self, rank: int) -> dist.ProcessGroup:
        """Return the group of trainer ranks and workers; a collective."""
        backend = "nccl" if self.device == "cuda" else "gloo"
        group: dist.ProcessGroup = stateless_init_torch_distributed_process_group(
            self.address, self.port, rank, self.world_size, backend, timeout=timedelta(seconds=self.timeout_seconds)
        )
        register_group(group, f"{BACKEND} {self.address}:{self.port}", f"{self.device}:{backend}")
        return group


class WorkerEngine(SyncEnd, base.WeightTransferEngine[WorkerInit, base.WeightTransferUpdateInfo]):  # type: ignore[misc]
    """vLLM's end, for the shards of a worker. A failed exchange leaves the model as it was."""

    init_info_cls = WorkerInit
    update_info_cls = base.WeightTransferUpdateInfo
    supports_draft_weight_update = False  # layouts are those of one model

    def init_transfer_engine(self, init_info: WorkerInit) -> None:
        """Join the trainer, record the model's loader and agree on one plan."""
        if self.device.type != init_info.device:
            raise ValueError(f"the trainer's tensors are on {init_info.device}, the worker's on {self.device}")
        kinds = {name: [kind.__name__ for kind in type(layer).__mro__] for name, layer in self.model.named_modules()}
        packed = [name for name, bases in kinds.items() if "RoutedExperts" in bases]
        parallel = self.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + parallel.rank
        group = init_info.join(init_info.num_trainer_ranks + place)
        with _checkpoint_format(self.model, self.model_config):
            self.recorded = record_layouts(self.model, init_info.weights(), group=group, strict=True)
            # Parameters would stay unchanged, and buffers would be lost with their layer.
            held, layers = dict(self.model.named_buffers()), _layers(self.recorded)
            problems = [
                Problem(
                    "missing-source",
                    name,
                    found="the trainer sends nothing for this tensor",
                    hint="send it too, under the name that the model's load_weights knows",
                )
                for name in self.recorded.unfilled
                if name not in held or (held[name].is_meta and name.rpartition(".")[0] in layers)
            ]
            if init_info.device == "cpu" and packed:
                # vLLM packs these weights once, after the first load, and skips it later: old values would answer.
                problems.append(
                    Problem(
                        "not-recordable",
                        packed[0],
                        found="expert layers on a CPU",
                        hint="sync expert layers on GPUs; on a CPU start vLLM anew from files",
                    )
                )
            if problems:
                raise_on_all_ranks(group_info(group), PlanError(problems))
            out = self.recorded.out
            # Tensors that vLLM leaves off meta (biases) are live memory: change them after all have arrived.
            self.atomic = any(not tensor.is_meta for tensor in out.values())
            self.resharder = StateDictResharder(
                {}, self.recorded.layouts, out=out, key_map=self.recorded.key_map, group=group
            )

    def start_weight_update(self) -> None:
        """Do nothing: the model changes after everything has arrived."""

    finish_weight_update = start_weight_update

    def receive_weights(self, update_info: base.WeightTransferUpdateInfo) -> None:
        """Receive into new parameters; then let vLLM process them for its kernels."""
        if self.resharder is None:
            raise RuntimeError("init_weight_transfer_engine comes before the first update")
        with _checkpoint_format(self.model, self.model_config) as ties:
            layers = [self.model.get_submodule(name) for name in _layers(self.recorded)]
            for layer in layers:
                materialize_layer(layer, layerwise.get_layerwise_info(layer))
            _tie(ties)
            layers += [tied for tied, *_ in ties]  # each derives its kernels' form of the shared tensor
            self.recorded.fill_constants()
            self.exchange({}, out=self.recorded.out, atomic=self.atomic)
            for layer in layers:
                layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))

    def shutdown(self) -> None:
        """Drop the trainer; its group ends with the last reference."""
        self.resharder = None


_Ties = list[tuple[nn.Module, str, nn.Module, str]]  # layers and names of a parameter, and its first owner


def _tie(ties: _Ties) -> None:
    for layer, name, first, first_name in ties:
        layer._parameters[name] = first._parameters[first_name]


@contextmanager
def _checkpoint_format(model: nn.Module, model_config: Any) -> Iterator[_Ties]:
    """Within the context, give layers the checkpoint's parameters, on meta; processed ones stay processed."""
    places: dict[int, tuple[nn.Module, str]] = {}
    held = [(layer, name, p) for layer in model.modules() for name, p in layer._parameters.items() if p is not None]
    ties = [(at, n, *places[id(p)]) for at, n, p in held if places.setdefault(id(p), (at, n)) != (at, n)]
    layerwise.initialize_layerwise_reload(model)
    try:
        _tie(ties)  # vLLM gives each layer a parameter of its own
        for layer in model.modules():
            for value in get_layer_tensors(layer).values():
                value.weight_loader = layerwise._get_original_loader(value)
            layerwise.get_layerwise_info(layer).load_numel_total = 0  # no layer waits for a loader
        yield ties
    finally:
        layerwise.finalize_layerwise_reload(model, model_config)


def _layers(recorded: RecordedLayouts) -> dict[str, None]:
    return dict.fromkeys(name.rpartition(".")[0] for name in recorded.filled)


# ---- the trainer ----------------------------------------------------------------------------------------------


class ShardedSource(base.WeightSource):  # type: ignore[misc]
    """Tensors as they lie (DTensors, ``_sharding_info``), of a module or from a function."""

    def __init__(self, tensors: nn.Module | Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._tensors = tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of this moment. Of a module also the buffers of its checkpoints, ties once."""
        if not isinstance(self._tensors, nn.Module):
            return dict(self._tensors())
        saved = tensors_of(self._tensors)
        first = {id(value): name for name, value in reversed(saved.items())}
        return {name: value for name, value in saved.items() if first[id(value)] == name}

    def metadata(self) -> list[base.ParamMeta]:
        """Return names, dtypes and global shapes."""
        metadata = []
        for name, value in self.tensors().items():
            layout = own_layout(name, value, lambda rank: rank)
            metadata.append(base.ParamMeta(name, value.dtype, tuple(value.shape) if layout is None else layout.shape))
        return metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors().items())


@dataclass
class TrainerInit(base.TrainerInitInfo):  # type: ignore[misc]
    """Rendezvous of all, a store of trainer rank 0; ``num_workers`` includes data-parallel ones."""

    backend: ClassVar[str] = BACKEND
    address: str
    port: int
    num_workers: int
    timeout_seconds: float = 300.0


class TrainerEngine(SyncEnd, base.TrainerWeightTransferEngine[TrainerInit]):  # type: ignore[misc]
    """The trainer's end, on every rank of its default group. Rank 0 drives vLLM through ``client``."""

    init_info_cls = TrainerInit

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInit, *, client: Any, source: base.WeightSource | None = None
    ) -> TrainerEngine:
        """Join the workers, and agree with them on one plan."""
        if not isinstance(source, ShardedSource):
            raise TypeError(f"{BACKEND} wants a ShardedSource, which gathers nothing, got {type(source).__name__}")
        if init_info.rank != dist.get_rank():  # layouts name the ranks of the trainer's meshes
            raise ValueError(f"rank={init_info.rank}, in the trainer's default group it is {dist.get_rank()}")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        metas, tensors, ranks = source.metadata(), source.tensors(), dist.get_world_size()
        described = [(meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape)) for meta in metas]
        where = init_info.address, init_info.port, ranks, ranks + init_info.num_workers, init_info.timeout_seconds
        worker_init = WorkerInit(*where, next(iter(tensors.values())).device.type, described)
        with engine._call("init_weight_transfer_engine", asdict(worker_init)):
            group = worker_init.join(init_info.rank)
            recorded = record_layouts(None, worker_init.weights(), group=group, strict=True)
            engine.resharder = StateDictResharder(tensors, recorded.layouts, key_map=recorded.key_map, group=group)
        return engine

    @contextmanager
    def _call(self, method: str, argument: dict[str, Any]) -> Iterator[None]:
        """Let vLLM's workers join this rank's collective within the context; only the sender calls."""
        if not self.is_sender:
            yield
            return
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(getattr(self.client, method), argument)
            try:
                yield
            finally:
                call.result()  # errors of the workers come first

    def send_weights(self) -> None:
        """Send the current tensors; every trainer rank calls."""
        if self.is_sender:
            self.client.start_weight_update()
        with self._call("update_weights", {}):
            self.exchange(self.source.tensors())
        if self.is_sender:
            self.client.finish_weight_update()
