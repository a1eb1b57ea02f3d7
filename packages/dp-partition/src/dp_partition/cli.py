"""The command line: ``dp-partition estimate``. ``--help`` imports neither torch nor a step."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

_EPILOG = """the step:
  MODULE:TRAIN_STEP    a function of a model, its optimizer and a batch, as dp_partition.compile takes it
  --args FACTORY       a function without arguments in the same module (or MODULE:FACTORY) that returns the step's
                       arguments as a tuple, for example (model, optim, batch); it is called on the meta device, so that
                       weights take no memory. Default: step_arguments

No GPU, no process group and no memory for weights is needed. dp_partition.estimate takes every argument of compile.

exit status: 0 good, 1 the step cannot be partitioned, 2 wrong usage"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    from dp_partition.__about__ import __version__

    parser = argparse.ArgumentParser(prog="dp-partition", description="Look at data-parallel train steps.")
    parser.add_argument("--version", action="version", version=f"dp-partition {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "estimate",
        help="bytes, collectives and live memory of a step on ranks that do not exist",
        description="Say what a train step would hold and send on one of many ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("step", metavar="MODULE:TRAIN_STEP", help="see below")
    command.add_argument("--args", metavar="FACTORY", default="step_arguments", help="see below")
    command.add_argument("--world", "--world-size", type=int, required=True, help="number of data-parallel ranks")
    command.add_argument("--style", default="default", help="replicate, zero1, zero2, fully_shard or default")
    command.add_argument("--device", help="where tensors seem to be, for example cuda (default cpu)")
    command.add_argument("--name", help="explain one parameter, by its full name")
    command.add_argument("--json", action="store_true", help="machine-readable output")
    command.add_argument("--svg", metavar="FILE", help="also write a picture of live memory")
    try:
        options = parser.parse_args(argv)
        step = _load(parser, options.step)
        where = options.args if ":" in options.args else f"{options.step.partition(':')[0]}:{options.args}"
        factory = _load(parser, where)
        import torch  # late: slow, and not for `--help`

        from dp_partition._shared.problems import PlanError
        from dp_partition.cost_estimate import estimate

        with torch.device("meta"):
            arguments = factory()
        if not isinstance(arguments, tuple):
            parser.error(f"{where} returns a {type(arguments).__name__}; it returns the step's arguments as a tuple")
        try:
            cost = estimate(step, *arguments, world=options.world, style=options.style, device=options.device)
        except PlanError as error:
            if options.json:
                print(json.dumps({"problems": [vars(problem) for problem in error.problems]}, indent=1))
            print(error, file=sys.stderr)  # stdout is for the JSON
            return 1
        try:
            if options.svg:
                cost.picture(options.svg)
                print(f"wrote {options.svg}", file=sys.stderr)
            print(cost.to_json() if options.json else cost.explain(options.name))
        except OSError as error:
            parser.error(f"cannot write {options.svg}: {error}")
        except KeyError:
            names = ", ".join(param.info.name for param in cost.plan.params[:5])
            parser.error(f"no parameter {options.name!r}; there are {names}, ...")
        return 0
    except SystemExit as stop:  # also of wrong usage
        return int(stop.code or 0)


def _load(parser: argparse.ArgumentParser, where: str) -> Any:
    module, colon, name = where.partition(":")
    if not colon or not module or not name:
        parser.error(f"{where!r} is not MODULE:NAME")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        parser.error(str(error))
    if not callable(target):
        parser.error(f"{where} is no function")
    return target


if __name__ == "__main__":
    raise SystemExit(main())
