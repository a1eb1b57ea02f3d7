"""`slurm.sbatch` as it stands on a real Slurm: two hosts made of this machine, a lost rank, going on with one host.

nox -s "multi_node(slurm)" (Debian: apt-get install slurm-wlm)
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGKILL

import pytest
from hosts import HERE, SMALL, START, TRAIN, free_port, losses, on_one_host, until

# Hosts are called by addresses of the loopback in short, since torchrun resolves the first one. Processors and GPUs are
# what the batch script asks for, not what this machine has (config_overrides).
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
NodeName=127.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 RealMemory=1000 Gres=gpu:8
NodeName=127.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 RealMemory=1000 Gres=gpu:8
PartitionName=all Nodes=127.[1-2] Default=YES State=UP
"""


class Slurm:
    """A controller and two hosts, with keys, ports and folders of their own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        host, user, ports = (
            socket.gethostname().split(".")[0],
            os.environ.get("USER", "root"),
            [free_port() for _ in "abc"],
        )
        for each in ("state", "127.1", "127.2"):
            (folder / each).mkdir()
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, user=user, ports=ports))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        for number in range(8):
            (folder / f"gpu{number}").touch()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._serve("munged", "--foreground", "--force", *(f"--{k}={folder}/munge.{v}" for k, v in names.items()))
        for _ in until("munged listens", 20):
            if (folder / "munge.socket").exists():
                break
        self._serve("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for node in ("127.1", "127.2"):
            self._serve("slurmd", "-D", "-N", node, "-f", f"{folder}/slurm.conf")
        for _ in until("both hosts are idle", 60):
            if self.run("sinfo", "--noheader", "--format=%D %T", check=False) == "2 idle":
                break

    def _serve(self, *command: str) -> None:
        log = self.stack.enter_context((self.folder / f"{command[0]}.out").open("a"))
        process = subprocess.Popen(command, env=self._env(), stdout=log, stderr=log)
        self.stack.callback(process.wait)
        self.stack.callback(process.terminate)

    def _env(self) -> dict[str, str]:
        # The scripts start `python`: this one's. Slurm hands the environment on to the job.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {
            "SLURM_CONF": f"{self.folder}/slurm.conf",
            "NPROC_PER_NODE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PATH": path,
        }
        return {**os.environ, **own}

    def run(self, *command: str, check: bool = True) -> str:
        """The output of a command of Slurm."""
        done = subprocess.run(command, env=self._env(), cwd=HERE, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, log: Path, *words: str) -> str:
        """The number of a new job."""
        return self.run("sbatch", "--parsable", f"--output={log}", *words)

    def state(self, job: str) -> str:
        """`RUNNING`, `COMPLETED`, `FAILED`, ..."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner")
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)["JobState"]

    def wait(self, job: str) -> str:
        """The state in which a job ended."""
        for _ in until(f"job {job} ends", 2 * START):
            state = self.state(job)
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return state
        raise AssertionError


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    # Paths of sockets are short, so not in pytest's own folder.
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield Slurm(folder, stack)


def test_two_hosts_train_as_one_process(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path / "log", "slurm.sbatch", TRAIN, *SMALL, "--steps", "4", f"--checkpoints={tmp_path}/run")
    assert slurm.wait(job) == "COMPLETED", (tmp_path / "log").read_text()
    assert "2 ranks, from step 0 to 4" in (tmp_path / "log").read_text()
    shown = slurm.run("scontrol", "show", "job", job)
    assert "NumNodes=2" in shown
    assert "TresPerNode=gres:gpu:8" in shown
    on_one_host(1, ["--steps", "4", f"--checkpoints={tmp_path}/alone"])
    found, wanted = losses(tmp_path / "run"), losses(tmp_path / "alone")
    assert list(found) == list(wanted) == [1, 2, 3, 4]
    assert all(abs(found[step] - wanted[step]) < 1e-9 * wanted[step] for step in wanted)


def test_a_rank_that_dies_ends_the_job_and_one_host_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    shared, log = tmp_path / "run", tmp_path / "log"
    words = ["slurm.sbatch", TRAIN, *SMALL, "--checkpoint-every", "4", f"--checkpoints={shared}"]
    job = slurm.submit(log, *words, "--steps", "100000")
    for _ in until("six steps", START):
        assert slurm.state(job) in ("PENDING", "CONFIGURING", "RUNNING"), log.read_text()
        if len(losses(shared)) >= 6:
            break
    (rank,) = ranks_of(f"SLURM_JOB_ID={job}", "SLURM_NODEID=1")
    os.kill(rank, SIGKILL)
    assert slurm.wait(job) == "FAILED", log.read_text()
    assert "start again on those that are left" in log.read_text()
    last = max(int(folder.parent.name.removeprefix("step-")) for folder in shared.glob("step-*/.metadata"))
    assert last >= 4

    job = slurm.submit(tmp_path / "log2", "--nodes", "1", *words, "--steps", str(last + 4))
    assert slurm.wait(job) == "COMPLETED", (tmp_path / "log2").read_text()
    assert f"1 ranks, from step {last} to {last + 4}" in (tmp_path / "log2").read_text()
    on_one_host(1, ["--steps", str(last + 4), f"--checkpoints={tmp_path}/alone"])
    found, wanted = losses(shared), losses(tmp_path / "alone")
    assert all(abs(found[step] - wanted[step]) < 1e-9 * wanted[step] for step in range(1, last + 5))


def ranks_of(*setting: str) -> list[int]:
    """Processes that torchrun started in an environment with these variables."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            if {*setting} <= {*words} and any(word.startswith("LOCAL_RANK=") for word in words):
                found.append(int(folder.name))
    return found
