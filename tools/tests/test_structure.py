"""tools/structure.py names a package that grows, a class that widens, a circle and a source that breaks a rule."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
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


SETTINGS = """[every]
max_fields = 2
max_function_lines = 5
usual_function_lines = 4

[a]
max_statements = 90
target_statements = 50
max_exports = 9
target_exports = 5
circles = ["a.x -> a.y"]
bought = { "pairs of weights and scales" = 10 }
layers = [
  ["x"],
]

[a.more_fields]
"a.x.Wide" = 4
"a.x.Once" = 3

[b]
max_statements = 90
target_statements = 50
"""
IMPORTS = {"a.x": {"a.y"}, "a.y": {"a.x"}}
FIELDS = {"a.x.Wide": 4, "a.x.Once": 3}


def problems(name: str, **counts: object) -> list[str]:
    row: dict[str, object] = {"imports": IMPORTS, "fields": FIELDS} if name == "a" else {}
    return list(structure.excess(name, structure.Measure(**(row | counts)), tomllib.loads(SETTINGS)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        (
            {"max_statements": 101},
            "a: 101 statements, 100 are allowed (target 50): delete first, or name under `bought` what they buy",
        ),
        ({"max_exports": 10}, "a: 10 exports, 9 are allowed (target 5): delete first"),
        ({"fields": FIELDS | {"a.y.New": 3}}, "a: a.y.New has 3 fields, 2 are allowed"),
        ({"fields": FIELDS | {"a.x.Wide": 5}}, "a: a.x.Wide has 5 fields, 4 are allowed"),
        ({"fields": {"a.x.Wide": 4}}, "a: a.x.Once needs no exception for its fields any more: run --lower"),
        ({"lengths": {"a.f": 6}}, "a: a.f has 6 lines, 5 are allowed"),
        ({"imports": IMPORTS | {"a.z": {"a.z2"}, "a.z2": {"a.z"}}}, "a: imports in a circle: a.z -> a.z2 -> a.z"),
        ({"imports": {"a.y": {"a.x"}}}, "a: a.x -> a.y is no import any more: delete it from `circles`"),
    ],
)
def test_each_excess_is_named_with_its_limit(counts: dict[str, object], problem: str) -> None:
    assert problems("a", max_statements=100, max_exports=9) == []
    at_limit: dict[str, object] = {"max_statements": 100, "max_exports": 9}
    usual = "a: 95 % of the functions have at most 6 lines, 4 are allowed"
    assert problems("a", **(at_limit | counts)) == [problem] + [usual] * ("lengths" in counts)


def test_a_package_without_limits_is_named() -> None:
    assert problems("c", max_statements=1) == ["c: structure.toml has no max_statements or no target_statements"]


def test_limits_are_lowered_to_the_count_and_not_below_the_target_and_never_raised() -> None:
    a = structure.Measure(40, 7, fields={"a.x.Wide": 3, "a.x.Once": 2})
    text = structure.lowered(SETTINGS, {"a": a, "b": structure.Measure(91)})
    expected = SETTINGS.replace("max_statements = 90", "max_statements = 40", 1).replace(
        "max_exports = 9", "max_exports = 7"
    )
    assert text == expected.replace('Wide" = 4', 'Wide" = 3').replace('"a.x.Once" = 3\n', "")
    assert structure.lowered(text, {"a": a, "b": structure.Measure(91)}) == text


def test_comments_docstrings_and_links_are_free_and_typing_only_imports_count(tmp_path: Path) -> None:
    package, shared = tmp_path / "package", tmp_path / "shared"
    for folder in (package, shared):
        folder.mkdir()
    code = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package import b\nclass A:\n    x: int\n"
    code += "    def f(self):\n        from package import c\n        self.y = 1\n"
    (package / "a.py").write_text(code)
    (package / "b.py").write_text("import package.a\n")
    (package / "c.py").write_text("")
    (shared / "d.py").write_text("x = 1\n")
    (package / "_shared").symlink_to("../shared")
    (package / "d.py").symlink_to("../shared/d.py")

    def counted() -> structure.Measure:
        return structure.measure(structure._python_files(package), tmp_path)

    bare = counted()
    assert bare == structure.Measure(
        9,
        None,
        {"package.a.A": 2},
        {"package.a.f": 3},
        {"package.a": {"package.b"}, "package.b": {"package.a"}, "package.c": set()},
    )
    (package / "a.py").write_text("# A comment\n\n" + code.replace("self):\n", "self):\n        # Another.\n", 1))
    assert counted().max_statements == bare.max_statements
    assert structure.import_circle(bare.imports, []) == ["package.a", "package.b", "package.a"]
