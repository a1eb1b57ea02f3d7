"""Names that a function's code uses: also within lambdas and comprehensions, and none of its own variables."""

from __future__ import annotations

import types
from typing import Any

from shared.function_names import contents, names_used

WEIGHT = 1.0
own = "a global of the name of a variable below"


def test_names_in_nested_code_count_and_variables_do_not() -> None:
    config = types.SimpleNamespace(scale=2.0)

    def step(values: list[float], own: float) -> Any:
        total = sum(WEIGHT * value for value in values)
        later = lambda: config.scale * own  # noqa: E731
        return total, later

    names = names_used(step)
    assert {"WEIGHT", "scale", "sum"} <= names
    assert not names & {"own", "values", "total", "later", "value"}


def test_a_cell_may_be_empty() -> None:
    assert contents(types.CellType(), "nothing") == "nothing" and contents(types.CellType(3)) == 3
