"""Ray Train: four workers as one process, a worker that is killed, going on with two, and weights to a generator.

nox -s "multi_node(ray)"
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import ray
import ray.train
import ray_train
import train
from hosts import HERE, SMALL, losses, on_one_host
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own deprecated settings and forks


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # Workers wait for each other most of the time: four on however many cores there are.
    ray.init(num_cpus=8, include_dashboard=False, runtime_env=ray_train.RUNTIME, log_to_driver=False)
    yield
    ray.shutdown()


def close(found: dict[int, float], wanted: dict[int, float]) -> bool:
    return len(wanted) > 0 and all(abs(found[step] - wanted[step]) < 1e-9 * wanted[step] for step in wanted)


def killed_at_six(config: dict[str, list[str]]) -> None:
    """`loop`, and the last worker is killed in step 6."""
    plain = train.Training.one_step

    def one_step(self: Any, *batch: Any) -> float:
        if self.step == 6 and ray.train.get_context().get_world_rank() == 3:
            os.kill(os.getpid(), SIGKILL)
        return plain(self, *batch)

    train.Training.one_step = one_step  # type: ignore[assignment, method-assign]  # in this worker only
    ray_train.loop(config)


def test_a_worker_is_killed_and_two_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    words = [*SMALL, "--checkpoint-every", "4", "--checkpoints", str(shared), "--timeout", "60"]
    with monkeypatch.context() as patched:
        patched.setattr(ray_train, "loop", killed_at_six)
        with pytest.raises(ray.train.TrainingFailedError):
            ray_train.fit(4, [*words, "--tp", "2", "--steps", "10"])
    together = losses(shared)
    assert max(together) >= 4
    last = train.last_checkpoint(shared)
    assert last is not None
    assert last.name == "step-00000004"

    ray_train.fit(2, [*words, "--tp", "1", "--steps", "8"])
    on_one_host(1, ["--steps", "8", "--checkpoints", str(tmp_path / "alone")])
    wanted = losses(tmp_path / "alone")
    assert list(wanted) == [*range(1, 9)]
    assert close(together, {step: wanted[step] for step in together})
    assert close(losses(shared), wanted)


def weight_sync(config: dict[str, str]) -> None:
    """The blocks of a page, which compare the generator with the trainer themselves."""
    os.chdir(config["folder"])
    scope: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", Path(config["page"]).read_text(), re.DOTALL):
        exec(block, scope)
    Path(f"synced-{ray.train.get_context().get_world_rank()}").write_text(str(scope["step"] + 1))


def test_weights_go_from_training_workers_to_generating_ones(tmp_path: Path) -> None:
    TorchTrainer(
        weight_sync,
        train_loop_config={"page": str(HERE.parent / "rl-weight-sync.md"), "folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=4),
        torch_config=TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path / "ray")),
    ).fit()
    assert [file.read_text() for file in tmp_path.glob("synced-*")] == ["3"] * 4  # syncs on each worker
