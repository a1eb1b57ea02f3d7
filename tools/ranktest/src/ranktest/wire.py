"""Length-prefixed pickles over a socket: how the pytest process, the server and the ranks talk."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!Q")


def send(sock: socket.socket, message: Any) -> None:
    """Send one message."""
    data = pickle.dumps(message)
    sock.sendall(_HEADER.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """Receive one message.

    Raises:
        EOFError: the other side is gone.
    """
    (length,) = _HEADER.unpack(_exactly(sock, _HEADER.size))
    return pickle.loads(_exactly(sock, length))


def _exactly(sock: socket.socket, length: int) -> bytes:
    chunks = []
    while length:
        try:
            chunk = sock.recv(min(length, 1 << 20))
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise EOFError("the other side of the socket is gone")
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)
