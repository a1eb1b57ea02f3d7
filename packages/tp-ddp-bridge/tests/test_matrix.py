"""DDP's options and ways of training: 2 x 2 ranks, 5 steps each, against one process that sees the whole batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint
from tp_ddp_bridge import check_optimizer, check_replicas, wrap_ddp

SGD_ATOL = 5e-7  # float32 sums of 4 terms in another order, 5 steps at lr 0.1
ADAM_ATOL = 5e-6  # Adam divides by the root of small second moments


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3)


def zero_optimizer(parameters: Any, **kwargs: Any) -> torch.optim.Optimizer:
    with warnings.catch_warnings():  # the package scripts its functional optimizers when it is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
        parameters, optimizer_class=torch.optim.Adam, lr=1e-3, **kwargs
    )
    return optimizer


def compare(ranks: Ranks, ddp: Any, reference: Any, *, count: int, atol: float) -> None:
    """State dicts, replicas, and the number of parameters."""
    models.assert_same_state(ddp.module.state_dict(), reference.state_dict(), count=count, atol=atol)
    assert check_replicas(ddp, ddp.process_group) == count


@contextlib.contextmanager
def case(name: str) -> Iterator[None]:
    """One of several cases that share a test's ranks: an error in it says which."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {name}")
        raise


MLP_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "batched_grad_copy": {"batched_grad_copy": True},
    "tiny_buckets": {"bucket_cap_mb": 1e-4},
    "no_init_sync": {"init_sync": False},
    "static_bucket_view_tiny": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
}


@pytest.mark.ranks(4)
def test_options(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.vectors()
    reference = models.seeded(models.MLP)
    models.train(reference, sgd(reference.parameters()), task)
    for options, kwargs in MLP_OPTIONS.items():
        with case(options):
            model = models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])
            ddp = wrap_ddp(model, mesh=mesh, **kwargs)
            optimizer = sgd(ddp.parameters())
            assert check_optimizer(ddp, optimizer) == 6
            models.train(ddp, optimizer, task, index=mesh["dp"].get_local_rank(), count=2)
            assert sum(isinstance(value, DTensor) for value in model.state_dict().values()) == 4
            compare(ranks, ddp, reference, count=6, atol=SGD_ATOL)


@pytest.mark.ranks(4)
def test_transformer_options(ranks: Ranks) -> None:
    """With an optimizer built before, and tied embeddings."""
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.tokens()
    references: dict[bool, Any] = {}
    for tied in (False, True):
        references[tied] = models.seeded(functools.partial(models.GPT, tied=tied, depth=1 if tied else 2))
        models.train(references[tied], adam(references[tied].parameters()), task)
    for tied, options in (
        (False, "default"),
        (False, "static_graph"),
        (False, "gradient_as_bucket_view"),
        (True, "default"),
        (True, "static_graph"),
        (True, "tiny_buckets"),
    ):
        with case(f"{options}, {'tied' if tied else 'untied'}"):
            reference = references[tied]
            model = models.seeded(functools.partial(models.GPT, depth=1 if tied else 2))
            models.parallelize_gpt(model, mesh["tp"])
            if tied:  # torch's parallelize_module unties; tie what it made
                model.head.weight = model.embedding.weight
            optimizer = adam(model.parameters())
            ddp = wrap_ddp(model, mesh=mesh, optimizers=optimizer, **MLP_OPTIONS[options])
            assert len(list(ddp.parameters())) == len(list(reference.parameters()))
            assert check_optimizer(ddp, optimizer) == len(list(reference.parameters()))
            models.train(ddp, optimizer, task, index=mesh["dp"].get_local_rank(), count=2)
            models.assert_same_state(
                model.state_dict(), reference.state_dict(), count=len(reference.state_dict()), atol=ADAM_ATOL
            )


class Branches(nn.Module):
    """One branch is never used, one only in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.always = models.MLP()
        self.sometimes = models.MLP()
        self.never = models.MLP()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if self.step % 2 else out


@pytest.mark.ranks(4)
def test_unused_parameters(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.vectors()
    reference = models.seeded(Branches)
    models.train(reference, sgd(reference.parameters()), task)
    model = models.seeded(Branches)
    for branch in model.children():
        models.parallelize_mlp(branch, mesh["tp"])
    ddp = wrap_ddp(model, mesh=mesh, find_unused_parameters=True)
    models.train(ddp, sgd(ddp.parameters()), task, index=mesh["dp"].get_local_rank(), count=2)
    compare(ranks, ddp, reference, count=18, atol=SGD_ATOL)


def accumulate(ddp: Any, reference: Any, task: models.Task, index: int) -> None:
    """Four micro-batches a step, synchronized with the last."""
    mine, whole = sgd(ddp.parameters()), sgd(reference.parameters())
    for step in range(5):
        mine.zero_grad()
        whole.zero_grad()
        for micro in range(4):
            x, y = task.part(step * 4 + micro, index, 2)
            with ddp.no_sync() if micro < 3 else contextlib.nullcontext():
                torch.autograd.backward(task.loss(ddp(x), y))
            x, y = task.part(step * 4 + micro, 0, 1)
            torch.autograd.backward(task.loss(reference(x), y))
        mine.step()
        whole.step()


def two_forwards(ddp: Any, reference: Any, task: models.Task, index: int) -> None:
    """Two outputs of the same parameters in one loss."""
    mine, whole = sgd(ddp.parameters()), sgd(reference.parameters())
    for step in range(5):
        for model, optimizer, part in ((ddp, mine, (index, 2)), (reference, whole, (0, 1))):
            optimizer.zero_grad()
            x, y = task.part(step, *part)
            first = model(x)
            second = model(x * 0.5)
            torch.autograd.backward(task.loss(first, y) + task.loss(second, y))
            optimizer.step()


@pytest.mark.ranks(4)
def test_ways_to_step(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.vectors(steps=20)
    for loop, atol in ((accumulate, 2e-6), (two_forwards, SGD_ATOL)):  # the first has 20 backward passes
        with case(loop.__name__):
            reference = models.seeded(models.MLP)
            ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
            loop(ddp, reference, task, mesh["dp"].get_local_rank())
            compare(ranks, ddp, reference, count=6, atol=atol)


@pytest.mark.ranks(4)
def test_join_with_uneven_inputs(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.vectors()
    index = mesh["dp"].get_local_rank()
    reference = models.seeded(models.MLP)
    whole = sgd(reference.parameters())
    for step in range(5):
        whole.zero_grad()
        parts = [task.part(step, part, 2) for part in range(2) if part == 0 or step < 3]
        for x, y in parts:  # join divides by the initial number of replicas
            torch.autograd.backward(task.loss(reference(x), y) / 2)
        whole.step()
    ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
    mine = sgd(ddp.parameters())
    with ddp.join():
        for step in range(5 if index == 0 else 3):
            x, y = task.part(step, index, 2)
            mine.zero_grad()
            torch.autograd.backward(task.loss(ddp(x), y))
            mine.step()
    # who had fewer inputs gets the parameters at the end, but no momentum
    compare(ranks, ddp, reference, count=6, atol=SGD_ATOL)


def bf16_by_another_name(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Torch's hook; under its own name DDP wants CUDA for it."""
    return default_hooks.bf16_compress_hook(state, bucket)


bf16_by_another_name.__annotations__ = default_hooks.bf16_compress_hook.__annotations__  # not texts


HOOKS: dict[str, tuple[Callable[[Any], tuple[Any, Any]], float]] = {
    "allreduce": (lambda group: (None, default_hooks.allreduce_hook), SGD_ATOL),
    "fp16": (lambda group: (None, default_hooks.fp16_compress_hook), 1e-3),  # 5 steps, lr 0.1, momentum, half precision
    "bf16": (lambda group: (group, bf16_by_another_name), 8e-3),  # three bits fewer
    # a rank as large as the matrices: what is left is the error of the orthogonalisation
    "powersgd": (
        lambda group: (
            powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=32, start_powerSGD_iter=2, min_compression_rate=0.0
            ),
            powerSGD_hook.powerSGD_hook,
        ),
        1e-4,
    ),
}


@pytest.mark.ranks(4)
def test_communication_hooks(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.vectors()
    reference = models.seeded(models.MLP)
    models.train(reference, sgd(reference.parameters()), task)
    for hook, (make, atol) in HOOKS.items():
        with case(hook):
            ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
            ddp.register_comm_hook(*make(ddp.process_group))
            models.train(ddp, sgd(ddp.parameters()), task, index=mesh["dp"].get_local_rank(), count=2)
            compare(ranks, ddp, reference, count=6, atol=atol)


@pytest.mark.ranks(4)
def test_hooks_over_the_wrong_ranks_are_refused(ranks: Ranks) -> None:
    # Torch's hooks read None as the default group: gradients of different shards would be averaged.
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    ddp = wrap_ddp(models.parallelize_mlp(models.MLP(), mesh["tp"]), mesh=mesh)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    with pytest.raises(ValueError, match="different shards would be mixed"):
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    with pytest.raises(ValueError, match="groups-mix"):
        ddp.register_comm_hook(mesh["tp"].get_group(), default_hooks.fp16_compress_hook)


@pytest.mark.ranks(4)
def test_zero_1(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.vectors()
    reference = models.seeded(models.MLP)
    models.train(reference, adam(reference.parameters()), task)
    ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
    optimizer = zero_optimizer(ddp.parameters(), process_group=ddp.process_group)
    assert check_optimizer(ddp, optimizer) == 6
    models.train(ddp, optimizer, task, index=mesh["dp"].get_local_rank(), count=2)
    compare(ranks, ddp, reference, count=6, atol=ADAM_ATOL)
    wrong = zero_optimizer(ddp.parameters())
    with pytest.raises(ValueError, match="groups-mix"):
        check_optimizer(ddp, wrong)


class Checkpointed(models.GPT):
    """Blocks are recomputed in backward."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(self.norm(x))
        return logits


@pytest.mark.ranks(4)
def test_activation_checkpointing(ranks: Ranks) -> None:
    # The seed had plain tensors back in the module when backward recomputed the block.
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.tokens()
    references: dict[int, Any] = {}
    for depth in (1, 2):
        references[depth] = models.seeded(functools.partial(models.GPT, depth=depth))
        models.train(references[depth], adam(references[depth].parameters()), task)
    for kind, options in itertools.product(("reentrant", "non_reentrant"), ("default", "static_graph")):
        with case(f"{kind}, {options}"):
            depth = 2 if options == "default" else 1
            reference = references[depth]
            model = models.seeded(functools.partial(Checkpointed, depth=depth))
            model.reentrant = kind == "reentrant"
            models.parallelize_gpt(model, mesh["tp"])
            ddp = wrap_ddp(model, mesh=mesh, **MLP_OPTIONS[options])
            models.train(ddp, adam(ddp.parameters()), task, index=mesh["dp"].get_local_rank(), count=2)
            compare(ranks, ddp, reference, count=len(reference.state_dict()), atol=ADAM_ATOL)


@pytest.mark.ranks(4)
def test_autocast(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(out.float(), y)

    def train(model: Any, index: int, count: int) -> None:
        task = models.vectors()
        task.loss = loss
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(5):
            x, y = task.part(step, index, count)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            assert out.dtype == torch.bfloat16
            torch.autograd.backward(task.loss(out, y))
            optimizer.step()

    reference = models.seeded(models.MLP)
    train(reference, 0, 1)
    ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
    train(ddp, mesh["dp"].get_local_rank(), 2)
    assert all(parameter.dtype == torch.float32 for parameter in ddp.parameters())
    compare(ranks, ddp, reference, count=6, atol=2e-3)  # bfloat16 partial sums: 2**-8 of gradients below 0.5, times lr


@pytest.mark.ranks(4)
def test_sequence_and_loss_parallel(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.tokens()
    reference = models.seeded(models.GPT)
    models.train(reference, adam(reference.parameters()), task)
    model = models.parallelize_gpt(models.seeded(models.GPT), mesh["tp"], sequence=True)
    ddp = wrap_ddp(model, mesh=mesh)
    models.train(ddp, adam(ddp.parameters()), task, index=mesh["dp"].get_local_rank(), count=2)
    compare(ranks, ddp, reference, count=len(reference.state_dict()), atol=ADAM_ATOL)
    assert check_replicas(ddp, mesh["tp"].get_group()) == 2 * (2 * 2 + 2) + 2  # norms, and the biases after a sum

    model = models.parallelize_gpt(models.seeded(models.GPT), mesh["tp"], loss_parallel=True)
    ddp = wrap_ddp(model, mesh=mesh)
    with loss_parallel():
        models.train(ddp, adam(ddp.parameters()), task, index=mesh["dp"].get_local_rank(), count=2)
    compare(ranks, ddp, reference, count=len(reference.state_dict()), atol=ADAM_ATOL)
