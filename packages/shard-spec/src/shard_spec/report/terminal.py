"""Reports in a terminal: coloured with ``rich`` where there is one, plain text elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard_spec.plan.communication import Communication
    from shard_spec.plan.memory import Memory


def show(explanation: str, memory: Memory, communication: Communication | None) -> None:
    """Print a plan, its memory and its communication, each under a title."""
    sections = [("plan", explanation), ("memory on each rank", str(memory))]
    if communication is not None:
        sections.append(("communication of a step", str(communication)))
    for title, text in sections:
        if sys.stdout.isatty() and _show_rich(title, text):
            continue
        print(f"\n{title}:\n{text}")


def _show_rich(title: str, text: str) -> bool:
    try:
        from rich.console import Console
        from rich.panel import Panel
        from rich.text import Text
    except ModuleNotFoundError:
        return False
    body = Text(text, no_wrap=True, overflow="ellipsis")
    body.highlight_regex(r"\b[A-Za-z_]\w*:(?:S|U|B|I)\([^)]*\)", "bold cyan")
    body.highlight_regex(r"\b[\d.]+ (?:B|KiB|MiB|GiB|TiB)\b", "green")
    body.highlight_regex(r"\[[a-z-]+\]", "bold red")
    Console().print(Panel(body, title=title, title_align="left"))
    return True
