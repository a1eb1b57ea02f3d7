"""Small pieces of pictures and tables, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# The same hue means the same thing in every picture of a page.
COLOURS = {
    "parameters": "#3b6fb6",
    "optimizer": "#5d9f6b",
    "buffers": "#8fa8c8",
    "batch": "#b0b7c3",
    "activations": "#c05a5a",
    "gathered": "#7fa3d6",
    "gradients": "#e08e3a",
    "collectives": "#9b6bb0",
    "update": "#a3c46f",
    "forward": "#9aa7bb",
    "backward": "#6d7a90",
    "update step": "#c3b58a",
    "wait": "none",
    "all_gather": "#3b6fb6",
    "reduce_scatter": "#e08e3a",
    "all_reduce": "#9b6bb0",
    "all_to_all": "#5d9f6b",
    "broadcast": "#c05a5a",
}


def rect(x: float, y: float, width: float, height: float, fill: str, tip: str = "", extra: str = "") -> str:
    """A rectangle with a tip that shows under the pointer."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    size = f'width="{max(width, 0.4):.2f}" height="{height:.2f}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" {size} fill="{fill}"{extra}>{title}</rect>'


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    """A line of text; ``anchor`` says which end of it is at ``x``."""
    css = f' class="{kind}"' if kind else ""
    end = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{end}{css}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "axis") -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def picture(identity: str, width: float, height: float, parts: Iterable[str]) -> str:
    """A picture that scrolls where the window is too narrow."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<div class="scroll"><svg id="{identity}" role="img" {size}>{"".join(parts)}</svg></div>'


def key(entries: Sequence[tuple[str, str]]) -> str:
    """What the colours mean."""
    spans = []
    for colour, words in entries:
        look = f"background:{colour}" if colour != "none" else "outline:1px dashed #999;outline-offset:-1px"
        spans.append(f'<span style="{look}"></span>{escape(words)}')
    return f'<p class="key">{"".join(spans)}</p>'


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table of finished HTML cells; columns in ``right`` are numbers."""
    lines = []
    for row in rows:
        cells = (f'<td class="n">{c}</td>' if at in right else f"<td>{c}</td>" for at, c in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    names = "".join(f'<th class="n">{name}' if at in right else f"<th>{name}" for at, name in enumerate(head))
    return f'<div class="scroll"><table><tr>{names}</tr>{"".join(lines)}</table></div>'


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to about ``most``."""
    if most <= 0:
        return [0.0]
    step = 10.0 ** len(str(int(most))) if most >= 1 else 1.0
    while most / step < count:
        for factor in (2.0, 2.5, 2.0):
            step /= factor
            if most / step >= count:
                break
    return [step * at for at in range(int(most / step) + 1)]
