"""DDP's options and ways of training: 2 x 2 ranks, 5 steps each, against one process that sees the whole batch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
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
@pytest.mark.parametrize("options", list(MLP_OPTIONS))
def test_options(ranks: Ranks, options: str) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.vectors()
    reference = models.seeded(models.MLP)
    models.train(reference, sgd(reference.parameters()), task)
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])
    ddp = wrap_ddp(model, mesh=mesh, **MLP_OPTIONS[options])
    models.train(ddp, sgd(ddp.parameters()), task, index=mesh["dp"].get_local_rank(), count=2)
    compare(ranks, ddp, reference, count=6, atol=SGD_ATOL)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", ["default", "static_graph", "gradient_as_bucket_view"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformer_options(ranks: Ranks, options: str, tied: bool) -> None:
    if tied and options == "gradient_as_bucket_view":
        options = "tiny_buckets"
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.tokens()
    reference = models.seeded(lambda: models.GPT(tied=tied))
    models.train(reference, adam(reference.parameters()), task)
    model = models.parallelize_gpt(models.seeded(models.GPT), mesh["tp"])
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
@pytest.mark.parametrize("how", ["accumulation", "two_forwards"])
def test_ways_to_step(ranks: Ranks, how: str) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.vectors(steps=20)
    reference = models.seeded(models.MLP)
    ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
    loop = {"accumulation": accumulate, "two_forwards": two_forwards}[how]
    loop(ddp, reference, task, mesh["dp"].get_local_rank())
    compare(ranks, ddp, reference, count=6, atol=2e-6 if how == "accumulation" else SGD_ATOL)  # 20 backward passes


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
@pytest.mark.parametrize("hook", list(HOOKS))
def test_communication_hooks(ranks: Ranks, hook: str) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.vectors()
    reference = models.seeded(models.MLP)
    models.train(reference, sgd(reference.parameters()), task)
    ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
    make, atol = HOOKS[hook]
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
    task = models.tokens()
    reference = models.seeded(models.GPT)
    models.train(reference, adam(reference.parameters()), task)
    ddp = wrap_ddp(models.parallelize_gpt(models.seeded(models.GPT), mesh["tp"]), mesh=mesh)
    optimizer = zero_optimizer(ddp.parameters(), process_group=ddp.process_group)
    count = len(list(reference.parameters()))
    assert check_optimizer(ddp, optimizer) == count
    models.train(ddp, optimizer, task, index=mesh["dp"].get_local_rank(), count=2)
    compare(ranks, ddp, reference, count=count, atol=ADAM_ATOL)
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
@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("options", ["default", "static_graph"])
def test_activation_checkpointing(ranks: Ranks, kind: str, options: str) -> None:
    # The seed had plain tensors back in the module when backward recomputed the block.
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.tokens()
    reference = models.seeded(models.GPT)
    models.train(reference, adam(reference.parameters()), task)
    model = models.seeded(Checkpointed)
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
def test_sequence_parallel(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.tokens()
    reference = models.seeded(models.GPT)
    models.train(reference, adam(reference.parameters()), task)
    model = models.parallelize_gpt(models.seeded(models.GPT), mesh["tp"], sequence=True)
    ddp = wrap_ddp(model, mesh=mesh)
    models.train(ddp, adam(ddp.parameters()), task, index=mesh["dp"].get_local_rank(), count=2)
    compare(ranks, ddp, reference, count=len(reference.state_dict()), atol=ADAM_ATOL)
    assert check_replicas(ddp, mesh["tp"].get_group()) == 2 * (2 * 2 + 2) + 2  # norms, and the biases after a sum


@contextlib.contextmanager
def on_shards(mesh: Any) -> Iterator[None]:
    with loss_parallel():
        yield


@pytest.mark.ranks(4)
def test_loss_parallel(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.tokens()
    reference = models.seeded(models.GPT)
    models.train(reference, adam(reference.parameters()), task)
    model = models.parallelize_gpt(models.seeded(models.GPT), mesh["tp"], loss_parallel=True)
    ddp = wrap_ddp(model, mesh=mesh)
    with on_shards(mesh["tp"]):
        models.train(ddp, adam(ddp.parameters()), task, index=mesh["dp"].get_local_rank(), count=2)
    compare(ranks, ddp, reference, count=len(reference.state_dict()), atol=ADAM_ATOL)
