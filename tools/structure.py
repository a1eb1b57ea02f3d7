"""Bound statements, exports, fields, function lengths and import circles of the packages, and check four rules.

    python tools/structure.py           fails where a package has more than `structure.toml` allows, and where a source
                                        breaks a rule that neither ruff nor import-linter knows
    python tools/structure.py --lower   after a deletion: lowers `max_statements` and `max_exports` to the present
                                        count, never below the target, and drops exceptions that are no longer needed

Statements are nodes of the syntax tree (`ast.stmt`): comments, blank lines and the length of a docstring are free.
`max_statements` is only ever lowered. New work is paid for by name: `"Pair: weights with scales" = 180` in the table
`[shard-reshard.bought]` adds 180 statements to that limit. A file that a link leads to counts once, where it stands.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import repo

SETTINGS = Path(__file__).resolve().parent / "structure.toml"
RATCHETS = {"max_statements": "target_statements", "max_exports": "target_exports"}
# ruff bans functions that reach a frame (`.ruff.toml`); it has no pattern for private names of torch or for attributes.
PRIVATE_TORCH = re.compile(r"torch(?:\.[a-z0-9]\w*)*\._")
FRAMES = re.compile(r"\.f_back\b|\.co_(?:names|consts|code|varnames)\b")
# ruff's S rules name pickle, marshal, eval, exec and yaml's loaders; these calls run code of a file, too.
UNSAFE = re.compile(
    r"\b(?:torch|numpy|np|joblib|dill|cloudpickle)\.load|yaml\.(?:unsafe|full)_load|__import__\(|import.*FileSystemReader"
    r"|trust_remote_code|allow_pickle|weights_only=False"
)
OPENERS = re.compile(r"(?:what|whether|where|who|whose|how|which|whoever)\b", re.IGNORECASE)


@dataclass
class Measure:
    """Counts of one package: names of classes and functions are `module.Class` and `module.function`."""

    max_statements: int = 0
    max_exports: int | None = None
    fields: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    imports: dict[str, set[str]] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="lower the limits to the present counts")
    lower = parser.parse_args().lower
    text = SETTINGS.read_text()
    measures = measure_all()
    if lower:
        text = lowered(text, measures)
        SETTINGS.write_text(text)
    settings = tomllib.loads(text)
    problems = [problem for name, counted in measures.items() for problem in excess(name, counted, settings)]
    problems += [problem for source in sources() for problem in broken_rules(source.read_text(), source)]
    for name, counted in measures.items():
        target = settings.get(name, {}).get("target_statements")
        exports = "" if counted.max_exports is None else f", {counted.max_exports} exports"
        print(f"{name}: {counted.max_statements} statements (target {target}){exports}")
    print("\n".join(problems) or f"structure: {len(measures)} rows and {len(sources())} sources within the rules")
    return 1 if problems else 0


def measure_all() -> dict[str, Measure]:
    """The counts of each table of `structure.toml`."""
    tools = repo.ROOT / "tools"
    rows: dict[str, Measure] = {}
    for package in repo.packages().values():
        source = package.path / "src" / package.module
        rows[package.dist] = measure(_python_files(source), source.parent)
        rows[package.dist].max_exports = exports(source / "__init__.py")
    rows["shared"] = measure(_python_files(tools / "shared"), tools)
    others = [file for file in _python_files(tools) if tools / "shared" not in file.parents]
    rows["tools"] = measure([*others, repo.ROOT / "noxfile.py"], repo.ROOT)
    return rows


def measure(files: list[Path], root: Path) -> Measure:
    """Count the statements, fields, function lengths and imports of modules that are named from `root`."""
    result = Measure()
    modules = {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    for module, file in modules.items():
        tree = ast.parse(file.read_text())
        nodes = list(ast.walk(tree))
        result.max_statements += sum(isinstance(node, ast.stmt) for node in nodes)
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                result.fields[f"{module}.{node.name}"] = num_fields(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                name = f"{module}.{node.name}"  # methods of one name in a module: the longest counts
                result.lengths[name] = max(node.end_lineno - node.lineno + 1, result.lengths.get(name, 0))
        if file.name != "__init__.py":  # an __init__ hands on names of its own modules
            result.imports[module] = set(_imports(tree, modules)) - {module}
    return result


def num_fields(node: ast.ClassDef) -> int:
    """Annotated names of a class body, and names that its methods assign to `self`."""
    names = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and isinstance(inner.value, ast.Name):
            names |= {inner.attr} if inner.value.id == "self" else set()
    return len(names)


def _imports(tree: ast.Module, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules among `modules` that a file imports outside of functions, under TYPE_CHECKING as well."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (names & modules.keys()) or ({node.module} & modules.keys())


def excess(name: str, counted: Measure, settings: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the limits that a package breaks, and those that its table lacks."""
    every, row = settings["every"], settings.get(name, {})
    for limit, target in RATCHETS.items():
        count = getattr(counted, limit)
        if count is None:
            continue
        if limit not in row or target not in row:
            yield f"{name}: {SETTINGS.name} has no {limit} or no {target}"
        elif count > (allowed := _allowed(row, limit)):
            noun = limit.removeprefix("max_")
            way_on = "delete first, or name under `bought` what they buy" if noun == "statements" else "delete first"
            yield f"{name}: {count} {noun}, {allowed} are allowed (target {row[target]}): {way_on}"
    for noun, counts, limit in (
        ("fields", counted.fields, every["max_fields"]),
        ("lines", counted.lengths, every["max_function_lines"]),
    ):
        excepted = row.get(f"more_{noun}", {})
        for item, count in counts.items():
            if count > excepted.get(item, limit):
                yield f"{name}: {item} has {count} {noun}, {excepted.get(item, limit)} are allowed"
        for item in excepted:
            if counts.get(item, 0) <= limit:
                yield f"{name}: {item} needs no exception for its {noun} any more: run --lower"
    lengths = sorted(counted.lengths.values())
    usual = lengths[int(0.95 * (len(lengths) - 1))] if lengths else 0
    if usual > row.get("usual_function_lines", every["usual_function_lines"]):
        yield f"{name}: 95 % of the functions have at most {usual} lines, {every['usual_function_lines']} are allowed"
    for pair in row.get("circles", []):
        importer, _, imported = pair.partition(" -> ")
        if imported not in counted.imports.get(importer, ()):
            yield f"{name}: {pair} is no import any more: delete it from `circles`"
    if circle := import_circle(counted.imports, row.get("circles", [])):
        yield f"{name}: imports in a circle: {' -> '.join(circle)}"


def _allowed(row: dict[str, Any], limit: str) -> int:
    bought = sum(row.get("bought", {}).values()) if limit == "max_statements" else 0
    return int(row[limit]) + bought


def import_circle(imports: dict[str, set[str]], excepted: list[str]) -> list[str]:
    """The first circle of imports, typing-only ones included, without the excepted `importer -> imported` pairs."""
    graph = {
        name: {other for other in others if f"{name} -> {other}" not in excepted} for name, others in imports.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))  # graphlib names the imported module first
    return []


def lowered(text: str, measures: dict[str, Measure]) -> str:
    """The settings with each ratchet lowered to the present count, and without exceptions that nothing needs."""
    settings = tomllib.loads(text)
    for name, counted in measures.items():
        row = settings[name]
        for limit, target in RATCHETS.items():
            count = getattr(counted, limit)
            if count is not None and max(count, row[target]) < _allowed(row, limit):
                new = max(count, row[target]) - (_allowed(row, limit) - row[limit])
                table = re.compile(rf"(^\[{re.escape(name)}\]\n(?:(?!\[).*\n)*?{limit} = )\d+", re.MULTILINE)
                text = table.sub(rf"\g<1>{new}", text)
        for noun, counts in (("fields", counted.fields), ("lines", counted.lengths)):
            limit = settings["every"]["max_fields" if noun == "fields" else "max_function_lines"]
            for item, excepted in row.get(f"more_{noun}", {}).items():
                count = counts.get(item, 0)
                entry = f'"{item}" = {min(count, excepted)}\n' if count > limit else ""
                text = text.replace(f'"{item}" = {excepted}\n', entry)
    return text


def sources() -> list[Path]:
    """The Python files of the packages' wheels, each once."""
    roots = [repo.ROOT / "tools" / "shared", *(package.path / "src" for package in repo.packages().values())]
    return [file for root in roots for file in _python_files(root)]


def broken_rules(text: str, source: Path) -> Iterator[str]:
    """Yield each use of frames, of private torch or of unsafe loading, and each docstring with a relative opener."""
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


def _python_files(folder: Path) -> list[Path]:
    """The `.py` files under a folder, without links: `_shared` of a package is counted in `tools/shared`."""
    files = (Path(place, file) for place, _, names in os.walk(folder) for file in names if file.endswith(".py"))
    return sorted(file for file in files if not file.is_symlink())


def exports(init: Path) -> int:
    """The number of names in a module's `__all__`."""
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return len(ast.literal_eval(node.value))
    raise SystemExit(f"structure: {init.relative_to(repo.ROOT)} has no __all__")


if __name__ == "__main__":
    sys.exit(main())
