"""The launch files on two hosts of this machine: the main job, a host that is cut off, and going on with fewer ranks.

nox -s multi_node
"""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hosts import free_port, namespaces_allowed, two_hosts, until

HERE = Path(__file__).resolve().parent
MAIN_JOB = HERE.parents[1] / "examples" / "plan_to_serving" / "main.py"
TRAIN = str(HERE / "train.py")
SMALL = ["--dim", "32", "--layers", "1", "--context", "32", "--batch", "8", "--dtype", "float64"]
TIMEOUT = 20.0  # of a collective
START = 180.0  # to import torch several times on a busy machine
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


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step, the last one that was written for it; whole lines only."""
    file = folder / "losses.jsonl"
    text = file.read_text() if file.exists() else ""
    return {line["step"]: line["loss"] for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines())}


def on_one_host(ranks: int, args: list[str]) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", TRAIN]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launch, *SMALL, *args],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * START,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def executable(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_slurm_gives_each_host_its_number(tmp_path: Path) -> None:
    # Slurm's own commands and Python are stood in for; the script is what sbatch would run.
    executable(tmp_path / "scontrol", '#!/bin/sh\nprintf "node7\\nnode8\\n"\n')
    srun = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nfor i in 0 1; do SLURM_NODEID=$i "$@"; done\n'
    executable(tmp_path / "srun", srun)
    executable(tmp_path / "python", '#!/bin/sh\necho "$@"\n')
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "41234",
        "SLURM_SUBMIT_DIR": str(HERE),
        "NPROC_PER_NODE": "8",
    }
    command = ["bash", str(HERE / "slurm.sbatch"), "train.py", "--tp", "8"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for number, line in enumerate(lines):
        assert f"--nnodes 2 --node-rank {number} --nproc-per-node 8" in line
        assert "--master-addr node7 --master-port 21234" in line
        assert line.endswith("train.py --tp 8")


def job_number() -> int:
    """A Slurm job number whose port nobody listens on."""
    for number in range(os.getpid() % 20000, 20000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20000 + number)) != 0:
                return number
    raise RuntimeError("no free port")


def trained_on_two_hosts(folder: Path, said: str) -> None:
    """Two steps by two hosts of one rank each are those of one process."""
    assert "2 ranks, from step 0 to 2" in said, said
    alone = folder / "alone"
    on_one_host(1, ["--steps", "2", "--checkpoints", str(alone)])
    wanted, found = losses(alone), losses(folder / "run1")
    assert list(found) == list(wanted) == [1, 2]
    assert all(abs(found[step] - wanted[step]) < 1e-9 * wanted[step] for step in wanted)


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_the_scripts_are_scripts(script: str) -> None:
    subprocess.run(["bash", "-n", str(HERE / script)], check=True)


def test_what_slurm_starts_trains(tmp_path: Path) -> None:
    """Slurm's commands are stood in for, by ones that start the tasks at once; everything else is what would run."""
    executable(
        tmp_path / "scontrol", '#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && printf "127.0.0.1\\nlocalhost\\n"\n'
    )
    wait = "for task in $tasks; do wait $task || status=$?; done; exit ${status:-0}"
    start = 'for i in 0 1; do SLURM_NODEID=$i "$@" & tasks="$tasks $!"; done'
    executable(tmp_path / "srun", f"#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\n{start}\n{wait}\n")
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_JOB_ID": str(job_number()),
        "SLURM_SUBMIT_DIR": str(HERE),
        "NPROC_PER_NODE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHON": sys.executable,
    }
    command = [
        "bash",
        str(HERE / "slurm.sbatch"),
        TRAIN,
        *SMALL,
        "--steps",
        "2",
        "--checkpoints",
        str(tmp_path / "run1"),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=2 * START)
    assert done.returncode == 0, done.stdout + done.stderr
    trained_on_two_hosts(tmp_path, done.stdout)


def test_what_kubernetes_starts_trains(tmp_path: Path) -> None:
    """The container's own command line, in the environment that the training operator gives to each pod."""
    job = yaml.safe_load((HERE / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    port, pods = str(free_port()), []
    for number, replica in enumerate(replicas.values()):
        (container,) = replica["template"]["spec"]["containers"]
        assert container["command"][0] == "torchrun"
        words = [*container["command"][1:], *container["args"]]
        # what is another one here: where the repository and the shared folder lie, one rank a host, two short steps
        smaller = {"--tp": "1", "--steps": "2", "--checkpoints": str(tmp_path / "run1")}
        words = [smaller.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        words = [word.replace("/repo/", f"{HERE.parents[2]}/") for word in words]
        operator = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port,
            "WORLD_SIZE": str(len(replicas)), "RANK": str(number), "PYTHONUNBUFFERED": "1",
            "PET_NNODES": str(len(replicas)), "PET_NODE_RANK": str(number), "PET_NPROC_PER_NODE": "1",
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


def test_the_kubernetes_job_is_two_hosts_that_run_a_script_of_this_repository() -> None:
    job = yaml.safe_load((HERE / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master", "Worker"]
    for replica in replicas.values():
        assert replica["replicas"] == 1
        assert replica["restartPolicy"] == "OnFailure"
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["command"][0] == "torchrun"
        script = container["command"][-1].removeprefix("/repo/")
        assert (HERE.parents[2] / script).exists()
        options = [word for word in container["args"] if word.startswith("--")]
        assert set(options) <= {"--tp", "--steps", "--checkpoints"}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in replica["template"]["spec"]["volumes"]}
