"""Whether ranks that should hold the same hold the same, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_ddp_bridge._torch_compat import local_of
from tp_ddp_bridge.layout import layout_of
from tp_ddp_bridge.problems import PlanError, Problem

_CHUNK = 1 << 20


def check_replicas(module: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Compare, bit for bit, what the ranks of ``group`` hold in common.

    In a tensor-parallel group that is every parameter and buffer that is not sharded over it; in a data-parallel group,
    every one. Communicates two small all-gathers. Call it whenever ranks may have drifted apart.

    Args:
        module: A module, bridged or not, or a DDP.
        group: The default group if ``None``.

    Returns:
        How many tensors were compared.

    Raises:
        PlanError: On all ranks alike: the tensors that differ and on which ranks, or that the modules are not the same.
    """
    ranks = dist.get_process_group_ranks(group)
    held = list(_common(module, ranks))
    _check_same(_names_digest(held), held, group, ranks)
    if len(ranks) == 1 or not held:
        return len(held)
    device = held[0][1].device
    own = torch.stack([fingerprint(tensor).to(device) for _, tensor in held])
    others = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(others, own, group=group)
    table = torch.stack(others).cpu()
    problems = [
        Problem(
            "replicas-differ",
            name,
            found="different values on ranks " + _partition(table[:, index].tolist(), ranks),
            hint="load or initialise it alike on all of them (same seed, or a broadcast); a gradient that is summed "
            "on one "
            "rank only lets replicas drift apart",
        )
        for index, (name, _) in enumerate(held)
        if not bool((table[:, index] == table[0, index]).all())
    ]
    if problems:
        raise PlanError(problems, f"{len(problems)} of {len(held)} tensors differ between replicas")
    return len(held)


def check_same_shards(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Whether all ranks of a data-parallel group hold the same parts of the same tensors; the values may still differ.

    Raises:
        PlanError: On all ranks alike.
    """
    ranks = dist.get_process_group_ranks(group)
    held = [(name, tensor) for name, tensor in _tensors(module)]
    lines = []
    for name, tensor in held:
        layout = layout_of(tensor)
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        where = "" if layout is None else f"{layout} part {layout.mesh.get_coordinate()} of {tuple(layout.mesh.shape)}"
        lines.append(f"{name} {tuple(local.shape)} {tensor.dtype} {tensor.requires_grad} {where}")
    _check_same(hashlib.sha256("\n".join(lines).encode()).hexdigest(), held, group, ranks)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Two int64 numbers that depend on every bit of ``tensor`` and on where it stands; computed where the tensor is.

    Args:
        tensor: Any strided tensor, of any dtype.
    """
    flat = tensor.detach().contiguous().flatten()
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).flatten()
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device)
        mixed = (part + place) * (place * 0x5851F42D4C957F2D + 0x14057B7EF767814F)
        mixed = mixed ^ (mixed >> 29)
        total += torch.stack([mixed.sum(), (mixed * (2 * place + 1)).sum()])
    return total


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _common(module: nn.Module, ranks: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """What this rank holds in common with the others of ``ranks``: local tensors by name."""
    for name, tensor in _tensors(module):
        layout = layout_of(tensor)
        if layout is not None:
            shared = set(ranks) & set(layout.mesh.mesh.flatten().tolist())
            if len(shared) > 1 and _differs(layout.mesh, layout.sharded_axes(), shared):
                continue
        yield name, local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _differs(mesh: DeviceMesh, sharded: tuple[int, ...], ranks: set[int]) -> bool:
    """Whether two of ``ranks`` stand at different places of a sharded axis."""
    table = mesh.mesh
    places = [(table == rank).nonzero()[0].tolist() for rank in sorted(ranks)]
    return any(len({place[axis] for place in places}) > 1 for axis in sharded)


def _names_digest(held: list[tuple[str, torch.Tensor]]) -> str:
    text = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in held)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_same(
    digest: str, held: list[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None, ranks: list[int]
) -> None:
    """Compare a digest; only if it differs send what it was made of."""
    device = held[0][1].device if held else torch.device("cpu")
    own = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=_device_for(group, device))
    others = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(others, own, group=group)
    if all(torch.equal(other, own) for other in others):
        return
    found = [bytes(other.cpu().tolist()).hex()[:8] for other in others]
    raise PlanError(
        Problem(
            "ranks-disagree",
            "module",
            found="the ranks " + _partition(found, ranks) + " hold different tensors, or different parts of them",
            hint="the group must be the ranks with the same tensor-parallel coordinate, and the module the same on "
            "all of them",
        ),
        "the data-parallel ranks do not hold the same shards",
    )


def _device_for(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """The device that the group's backend can send a tensor from: the CPU if it can, else the module's."""
    from torch.distributed import get_backend_config

    backends = get_backend_config(group)
    return torch.device("cpu") if "cpu:" in backends else device


def _partition(values: list[object] | list[str], ranks: list[int]) -> str:
    """``{0, 1} and {2}``: the ranks, grouped by what they hold."""
    groups: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        groups.setdefault(str(value), []).append(rank)
    return " and ".join("{" + ", ".join(map(str, members)) + "}" for members in groups.values())
