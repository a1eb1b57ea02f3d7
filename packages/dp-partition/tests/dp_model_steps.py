"""Models of the table: buffers, aliases, strides, dtypes, hooks."""

from __future__ import annotations

import dp_models as models
import torch
import torch.nn.functional as F
from dp_plain_step import WIDTH
from torch import nn
from torch.utils.checkpoint import checkpoint


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare, self.body = nn.Linear(WIDTH, WIDTH), models.mlp(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


class Buffers(nn.Module):
    """Buffers that are written in place, replaced, and used."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.3))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * out.mean(0)
            self.calls += 1
        return (out - self.mean) / self.calls


class Counts(nn.Module):
    """A Python number that forward changes: a graph would burn it in."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.body(x) * self.calls
        return out


class SharedMemory(nn.Module):
    """A buffer that is a view of a parameter: wherever the parameter goes, the buffer does not follow."""

    view: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("view", self.body.weight.data[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) + self.view.sum()
        return out


class Strided(nn.Module):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, 6).t())
        self.conv = nn.Conv2d(2, WIDTH, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.turned)[:, :, None, None].expand(-1, -1, 2, 2)[:, :2]
        out: torch.Tensor = self.conv(y).flatten(1)
        return out


class Small(nn.Module):
    """Fewer rows than ranks, no rows, no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.row = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1, WIDTH))
        self.none, self.scale = nn.Parameter(torch.zeros(0, WIDTH)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.body(x) * self.row, F.linear(x, self.none)], 1) * self.scale


class Rounded(nn.Module):
    """Parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x.to(torch.bfloat16)).double()).float()
        return out


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(WIDTH, WIDTH), models.mlp(WIDTH, WIDTH), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.second, torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        return out


def parametrized(kind: str) -> nn.Module:
    model = models.mlp(WIDTH, WIDTH)
    getattr(nn.utils.parametrizations, kind)(model[0])
    return model


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table((x.abs() * 3).long() % WIDTH).sum(1)
        return out
