"""`tp-styles explain`: print a plan's effects on a model, without a process group."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

GOOD, PROBLEMS, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. 0 is good, 1 problems in the plan, 2 wrong usage."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        model, plan = _load(options.model, "model"), _load(options.plan, "plan") if options.plan else None
    except (ImportError, AttributeError, ValueError) as error:
        print(f"tp-styles: {error}", file=sys.stderr)
        return USAGE
    return _explain(model, plan, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tp-styles", description="Look at tensor-parallel plans.")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="shapes and collectives of a plan on a model, and its problems")
    explain.add_argument("model", metavar="MODULE:FACTORY", help="makes the model; it is called on the meta device")
    explain.add_argument("plan", metavar="MODULE:PLAN", nargs="?", help="a dict, or makes it; default: auto_plan")
    explain.add_argument("--world-size", type=int, default=2, help="tensor-parallel ranks (default 2)")
    explain.add_argument("--whole-experts", action="store_true", help="without a plan: whole experts on each rank")
    explain.add_argument("--num-tokens", type=int, help="tokens of one step; default: bytes per token")
    explain.add_argument("--name", help="only the modules at or below this FQN")
    explain.add_argument("--json", action="store_true", help="the plan as JSON")
    return parser


def _load(where: str, what: str) -> Any:
    module, colon, name = where.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"{what}: {where!r} is not MODULE:NAME")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _explain(model: Any, plan: Any, options: argparse.Namespace) -> int:
    import torch

    from tp_styles.plan.planned import plan_styles
    from tp_styles.problems import PlanError
    from tp_styles.sources.auto import auto_plan

    with torch.device("meta"):  # no memory for weights
        module = model if isinstance(model, torch.nn.Module) else model()
    size = options.world_size
    ep_size = size if options.whole_experts else None
    if ep_size is not None and plan is not None:
        print("tp-styles: --whole-experts is for auto_plan; the plan given has its own styles", file=sys.stderr)
        return USAGE
    try:
        if plan is None:
            plan = auto_plan(module, tp_size=size, ep_size=ep_size)
        styles = plan() if callable(plan) else plan
    except PlanError as error:
        print(f"tp-styles: {error}", file=sys.stderr)
        return PROBLEMS
    planned = plan_styles(module, styles, size)
    print(planned.to_json() if options.json else planned.explain(options.name, num_tokens=options.num_tokens))
    return PROBLEMS if planned.problems else GOOD


if __name__ == "__main__":
    raise SystemExit(main())
