"""A rank that alone does something else: all ranks raise, or each names its call, its rank and its peer."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import dp_partition as dp
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

ODD_CALL = 5
DISTRIBUTE, COMPILE = dp.distribute, dp.compile


def update(model: Any, optim: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    return norm


def skips(model: Any, optim: Any, x: torch.Tensor, is_odd: bool) -> Any:
    model(x).square().mean().backward()
    if not is_odd:
        optim.step()
    optim.zero_grad()


def runs_in_another_order(model: Any, optim: Any, x: torch.Tensor, is_odd: bool) -> Any:
    first, second = (model[2], model[0]) if is_odd else (model[0], model[2])
    second(first(x).tanh()).square().mean().backward()
    optim.step()
    optim.zero_grad()


def returns_none(model: Any, optim: Any, x: torch.Tensor, is_odd: bool) -> Any:
    model(x).square().mean().backward()
    optim.step()
    optim.zero_grad()
    with torch.no_grad():
        return None if is_odd else model[0].weight * 1  # in shards


def skips_a_norm(model: Any, optim: Any, x: torch.Tensor, is_odd: bool) -> Any:
    model(x).square().mean().backward()
    if not is_odd:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()


def returns_early(model: Any, optim: Any, x: torch.Tensor, is_odd: bool) -> Any:
    return None if is_odd else update(model, optim, x)


def skips_backward(model: Any, optim: Any, x: torch.Tensor, is_odd: bool) -> Any:
    if is_odd:
        return model(x)
    return update(model, optim, x)


def passes(model: Any, optim: Any, x: torch.Tensor, is_odd: bool) -> Any:
    for _ in range(1 if is_odd else 2):
        model(x).square().mean().backward()
    optim.step()
    optim.zero_grad()


def raises_at_the_end(model: Any, optim: Any, x: torch.Tensor, is_odd: bool) -> Any:
    result = update(model, optim, x)
    if is_odd:
        raise ValueError("mine")
    return result


def raises_at_once(model: Any, optim: Any, x: torch.Tensor, is_odd: bool) -> Any:
    if is_odd:
        raise ValueError("mine")
    return update(model, optim, x)


def nothing_odd(model: Any, optim: Any, x: torch.Tensor, is_odd: bool) -> Any:
    return update(model, optim, x)


def frozen(model: Any) -> None:
    model[0].weight.requires_grad_(False)


def replaced(model: Any) -> None:
    model[0] = nn.Linear(8, 8).double()


# Rank 1 waits at the end of its call, rank 0 in a line of the step's.
NUMBERS = ("different numbers of backward passes",) * 2
GATHERS = ("some ranks alone enter unsharded() or call release()",) * 2
WAITS, ENDED = "rank 1 waits for other ranks at its end in call 5", "rank 0 waits for other ranks (at"
# the step, the door, what rank 1 does to its model before the odd call, and what the first line of each error says
APART: dict[str, tuple[Callable[..., Any], Any, Any, tuple[str, str]]] = {
    "skips an optimizer step": (skips, DISTRIBUTE, None, ("one has skipped an optimizer step",) * 2),
    "runs in another order": (runs_in_another_order, DISTRIBUTE, None, ("in another order by call 5",) * 2),
    "returns None": (returns_none, DISTRIBUTE, None, ("ranks return other tensors in call 5",) * 2),
    "raises at the end": (raises_at_the_end, DISTRIBUTE, None, ("another rank raised in call 5", "mine")),
    "skips a norm": (skips_a_norm, DISTRIBUTE, None, (WAITS, ENDED)),
    "returns early": (returns_early, DISTRIBUTE, None, NUMBERS),
    "skips backward": (skips_backward, DISTRIBUTE, None, NUMBERS),
    "skips the second pass": (passes, DISTRIBUTE, None, NUMBERS),
    "raises at once": (raises_at_once, DISTRIBUTE, None, ("another rank raised in call 5", "mine")),
    "releases": (nothing_odd, DISTRIBUTE, None, GATHERS),
    "freezes a weight": (nothing_odd, COMPILE, frozen, ("rank 1 has raised PlanError", "on this rank alone")),
    "replaces a layer": (nothing_odd, COMPILE, replaced, ("rank 1 has raised ModelChangedError", "ModelChangedError")),
}


def test_a_rank_apart_is_named_or_all_raise(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    libraries = ["torch._dynamo", "torch._functorch.partitioners", "torch.fx.experimental.symbolic_shapes"]
    context.set_forkserver_preload([*libraries, "dp_partition.runner"])
    workers = [context.Process(target=train, args=(rank, tmp_path, how)) for how in APART for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        worker.kill()
    for how, (function, *_, expected) in APART.items():
        for rank in (0, 1):
            report = tmp_path / f"{how} {rank}"
            line = report.read_text().splitlines()[0] if report.exists() else "no report"
            words = expected[rank]
            assert words in line, (how, rank, line)
            if words.startswith("rank "):  # an error of a collective: its call and the rank itself
                assert f"call {ODD_CALL} of {function.__name__} on rank {rank}" in line, (how, rank, line)


def train(rank: int, folder: Path, how: str) -> None:
    torch.set_num_threads(1)
    text = "no error"
    try:
        store = torch.distributed.FileStore(str(folder / how), 2)  # type: ignore[attr-defined]  # public
        limit = timedelta(seconds=20)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        optim = torch.optim.AdamW(model.parameters(), 0.1)
        function, door, change, _ = APART[how]
        step = door(function, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), style="fully_shard")
        for call in range(1, ODD_CALL + 4):
            if change and rank and call == ODD_CALL:
                change(model)
            if how == "releases" and rank and call == ODD_CALL:
                step.release()
            step(model, optim, torch.ones(4, 8).double() * call, call == ODD_CALL and rank == 1 and change is None)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    (folder / f"{how} {rank}").write_text(text)
    # A rank that ends closes its connections, and the other would see that in place of a rank that waits.
    while not (folder / f"{how} {1 - rank}").exists():
        time.sleep(0.1)
    os._exit(0)
