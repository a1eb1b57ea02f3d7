"""What the site adds to a benchmark page: its plots first, and a mark for each target that is met or missed."""

from __future__ import annotations

import operator
import re
from typing import Any

TARGET = re.compile(r"^(<=|>=|<|>)\s*(?P<number>[\d.,]+)\s*(?P<unit>x|%|ms|us|s|KB)?(?=$|[\s,;])")
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
PLOT = re.compile(r"^!\[.*\]\(.*\.svg\)\n", re.MULTILINE)


def verdict(target: str, measured: str) -> str:
    """Return "met" or "missed"; nothing where the target is no single number of the unit of what was measured."""
    wanted = TARGET.match(target)
    if wanted is None:
        return ""
    unit = wanted["unit"] or ""
    units = "|".join(SECONDS) if unit in SECONDS else unit
    found = re.match(rf"(?P<number>[\d.,]+)\s*(?P<unit>{units})(?![\w%])", measured)
    if found is None:
        return ""
    number, bound = (
        float(text["number"].rstrip(".,").replace(",", "")) * SECONDS.get(text["unit"] or "", 1.0)
        for text in (found, wanted)
    )
    return "met" if COMPARE[wanted[1]](number, bound) else "**missed**"


def marked(text: str) -> str:
    """Return a page whose tables of targets have a column for the verdict."""
    lines = []
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| what | target | measured |"):
            inside, line = True, line + " |"
        elif inside and not line.startswith("|"):
            inside = False
        elif inside:
            line += "---|" if set(line) <= set("|-") else f" {verdict(cells[1], cells[2])} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def plots_first(text: str) -> str:
    """Return a page with its plots before the first section."""
    plots = PLOT.findall(text)
    head, mark, rest = PLOT.sub("", text).partition("\n## ")
    return f"{head}\n" + "\n".join(plots) + mark + rest if plots and mark else text


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Hook of mkdocs."""
    return plots_first(marked(markdown)) if page.file.src_uri.startswith("benchmarks/") else markdown
