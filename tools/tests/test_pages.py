"""Pages and docstrings name only files, tests, classes and functions that are there."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "folder", "least"), [("design/dp-partition-tests", "packages/dp-partition/tests", 31), ("refused", "", 18)]
)
def test_the_tests_that_a_page_names_are_there(name: str, folder: str, least: int) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    named = re.findall(r"`((?:[\w-]+/)*test_\w+)(?:\.py)?::(test_\w+)`", page)
    assert len(named) >= least
    places = [ROOT / folder, ROOT / "packages"]
    for file, test in named:
        text = "".join(path.read_text() for place in places if (path := place / f"{file}.py").exists())
        assert f"def {test}(" in text, f"{file}::{test}"


def test_the_files_that_pages_name_are_there() -> None:
    pages = [*(ROOT / "docs" / "design").glob("*.md"), ROOT / ".github" / "CONTRIBUTING.md"]
    path = re.compile(r"`([\w./-]+(?:/|\.(?:py|md|toml|cfg|yml)))`")
    named = [(page.name, name) for page in pages for name in path.findall(page.read_text())]
    packages = ROOT / "packages"
    places = [ROOT, *packages.iterdir(), *packages.glob("*/src/*"), *packages.glob("*/tests"), ROOT / "tools"]
    assert len(named) > 60
    assert [(page, name) for page, name in named if not any((place / name).exists() for place in places)] == []


def test_the_tests_that_the_first_hour_runs_are_there() -> None:
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    commands = re.findall(r"(?:cd packages/(\S+) && )?uv run pytest (tests/\S+?\.py)(?: -k (\w+))?", text)
    assert len(commands) == 3
    folder = ROOT
    for package, file, word in commands:  # a command without `cd` runs where the one before it did
        folder = ROOT / "packages" / package if package else folder
        assert re.search(rf"^def test_\w*{word}", (folder / file).read_text(), re.MULTILINE), f"{file} -k {word}"


# ---- names of ours
# Words in code type that name nothing in these sources: other libraries' names, and values that users write.
OTHERS = {
    "accelerate": {"ParallelismConfig", "_validate_accelerator", "set_trigger"},
    "torch": {
        "FileSystemReader.read_metadata",
        "add_param_group",
        "get_ema_avg_fn",
        "get_ema_multi_avg_fn",
        "get_optimizer_state_dict",
        "nn.init.orthogonal_",
        "pow_",
    },
    "torch, private or of other versions": {
        "spectral_norm",
        "split_group",
        "torch.distributed._spmd",
        "torch.library.get_kernel",
        "torch.testing._internal.distributed._tensor.common_dtensor.Transformer",
    },
    "transformers": {"BatchEncoding", "UserDict", "k_norm", "q_norm", "to_dict()"},
    "vLLM": {"nccl_m2n", "vllm.general_plugins"},
    "kinds of a changelog entry": {"deprecated", "security"},
    "a keyword, a symbol of a formula, default names of axes, a file": {
        "yield",
        "x_i",
        "axis0",
        "axis1",
        "shard1",
        "slurm.sbatch",
    },
}
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")


def sources() -> list[Path]:
    """The Python files of this repository, each once: files that a link leads to are read where they stand."""
    folders = [*ROOT.glob("packages/*/src"), *ROOT.glob("packages/*/tests"), ROOT / "tools", ROOT / "integration_tests"]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return [file for file in files if file.resolve() == file] + [ROOT / "noxfile.py"]


@functools.cache
def words_of_code() -> set[str]:
    """Each identifier of the sources, and each word of their strings: names of axes, fields of files. No docstrings."""
    words: set[str] = set()
    for file in sources():
        words.update(file.relative_to(ROOT).with_suffix("").parts)
        tree = ast.parse(file.read_text())
        docstrings = {id(node.body[0].value) for node in documented(tree) if isinstance(node.body[0], ast.Expr)}
        for node in ast.walk(tree):
            for field in ("id", "attr", "arg", "name", "asname", "module"):
                if isinstance(value := getattr(node, field, None), str):
                    words.update(value.split("."))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                words.update(re.findall(r"\w+", node.value))
    return words


def documented(tree: ast.Module) -> list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The nodes of a source that may carry a docstring."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and node.body]


def names_in(text: str) -> list[str]:
    """The identifiers in code type: `name`, ``package.name`` or `name()`; blocks of code are no prose."""
    spans = re.findall(r"``([^`\n]+)``|`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [name for pair in spans if IDENTIFIER.fullmatch(name := "".join(pair))]


def is_there(name: str) -> bool:
    """Return True if a name occurs in the sources, is a public name of torch, or belongs to another library."""
    if any(name in others for others in OTHERS.values()):
        return True
    parts = name.removesuffix("()").split(".")
    if parts[0] == "torch":
        target: object = torch
        for at, part in enumerate(parts[1:], 2):
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join(parts[:at]))
            target = getattr(target, part, None)
        return target is not None
    return all(part in words_of_code() for part in parts)


def test_a_page_names_nothing_that_the_sources_lack() -> None:
    pages = [*(ROOT / "docs" / "design").glob("*.md"), ROOT / ".github" / "CONTRIBUTING.md"]
    pages += [ROOT / "tools" / "ranktest" / "README.md", *ROOT.glob("packages/*/README.md")]
    named = [(page.relative_to(ROOT), name) for page in pages for name in names_in(page.read_text())]
    assert len(named) > 300
    assert [(str(page), name) for page, name in named if not is_there(name) and not (page.parent / name).exists()] == []


def test_a_readme_is_read_in_four_minutes() -> None:
    lengths = {page.parent.name: len(page.read_text().split()) for page in ROOT.glob("packages/*/README.md")}
    assert len(lengths) == 5
    assert {name: words for name, words in lengths.items() if words > 900} == {}


def test_a_docstring_names_nothing_that_the_sources_lack() -> None:
    named = [
        (f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", name)
        for file in sources()
        for node in documented(ast.parse(file.read_text()))
        for name in names_in(ast.get_docstring(node) or "")
    ]
    assert len(named) > 800
    assert [(place, name) for place, name in named if not is_there(name)] == []


def test_a_name_that_was_deleted_is_found() -> None:
    gone = "split_" + "module"  # deleted from dp-partition while a page still described it
    assert names_in(f"`{gone}` separates; ``text.{gone}``, `torch.nn.Linear`, ```\n`code`\n``` and `a b`") == [
        gone, f"text.{gone}", "torch.nn.Linear",
    ]  # fmt: skip
    assert not is_there(gone) and not is_there(f"text.{gone}") and not is_there(f"torch.{gone}")
    assert is_there("torch.nn.Linear") and is_there("ShardingPlan.apply()")


def test_a_folder_of_tests_is_about_a_folder_or_module_of_the_sources() -> None:
    folders = [
        (source, folder.relative_to(package / "tests"))
        for package in (ROOT / "packages").iterdir()
        for source in (package / "src").iterdir()
        for folder in (package / "tests").rglob("*")
        if folder.is_dir() and not any(part.startswith(("_", ".")) for part in folder.relative_to(package).parts)
    ]
    assert len(folders) > 15
    assert [str(f) for source, f in folders if not (source / f).is_dir() and not (source / f"{f}.py").exists()] == []
