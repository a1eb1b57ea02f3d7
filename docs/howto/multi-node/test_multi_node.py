"""The launch files on two hosts of this machine: the main job, a host that is cut off, and going on with fewer ranks.

nox -s "multi_node(torchrun)"
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hosts import (
    HERE,
    SMALL,
    START,
    TRAIN,
    free_port,
    losses,
    namespaces_allowed,
    on_one_host,
    trained_on_two_hosts,
    two_hosts,
    until,
)
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

MAIN_JOB = HERE.parents[1] / "examples" / "plan_to_serving" / "main.py"
TIMEOUT = 20.0  # of a collective
KINDS = [
    pytest.param(
        True,
        id="network namespaces",
        marks=pytest.mark.skipif(not namespaces_allowed(), reason="no right to make network namespaces"),
    ),
    pytest.param(False, id="loopback"),
]


def variables(address: str, ranks_per_host: int) -> dict[str, str]:
    return {
        "NNODES": "2",
        "NPROC_PER_NODE": str(ranks_per_host),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port()),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize("namespaces", KINDS)
def test_a_host_is_cut_off_and_training_goes_on_with_fewer_ranks(namespaces: bool, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    args = [*SMALL, "--tp", "2", "--steps", "100000", "--checkpoint-every", "4", "--checkpoints", str(shared)]
    args += ["--timeout", str(TIMEOUT)]
    logs = [tmp_path / f"host{number}.log" for number in range(2)]
    with two_hosts(namespaces=namespaces) as hosts:
        setting = variables(hosts[0].address, 2)
        for host, log in zip(hosts, logs, strict=True):
            host.start(TRAIN, args, setting, log)
        for _ in until("six steps on two hosts", START):
            assert all(host.running and host.running.poll() is None for host in hosts), logs[0].read_text()
            if len(losses(shared)) >= 6:
                break
        hosts[1].cut_off()
        began = time.monotonic()
        code = hosts[0].wait(TIMEOUT + 40)  # what is left notices, has its say, and torchrun ends
        took = time.monotonic() - began
        text = logs[0].read_text()
        assert code != 0
        assert 0 < took < TIMEOUT + 40
        for rank in (0, 1):  # each remaining rank says where it was and what to do
            assert f"rank {rank} on " in text, text
        assert text.count("start again on those that are left") == 2
    together = losses(shared)
    last = max(int(folder.parent.name.removeprefix("step-")) for folder in shared.glob("step-*/.metadata"))
    assert last >= 4
    assert f"step-{last:08}" in text

    args = ["--steps", str(last + 4), "--checkpoint-every", "1000"]
    said = on_one_host(2, [*args, "--tp", "1", "--checkpoints", str(shared)])
    assert f"2 ranks, from step {last} to {last + 4}" in said
    alone = tmp_path / "alone"
    on_one_host(1, [*args, "--checkpoints", str(alone)])
    reference, resumed = losses(alone), losses(shared)
    compared = 0
    for step, wanted in reference.items():
        found = resumed[step] if step > last else together[step]
        assert abs(found - wanted) < 1e-9 * wanted, (step, found, wanted)  # float64; sums in another order
        compared += 1
    assert compared == last + 4


@pytest.mark.parametrize("namespaces", KINDS[:1] if namespaces_allowed() else KINDS[1:])
def test_the_main_job_on_two_hosts(namespaces: bool, tmp_path: Path) -> None:
    args = ["--steps", "4", "--compared", "3", "--styles", "replicate", "--report", str(tmp_path / "report")]
    with two_hosts(namespaces=namespaces) as hosts:
        setting = variables(hosts[0].address, 2)
        for host in hosts:
            host.start(str(MAIN_JOB), args, setting, tmp_path / f"host{host.number}.log")
        for host in hosts:
            assert host.wait(3 * START) == 0, (tmp_path / f"host{host.number}.log").read_text()
    assert (tmp_path / "report" / "index.html").exists()
    assert "4 ranks on" in (tmp_path / "host0.log").read_text()


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_the_scripts_are_scripts(script: str) -> None:
    subprocess.run(["bash", "-n", str(HERE / script)], check=True)


def pytorchjob() -> list[dict[str, Any]]:
    """The container of each host."""
    job = yaml.safe_load((HERE / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master", "Worker"]
    containers = []
    for replica in replicas.values():
        assert (replica["replicas"], replica["restartPolicy"]) == (1, "OnFailure")
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        containers.append(container)
    return containers


def trainjob() -> list[dict[str, Any]]:
    """The container of each host; every field is one of the operator's own schema, with its type."""
    job = yaml.safe_load((HERE / "trainjob.yaml").read_text())
    parsed = TrainerV1alpha1TrainJob.from_dict(job)
    assert parsed is not None
    assert parsed.to_dict() == job  # unknown fields would be dropped
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node"  # as the runtime calls them
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    return [job["spec"]["trainer"]] * job["spec"]["trainer"]["numNodes"]


@pytest.mark.parametrize("job", [pytorchjob, trainjob])
def test_what_kubernetes_starts_trains(job: Callable[[], list[dict[str, Any]]], tmp_path: Path) -> None:
    """The container's own command line, in the environment that the operator gives to each pod."""
    containers = job()
    assert len(containers) == 2
    port, pods = str(free_port()), []
    for number, container in enumerate(containers):
        assert container["command"][0] == "torchrun"
        words = [*container["command"][1:], *container["args"]]
        # what is another one here: where the repository and the shared folder lie, one rank a host, two short steps
        smaller = {"--tp": "1", "--steps": "2", "--checkpoints": str(tmp_path / "run1")}
        words = [smaller.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        words = [word.replace("/repo/", f"{HERE.parents[2]}/") for word in words]
        operator = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port,
            "WORLD_SIZE": str(len(containers)), "RANK": str(number), "PYTHONUNBUFFERED": "1",
            "PET_NNODES": str(len(containers)), "PET_NODE_RANK": str(number), "PET_NPROC_PER_NODE": "1",
        }  # fmt: skip
        own = {entry["name"]: entry["value"].replace("eth0", "lo") for entry in container["env"]}
        command = [sys.executable, "-m", "torch.distributed.run", *words, *SMALL]
        with (tmp_path / f"pod{number}.log").open("w") as log:
            pods.append(subprocess.Popen(command, env={**os.environ, **own, **operator}, stdout=log, stderr=log))
    try:
        codes = [pod.wait(2 * START) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    said = [(tmp_path / f"pod{number}.log").read_text() for number in range(len(pods))]
    assert codes == [0, 0], said
    trained_on_two_hosts(tmp_path, said[0])
