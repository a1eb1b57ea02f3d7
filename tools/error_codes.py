"""The error codes of all packages: one table of cause and remedy, and a page that every code leads to.

    python tools/error_codes.py           every code has a row, every row a code, the page is current   (nox -s lint)
    python tools/error_codes.py --write   write docs/errors.md

`tools/error_codes.toml` holds cause and remedy. A code is the first argument of a `Problem` in a package's sources; one
that stands in a variable is found by its row.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict

import repo

# What makes a problem; `refusal` is shard-reshard's error of one problem.
CALLS = ("Problem", "refusal")
TABLE = repo.ROOT / "tools" / "error_codes.toml"
PAGE = repo.ROOT / "docs" / "errors.md"
HEAD = """# Error codes

A `PlanError` lists its problems, one a line: `[code] name, dim, axis: what was found -> what to do`. Programs compare
`problem.code`. The same fact has the same code in all five packages. `errors.md#CODE` is the address of a code.
"""


def raised(rows: set[str]) -> tuple[dict[str, set[str]], set[str]]:
    """Return the packages that raise each code of ``rows``, and the codes of a `Problem` that have no row."""
    users: dict[str, set[str]] = defaultdict(set)
    unknown: set[str] = set()
    for package in repo.packages().values():
        for path in filter(lambda file: file.suffix == ".py", repo.source_files(package.path / "src")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and node.value in rows:
                    users[str(node.value)].add(package.dist)
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in CALLS and node.args:
                    code = node.args[0]
                    if isinstance(code, ast.Constant) and code.value not in rows:
                        unknown.add(f"{path.relative_to(repo.ROOT)}:{node.lineno}: {code.value!r}")
    return users, unknown


def page(rows: dict[str, dict[str, str]], users: dict[str, set[str]]) -> str:
    """Return the page, a heading for each code: the site and GitHub both make an anchor of it."""
    parts = [HEAD]
    for code, row in sorted(rows.items()):
        packages = ", ".join(sorted(users[code]))
        parts.append(f"## {code}\n\n{row['cause']}\n\n**Remedy:** {row['remedy']} *({packages})*\n")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    rows = tomllib.loads(TABLE.read_text())
    users, unknown = raised(set(rows))
    wrong = [f"no row in {TABLE.name}: {line}" for line in sorted(unknown)]
    wrong += [f"raised nowhere: {code}" for code in sorted(set(rows) - set(users))]
    text = page(rows, users)
    if "--write" in arguments:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        wrong.append(f"{PAGE.name} is not current: python tools/error_codes.py --write")
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"error codes: {len(rows)}, {sum(len(each) for each in users.values())} uses of a code by a package")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
