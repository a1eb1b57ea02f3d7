"""Error codes of all packages: one table of causes and remedies, a page for each package, an index by code.

    python tools/error_codes.py           every code has a row, every row a code, the pages are current   (nox -s lint)
    python tools/error_codes.py --write   write docs/errors.md and docs/errors/PACKAGE.md

`tools/error_codes.toml` holds cause and remedy. A code is the first argument of a `Problem` in a package's sources; a
code that stands in a variable is found by its row. A code that several packages raise is on each of their pages: a user
of one package reads one page.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict

import repo

TABLE = repo.ROOT / "tools" / "error_codes.toml"
INDEX = repo.ROOT / "docs" / "errors.md"
INDEX_HEAD = """# Error codes

A `PlanError` lists its problems, one a line: `[code] name, dim, axis: what was found -> what to do`. Programs compare
`problem.code`. The same fact has the same code in all five packages. `errors.md#CODE` is the address of a code; the
remedy stands on the page of the package that raised it.

| code | cause | remedy, by package |
|---|---|---|
"""
PAGE_HEAD = """# Error codes of {dist}

{dist} raises these {count} codes. [All codes of all packages](../errors.md).
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
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Problem", "refusal")) and node.args:
                    code = node.args[0]
                    if isinstance(code, ast.Constant) and code.value not in rows:
                        unknown.add(f"{path.relative_to(repo.ROOT)}:{node.lineno}: {code.value!r}")
    return users, unknown


def index(rows: dict[str, dict[str, str]], users: dict[str, set[str]]) -> str:
    """Return the index of all codes: the cause of each, and links to the remedy on each package's page."""
    lines = []
    for code, row in sorted(rows.items()):
        pages = ", ".join(f"[{dist}](errors/{dist}.md#{code})" for dist in sorted(users[code]))
        cause = row["cause"].replace("|", "\\|")
        lines.append(f'| <a id="{code}"></a>`{code}` | {cause} | {pages} |\n')
    return INDEX_HEAD + "".join(lines)


def page(rows: dict[str, dict[str, str]], users: dict[str, set[str]], dist: str) -> str:
    """Return a package's page, a heading for each code: the site and GitHub both make an anchor of it."""
    codes = [code for code in sorted(rows) if dist in users[code]]
    parts = [PAGE_HEAD.format(dist=dist, count=len(codes))]
    parts += [f"## {code}\n\n{rows[code]['cause']}\n\n**Remedy:** {rows[code]['remedy']}\n" for code in codes]
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    rows = tomllib.loads(TABLE.read_text())
    users, unknown = raised(set(rows))
    wrong = [f"no row in {TABLE.name}: {line}" for line in sorted(unknown)]
    wrong += [f"raised nowhere: {code}" for code in sorted(set(rows) - set(users))]
    texts = {INDEX: index(rows, users)}
    texts |= {INDEX.parent / "errors" / f"{dist}.md": page(rows, users, dist) for dist in repo.packages()}
    for path, text in texts.items():
        if "--write" in arguments:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            wrong.append(f"{path.relative_to(repo.ROOT)} is not current: python tools/error_codes.py --write")
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"error codes: {len(rows)}, {sum(len(each) for each in users.values())} uses of a code by a package")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
