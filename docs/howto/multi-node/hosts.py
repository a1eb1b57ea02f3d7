"""Several hosts on one machine: network namespaces joined by a cable that can be pulled, or else the loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
TRAIN = str(HERE / "train.py")
SMALL = ["--dim", "32", "--layers", "1", "--context", "32", "--batch", "8", "--dtype", "float64"]
START = 180.0  # to import torch several times on a busy machine


class Host:
    """One of two hosts: starts a launch script and can be cut off."""

    def __init__(self, number: int, namespace: str | None, address: str, interface: str) -> None:
        self.number, self.namespace, self.address, self.interface = number, namespace, address, interface
        self.running: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def start(self, script: str, args: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        """Run `torchrun.sh script args...` on this host."""
        command = [str(HERE / "torchrun.sh"), script, *args]
        if self.namespace is not None:
            command = ["ip", "netns", "exec", self.namespace, *command]
        env = {**os.environ, **variables, "NODE_RANK": str(self.number), "GLOO_SOCKET_IFNAME": self.interface}
        self._log = log.open("w")
        # a session of its own: the host's processes can be ended together
        self.running = subprocess.Popen(
            command, env=env, stdout=self._log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def wait(self, seconds: float) -> int:
        """The exit code; raises `subprocess.TimeoutExpired`."""
        assert self.running is not None
        return self.running.wait(seconds)

    def cut_off(self) -> None:
        """Pull the cable; without namespaces, cut the power."""
        if self.namespace is not None:
            subprocess.run(["ip", "-n", self.namespace, "link", "set", self.interface, "down"], check=True)
        else:
            self.end()

    def end(self) -> None:
        """End whatever is left of this host: the agent and, each in a session of its own, its ranks."""
        if self.running is not None:
            for process in [self.running.pid, *descendants(self.running.pid)]:
                _kill(process)
            self.running.wait()
        if self._log is not None:
            self._log.close()


def descendants(process: int) -> list[int]:
    """Children of a process and theirs."""
    found: list[int] = []
    waiting = [process]
    while waiting:
        try:
            text = Path(f"/proc/{waiting[-1]}/task/{waiting.pop()}/children").read_text()
        except OSError:
            continue
        children = [int(child) for child in text.split()]
        found += children
        waiting += children
    return found


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def namespaces_allowed() -> bool:
    """Whether this user may make network namespaces."""
    if shutil.which("ip") is None:
        return False
    name = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


@contextmanager
def two_hosts(*, namespaces: bool) -> Iterator[tuple[Host, Host]]:
    """Two hosts; everything that runs on them has ended when the block ends."""
    with ExitStack() as stack:
        hosts = _on_a_cable(stack) if namespaces else (_on_loopback(0), _on_loopback(1))
        for host in hosts:
            stack.callback(host.end)
        yield hosts


def _on_loopback(number: int) -> Host:
    return Host(number, None, "127.0.0.1", "lo")


def _on_a_cable(stack: ExitStack) -> tuple[Host, Host]:
    number = os.getpid()
    hosts = tuple(Host(i, f"host{i}-{number}", f"10.89.0.{i + 1}", f"cable{i}") for i in range(2))
    for host in hosts:
        _ip("netns", "add", str(host.namespace))
        stack.callback(_ip, "netns", "del", str(host.namespace))
        _ip("-n", str(host.namespace), "link", "set", "lo", "up")
    first, second = hosts
    ends = ("type", "veth", "peer", "name", second.interface, "netns", str(second.namespace))
    _ip("-n", str(first.namespace), "link", "add", first.interface, *ends)
    for host in hosts:
        _ip("-n", str(host.namespace), "address", "add", f"{host.address}/24", "dev", host.interface)
        _ip("-n", str(host.namespace), "link", "set", host.interface, "up")
    return first, second


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(what: str, seconds: float) -> Iterator[None]:
    """Iterate, pausing, for `seconds`; then raise."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.05)
    raise TimeoutError(f"not within {seconds} s: {what}")


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


def trained_on_two_hosts(folder: Path, said: str) -> None:
    """Two steps by two hosts of one rank each are those of one process."""
    assert "2 ranks, from step 0 to 2" in said, said
    alone = folder / "alone"
    on_one_host(1, ["--steps", "2", "--checkpoints", str(alone)])
    wanted, found = losses(alone), losses(folder / "run1")
    assert list(found) == list(wanted) == [1, 2]
    assert all(abs(found[step] - wanted[step]) < 1e-9 * wanted[step] for step in wanted)
