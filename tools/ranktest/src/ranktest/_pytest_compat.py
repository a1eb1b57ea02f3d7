"""Every private pytest name this plugin uses. Read against pytest 9.2."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest import config as pytest_config
from _pytest import pathlib as pytest_pathlib
from _pytest._code import Traceback
from _pytest.assertion import util

from ranktest.job import Job, Outcome


def make_config(args: list[str]) -> pytest.Config:
    """A configuration as a pytest run with these arguments has; importing under it rewrites asserts."""
    # pytest warns that the server has imported this plugin before, and so without rewritten asserts
    return pytest_config._prepareconfig([*args, "-W", "ignore::pytest.PytestAssertRewriteWarning"])


def import_test_module(config: pytest.Config, path: Path) -> ModuleType:
    """Import a test module exactly as pytest's collection does."""
    mode = config.getoption("importmode")
    return pytest_pathlib.import_path(
        path,
        mode=mode,
        root=config.rootpath,
        consider_namespace_packages=bool(config.getini("consider_namespace_packages")),
    )


def apply_warning_filters(config: pytest.Config, marks: tuple[str, ...]) -> None:
    """Set the warning filters of a test: pytest's defaults, the ini file's, the command line's, the marks'."""
    warnings.filterwarnings("always", category=DeprecationWarning)
    warnings.filterwarnings("always", category=PendingDeprecationWarning)
    cmdline = config.known_args_namespace.pythonwarnings or []
    pytest_config.apply_warning_filters(config.getini("filterwarnings"), cmdline)
    for arg in marks:
        warnings.filterwarnings(*pytest_config.parse_warning_filter(arg, escape=False))


@contextlib.contextmanager
def assertion_details(config: pytest.Config) -> Iterator[None]:
    """Let rewritten asserts explain comparisons, as they do in a normal run."""

    def explain(op: str, left: object, right: object) -> str | None:
        for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
            if lines:
                return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    saved = util._reprcompare, util._config
    util._reprcompare, util._config = explain, config
    try:
        yield
    finally:
        util._reprcompare, util._config = saved


def outcome_of(config: pytest.Config, rank: int, problem: BaseException, job: Job) -> Outcome:
    """Turn a body's error into an outcome, its traceback from the test module on."""
    if isinstance(problem, pytest.skip.Exception):
        return Outcome(rank, "skipped", str(problem), str(problem))
    if isinstance(problem, pytest.xfail.Exception):
        return Outcome(rank, "xfailed", str(problem), str(problem))
    info = pytest.ExceptionInfo.from_exception(problem)
    cut = info.traceback.cut(path=Path(job.path))
    if cut != info.traceback:
        cut = cut.filter(info)
    if cut:
        info.traceback = cut
    style: Any = {"auto": "long", "no": "line"}.get(job.tbstyle, job.tbstyle)
    if job.tbstyle == "auto":
        # the frames of the test in full, those of torch in a line or two
        info.traceback = Traceback(
            entry if str(entry.path) == job.path else entry.with_repr_style("short") for entry in info.traceback
        )
    if isinstance(problem, pytest.fail.Exception) and not problem.pytrace:
        text = str(problem)
    else:
        text = str(info.getrepr(style=style, chain=True, truncate_locals=True))
    return Outcome(rank, "failed", text, info.exconly(tryshort=True).splitlines()[0][:300])
