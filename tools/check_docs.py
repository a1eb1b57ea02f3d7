"""Run what the docs show, and check where their links lead.

    python tools/check_docs.py run [PAGE...]  every code block of docs/ and of the packages' READMEs
    python tools/check_docs.py links site     every link inside the built site

Python blocks of one page run in order, in one process and one namespace. `<!-- run: torchrun 4 -->` before a block runs
it, with the page's earlier torchrun blocks, on that many ranks. Of shell blocks, the packages' own commands run, a
page's in one folder with the files of `docs_samples.py`; `# exits 1` behind a command is checked. What installs,
launches sessions or needs a cluster is listed as not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import docs_samples
import repo

FENCE = re.compile(
    r"(?:<!-- run: (?P<how>[^>]*?) -->\s*\n)?```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE
)
COMMANDS = tuple(repo.packages())


@dataclass(frozen=True)
class Block:
    """One fenced block and how a page says to run it."""

    page: Path
    language: str
    code: str
    ranks: int  # 0: a plain process


def pages() -> list[Path]:
    return [
        repo.ROOT / "README.md",
        *sorted((repo.ROOT / "docs").rglob("*.md")),
        *(p.path / "README.md" for p in repo.packages().values()),
    ]


def blocks(page: Path) -> list[Block]:
    found = []
    for match in FENCE.finditer(page.read_text()):
        how = (match["how"] or "").split()
        ranks = int(how[1]) if how[:1] == ["torchrun"] else 0
        found.append(Block(page, match["language"], match["code"], ranks))
    return found


def run_page(page: Path) -> tuple[int, list[str], list[str]]:
    """Returns the number of blocks and commands run, what failed, and what was not run."""
    python: dict[int, list[str]] = {}
    commands, left = [], []
    for block in blocks(page):
        if block.language in ("python", "py"):
            python.setdefault(block.ranks, []).append(block.code)
        elif block.language in ("sh", "bash", "shell", "console"):
            for line in filter(None, map(str.strip, block.code.replace("\\\n", " ").splitlines())):
                if line.removeprefix("$ ").startswith(COMMANDS):
                    commands.append(line.removeprefix("$ "))
                elif not line.startswith("#"):
                    left.append(line)
    failed = _run_commands(commands, page)
    for ranks, codes in python.items():
        failed += _run_python("\n".join(codes), ranks, page)
    return len(commands) + sum(map(len, python.values())), failed, left


def _run_python(code: str, ranks: int, page: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "page.py"
        script.write_text(code)
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        return _call([sys.executable, *launch, str(script)], page, Path(folder))


def _run_commands(commands: list[str], page: Path) -> list[str]:
    if not commands:
        return []
    with tempfile.TemporaryDirectory() as folder:
        docs_samples.write(Path(folder))
        failed = []
        for command in commands:
            told = re.search(r"# exits (\d+)", command)
            failed += _call(["bash", "-ec", command], page, Path(folder), int(told[1]) if told else 0)
        return failed


def _call(command: list[str], page: Path, folder: Path, status: int = 0) -> list[str]:
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode == status:
        return []
    said = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return [f"{page.relative_to(repo.ROOT)}: exit {done.returncode}: {command[-1][:120]}\n{said}"]


def run(chosen: list[Path]) -> int:
    total, failed = 0, []
    for page in chosen:
        num_run, wrong, left = run_page(page)
        total += num_run
        failed += wrong
        print(f"{'FAILED' if wrong else 'ok':>6}  {num_run:>3} run  {page.relative_to(repo.ROOT)}", flush=True)
        for line in left:
            print(f"{'':>16}not run: {line}")
    print("\n".join(failed) or f"docs: {total} blocks run")
    return 1 if failed or not total else 0


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.update(filter(None, (values.get("id"), values.get("name"))))
        if target := values.get("href" if tag in ("a", "link") else "src"):
            self.targets.append(target)


def links(site: Path) -> int:
    parsed = {file.resolve(): _parse(file) for file in site.rglob("*.html")}
    broken, checked = [], 0
    for file, page in parsed.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or file.name == "404.html":
                continue
            checked += 1
            aim = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            aim = aim / "index.html" if aim.is_dir() else aim
            anchor_missing = parts.fragment and aim in parsed and unquote(parts.fragment) not in parsed[aim].ids
            if not aim.exists() or anchor_missing:
                broken.append(f"{file.relative_to(site.resolve())}: {target}")
    print("\n".join(broken) or f"links: {checked} inside {len(parsed)} pages, none broken")
    return 1 if broken or not checked else 0


def _parse(file: Path) -> _Links:
    parser = _Links()
    parser.feed(file.read_text())
    return parser


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", *names]:
            sys.exit(run([Path(name).resolve() for name in names] or pages()))
        case ["links", folder]:
            sys.exit(links(Path(folder)))
        case _:
            raise SystemExit(__doc__)
