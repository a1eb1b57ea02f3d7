"""`--ranks-debugger RANK`: that rank, and no other, waits until a client of debugpy has attached."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading

import pytest

BODY = """
    import sys
    import pytest
    import torch.distributed as dist

    @pytest.mark.ranks(2)
    def test_attached(ranks):
        dist.barrier()  # rank 0 comes here first, and waits for as long as rank 1 waits for its debugger
        if ranks.rank == 1:
            assert sys.modules["debugpy"].is_client_connected()
        else:
            assert "debugpy" not in sys.modules
"""


def debug(port: int) -> None:
    """Do what an editor does, in the Debug Adapter Protocol: attach, let the program go on, leave when it has ended."""
    with socket.create_connection(("127.0.0.1", port), timeout=300) as client, client.makefile("rb") as answers:

        def request(seq: int, command: str, **arguments: object) -> None:
            text = json.dumps({"seq": seq, "type": "request", "command": command, "arguments": arguments}).encode()
            client.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(text), text))

        def await_event(name: str) -> None:
            message: dict[str, object] = {}
            while message.get("event") != name:
                length = int(answers.readline().split(b":")[1])
                answers.readline()
                message = json.loads(answers.read(length))

        request(1, "initialize", adapterID="test")
        request(2, "attach", justMyCode=True)
        await_event("initialized")
        request(3, "configurationDone")
        await_event("terminated")


@pytest.mark.extra("debugpy")
def test_one_rank_waits_for_its_debugger(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BODY)
    command = [sys.executable, "-m", "pytest", "--ranks-debugger", "1", "-p", "no:cacheprovider"]
    process = pytester.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with process, contextlib.ExitStack() as at_end:
        at_end.callback(process.kill)  # where an assertion fails, rank 1 would wait for ever
        assert process.stdout is not None
        output = b""
        while (match := re.search(rb"rank 1 of 2 waits for a debugger: attach to 127.0.0.1:(\d+)\n", output)) is None:
            line = process.stdout.readline()
            assert line, output.decode()
            output += line
        attached, pause = False, threading.Event()
        while not attached and process.poll() is None:  # the port is printed before rank 1 is forked and listens
            with contextlib.suppress(ConnectionRefusedError):
                debug(int(match[1]))
                attached = True
            pause.wait(0.2)
        output += process.stdout.read()
        assert process.wait() == 0, output.decode()
    assert attached
    assert b"1 passed" in output


def test_a_rank_that_is_not_there_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BODY)
    result = pytester.runpytest_subprocess("--ranks-debugger", "2", "-p", "no:cacheprovider")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*--ranks-debugger 2: the test runs on ranks 0 to 1*"])
