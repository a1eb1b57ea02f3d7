"""The process that imports torch once and that ranks are forked from.

`python -m ranktest.server FD` imports torch once, and then serves requests on the socket FD: import a test module,
fork the ranks of one test, say how forked ranks ended. Each test gets freshly forked ranks, so that no test sees
another's groups, caches or hooks; a fork takes about 5 ms, importing torch 3 s.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from ranktest import process, supervise
from ranktest.job import Job, Meeting


class Server:
    """Forks ranks and reports how they ended."""

    def __init__(self, control: Connection) -> None:
        self.control = control
        self.body: Any = None

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take over the pytest process's path and settings, and import what ranks will need."""
        sys.path[:] = request["sys_path"]
        os.chdir(request["cwd"])
        from ranktest import _pytest_compat, body

        body.configure(_pytest_compat.make_config(request["pytest_args"]))
        os.environ.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD", None)
        body.preload(body.PRELOAD)
        self.body = body
        return {"ok": True}

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import a test module, so that ranks forked later have it."""
        try:
            self.body.load_module(request["path"])
            self.body.learn(request["learnt"])
        except BaseException:
            return {"ok": False, "error": traceback.format_exc()}
        return {"ok": True}

    def fork(self, request: dict[str, Any], channels: list[int]) -> dict[str, Any]:
        """Fork one process per channel."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        port = listener.getsockname()[1]
        sys.stdout.flush()
        sys.stderr.flush()
        pids = []
        for rank, channel in enumerate(channels):
            pid = os.fork()
            if pid == 0:
                self._become_rank(request["job"], rank, channel, channels, listener, port)
            pids.append(pid)
        for channel in channels:
            os.close(channel)
        listener.close()
        return {"pids": pids}

    def _become_rank(
        self, job: Job, rank: int, channel: int, channels: list[int], listener: socket.socket, port: int
    ) -> None:
        self.control.close()
        for other in channels:
            if other != channel:
                os.close(other)
        listen_fd = listener.detach()
        if rank != 0:
            os.close(listen_fd)
        meeting = Meeting(rank, port, listen_fd if rank == 0 else None)
        self.body.become_rank(job, meeting, Connection(channel))

    def reap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Wait for forked ranks and say how each ended (None: it did not, within the time)."""
        return {"ended": supervise.reap_own(request["pids"], request["timeout_s"])}

    def serve(self) -> None:
        """Answer requests until the pytest process is gone."""
        while True:
            try:
                request = self.control.recv()
            except (EOFError, OSError):
                return
            if request["do"] == "fork":
                answer = self.fork(request, [recv_handle(self.control) for _ in range(request["job"].world_size)])
            else:
                answer = getattr(self, request["do"])(request)
            self.control.send(answer)


def main() -> None:
    """Entry point of `python -m ranktest.server FD`."""
    process.die_with_parent()
    Server(Connection(int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
