"""Check the structure inside each package against `structure.toml`: layers, import circles, where imports stand.

Numbers in `structure.toml` are exceptions of packages that are not rebuilt yet. They may only shrink: a package that
is better than its number fails too, until the number is lowered. A package without a row has to be clean.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import repo

SETTINGS = Path(__file__).resolve().parent / "structure.toml"
RULES = {
    "circle_files": "modules in import circles (imports inside functions count)",
    "imports_in_functions": "imports of own modules inside functions, outside command lines",
    "private_torch": "imports of torch's private modules outside _torch_compat.py",
    "frames_and_bytecode": "looks at callers' frames, bytecode or the garbage collector",
    "docstring_openers": "docstrings that open with What, Whether, Where, Who, Whose, Which or How",
}
OPENERS = ("what", "whether", "where", "who", "whose", "how", "which", "whoever")
NOT_OURS = re.compile(
    r"sys\._getframe|\.f_back\b|\.co_(?:names|consts|code|varnames)\b|gc\.get_(?:referrers|objects)|currentframe"
)
PRIVATE_TORCH = re.compile(r"^torch(?:\.[a-z0-9]\w*)*\._|^torch\.testing\._internal")


def main() -> int:
    settings = tomllib.loads(SETTINGS.read_text())
    failures = 0
    for package in repo.packages().values():
        row: dict[str, Any] = dict(settings.get(package.dist, {}))
        layers = row.pop("layers", None)
        modules = dict(_modules(package.path / "src" / package.module))
        for rule, places in measure(package.module, modules).items():
            allowed = row.pop(rule, 0)
            if len(places) == allowed:
                continue
            failures += 1
            better = len(places) < allowed
            say = f"lower the number in {SETTINGS.name}" if better else "; ".join(sorted(places)[:12])
            print(f"{package.dist}: {len(places)} {RULES[rule]}, {allowed} allowed: {say}")
        if row:
            failures += 1
            print(f"{package.dist}: {SETTINGS.name} has unknown keys {', '.join(row)}")
        for problem in layer_problems(package.module, modules, layers) if layers else ():
            failures += 1
            print(f"{package.dist}: {problem}")
    print(f"structure: {len(repo.packages())} packages, {failures} problems")
    return 1 if failures else 0


def _modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        yield ".".join(parts), ast.parse(path.read_text())


def measure(package: str, modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return rule -> places that break it."""
    found: dict[str, list[str]] = {rule: [] for rule in RULES}
    graph: dict[str, set[str]] = {}
    for name, tree in modules.items():
        in_functions = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        own: set[str] = set()
        for node, target in imports(tree):
            place = f"{name}:{node.lineno}"
            if target.split(".")[0] == package:
                own.add(_module_of(target, modules))
                if id(node) in in_functions and "cli" not in name.split("."):
                    found["imports_in_functions"].append(place)
            elif PRIVATE_TORCH.match(target) and not name.endswith("_torch_compat"):
                found["private_torch"].append(place)
        if not name.endswith("__init__"):  # an __init__ only hands names on
            graph[name] = own - {name}
        for doc in filter(None, map(ast.get_docstring, _documented(tree))):
            if doc.split()[0].strip("`*,:").lower() in OPENERS:
                found["docstring_openers"].append(f"{name}: {doc.splitlines()[0][:40]}")
        for match in NOT_OURS.finditer(ast.unparse(tree)):
            found["frames_and_bytecode"].append(f"{name}: {match.group()}")
    found["circle_files"] = [name for name in graph if name in _reachable(graph, name)]
    return found


def imports(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Yield every import of a module with the full names it imports; those for type checkers left out."""
    typing = {
        id(n)
        for b in ast.walk(tree)
        if isinstance(b, ast.If) and "TYPE_CHECKING" in ast.dump(b.test)
        for n in ast.walk(b)
    }
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def _documented(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _module_of(target: str, modules: dict[str, ast.Module]) -> str:
    """Return the module that an imported name lives in."""
    for name in (target, target.rpartition(".")[0]):
        for candidate in (name, f"{name}.__init__"):
            if candidate in modules:
                return candidate
    return target


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph.get(name, ())
    return seen


def layer_problems(package: str, modules: dict[str, ast.Module], layers: list[list[str]]) -> Iterator[str]:
    """Yield imports that go up, and modules that stand in no layer.

    Args:
        package: Name of the package's top module.
        modules: Its modules.
        layers: From top to bottom, the names in each that are directly under the package. Names in one layer do not
            import each other.
    """
    level = {name: at for at, names in enumerate(layers) for name in names}
    for name, tree in modules.items():
        first = _below(name)
        if first not in level:
            if first not in ("__init__", "__about__"):
                yield f"{name} stands in no layer of {SETTINGS.name}"
            continue
        for node, target in imports(tree):
            if target.split(".")[0] != package:
                continue
            other = _below(_module_of(target, modules))
            if other in level and other != first and level[other] <= level[first]:
                yield f"{name}:{node.lineno} imports {target}, which does not lie below it"


def _below(module: str) -> str:
    return module.split(".")[1]


if __name__ == "__main__":
    sys.exit(main())
