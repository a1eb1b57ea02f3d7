"""Lines, exports and rules of sources: what grows or breaks a rule is named."""

from __future__ import annotations

import tomllib
from pathlib import Path

import structure


def test_private_torch_frames_and_openers_are_named() -> None:
    text = (
        '"""What it is."""\nimport torch._ops\nfrom torch.distributed import (\na,\n_y)\nfrom torch.nn import x_\n'
        "def f():\n    from torch._dynamo import z\nframe.f_back\ntorch.load(path)\n"
    )
    problems = [problem.rpartition(": ")[2] for problem in structure.broken_rules(text, Path("a.py"))]
    assert sorted(problems) == [
        ".f_back",
        "a docstring opens with 'What'",
        "torch._dynamo.z",
        "torch._ops",
        "torch.distributed._y",
        "torch.load",
    ]
    assert len(list(structure.broken_rules(text, Path("_torch_compat.py")))) == 3


SETTINGS = (
    '[a]\nmax_lines = 90\nline_budget = 50\nmax_exports = 9\nexport_budget = 5\nlayers = [\n  ["x"],\n]\n\n'
    "[b]\nmax_lines = 90\nline_budget = 50\n"
)


def test_what_grows_is_named_with_its_limit_and_its_budget() -> None:
    rows = {"a": {"max_lines": 91, "max_exports": 9}, "b": {"max_lines": 90}}
    settings = tomllib.loads(SETTINGS)
    assert list(structure.excess("a", rows["a"], settings)) == [
        "a: 91 lines, max_lines is 90 (budget 50): delete first"
    ]
    assert not list(structure.excess("b", rows["b"], settings))
    assert list(structure.excess("c", {"max_lines": 1}, settings)) == [
        "c: structure.toml has no max_lines or no line_budget"
    ]


def test_limits_are_lowered_to_the_count_and_not_below_the_budget_and_never_raised() -> None:
    text = structure.lowered(SETTINGS, {"a": {"max_lines": 40, "max_exports": 7}, "b": {"max_lines": 91}})
    assert text == SETTINGS.replace("max_lines = 90", "max_lines = 50", 1).replace("max_exports = 9", "max_exports = 7")


def test_links_are_not_counted(tmp_path: Path) -> None:
    package, shared = tmp_path / "package", tmp_path / "shared"
    for folder in (package, shared):
        folder.mkdir()
        (folder / "a.py").write_text("1\n2\n")
    (package / "_shared").symlink_to("../shared")
    (package / "b.py").symlink_to("../shared/a.py")
    assert structure.lines(package) == 2
