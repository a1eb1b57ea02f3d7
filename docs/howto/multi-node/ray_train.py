"""`train.py` on the workers of Ray Train.

python ray_train.py --workers 4 --tp 2 --checkpoints /shared/run1
python ray_train.py --workers 2 --tp 1 --checkpoints /shared/run1     goes on with fewer workers
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray
import ray.train.torch
import torch
import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

# Workers import the modules that lie here.
RUNTIME = {
    "env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))}
}


def loop(config: dict[str, list[str]]) -> None:
    """One worker; Ray has made the process group."""
    args, device = train.arguments(config["words"]), ray.train.torch.get_device()
    torch.set_num_threads(1)
    train.train(args, train.Training(args, device), device)


def fit(workers: int, words: list[str]) -> ray.train.Result:
    """Run `train.py` with these words on so many workers.

    Raises:
        ray.train.TrainingFailedError: A worker failed or is gone; call again, with the workers that are left.
    """
    use_gpu = torch.cuda.is_available()
    args = train.arguments(words)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"words": words},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo", timeout_s=int(args.timeout)),
        run_config=RunConfig(storage_path=str(args.checkpoints.absolute() / "ray")),
    )
    return trainer.fit()


if __name__ == "__main__":
    ray.init(runtime_env=RUNTIME)
    number, words = sys.argv.index("--workers"), sys.argv[1:]
    fit(int(sys.argv[number + 1]), words[: number - 1] + words[number + 1 :])
