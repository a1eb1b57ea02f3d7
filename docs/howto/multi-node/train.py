"""Tensor parallel inside a host, data parallel across hosts, with checkpoints that any number of ranks goes on from.

    ./torchrun.sh train.py --tp 8 --steps 1000 --checkpoints /shared/run1

The model and the text are those of the main job (docs/examples/plan_to_serving). Start it again, on as many hosts as
there are, with the same --checkpoints: it goes on from the last complete one, with the losses that it would have had.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import shard_spec
import torch
import torch.distributed as dist
import tp_styles
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from tp_ddp_bridge import clip_grad_norm_, optimizer_state_to_dtensor, optimizer_state_to_local, wrap_ddp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "plan_to_serving"))

from corpus import batches, rows_of, standard_library
from model import GPTConfig, new_model
from training import mean

GRACE = 5.0  # seconds: torchrun ends a host's other ranks as soon as one has ended; each is to have its say


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder that all hosts share")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=1000, help="step to stop after, counted from the very first")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; they should be on one host")
    parser.add_argument("--batch", type=int, default=16, help="windows in a global batch, whatever the number of ranks")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a collective has failed")
    return parser.parse_args(words)


def start(timeout: float) -> torch.device:
    """Join the group that torchrun describes."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend, device_id = ("nccl", device) if on_gpus else ("gloo", None)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=device_id)
    return device


def new_mesh(device: torch.device, shape: tuple[int, int], timeout: float) -> DeviceMesh:
    """A dp x tp mesh whose groups give up after `timeout` seconds; `init_device_mesh` leaves 30 minutes to gloo."""
    ranks = torch.arange(shape[0] * shape[1]).view(shape)
    groups = []
    for lines in (ranks.t().tolist(), ranks.tolist()):  # along dp, along tp; the same order on every rank
        own, _ = dist.new_subgroups_by_enumeration(lines, timeout=timedelta(seconds=timeout))
        groups.append(own)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("dp", "tp"))


class Training:
    """The model on its mesh, its optimizer, and the number of the last step."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        config = GPTConfig(dim=args.dim, layers=args.layers, context=args.context)
        size = dist.get_world_size()
        if size % args.tp or args.batch % (size // args.tp):
            raise SystemExit(f"{size} ranks do not divide by --tp {args.tp}, or --batch {args.batch} by the rest")
        shape = (size // args.tp, args.tp)
        self.mesh = new_mesh(device, shape, args.timeout)
        self.model = new_model(config, dtype=getattr(torch, args.dtype)).to(device)
        plan = shard_spec.MegatronPlanner(mesh=shard_spec.MeshSpec({"dp": shape[0], "tp": shape[1]}))
        styles = tp_styles.from_sharding_plan(plan.build_plan(self.model), self.model)
        tp_styles.apply_plan(self.model, self.mesh["tp"], styles)
        self.ddp = wrap_ddp(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        self.step = 0

    def one_step(self, ids: torch.Tensor, targets: torch.Tensor) -> float:
        """Returns the loss of the global batch."""
        self.optimizer.zero_grad()
        loss = self.ddp(ids, targets)
        loss.backward()
        clip_grad_norm_(self.ddp.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return mean(loss.detach(), self.mesh.get_group("dp"))

    def state(self, *, template: bool = False) -> dict[str, Any]:
        optim = optimizer_state_to_dtensor(self.model, self.optimizer, template=template)
        return {"model": self.model.state_dict(), "optim": optim}

    def save(self, folder: Path) -> None:
        save(self.state(), checkpoint_id=folder / f"step-{self.step:08}")

    def load(self, checkpoint: Path) -> None:
        state = self.state(template=True)
        load(state, checkpoint_id=checkpoint)
        self.model.load_state_dict(state["model"])
        optimizer_state_to_local(self.model, self.optimizer, state["optim"])
        self.step = int(checkpoint.name.removeprefix("step-"))


def last_checkpoint(folder: Path) -> Path | None:
    """The last complete one: its metadata are written last. What a failed save left has none."""
    return max((metadata.parent for metadata in folder.glob("step-*/.metadata")), default=None)


def train(args: argparse.Namespace, training: Training, device: torch.device) -> None:
    agreed = [last_checkpoint(args.checkpoints)]
    dist.broadcast_object_list(agreed)  # one answer, even if the shared folder shows hosts different things
    if agreed[0] is not None:
        training.load(agreed[0])
    first = dist.get_rank() == 0
    if first:
        args.checkpoints.mkdir(parents=True, exist_ok=True)
        print(f"{dist.get_world_size()} ranks, from step {training.step} to {args.steps}", flush=True)
    shard, num_shards = training.mesh.get_local_rank("dp"), training.mesh["dp"].size()
    drawn = batches(standard_library(), batch=args.batch, context=args.context, seed=1)
    for pair in itertools.islice(drawn, training.step, args.steps):  # the batches of earlier steps are passed over
        ids, targets = rows_of(pair, shard, num_shards)
        loss = training.one_step(ids.to(device), targets.to(device))
        if first:
            with (args.checkpoints / "losses.jsonl").open("a") as file:
                file.write(json.dumps({"step": training.step, "loss": loss}) + "\n")
        if training.step % args.checkpoint_every == 0:
            training.save(args.checkpoints)


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")  # about its own future
    device = start(args.timeout)
    training = Training(args, device)
    try:
        train(args, training, device)
    except RuntimeError as error:  # a peer that ended, or that did not answer within --timeout
        print(
            f"rank {dist.get_rank()} on {socket.gethostname()} ends in step {training.step + 1}: {error}\n"
            f"If a host is gone: start again on those that are left, with the same --checkpoints; the last complete "
            f"checkpoint is {last_checkpoint(args.checkpoints)}",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(GRACE)
        os._exit(3)  # leaving the group in order would wait for the peer again
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
