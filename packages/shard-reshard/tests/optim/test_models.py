"""Models under FSDP2, tensor parallelism and both; a rank that dies; optimizers of other packages."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import WholeMatrices
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from whole_models import SIZES, add_experts, local, mesh_of, of_mesh, of_sections


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Linear(20, 12, bias=False)]
    return nn.Sequential(*blocks, nn.Linear(12, 7, bias=False)).double()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a hint on operations in place
@pytest.mark.ranks(2, 4)
def test_fsdp2_and_tensor_parallelism(ranks: Ranks) -> None:
    world, compared = ranks.world_size, 0
    kinds: dict[str, tuple[tuple[int, ...], int | None, int | None]] = {  # mesh, FSDP's axis, tensor parallelism's
        "fsdp": ((world,), 0, None),
        "tp": ((world,), None, 0),
    }
    if world == 4:
        kinds |= {"fsdp x tp": ((2, 2), 0, 1), "hsdp": ((2, 2), -1, None)}
    for shape, fsdp, tp in kinds.values():
        mesh, reference, model = mesh_of(shape), _model(), _model()
        if tp is not None:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh[f"axis{tp}"], plan)
        if fsdp is not None:
            data = mesh if fsdp < 0 else mesh[f"axis{fsdp}"]
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=data)
        count = world if fsdp is not None and fsdp < 0 else (mesh.size(fsdp) if fsdp is not None else 1)
        at = ranks.rank if fsdp is not None and fsdp < 0 else (mesh.get_local_rank(fsdp) if fsdp is not None else 0)
        named = dict(model.named_parameters())
        matrices = {name: p for name, p in named.items() if hasattr(p, "device_mesh")}
        plain = [p for name, p in named.items() if name not in matrices]
        optimizer, one = WholeMatrices(matrices, _muon), _muon(reference.parameters())
        beside = _muon(plain) if plain else None  # full on every rank: any optimizer is right there
        for step in range(5):
            batch = torch.randn(8, 12, generator=torch.Generator().manual_seed(step)).double()
            (model(batch.chunk(count)[at]).square().mean()).backward()
            reference(batch).square().mean().backward()
            # The rounding of averages over ranks is FSDP's and TP's; the update itself has to be that of one process.
            for name, parameter in reference.named_parameters():
                own: Any = named[name].grad
                full = own.full_tensor() if name in matrices else own
                torch.testing.assert_close(full, parameter.grad, rtol=1e-9, atol=1e-12)
                parameter.grad = full.clone()
            optimizer.step()
            one.step()
            if beside is not None:
                beside.step()
            for name, parameter in reference.named_parameters():
                value: Any = named[name]
                full = value.full_tensor() if name in matrices else value
                assert torch.equal(full, parameter), name
                compared += full.numel()
            model.zero_grad()
            reference.zero_grad()
    assert compared == 5 * len(kinds) * sum(p.numel() for p in _model().parameters())


class _Dies(torch.optim.SGD):
    """Kills its process in the third step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def _rank(rank: int, world: int, folder: str, results: Any) -> None:
    """Train until an owner dies; report the error and whether parameters have their old values."""
    import datetime

    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]  # public, though not declared so
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=10))
    twin = of_mesh(mesh_of((world,)), [Shard(0)], SIZES)

    def make(params: Any) -> torch.optim.Optimizer:
        return (_Dies if rank == 1 else torch.optim.SGD)(params, lr=0.1)

    optimizer = WholeMatrices(twin.named, make, bucket_bytes=10**6, per_matrix=True)
    text, same = "", False
    for step in range(3):
        twin.backward(step)
        before = [local(p.detach()).clone() for p in twin.named.values()]
        try:
            optimizer.step()
        except RuntimeError as error:
            text = f"{step}: {error}"
            same = all(torch.equal(a, local(p.detach())) for a, p in zip(before, twin.named.values(), strict=True))
    results.put((rank, text, same))
    os._exit(0)


@pytest.mark.filterwarnings("ignore:This process")
def test_a_rank_that_is_killed(tmp_path: Any) -> None:
    import multiprocessing

    context, world = multiprocessing.get_context("fork"), 3
    results = context.SimpleQueue()
    workers = [context.Process(target=_rank, args=(rank, world, str(tmp_path), results)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert [worker.exitcode for worker in workers] == [0, -signal.SIGKILL, 0]
    outcomes = sorted(results.get() for _ in range(world - 1))
    assert [(rank, same) for rank, _, same in outcomes] == [(0, True), (2, True)]
    assert all(text.startswith("2: ") for _, text, _ in outcomes)


@pytest.mark.extra("pytorch_optimizer")
@pytest.mark.filterwarnings("ignore")  # the package's own
@pytest.mark.ranks(2, 3, 4)
def test_optimizers_of_other_packages(ranks: Ranks) -> None:
    import pytorch_optimizer

    world, mesh = ranks.world_size, mesh_of((ranks.world_size,))
    for name in ("SOAP", "Shampoo"):
        kind: Callable[..., torch.optim.Optimizer] = getattr(pytorch_optimizer, name)
        twin = of_mesh(mesh, [Shard(0)], SIZES)
        of_sections(mesh, [(16, 4, 1), (8, 4, world // 2 if world != 3 else 1)], 12)(twin, "qkv")
        add_experts(twin, "experts", mesh, Shard(0))
        optimizer = WholeMatrices(twin.named, partial(kind, lr=0.01), bucket_bytes=500)
        one = kind(list(twin.reference.values()), lr=0.01)
        compared = 0
        for step in range(6):
            twin.backward(step)
            optimizer.step()
            one.step()
            compared += twin.compared()
        assert compared > 0
        assert optimizer.param_groups[0].get("step") == one.param_groups[0].get("step")
