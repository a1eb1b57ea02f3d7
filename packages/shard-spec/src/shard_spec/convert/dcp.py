"""Local tensors in the form of torch.distributed.checkpoint (DCP): each box a chunk, nothing gathered.

Fused, uneven and block-wise shards are saved and loaded, and read back under every other layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shard_spec._shared.chunked_tensor import ChunkedTensor
from shard_spec._shared.consensus import all_gather_header, all_gather_objects, tensor_hashes
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec._shared.sharding_info import sharding_info_of
from shard_spec._torch_compat import strided_shard_factor
from shard_spec.distributed import split
from shard_spec.layout import Box, Layout
from shard_spec.plan.content import PlanContent
from shard_spec.plan.from_module import layout_of_tensor
from shard_spec.plan.resolve import ModelMetadata, resolve

_METHODS = ("size", "dim", "numel", "element_size", "__repr__", "is_floating_point", "is_complex")
_PROPERTIES = ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_meta", "is_sparse")
_READABLE: set[Any] = {getattr(torch.Tensor, name) for name in _METHODS}
_READABLE |= {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES}


class CheckpointShard(ChunkedTensor):
    """A local tensor with its boxes of the global tensor. Only for DCP to save from and load into.

    It has the global shape and no data of its own: ``local`` is the tensor, which loading fills in place. Computing
    with it raises. It is created as ``CheckpointShard(local, layout, shape, rank)``: the local tensor, the layout and
    global shape of the full one, and this rank on the layout's mesh; ``PlanError`` with ``shape-mismatch`` if the
    shape of ``local`` is not the layout's local shape on ``rank``.
    """

    local: torch.Tensor
    boxes: tuple[Box, ...]

    @staticmethod
    def __new__(cls, local: torch.Tensor, layout: Layout, shape: tuple[int, ...], rank: int) -> CheckpointShard:
        expected = layout.local_shape(rank, shape)
        if tuple(local.shape) != expected:
            raise PlanError(_shape_problem("", tuple(local.shape), expected, layout, rank))
        # One element, expanded: the global shape without the memory of the global tensor.
        hollow = torch.empty((), dtype=local.dtype, device=local.device).expand(shape)
        shard = torch.Tensor.as_subclass(hollow, cls)  # size() is the global shape
        shard.local = local.detach()  # shares memory: loading fills the parameter
        shard.boxes = layout.boxes(rank, shape)
        shard._shards = split(shard.local, layout, rank, shape)
        return shard

    _shards: tuple[torch.Tensor, ...]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _READABLE:  # anything else would compute on one element
            name = getattr(func, "__name__", func)
            raise TypeError(f"{name}: a CheckpointShard is only for torch.distributed.checkpoint; compute with .local")
        with torch._C.DisableTorchFunctionSubclass():  # plain access to size and dtype
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # returns Any
        return f"CheckpointShard(shape={tuple(self.shape)}, boxes={self.boxes})"

    def plain(self) -> torch.Tensor:
        """Return the local tensor."""
        return self.local

    def chunks(self) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Return each box's offsets, which identify a chunk, and its values."""
        return [(box.offsets, view) for box, view in zip(self.boxes, self._shards, strict=True)]


def to_dcp(
    plan: PlanContent, module: nn.Module | ModelMetadata, state_dict: Mapping[str, Any], rank: int
) -> dict[str, Any]:
    """Wrap the local tensors of the state dict for DCP; see ``ShardingPlan.to_dcp``."""
    resolution = resolve(plan, module)
    shapes = {alias: tensor.shape for tensor in resolution.metadata.tensors for alias in tensor.aliases}
    problems: list[Problem] = []
    converted: dict[str, Any] = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor | CheckpointShard):
            converted[name] = value  # DCP handles these itself
            continue
        layout = resolution.layouts.get(resolution.tensor(name).name) if name in shapes else None
        if layout is None:
            problems.append(
                Problem(
                    "unknown-name",
                    name,
                    found="the plan has no layout for it",
                    hint="state dicts are keyed by the FQNs of the model that the plan is for",
                )
            )
        elif layout.mesh.coordinate(rank) is None:
            problems.append(
                Problem(
                    "rank-outside-mesh",
                    name,
                    found=f"rank {rank} on {layout.mesh}",
                    hint="leave it out on ranks that hold nothing of it",
                )
            )
        elif tuple(value.shape) != layout.local_shape(rank, shapes[name]):
            expected = layout.local_shape(rank, shapes[name])
            problems.append(_shape_problem(name, tuple(value.shape), expected, layout, rank))
        else:
            converted[name] = CheckpointShard(value, layout, shapes[name], rank)
    raise_problems(problems, "the state dict does not have the plan's layout")
    return converted


def dcp_state_dict(state: Mapping[str, Any], *, loading: bool = False) -> dict[str, Any]:
    """Return ``state`` with a `CheckpointShard` for each tensor that torch's checkpoint hooks would misplace.

    These are DTensors with a strided placement (an axis shards before an earlier one, or each section of a fused dim is
    sharded by itself) and local parameters with ``_sharding_info`` (fused weights and their copies). All else passes
    unchanged. Memory is shared, so ``torch.distributed.checkpoint.load`` fills the tensors in place. Any other mesh,
    and one process, reads the global tensors.

    A checkpoint stores one rank's values of a plain tensor. So the ranks of the default group compare theirs (one small
    message if all are equal); every rank calls this.

    Args:
        state: A state dict of a model or an optimizer; dicts, lists and tuples may be nested.
        loading: ``load`` follows and overwrites the values: plain tensors are not compared.

    Raises:
        PlanError: On every rank, with the name of each plain tensor that differs between ranks
            (``ranks-disagree``), and of each shard with inexpressible placements or sections.
    """
    problems: list[Problem] = []
    plain: dict[str, torch.Tensor] = {}

    def convert(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: convert(each, f"{name}.{key}" if name else str(key)) for key, each in value.items()}
        if type(value) in (list, tuple):  # not named tuples: other constructors
            return type(value)(convert(each, f"{name}.{at}") for at, each in enumerate(value))
        if not isinstance(value, torch.Tensor) or isinstance(value, CheckpointShard):  # steps, lists
            return value
        try:
            info = sharding_info_of(value)
            if info is not None or (isinstance(value, DTensor) and any(map(strided_shard_factor, value.placements))):
                layout = layout_of_tensor(value)  # raises if no layout expresses it
                assert layout is not None
                local = value.to_local() if isinstance(value, DTensor) else value
                shape = tuple(value.shape if info is None else info.shape)
                return CheckpointShard(local, layout, shape, dist.get_rank())
        except PlanError as error:
            problems.extend(replace(problem, name=name) for problem in error.problems)
            return value  # collect all; this rank still joins the collective
        if not isinstance(value, DTensor) and not value.is_meta:
            plain[name] = value
        return value

    converted: dict[str, Any] = convert(state, "")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not loading:
        problems += _replica_problems(plain, tuple(problems))
    raise_problems(list(dict.fromkeys(problems)), "the state dict cannot be saved as it is")
    return converted


def _replica_problems(plain: Mapping[str, torch.Tensor], problems: tuple[Problem, ...]) -> list[Problem]:
    """Return every rank's problems, and plain tensors of one name with different values; a collective.

    Ranks may hold other names (stages of a pipeline): those are not compared.
    """
    subject = "dcp_state_dict"
    hashes = tensor_hashes(plain)
    lines = {name: f"{value.dtype} {list(value.shape)} {hashes[name]}" for name, value in plain.items()}
    digest = hashlib.sha256(repr(sorted(lines.items())).encode()).digest()
    headers = all_gather_header(dist.group.WORLD, bytes([bool(problems)]) + digest, subject)
    if len(set(headers)) == 1 and not problems:  # one header: no objects to exchange
        return []
    states = all_gather_objects(dist.group.WORLD, (lines, problems), subject)
    all_problems = [problem for _, others in states for problem in others]  # same on every rank
    # Values are compared among ranks that hold the name.
    all_problems += [
        Problem(
            "ranks-disagree",
            name,
            found="a plain tensor that differs between ranks: a checkpoint would keep one rank's values",
            hint=(
                "its ranks hold shards that nothing describes, or replicas that drifted apart; "
                "loading=True where load follows"
            ),
        )
        for name in dict.fromkeys(name for values, _ in states for name in values)
        if len({values[name] for values, _ in states if name in values}) > 1
    ]
    return all_problems


def _shape_problem(name: str, found: tuple[int, ...], expected: tuple[int, ...], layout: Layout, rank: int) -> Problem:
    return Problem(
        "shape-mismatch",
        name,
        found=f"a local tensor of shape {found}; {layout} puts {expected} on rank {rank}",
        hint="pass the local tensors of the plan's layout",
    )
