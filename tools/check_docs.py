"""Run what the docs show; links are checked by `mkdocs build --strict`.

    python tools/check_docs.py run [PAGE...]  every code block of docs/ and of the READMEs, and every notebook
    python tools/check_docs.py numbers        every figure of the front page is on its package's benchmark page
    python tools/check_docs.py widths SITE    in Chromium, nothing of a page is cut at the width of a phone or a laptop

Python blocks of one page run in order, in one process and one namespace; a text block behind `<!-- output -->` is what
the block before it has to print. `<!-- run: torchrun 4 -->` before a block runs it, with the page's earlier torchrun
blocks, on that many ranks; `<!-- file: model.py -->` makes it a file that the other blocks import. Of shell blocks, the
packages' own commands run; `# exits 1` behind a command is checked. A page has one folder, with the files of
`docs_samples/` where it names one. A command that installs, launches sessions or needs a cluster is listed as not run.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import docs_hooks
import repo

FENCE = re.compile(
    r"(?:<!-- (?P<verb>run|file): (?P<how>[^>]*?) -->\s*\n)?```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
OUTPUT = re.compile(r"\s*<!-- output -->\s*\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS = tuple(repo.packages())
SAMPLES = Path(__file__).with_name("docs_samples")
SAMPLE_FILES = ("mypackage", "path/to/config.json", "model.safetensors", "before.json", "after.json")
BETWEEN = "\x1e"  # printed between blocks


@dataclass(frozen=True)
class Block:
    """One fenced block and how a page says to run it."""

    page: Path
    language: str
    code: str
    ranks: int  # 0: a plain process
    output: str | None = None  # what it has to print
    file: str | None = None  # the name under which other blocks import it


def pages() -> list[Path]:
    return [
        repo.ROOT / "README.md",
        *sorted((repo.ROOT / "docs").rglob("*.md")),
        *sorted((repo.ROOT / "docs").rglob("*.ipynb")),
        *(p.path / "README.md" for p in repo.packages().values()),
    ]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; of a notebook, those of the page that the site makes of it."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        text = docs_hooks.notebook_page(text)
        # In a notebook `%%writefile NAME` makes a file of a cell, and `!COMMAND` runs between the lines around it.
        text = re.sub(r"^```python\n%%writefile (\S+)$", r"<!-- file: \1 -->\n```python", text, flags=re.MULTILINE)
        shell = "import subprocess\nsubprocess.run({!r}, shell=True, check=True)"
        text = re.sub("^!(.*)$", lambda command: shell.format(command[1]), text, flags=re.MULTILINE)
    fenced = []
    for match in FENCE.finditer(text):
        how = (match["how"] or "").split()
        ranks = int(how[1]) if how[:1] == ["torchrun"] else 0
        output = OUTPUT.match(text, match.end())
        file = how[0] if match["verb"] == "file" else None
        fenced.append(Block(page, match["language"], match["code"], ranks, output[1] if output else None, file))
    return fenced


def write_samples(folder: Path) -> None:
    """Put the files into a folder that pages name: a model, a Hugging Face config, weights, and two plans."""
    from safetensors.torch import save_file
    from shard_spec.planners import FullyShardPlanner, MegatronPlanner

    shutil.copytree(SAMPLES, folder, dirs_exist_ok=True)
    model = runpy.run_path(str(folder / "mypackage" / "models.py"))["make"]()
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "before.json").write_text(MegatronPlanner({"tp": 8}).build_plan(model).to_json())
    (folder / "after.json").write_text(FullyShardPlanner({"dp": 8}).build_plan(model).to_json())


def run_page(page: Path) -> tuple[int, list[str], list[str]]:
    """Returns the number of blocks and commands run, what failed, and what was not run."""
    python: dict[int, list[Block]] = {}
    commands, left = [], []
    on_page = blocks(page)
    for block in on_page:
        if block.language in ("python", "py") and block.file is None:
            python.setdefault(block.ranks, []).append(block)
        elif block.language in ("sh", "bash", "shell", "console"):
            for line in filter(None, map(str.strip, block.code.replace("\\\n", " ").splitlines())):
                if line.removeprefix("$ ").startswith(COMMANDS):
                    commands.append(line.removeprefix("$ "))
                elif not line.startswith("#"):
                    left.append(line)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if commands or any(sample in block.code for block in on_page for sample in SAMPLE_FILES):
            write_samples(folder)
        for block in on_page:
            if block.file is not None:
                (folder / block.file).write_text(block.code)
        failed = _run_commands(commands, page, folder)
        for ranks, same in python.items():
            failed += _run_python(same, ranks, page, folder)
    return len(commands) + sum(map(len, python.values())), failed, left


def _run_python(same: list[Block], ranks: int, page: Path, folder: Path) -> list[str]:
    script = folder / "page.py"
    # A gloo thread may abort a process while Python ends (docs/troubleshooting.md): a page that is through is right.
    end = "\nimport os, sys\nsys.stdout.flush(), sys.stderr.flush()\nos._exit(0)\n" if ranks else ""
    script.write_text(f"\nprint({BETWEEN!r})\n".join(block.code for block in same) + end)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    completed = _call([sys.executable, *launch, str(script)], folder)
    failed = _failure(completed, page)
    if not failed and not ranks:
        printed = completed.stdout.split(BETWEEN + "\n")
        for block, text in zip(same, printed, strict=True):
            if block.output is not None and _plain(text) != _plain(block.output):
                failed.append(f"{page.relative_to(repo.ROOT)} shows another output than this:\n{text}")
    return failed


def _plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def _run_commands(commands: list[str], page: Path, folder: Path) -> list[str]:
    failed = []
    for command in commands:
        status = re.search(r"# exits (\d+)", command)
        failed += _failure(_call(["bash", "-ec", command], folder), page, int(status[1]) if status else 0)
    return failed


def _call(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # notebooks call torchrun
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "PATH": search_path}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300)


def _failure(done: subprocess.CompletedProcess[str], page: Path, status: int = 0) -> list[str]:
    if done.returncode == status:
        return []
    # Under torchrun the first rank's error comes first, then those of the others, then the launcher's own report.
    error = done.stderr.split("Traceback")[:2][-1]
    tail = f"{done.stdout[-2000:]}{error[-4000:]}"
    return [f"{page.relative_to(repo.ROOT)}: exit {done.returncode}: {done.args[-1][:120]}\n{tail}"]


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


def numbers() -> int:
    readme = (repo.ROOT / "README.md").read_text()
    front = readme.split("[start:numbers]")[1].split("[end:numbers]")[0]
    figures = re.findall(r"^\| ([a-z-]+) \| (.*) \|$", front, re.MULTILINE)
    figures += [("dp-partition-steps", text) for text in re.findall(r"\d+ of \d+ steps as .*?, \d+ as", readme)]
    wrong, checked = [], 0
    for name, text in figures:
        page = repo.ROOT / "docs" / "benchmarks" / f"{name}.md"
        for figure in re.findall(r"\d+\.\d+" if name in repo.packages() else r"\d+", text) if page.exists() else ():
            checked += 1
            wrong += [] if figure in page.read_text() else [f"{name}: {figure} is not in docs/benchmarks/{name}.md"]
    print("\n".join(wrong) or f"front page: {checked} figures, all on the benchmark pages")
    return 1 if wrong or not checked else 0


def widths(site: Path) -> int:
    """Load each page in frames of 390 and 1,280 pixels; tables and code scroll inside, nothing else is wider."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("widths: not checked, this machine has no Chromium (Debian: apt-get install chromium)")
        return 0
    loads = [(str(page.relative_to(site)), width) for page in sorted(site.rglob("*.html")) for width in (390, 1280)]
    frames = site / "widths.html"
    frames.write_text(Path(__file__).with_name("widths.html").read_text().replace("LOADS", json.dumps(loads)))
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
        command = [browser, *flags, f"--user-data-dir={profile}", "--dump-dom", frames.as_uri()]
        completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    frames.unlink()
    measured = re.findall(r"^(?:.*>)?(\d+) (\d+) (\S+)$", completed.stdout, re.MULTILINE)
    wide = [f"widths: {page}: {right} pixels at {width}" for width, right, page in measured if int(right) > int(width)]
    wide += [] if len(measured) == len(loads) > 0 else [f"widths: {len(measured)} of {len(loads)} pages were shown"]
    print("\n".join(wide) or f"widths: {len(measured)} pages at 390 and 1,280 pixels, nothing cut")
    return 1 if wide else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", *names]:
            sys.exit(run([Path(name).resolve() for name in names] or pages()))
        case ["numbers"]:
            sys.exit(numbers())
        case ["widths", site]:
            sys.exit(widths(Path(site).resolve()))
        case _:
            raise SystemExit(__doc__)
