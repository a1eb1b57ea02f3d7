"""Parameters in many layouts, with the same values and gradients as parameters of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SIZES: dict[str, tuple[int, ...]] = {
    "a": (24, 16),
    "b": (16, 40),
    "c": (5, 16),
    "d": (7, 6),
    "e": (1, 9),
    "f": (8, 8),
    "g": (3, 3),
}


def meshed(world: int) -> dict[str, tuple[tuple[int, ...], list[Any]]]:
    """Mesh shapes and placements by name for a number of ranks."""
    layouts: dict[str, tuple[tuple[int, ...], list[Any]]] = {
        "fsdp": ((world,), [Shard(0)]),
        "tp": ((world,), [Shard(1)]),
        "replicated": ((world,), [Replicate()]),
    }
    if world == 4:
        layouts |= {"2d": ((2, 2), [Shard(0), Shard(1)]), "hsdp": ((2, 2), [Replicate(), Shard(0)])}
        layouts["two axes, one dim"] = ((2, 2), [Shard(0), Shard(0)])
    return layouts


@dataclass
class Twin:
    """Parameters in a layout, and those of one process: the matrices that they consist of."""

    named: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, nn.Parameter] = field(default_factory=dict)
    shard: dict[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    matrices: dict[str, list[str]] = field(default_factory=dict)  # names in the reference, for each parameter
    join: dict[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        full: torch.Tensor,
        shard: Callable[[torch.Tensor], Any],
        parts: Sequence[tuple[str, torch.Tensor]] = (),
        join: Callable[[Sequence[torch.Tensor]], torch.Tensor] = lambda parts: parts[0],
    ) -> None:
        """Add a parameter: ``shard`` makes this rank's tensor of a full one, ``parts`` are its matrices."""
        self.shard[name], self.join[name] = shard, join
        value = shard(full.clone())
        self.named[name] = nn.Parameter(value)
        if (info := getattr(value, "_sharding_info", None)) is not None:
            self.named[name]._sharding_info = info
        parts = parts or [(name, full)]
        self.matrices[name] = [part for part, _ in parts]
        self.reference |= {part: nn.Parameter(value.clone()) for part, value in parts}

    def backward(self, seed: int, without: Sequence[str] = ()) -> None:
        """Give both sides the same gradients."""
        for number, name in enumerate(self.named):
            parts = []
            for at, part in enumerate(self.matrices[name]):
                value = self.reference[part]
                generator = torch.Generator().manual_seed(1000 * seed + 10 * number + at)
                gradient = torch.randn(value.shape, generator=generator).to(value.dtype)
                value.grad = None if name in without else gradient
                parts.append(gradient)
            if name in without:
                self.named[name].grad = None
                continue
            sharded = self.shard[name](self.join[name](parts))
            self.named[name].grad = sharded if isinstance(sharded, DTensor) else sharded.clone()  # without its layout

    def compared(self) -> int:
        """Assert that this rank's values are bit for bit those of one process; return the number of elements."""
        count = 0
        for name, parameter in self.named.items():
            full = self.join[name]([self.reference[part].detach() for part in self.matrices[name]])
            expected = local(self.shard[name](full.clone()))
            assert torch.equal(local(parameter.detach()), expected), name
            count += expected.numel()
        return count


def local(value: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, else the tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def of_mesh(
    mesh: DeviceMesh,
    placements: Sequence[Any],
    sizes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
) -> Twin:
    """Return DTensors of one mesh."""
    twin = Twin()
    generator = torch.Generator().manual_seed(0)
    for name, size in sizes.items():
        full = torch.randn(size, generator=generator).to(dtype)
        twin.add(name, full, lambda value: distribute_tensor(value, mesh, placements, src_data_rank=None))
    return twin


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Return a CPU mesh with names."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis{n}" for n in range(len(shape))))


def of_sections(
    mesh: DeviceMesh, sections: Sequence[tuple[int, int, int]], width: int, experts: int = 0, together: bool = False
) -> Callable[[Twin, str], None]:
    """Return what adds a fused local shard to a twin: sections of (rows, unit, copies) along dim 0, or 1 of experts."""
    dim, rank, count = (1 if experts else 0), mesh.get_local_rank(), mesh.size()
    rows = [size for size, _, _ in sections]
    shape = torch.Size((experts, sum(rows), width) if experts else (sum(rows), width))

    def shard(full: torch.Tensor) -> torch.Tensor:
        held = []
        for part, (size, unit, copies) in zip(full.split(rows, dim), sections, strict=True):
            chunks = part.split(-(-(size // unit) // (count // copies)) * unit, dim)
            at = rank // copies
            held.append(chunks[at] if at < len(chunks) else part.narrow(dim, 0, 0))
        local_shard = torch.cat(held, dim)
        stride = torch.empty(shape, device="meta").stride()
        local_shard._sharding_info = (mesh, (Shard(dim),), shape, stride, tuple(sections))  # type: ignore[attr-defined]
        return local_shard

    def add(twin: Twin, name: str) -> None:
        full = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        parts = [(name, full)]
        if experts and not together:
            parts = [(f"{name}[{e}]:{n}", part) for e in range(experts) for n, part in enumerate(full[e].split(rows))]
        elif not together:
            parts = [(f"{name}:{n}", part) for n, part in enumerate(full.split(rows))]

        def join(held: Sequence[torch.Tensor]) -> torch.Tensor:
            if together:
                return held[0]
            if not experts:
                return torch.cat(list(held))
            each = len(rows)
            return torch.stack([torch.cat(list(held[each * e : each * (e + 1)])) for e in range(experts)])

        twin.add(name, full, shard, parts, join)

    return add


def add_experts(twin: Twin, name: str, mesh: DeviceMesh, placement: Any, experts: int = 4) -> None:
    """Add a stack of expert matrices as a DTensor."""
    full = torch.randn((experts, 6, 10), generator=torch.Generator().manual_seed(experts))
    parts = [(f"{name}[{e}]", full[e]) for e in range(experts)]
    twin.add(
        name,
        full,
        lambda value: distribute_tensor(value, mesh, [placement], src_data_rank=None),
        parts,
        lambda held: torch.stack(list(held)),
    )
