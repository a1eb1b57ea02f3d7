"""The structure lint finds what it is for."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lint_structure


def modules(**sources: str) -> dict[str, ast.Module]:
    return {name.replace("__", "."): ast.parse(text) for name, text in sources.items()}


def test_circles_are_found_through_imports_in_functions() -> None:
    trees = modules(p__a="from p.b import x\n", p__b="def f():\n    from p.a import y\n", p__c="from p.a import y\n")
    found = lint_structure.measure("p", trees)
    assert found["circle_files"] == ["p.a", "p.b"]
    assert found["imports_in_functions"] == ["p.b:2"]


def test_type_checking_imports_make_no_circle() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import y\n"
    assert lint_structure.measure("p", modules(p__a="from p.b import x\n", p__b=source))["circle_files"] == []


def test_private_torch_frames_and_openers_are_found() -> None:
    source = (
        '"""What it is."""\nimport sys\nfrom torch._ops import x\nfrom torch.distributed import _y\nsys._getframe(1)\n'
    )
    found = lint_structure.measure("p", modules(p__a=source, p___torch_compat="import torch._dynamo\n"))
    assert found["private_torch"] == ["p.a:3", "p.a:4"]
    assert found["frames_and_bytecode"] == ["p.a: sys._getframe"]
    assert len(found["docstring_openers"]) == 1


def test_layers_go_down_only() -> None:
    trees = modules(p__api="from p.plan.x import a\n", p__plan__x="", p__plan__y="from p.api import b\n", p__odd="")
    found = list(lint_structure.layer_problems("p", trees, [["api"], ["plan"]]))
    assert found == [
        "p.plan.y:1 imports p.api.b, which does not lie below it",
        "p.odd stands in no layer of structure.toml",
    ]
    assert list(lint_structure.layer_problems("p", modules(p__a="from p.b import x\n", p__b=""), [["a", "b"]]))
