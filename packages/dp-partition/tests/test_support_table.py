"""The support table, `SUPPORT.md`: what the other tests run and compare, in the words in which they expect it.

`test_pipeline` and `capture/test_fingerprint` hold each row to its outcome, `test_coverage` the optimizers; this
one holds `SUPPORT.md` to those rows. `UPDATE_SUPPORT=1` writes it.
"""

from __future__ import annotations

import os
from pathlib import Path

from dp_cells import OPTIMIZERS
from dp_step_table import ALSO_REFUSED, STEP_ROWS
from python_effects import REFUSED

PAGE = Path(__file__).parents[1] / "SUPPORT.md"
MARKS = "<!-- support table: begin -->\n", "<!-- support table: end -->"


def table() -> str:
    """A row for what is refused, one cell for all that is right."""
    right = [name for name, row in STEP_ROWS.items() if not row.refused]
    lines = ["| a step, a model or an optimizer with | outcome |", "|---|---|"]
    for name, row in STEP_ROWS.items():
        if row.refused:
            lines.append(f"| {name} | refused: `{row.refused}` |")
    for name, (_, code, _) in REFUSED.items():
        lines.append(f"| {name} | refused: `{code}` |")
    for name in right:
        styles = {style: code for (step, style), code in ALSO_REFUSED.items() if step == name}
        but = "; ".join(f'"{style}" refused: `{code}`' for style, code in styles.items())
        lines += [f"| {name} | right; {but} |"] if but else []
    plain = [name for name in right if name not in {step for step, _ in ALSO_REFUSED}]
    lines.append(f"| {', '.join(OPTIMIZERS)} | right in every style |")
    lines.append(f"| {'; '.join(plain)} | right in every style |")
    return "\n".join(lines) + "\n"


def test_the_readme_shows_what_is_right_and_what_is_refused() -> None:
    text = PAGE.read_text()
    before, rest = text.split(MARKS[0])
    expected = before + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1]
    if os.environ.get("UPDATE_SUPPORT"):
        PAGE.write_text(expected)
    assert text == expected or os.environ.get("UPDATE_SUPPORT"), "run this test with UPDATE_SUPPORT=1"
