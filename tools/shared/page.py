"""Self-contained HTML pages: one style, tables, legends and SVG shapes, all as text. A page loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1180px;padding:0 1rem;color:#1d2430;background:#fff}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:2rem 0 .5rem;border-bottom:1px solid #d8dde6}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:.7rem;list-style:none;
margin:1rem 0 0;padding:0}.cards li{border:1px solid #d8dde6;border-radius:8px;padding:.5rem .8rem}
.cards b{display:block;font-size:1.25rem;font-weight:650;font-variant-numeric:tabular-nums}
.cards span{color:#5a6475;font-size:12px}
table{border-collapse:collapse;font-size:13px}td,th{padding:2px 14px 2px 0;text-align:left;vertical-align:top}
th{color:#5a6475;font-weight:600;white-space:nowrap}.n{text-align:right;font-variant-numeric:tabular-nums}
td.n{white-space:nowrap}code{font-size:12px}pre{overflow-x:auto;background:#f6f8fa;padding:1rem}
.key span{display:inline-block;width:12px;height:12px;margin:0 5px 0 16px;vertical-align:-1px;border-radius:2px}
.key span:first-child{margin-left:0}.note{color:#5a6475}.bad{color:#a3212d}.scroll{overflow-x:auto}
svg text{font:12px system-ui,sans-serif;fill:#1d2430}svg .mono{font:11px ui-monospace,monospace}
svg .soft{fill:#5a6475}svg .in{fill:#fff;font-weight:600;pointer-events:none}svg .end{font-weight:650}
@media(prefers-color-scheme:dark){body{background:#14181f;color:#dfe5ee}svg text{fill:#dfe5ee}pre{background:#1b212b}
th,.note,.cards span{color:#98a3b5}h2,.cards li{border-color:#333c4a}svg .soft{fill:#98a3b5}.bad{color:#ff8590}}
"""


def page(title: str, parts: Iterable[str], style: str = "") -> str:
    """Return a full page.

    Args:
        title: Title and first heading.
        parts: Finished HTML, one part a line.
        style: More CSS, after the common style.
    """
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}{style}</style>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return f"<!doctype html>\n<html lang=en><head>{head}{view}</head>\n<body>\n{body}\n</body></html>\n"


def note(text: str, kind: str = "note") -> str:
    """Return a paragraph of plain text."""
    return f'<p class="{kind}">{escape(text)}</p>'


def cards(entries: Iterable[tuple[str, str]]) -> str:
    """Return the numbers that people look for first, as ``(value, label)``."""
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(label)}</span></li>" for value, label in entries)
    return f'<ul class="cards">{items}</ul>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table that scrolls where the window is narrow.

    Args:
        head: Names of the columns, plain text.
        rows: Cells of finished HTML.
        numbers: Indices of columns that are aligned to the right.
    """
    css = [' class="n"' if at in numbers else "" for at in range(len(head))]
    names = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(head, css, strict=True))
    lines = ("".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, css, strict=True)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{names}</tr>{body}</table></div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return the meaning of colours, as ``(colour, text)``; colour ``"none"`` is drawn as an outline."""
    spans = []
    for colour, text in entries:
        css = f"background:{colour}" if colour != "none" else "outline:1px dashed #999;outline-offset:-1px"
        spans.append(f'<span style="{css}"></span>{escape(text)}')
    return f'<p class="key">{"".join(spans)}</p>'


def svg(identity: str, width: float, height: float, shapes: Iterable[str]) -> str:
    """Return a picture that scrolls where the window is too narrow."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<div class="scroll"><svg id="{escape(identity)}" role="img" {size}>{"".join(shapes)}</svg></div>'


def rect(x: float, y: float, width: float, height: float, fill: str, tip: str = "", extra: str = "") -> str:
    """Return a rectangle; ``tip`` shows under the pointer, ``extra`` is further attributes."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    size = f'width="{max(width, 0.4):.2f}" height="{height:.2f}"'  # an invisible sliver would hide a small message
    return f'<rect x="{x:.2f}" y="{y:.2f}" {size} fill="{fill}"{extra}>{title}</rect>'


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    """Return a line of text; ``anchor`` says which end of it stands at ``x``."""
    css = f' class="{kind}"' if kind else ""
    end = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{end}{css}>{escape(words)}</text>'


def stacked_bars(
    identity: str, rows: Sequence[tuple[str, Sequence[tuple[str, int]]]], colours: Mapping[str, str]
) -> str:
    """Return horizontal stacked bars of bytes on one scale, with their legend.

    Args:
        identity: Id of the picture.
        rows: ``(label, [(part, bytes), ...])``, one bar each.
        colours: Part -> colour; grey where it is missing.
    """
    left, wide, height = 150, 760, 30
    largest = max((sum(size for _, size in parts) for _, parts in rows), default=0) or 1
    shapes: list[str] = []
    used: dict[str, str] = {}
    for row, (label, parts) in enumerate(rows):
        x, y = float(left), row * height
        shapes.append(text(0, y + 16, label))
        for part, size in parts:
            if not size:
                continue
            width = wide * size / largest
            used[part] = colours.get(part, "#888")
            shapes.append(rect(x, y, width, 24, used[part], f"{part}: {human_bytes(size)}"))
            if width > 8 * len(human_bytes(size)) + 8:
                shapes.append(text(x + 6, y + 16, human_bytes(size), kind="in"))
            x += width
        shapes.append(text(x + 6, y + 16, human_bytes(sum(size for _, size in parts)), kind="end"))
    keys = legend([(colour, part) for part, colour in used.items()])
    return keys + svg(identity, left + wide + 110, max(1, len(rows)) * height, shapes)


def human_bytes(size: float) -> str:
    """Return a number of bytes in the binary unit that fits: ``1536 -> "1.50 KiB"``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    value, unit = float(size), 0
    while abs(value) >= 1024 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {units[unit]}" if unit == 0 else f"{value:.2f} {units[unit]}"
