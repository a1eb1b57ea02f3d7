"""The README's examples run as they stand."""

import re
from pathlib import Path


def test_readme() -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
