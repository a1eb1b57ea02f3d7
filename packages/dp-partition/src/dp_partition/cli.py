"""The command line: ``dp-partition estimate``. ``--help`` imports neither torch nor a step."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

GOOD, PROBLEMS, USAGE = 0, 1, 2

_EPILOG = """the step:
  MODULE:TRAIN_STEP    a function of a model, its optimizer and a batch, as dp_partition.compile takes it
  --args FACTORY       a function without arguments in the same module (or MODULE:FACTORY) that returns the step's
                       arguments as a tuple, for example (model, optim, batch); it is called on the meta device, so that
                       weights take no memory. Default: step_arguments

No GPU, no process group and no memory for weights is needed. dp_partition.estimate takes every argument of compile.

exit status: 0 good, 1 the step cannot be partitioned, 2 wrong usage"""


class UsageError(Exception):
    """Wrong usage; the message shows the right one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        estimated = _estimate(options)
    except UsageError as error:
        print(f"dp-partition: {error}", file=sys.stderr)
        return USAGE
    if isinstance(estimated, Exception):
        problems: Any = getattr(estimated, "problems", ())
        if options.json:
            print(json.dumps({"problems": [vars(problem) for problem in problems]}, indent=1))
        print(estimated, file=sys.stderr)  # stdout is for the JSON
        return PROBLEMS
    return _show(estimated, options)


def _parser() -> argparse.ArgumentParser:
    from dp_partition.__about__ import __version__

    parser = argparse.ArgumentParser(prog="dp-partition", description="Look at data-parallel train steps.")
    parser.add_argument("--version", action="version", version=f"dp-partition {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    estimate = commands.add_parser(
        "estimate",
        help="bytes, collectives and live memory of a step on ranks that do not exist",
        description="Say what a train step would hold and send on one of many ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    estimate.add_argument("step", metavar="MODULE:TRAIN_STEP", help="see below")
    estimate.add_argument("--args", metavar="FACTORY", default="step_arguments", help="see below")
    estimate.add_argument("--world", "--world-size", type=int, required=True, help="number of data-parallel ranks")
    estimate.add_argument("--style", default="default", help="replicate, zero1, zero2, fully_shard or default")
    estimate.add_argument("--device", help="where tensors seem to be, for example cuda (default cpu)")
    estimate.add_argument("--name", help="explain one parameter, by its full name")
    estimate.add_argument("--json", action="store_true", help="machine-readable output")
    estimate.add_argument("--svg", metavar="FILE", help="also write a picture of live memory")
    return parser


def _estimate(options: argparse.Namespace) -> Any:
    """Return the estimate, or the error in place of one."""
    step = _load(options.step, "the step")
    where = options.args if ":" in options.args else f"{options.step.partition(':')[0]}:{options.args}"
    factory = _load(where, "--args")
    from dp_partition._shared.problems import PlanError
    from dp_partition.cost_estimate import estimate  # late: it imports torch

    arguments = _arguments(factory, where)
    try:
        return estimate(step, *arguments, world=options.world, style=options.style, device=options.device)
    except PlanError as error:
        return error


def _arguments(factory: Any, where: str) -> tuple[Any, ...]:
    """Return the step's arguments, made on the meta device."""
    import torch  # late: slow, and not for `--help`

    with torch.device("meta"):
        arguments = factory()
    if not isinstance(arguments, tuple):
        raise UsageError(f"{where} returns a {type(arguments).__name__}; it returns the step's arguments as a tuple")
    return arguments


def _load(where: str, what: str) -> Any:
    module, colon, name = where.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"{what}: {where!r} is not MODULE:NAME")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{what}: {error}") from None  # the user's import error is enough
    if not callable(target):
        raise UsageError(f"{what}: {where} is no function")
    return target


def _show(found: Any, options: argparse.Namespace) -> int:
    if options.svg:
        try:
            found.picture(options.svg)
        except OSError as error:
            print(f"dp-partition: cannot write {options.svg}: {error}", file=sys.stderr)
            return USAGE
        print(f"wrote {options.svg}", file=sys.stderr)
    try:
        print(found.to_json() if options.json else found.explain(options.name))
    except KeyError:
        reason = ", ".join(param.info.name for param in found.plan.params[:5])
        print(f"dp-partition: no parameter {options.name!r}; there are {reason}, ...", file=sys.stderr)
        return USAGE
    return GOOD


if __name__ == "__main__":
    raise SystemExit(main())
