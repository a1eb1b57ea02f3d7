"""Self-contained HTML pages, whose parts are macros of `page.html.j2`; a page loads nothing from anywhere."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any


@functools.cache
def page_parts() -> Any:
    """Return the macros: ``page_parts().note(["text"])`` escapes text and leaves the parts of others alone."""
    from jinja2 import Environment  # torch brings it; a program that draws no page need not import it

    template = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    return Environment(autoescape=True).from_string(template).module


def human_bytes(size: float) -> str:
    """Return a number of bytes in the binary unit that fits: ``1536 -> "1.50 KiB"``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    value, unit = float(size), 0
    while abs(value) >= 1024 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {units[unit]}" if unit == 0 else f"{value:.2f} {units[unit]}"
