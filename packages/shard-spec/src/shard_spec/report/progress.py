"""A bar on stderr for work that takes longer than a second; nothing for quick work, and nothing outside a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_WIDTH, _MARK = 24, 6


@contextmanager
def progress(what: str, after: float = 1.0, stream: TextIO | None = None) -> Iterator[None]:
    """Show that ``what`` goes on, from ``after`` seconds until it is done, and then how long it took.

    The bar moves, it does not fill: nobody knows how long planning will take. It runs in a thread of its own, so that
    the work need not report.

    Args:
        what: What is done, in a few words.
        after: Seconds of silence before it shows.
        stream: Where to; default stderr.
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield
        return
    done = threading.Event()
    begin = time.monotonic()
    thread = threading.Thread(target=_draw, args=(what, after, begin, stream, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        seconds = time.monotonic() - begin
        if seconds > after:
            stream.write(f"\r\x1b[2K{what}: {seconds:.1f} s\n")
            stream.flush()


def _draw(what: str, after: float, begin: float, stream: TextIO, done: threading.Event) -> None:
    wait = after
    while not done.wait(wait):
        seconds = time.monotonic() - begin
        stream.write(f"\r\x1b[2K{what} {bar(seconds)} {seconds:.0f} s")
        stream.flush()
        wait = 0.1


def bar(seconds: float) -> str:
    """A mark that goes to and fro in brackets."""
    way = _WIDTH - _MARK
    at = int(seconds * 10) % (2 * way)
    at = min(at, 2 * way - at)
    return "[" + " " * at + "=" * _MARK + " " * (way - at) + "]"
