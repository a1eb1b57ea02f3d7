"""Bound the lines and exports of packages and tools, and check three rules.

    python tools/structure.py           fails where there are more lines or exports than `structure.toml` allows, and
                                        where a source breaks a rule that neither ruff nor import-linter knows
    python tools/structure.py --lower   after a deletion: lowers `max_lines` and `max_exports` to the present count

`line_budget` and `export_budget` in the same file are where a package has to land: a limit is lowered to them and not
below. Nothing raises a limit. Lines are those of `.py` files; what a link leads to counts once, where it stands.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import repo

SETTINGS = Path(__file__).resolve().parent / "structure.toml"
LIMITS = {"max_lines": "line_budget", "max_exports": "export_budget"}
# ruff bans what reaches a frame (`.ruff.toml`); it has no pattern for private names of torch, and none for attributes.
PRIVATE_TORCH = re.compile(r"torch(?:\.[a-z0-9]\w*)*\._")
FRAMES = re.compile(r"\.f_back\b|\.co_(?:names|consts|code|varnames)\b")
# ruff's S rules name pickle, marshal, eval, exec and yaml's loaders; these run what a file holds, too.
UNSAFE = re.compile(
    r"\b(?:torch|numpy|np|joblib|dill|cloudpickle)\.load|yaml\.(?:unsafe|full)_load|__import__\(|import.*FileSystemReader"
    r"|trust_remote_code|allow_pickle|weights_only=False"
)
OPENERS = re.compile(r"(?:what|whether|where|who|whose|how|which|whoever)\b", re.IGNORECASE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="lower the limits to what stands, not below the budgets")
    lower = parser.parse_args().lower
    text = SETTINGS.read_text()
    counted = counts()
    if lower:
        text = lowered(text, counted)
        SETTINGS.write_text(text)
    problems = [problem for name, count in counted.items() for problem in excess(name, count, tomllib.loads(text))]
    problems += [problem for source in sources() for problem in broken_rules(source.read_text(), source)]
    for name, count in counted.items():
        print(f"{name}: " + ", ".join(f"{n} {what.removeprefix('max_')}" for what, n in count.items()))
    print("\n".join(problems) or f"structure: {len(counted)} rows and {len(sources())} sources within the rules")
    return 1 if problems else 0


def counts() -> dict[str, dict[str, int]]:
    """What stands: limit -> number, for each table of `structure.toml`."""
    tools = repo.ROOT / "tools"
    rows: dict[str, dict[str, int]] = {}
    for package in repo.packages().values():
        source = package.path / "src" / package.module
        rows[package.dist] = {"max_lines": lines(source), "max_exports": exports(source / "__init__.py")}
    rows["shared"] = {"max_lines": lines(tools / "shared")}
    rows["tools"] = {"max_lines": lines(tools) - lines(tools / "shared") + _length(repo.ROOT / "noxfile.py")}
    return rows


def excess(name: str, count: dict[str, int], settings: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the limits that a row breaks, and those that it lacks."""
    row = settings.get(name, {})
    for limit, budget in LIMITS.items():
        if limit not in count:
            continue
        if limit not in row or budget not in row:
            yield f"{name}: {SETTINGS.name} has no {limit} or no {budget}"
        elif count[limit] > row[limit]:
            what = limit.removeprefix("max_")
            yield f"{name}: {count[limit]} {what}, {limit} is {row[limit]} (budget {row[budget]}): delete first"


def lowered(text: str, counted: dict[str, dict[str, int]]) -> str:
    """The settings with each limit lowered to the present count, never below the budget."""
    settings = tomllib.loads(text)
    for name, count in counted.items():
        for limit, budget in LIMITS.items():
            if limit in count:
                row = settings[name]
                new = max(count[limit], row[budget])
                if new < row[limit]:
                    table = re.compile(rf"(^\[{re.escape(name)}\]\n(?:(?!\[).*\n)*?{limit} = )\d+", re.MULTILINE)
                    text = table.sub(rf"\g<1>{new}", text)
    return text


def sources() -> list[Path]:
    """The Python files that wheels are made of, each once."""
    roots = [repo.ROOT / "tools" / "shared", *(package.path / "src" for package in repo.packages().values())]
    return [file for root in roots for file in _python_files(root)]


def broken_rules(text: str, source: Path) -> Iterator[str]:
    """Yield what a source does that no source should."""
    for match in FRAMES.finditer(text):
        yield f"{source}: looks at frames or bytecode: {match.group()}"
    for match in UNSAFE.finditer(text):
        yield f"{source}: may run what it reads: {match.group()}"
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names if not node.level]
        for name in filter(PRIVATE_TORCH.match, names):
            if source.name != "_torch_compat.py":
                yield f"{source}: private names of torch are imported in _torch_compat.py alone: {name}"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            opening = OPENERS.match(ast.get_docstring(node) or "")
            if opening:
                yield f"{source}:{getattr(node, 'lineno', 1)}: a docstring opens with {opening.group()!r}"


def lines(folder: Path) -> int:
    """Lines of the Python files under a folder, without what links lead to."""
    return sum(map(_length, _python_files(folder)))


def _python_files(folder: Path) -> list[Path]:
    files = (Path(place, file) for place, _, names in os.walk(folder) for file in names if file.endswith(".py"))
    return sorted(file for file in files if not file.is_symlink())


def _length(file: Path) -> int:
    return file.read_text().count("\n")


def exports(init: Path) -> int:
    """Names in a module's `__all__`."""
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return len(ast.literal_eval(node.value))
    raise SystemExit(f"structure: {init.relative_to(repo.ROOT)} has no __all__")


if __name__ == "__main__":
    sys.exit(main())
