"""Reports in a terminal: tables of ``rich`` where there is one, plain text elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from shard_spec.formatting import Parts, Table, communication_parts, joined, memory_parts
from shard_spec.plan.resolve import examine
from shard_spec.report.explain import explain_model

if TYPE_CHECKING:
    from shard_spec.estimate.communication import Communication
    from shard_spec.estimate.memory import Memory
    from shard_spec.plan.content import PlanContent
    from shard_spec.plan.metadata import ModelMetadata


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


def show(plan: PlanContent, metadata: ModelMetadata, memory: Memory, communication: Communication | None) -> None:
    """Print a plan, its memory and its communication, each under a title."""
    sections = [("plan", explain_model(plan, examine(plan, metadata))), ("memory on each rank", memory_parts(memory))]
    if communication is not None:
        sections.append(("communication of a step", communication_parts(communication)))
    console = _console() if sys.stdout.isatty() else None
    for title, parts in sections:
        if console is None:
            print(f"\n{title}:\n{joined(parts)}")
        else:
            _show_rich(console, title, parts)


def _console() -> Any:
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    return Console()


def _show_rich(console: Any, title: str, parts: Parts) -> None:
    """Tables as tables, as wide as the terminal; names are text, never markup."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    console.print()
    console.print(Text(title, style="bold"))
    for part in parts:
        if not isinstance(part, Table):
            style = "red" if part.lstrip().startswith("[") else "dim"
            console.print(Text(part, style=style))
            continue
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold cyan")
        for at, head in enumerate(part.head):
            drawn.add_column(head, justify="right" if at in part.right else "left", overflow="fold")
        for row in part.rows:
            drawn.add_row(*(_coloured(str(cell)) for cell in row))
        console.print(drawn)


def _coloured(cell: str) -> Any:
    """A cell: what is cut stands out, and so do sizes."""
    from rich.text import Text

    text = Text(cell)
    text.highlight_regex(r"\b[A-Za-z_][\w.\-]*:(?:S|U|B|I)\([^)]*\)", "cyan")
    text.highlight_regex(r"^[\d.]+ (?:B|KiB|MiB|GiB|TiB|PiB)$", "green")
    return text
