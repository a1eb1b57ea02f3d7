"""Metadata of all ranks' inputs, gathered before a forward communicates.

Each call of a sharded forward starts with one small all_gather of shapes, dtypes and grad modes. It costs one
latency and makes the rest safe: uneven local batches are right, and inputs that do not fit together raise the same
error on every rank instead of leaving some of them in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from shard_spec import _torch_compat
from shard_spec._shared.consensus import named_collective
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.distributed.mesh_cache import RankState, raise_on_all_ranks
from shard_spec.legacy.module_tracker import ForwardContext

_MAX_DIMS = 8
_HEAD = 4  # what is wrong, grad mode, autocast, what the module is made of; then dtype, ndim, requires_grad, dims
_BAD_INPUT, _BAD_MODULE = 1, 2


@dataclass(frozen=True)
class InputMetadata:
    """One tensor as one rank passes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class BatchMetadata:
    """One input, as all ranks pass it to one call, in group order."""

    inputs: tuple[InputMetadata, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows (dim 0) on each rank."""
        return tuple(each.shape[0] if each.shape else 0 for each in self.inputs)

    @property
    def any_requires_grad(self) -> bool:
        """True if some rank needs a gradient: then the backward of this input runs on all of them."""
        return any(each.requires_grad for each in self.inputs)


def all_gather_input_metadata(
    tensor: torch.Tensor, context: ForwardContext, name: str, problem: str = ""
) -> BatchMetadata:
    """Tell all ranks what this rank passes; a collective.

    Args:
        tensor: The rows; concatenated along dim 0 over the ranks they have to make sense.
        context: The ranks, and what the root module was made of when its forward began.
        name: FQN of the module, for errors.
        problem: What this rank finds wrong with its own input; the call then raises on every rank.

    Raises:
        PlanError: ``invalid-argument`` on every rank: some rank found a problem, or dtypes, trailing dims, grad modes
            or autocast differ. ``ranks-disagree`` where the modules of
            the ranks differ, ``not-sharded`` where somebody put a full parameter in the place of a shard.
    """
    group, scan = context.group.group, context.scan
    wrong_here = _BAD_INPUT * bool(problem) | _BAD_MODULE * bool(scan is not None and scan.problems)
    line = [
        wrong_here,
        int(torch.is_grad_enabled()),
        _autocast(tensor.device.type),
        0 if scan is None else scan.checksum,
    ]
    line += _encode(tensor)
    with named_collective(f"the forward of {name}"):
        table = _all_gather_line(line, group, tensor.device)
    inputs = tuple(_decode(row[_HEAD:]) for row in table)
    if any(row[0] & _BAD_MODULE for row in table) or len({row[3] for row in table} - {0}) > 1:
        # Every rank is here, so there is time to ask what differs.
        raise_on_all_ranks(group, RankState() if scan is None else scan.outcome, f"the forward of {name}")
    context.agreed()
    wrong = [rank for rank, row in enumerate(table) if row[0] & _BAD_INPUT]
    if wrong:
        # Every rank is here, so there is time to ask what is wrong.
        texts: list[str] = [""] * len(table)
        dist.all_gather_object(texts, problem, group=group)
        shown = "; ".join(f"rank {rank} of the group passes {texts[rank]}" for rank in wrong)
        raise PlanError(_bad(name, shown, "correct the input there"))
    if len({row[1] for row in table}) > 1:
        modes = [bool(row[1]) for row in table]
        raise PlanError(_bad(name, f"grad mode by rank: {modes}", "use no_grad on every rank or on none"))
    if len({row[2] for row in table}) > 1:
        casts = [None if row[2] < 0 else str(_dtypes()[row[2]]).removeprefix("torch.") for row in table]
        raise PlanError(_bad(name, f"autocast by rank: {casts}", "use autocast alike on every rank or on none"))
    if len({(each.dtype, each.shape[1:]) for each in inputs}) > 1:
        shown = "; ".join(f"rank {rank} passes {each}" for rank, each in enumerate(inputs))
        hint = "local batches are concatenated along dim 0: dtypes and the other dims have to be equal"
        raise PlanError(_bad(name, shown, hint))
    return BatchMetadata(inputs)


def _bad(name: str, found: str, hint: str) -> Problem:
    return Problem("invalid-argument", name, found=found, hint=hint)


@cache
def _dtypes() -> tuple[torch.dtype, ...]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return tuple(sorted(found, key=str))


def _autocast(device_type: str) -> int:
    """The dtype that autocast computes in, as a number; -1 without autocast."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return -1
    return _dtypes().index(torch.get_autocast_dtype(device_type))


def _encode(tensor: torch.Tensor) -> list[int]:
    shape = list(tensor.shape[:_MAX_DIMS])
    padding = [0] * (_MAX_DIMS - len(shape))
    return [_dtypes().index(tensor.dtype), tensor.dim(), int(tensor.requires_grad), *shape, *padding]


def _decode(fields: Sequence[int]) -> InputMetadata:
    return InputMetadata(_dtypes()[fields[0]], tuple(fields[3 : 3 + fields[1]]), bool(fields[2]))


def _all_gather_line(line: list[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Every rank's line. Over the group's CPU backend where it has one, so that no device has to be waited for."""
    if device.type != "cpu" and "cpu:" in str(dist.get_backend_config(group)):
        device = torch.device("cpu")
    size = dist.get_world_size(group)
    mine = torch.tensor(line, dtype=torch.int64, device=device)
    table = torch.empty(size * len(line), dtype=torch.int64, device=device)
    _torch_compat.all_gather_flat(table, mine, group)
    rows: list[list[int]] = table.view(size, len(line)).tolist()
    return rows
