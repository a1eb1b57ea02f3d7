"""DistributedDataParallel over tensor parallelism in Hugging Face accelerate.

accelerate's own ``prepare_model`` refuses DTensor parameters, and its ``ParallelismConfig`` refuses tensor parallelism
beside replicas (``_validate_accelerator`` of accelerate 1.15). This ``Accelerator`` overrides all that depends on ranks
with the same data: the wrapper, metrics, the norm, the loss scale, the scheduler, random states, checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as read_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from tp_ddp_bridge._shared.consensus import tensor_hash
from tp_ddp_bridge._shared.norms import clip_grad_norm_
from tp_ddp_bridge._shared.problems import PlanError, Problem
from tp_ddp_bridge.api import pre_dp_module_transform, wrap_ddp
from tp_ddp_bridge.consistency.replicas import raise_on_all_ranks
from tp_ddp_bridge.ddp import tensor_ranks
from tp_ddp_bridge.optim.elementwise import parameters_of
from tp_ddp_bridge.optim.scaler import GradScaler
from tp_ddp_bridge.optim.state import optimizer_state_to_dtensor, optimizer_state_to_local, repoint

__all__ = ["Accelerator"]


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # the host has no types here
    """``accelerate.Accelerator`` with DDP around tensor-parallel models.

    Make the model tensor parallel on ``accelerator.mesh["tp"]``, and call ``prepare`` as usual. Ranks of one
    tensor-parallel group get the same batches; ``gather``, ``gather_for_metrics`` and ``reduce`` count samples once.

    Args:
        tp_size: Ranks of a tensor-parallel group; consecutive ranks form one.
        **kwargs: As in accelerate, without ``parallelism_config`` (it refuses tensor parallelism under DDP).

    Attributes:
        mesh: The ranks as ``(dp_replicate, tp)``.
        data_parallel_size: Number of ranks with different batches.

    Raises:
        PlanError: ``tp_size`` does not divide the ranks, or another parallelism is configured; in ``prepare``, an
            optimizer holds parameters of no prepared model; at the start of a loader's pass, tensor-parallel ranks have
            different batches.
    """

    scaler: Any
    flag_tensor: torch.Tensor | None
    data_parallel_size: int
    _models: list[Any]
    _optimizers: list[Any]
    _schedulers: list[Any]

    def __init__(self, tp_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        ranks = self.num_processes
        if tp_size < 1 or ranks % tp_size or self.parallelism_config or self.is_fsdp2 or self.dispatch_batches:
            raise PlanError(
                Problem(
                    "invalid-mesh",
                    "tp_size",
                    found=f"tp_size={tp_size} on {ranks} ranks",
                    hint="a size that divides the ranks, without parallelism_config, FSDP and dispatch_batches",
                )
            )
        self.dataloader_config.dispatch_batches = False  # dispatching sends other rows to each rank of the world
        axes = ("dp_replicate", "tp")  # accelerate's names, read by its data loaders
        self.mesh = init_device_mesh(self.device.type, (ranks // tp_size, tp_size), mesh_dim_names=axes)
        self.state.device_mesh, self.data_parallel_size = self.mesh, ranks // tp_size
        self._data_group, self._tensor_group = self.mesh.get_group(axes[0]), self.mesh.get_group(axes[1])
        self._unbridged: list[Optimizer] = []
        if self.scaler is not None:
            handler = self.scaler_handler
            self.scaler = GradScaler(self.device.type, **({} if handler is None else handler.to_kwargs()))
        self.register_save_state_pre_hook(self._save_shards)
        self.register_load_state_pre_hook(self._load_shards)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as accelerate does. An optimizer of the unprepared model gets its new parameters."""
        self._unbridged = [each for each in args if isinstance(each, Optimizer)]
        for optimizer in self._unbridged:
            repoint(optimizer)  # its model may have been prepared before
        prepared = super().prepare(*args, device_placement=device_placement)
        trained = {id(parameter) for model in self._models for parameter in model.parameters()}
        listed = [each for optimizer in self._unbridged for each in parameters_of(optimizer)]
        strays = [f"optimizer parameter of shape {tuple(each.shape)}" for each in listed if id(each) not in trained]
        problems = [
            Problem("parameter-not-in-module", name, hint="build the optimizer after the model is tensor parallel")
            for name in strays
            if trained
        ]
        if self._unbridged:  # the ranks that prepare an optimizer raise together
            raise_on_all_ranks([self.mesh], "prepare", problems)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Bridge ``model``, apply accelerate's mixed precision, and wrap it in DDP over the replicas."""
        if getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement)  # type: ignore[no-any-return]
        if self._tensor_group.size() > 1 and not tensor_ranks(model):
            text = "is not tensor parallel, each rank holds all of it: parallelize it on accelerator.mesh['tp'] first"
            warnings.warn(f"{type(model).__name__} {text}", stacklevel=2)
        pre_dp_module_transform(model, optimizers=self._unbridged)
        if hasattr(model, "save_pretrained"):
            model.__dict__["save_pretrained"] = MethodType(save_pretrained, model)
        self._share_random_states()
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or not any(p.requires_grad for p in model.parameters()):
            return model
        handler = self.ddp_handler
        ddp = wrap_ddp(model, mesh=self.mesh, **({} if handler is None else handler.to_kwargs()))
        if handler is not None:
            handler.register_comm_hook(ddp)
        self._models[-1] = ddp
        return ddp

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare as accelerate does, for data-parallel ranks; the batches of tensor-parallel peers are compared."""
        prepared = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if not isinstance(prepared, _SameBatches):
            prepared.accelerator = self
            # accelerate 1.15 makes its loader by the class's name (`prepare_data_loader` in data_loader.py ends in
            # `DataLoaderShard(...)`) and iterates in that class's `__iter__`: neither a subclass nor a hook gets in.
            # The loader's own `__class__` is that of the loader within, and cannot be set.
            object.__dict__["__class__"].__set__(prepared, type("SameBatches", (_SameBatches, type(prepared)), {}))
        return prepared

    def _share_random_states(self) -> None:
        """Give tensor-parallel ranks equal dropout: ``set_seed(device_specific=True)`` seeds each differently."""
        for module in (torch,) if self.device.type == "cpu" else (torch, torch.get_device_module(self.device)):
            state = module.get_rng_state().to(self.device)  # NCCL takes no CPU tensors
            dist.broadcast(state, group=self._tensor_group, group_src=0)
            module.set_rng_state(state.cpu())

    def check_trigger(self) -> bool:
        """Return True if ``set_trigger`` was called on any rank since the last time. Every rank calls this."""
        flag = torch.tensor(0 if self.flag_tensor is None else int(self.flag_tensor), device=self.device)
        dist.all_reduce(flag)  # over all ranks, unlike reduce()
        self.flag_tensor = torch.zeros_like(flag)  # consumed
        return bool(flag)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare as accelerate does; it steps once for each data-parallel rank, not for each rank."""
        prepared = super().prepare_scheduler(scheduler)
        if type(prepared) is AcceleratedScheduler and not self.split_batches:
            stepping = _Scheduler(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, True)
            stepping.times = self.data_parallel_size
            self._schedulers[self._schedulers.index(prepared)] = prepared = stepping
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip by the norm of the full model, equal on all ranks."""
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """Gather over the data-parallel ranks alone."""

        def one(value: torch.Tensor) -> torch.Tensor:
            own = value.detach().reshape(1) if value.ndim == 0 else value.detach().contiguous()
            rows = [torch.empty_like(own) for _ in range(self.data_parallel_size)]
            dist.all_gather(rows, own, group=self._data_group)
            return torch.cat(rows)

        return recursively_apply(one, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather over the data-parallel ranks, without the padding samples of the last batch."""
        state = self.gradient_state
        samples = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        try:
            data = None if use_gather_object else self.gather(input_data)
        except TypeError:  # no tensors, as in accelerate
            data = None
        if data is None:
            rows: list[Any] = [None] * self.data_parallel_size
            dist.all_gather_object(rows, input_data, group=self._data_group)
            return [each for row in rows for each in row][:samples]
        return recursively_apply(lambda each: each[:samples], data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over the data-parallel ranks alone; ``scale`` is for XLA only, as in accelerate."""

        def one(value: torch.Tensor) -> torch.Tensor:
            total = value.detach().clone()
            if reduction != "none":
                dist.all_reduce(total, group=self._data_group)
            return total / self.data_parallel_size if reduction == "mean" else total

        return recursively_apply(one, tensor, error_on_other_type=True)

    # ---- checkpoints: a full state dict for people, shards for resuming ----------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict on every rank; a collective of the tensor-parallel ranks."""
        return _full_state(self.unwrap_model(model) if unwrap else getattr(model, "module", model))

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save as accelerate does, and shards of models and optimizers beside. These load on any mesh."""
        return self._apart(super().save_state, *args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint of ``save_state``, on this number of ranks or another."""
        return self._apart(super().load_state, *args, **kwargs)

    def _apart(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keep accelerate from saving or loading one rank's shards as if they were full."""
        self._held = self._models, self._optimizers  # for the hooks of this call
        self._models, self._optimizers = [], []
        try:
            return call(*args, **kwargs)
        finally:
            self._models, self._optimizers = self._held

    def _shards(self, template: bool) -> tuple[nn.ModuleList, dict[str, Any]]:
        """Return all models as one module, and the state of it and of all optimizers."""
        models, optimizers = self._held
        inner = nn.ModuleList(getattr(model, "module", model) for model in models)
        state: dict[str, Any] = {"models": inner.state_dict()}
        for index, each in enumerate(optimizers):
            state[f"optimizer_{index}"] = optimizer_state_to_dtensor(inner, each.optimizer, template=template)
        return inner, state

    def _save_shards(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        save(self._shards(template=False)[1], checkpoint_id=Path(output_dir) / "shards")

    def _load_shards(self, models: list[nn.Module], input_dir: str) -> None:
        inner, state = self._shards(template=True)
        read_checkpoint(state, checkpoint_id=Path(input_dir) / "shards")
        inner.load_state_dict(state["models"])
        for index, each in enumerate(self._held[1]):
            optimizer_state_to_local(inner, each.optimizer, state[f"optimizer_{index}"])


def _full_state(model: nn.Module) -> dict[str, Any]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def save_pretrained(model: Any, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
    """Save the full weights, as the model's own class would save one rank's shards. All ranks call it."""
    state_dict = _full_state(model) if state_dict is None else state_dict
    return type(model).save_pretrained(model, save_directory, *args, state_dict=state_dict, **kwargs)


class _SameBatches:
    """A data loader that compares the first batch of each pass. Unseeded data sets differ between ranks."""

    accelerator: Accelerator

    def __iter__(self) -> Iterator[Any]:
        self.accelerator._share_random_states()
        lines: list[str] = []

        def note(each: torch.Tensor) -> None:
            lines.append(f"batch: {each.dtype} {tuple(each.shape)}, hash {tensor_hash(each).tolist()}")

        for index, batch in enumerate(super().__iter__()):  # type: ignore[misc]  # of the loader's own class
            if index == 0:
                recursively_apply(note, batch)
                raise_on_all_ranks([self.accelerator.mesh["tp"]], "the first batch of a data loader", (), lines)
            yield batch


class _Scheduler(AcceleratedScheduler):  # type: ignore[misc]  # the host has no types here
    """A scheduler with one step for each data-parallel rank."""

    times: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step once for each batch in one step of the optimizer."""
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self.times if self.gradient_state.sync_gradients else 1):
            if total is None or self.scheduler._step_count <= total:  # OneCycleLR raises beyond its last step
                super().step(*args, **kwargs)
