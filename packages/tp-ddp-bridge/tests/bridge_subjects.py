"""Three models that the matrix trains, with their plans, data and comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import bridge_models as models
import torch
from ranktest import Ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from tp_ddp_bridge import check_replicas, wrap_ddp

SGD_ATOL = 5e-7  # float32 sums of 4 terms in another order, 5 steps at lr 0.1
ADAM_ATOL = 5e-6  # Adam divides by the root of small second moments


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Momentum, so that an error stays."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """A second state besides momentum."""
    return torch.optim.Adam(parameters, 1e-3)


@dataclass(frozen=True)
class Subject:
    """A model and what it takes to train it.

    Attributes:
        build: Makes the model; the same weights wherever it is called.
        shard: Applies tensor parallelism over a mesh of one axis.
        task: Its data, for so many steps.
        optimizer: From parameters to the optimizer of most cells.
        atol: How far its state may lie from one process's after 5 steps.
        tensors: Entries of its state dict, all of which are compared.
        sharded: How many of them are DTensors.
        regions: The modules that activation checkpointing recomputes.
        norms: How many parameters normalize.
        variants: Other tensor-parallel plans, as arguments of ``shard``, and the number of DTensors under each.
    """

    build: Callable[[], Any]
    shard: Callable[..., Any]
    task: Callable[..., models.Task]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    atol: float
    tensors: int
    sharded: int
    regions: Callable[[Any], Iterable[Any]]
    norms: int = 0
    variants: Mapping[str, int] = field(default_factory=dict)


SUBJECTS: dict[str, Subject] = {
    "MLP": Subject(
        functools.partial(models.seeded, models.MLP),
        models.parallelize_mlp,
        models.vectors,
        sgd,
        SGD_ATOL,
        tensors=6,
        sharded=4,
        regions=lambda model: [model.down],  # the first layer's input has no gradient, without which nothing recomputes
    ),
    "transformer": Subject(
        functools.partial(models.seeded, models.GPT),
        models.parallelize_gpt,
        models.tokens,
        adam,
        ADAM_ATOL,
        tensors=34,
        sharded=24,
        regions=lambda model: model.blocks,
        norms=10,
        variants={"sequence": 34, "loss_parallel": 24},
    ),
    "Llama of transformers": Subject(
        functools.partial(models.seeded, models.Llama),
        models.parallelize_llama,
        models.tokens,
        adam,
        ADAM_ATOL,
        tensors=21,
        sharded=14,
        regions=lambda model: model.causal.model.layers,
        norms=5,
        variants={"sequence": 20, "loss_parallel": 15},
    ),
}


@dataclass
class Run:
    """One cell: a subject on this rank's part of a 2 x 2 mesh."""

    ranks: Ranks
    subject: Subject
    mesh: DeviceMesh

    @property
    def part(self) -> tuple[int, int]:
        """This rank's share of a batch: which, and of how many."""
        return self.mesh["dp"].get_local_rank(), 2

    def reference(self, **changes: Any) -> Any:
        """The subject trained by the plain loop in one process. Made once for a test."""
        subject = replace(self.subject, **changes)
        key = (subject.build, subject.optimizer)
        if key not in _REFERENCES:
            model = subject.build()
            models.train(model, subject.optimizer(model.parameters()), subject.task())
            _REFERENCES[key] = model
        return _REFERENCES[key]

    def wrapped(self, model: Any = None, **kwargs: Any) -> Any:
        """A sharded model, bridged and wrapped."""
        if model is None:
            model = self.subject.shard(self.subject.build(), self.mesh["tp"])
        return wrap_ddp(model, mesh=self.mesh, **kwargs)

    def train(self, ddp: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        """The plain loop on this rank's share."""
        index, count = self.part
        optimizer = optimizer or self.subject.optimizer(ddp.parameters())
        models.train(ddp, optimizer, self.subject.task(), index=index, count=count)

    def compare(
        self, ddp: Any, reference: Any, *, atol: float | None = None, copies: int = 1, sharded: int | None = None
    ) -> models.Compared:
        """Compare every tensor of the state with the reference's, and replicas with one another."""
        count = self.subject.tensors * copies
        state, expected = ddp.module.state_dict(), reference.state_dict()
        atol = self.subject.atol if atol is None else atol
        compared = models.assert_same_state(state, expected, count=count, atol=atol)
        assert sum(isinstance(value, DTensor) for value in state.values()) == (sharded or self.subject.sharded * copies)
        num_tensors = len(list(ddp.parameters())) + len(list(ddp.buffers()))  # a state dict leaves some buffers out
        assert check_replicas(ddp, ddp.process_group) == num_tensors >= count
        return compared


_REFERENCES: dict[Any, Any] = {}
