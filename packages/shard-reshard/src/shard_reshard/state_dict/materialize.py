"""Modules on the meta device: memory for tensors to fill, and uninitialised buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shard_reshard._shared.problems import Problem
from shard_reshard._torch_compat import as_dtensor, storage_key
from shard_reshard.execution.checks import has_memory
from shard_reshard.state_dict.agreement import checksum
from shard_reshard.state_dict.meta import local_tensor


class Materialized:
    """New tensors for a module's meta tensors; `register` installs them.

    Until then a failed load leaves the module unchanged.

    Attributes:
        names: Tensors with new memory, in their order in the module.
        targets: Name -> tensor, with the new ones in place of the old.
    """

    def __init__(self, targets: Mapping[str, Any], filled: Collection[str], device: torch.device) -> None:
        self._fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of the old one -> old, new
        on_meta = {name: local_tensor(value) for name, value in targets.items() if _is_meta(value)}
        # Shared memory stays shared: tied names, filled or not, get it, and so do filled views of it.
        memory = {storage_key(local): local.untyped_storage() for name, local in on_meta.items() if name in filled}
        for key, storage in memory.items():
            memory[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
        places = {_place(local) for name, local in on_meta.items() if name in filled}
        for name, local in on_meta.items():
            value = targets[name]
            if _place(local) in places and id(value) not in self._fresh:
                fresh = torch.empty(0, dtype=local.dtype, device=device)
                fresh.set_(memory[storage_key(local)], local.storage_offset(), local.shape, local.stride())
                self._fresh[id(value)] = value, _like(value, fresh)
        self.names = tuple(name for name, value in targets.items() if id(value) in self._fresh)
        self.targets = {
            name: self._fresh[id(value)][1] if id(value) in self._fresh else value for name, value in targets.items()
        }

    def register(self, module: nn.Module) -> None:
        """Replace the old tensors by the new ones, at every place in the module."""
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for name, value in table.items():
                    if id(value) in self._fresh:
                        table[name] = self._fresh[id(value)][1]  # type: ignore[assignment]  # as the old one was


def _place(local: torch.Tensor) -> object:
    return storage_key(local), local.storage_offset(), local.shape, local.stride(), local.dtype


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and local_tensor(value).is_meta


def _like(value: Any, fresh: torch.Tensor) -> torch.Tensor:
    """Return ``fresh`` as a tensor of the same kind: DTensor, parameter subclass and attributes are preserved."""
    if hasattr(value, "device_mesh"):
        dtensor: torch.Tensor = as_dtensor(fresh, value.device_mesh, value.placements, value.shape)
        return nn.Parameter(dtensor, value.requires_grad) if isinstance(value, nn.Parameter) else dtensor
    if isinstance(value, nn.Parameter):
        # A subclass holds its sharding, which a plain Parameter around the same memory would lose.
        fresh = torch.Tensor._make_subclass(type(value), fresh, value.requires_grad)
    fresh.__dict__.update(value.__dict__)
    return fresh


# ---- buffers outside of files ---------------------------------------------------------------------------------


_HINT = (
    "build its module again on a device that has memory, for example model.rotary_emb = "
    "type(model.rotary_emb)(config), or pass strict=False"
)


def uninitialized_buffers(module: Any) -> tuple[list[Problem], dict[str, bytes]]:
    """Return this rank's buffers without values, and checksums of the others to compare between ranks.

    After ``to_empty()`` a buffer holds the allocator's old data: often NaNs, or different bits on each rank.
    """
    problems, sums = [], {}
    saved = module.state_dict(keep_vars=True) if isinstance(module, nn.Module) else {}
    for name, buffer in module.named_buffers() if isinstance(module, nn.Module) else ():
        if name in saved or buffer.layout is not torch.strided:
            continue
        reason = ""
        if _is_meta(buffer):
            reason = "a buffer on the meta device, which is in no file"
        elif not has_memory(local := local_tensor(buffer)):
            reason = "a buffer whose storage was freed, which is in no file"
        elif buffer.is_floating_point() and not hasattr(buffer, "device_mesh") and buffer.dtype.itemsize > 1:
            if bool(local.isnan().any()):
                reason = "a buffer of NaNs, which is in no file"
            else:
                sums[name] = checksum(local)
        if reason:
            problems.append(Problem("uninitialized-buffer", name, found=reason, hint=_HINT))
    return problems, sums


def differing_buffers(by_rank: Sequence[Mapping[str, bytes]]) -> list[Problem]:
    """Report buffers outside of files that differ between their ranks."""
    names = sorted({name for sums in by_rank for name in sums})
    return [
        Problem("uninitialized-buffer", name, found="other values on other ranks, and it is in no file", hint=_HINT)
        for name in names
        if len({sums[name] for sums in by_rank if name in sums}) > 1
    ]
