"""Entry point: parses arguments and returns 0 (good), 1 (problems found) or 2 (wrong usage)."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence

from shard_spec.cli.usage import UsageError

_MODELS = """models:
  MODULE:FACTORY                 an importable function (or class) that makes the model, called on the meta device
  config.json, a folder with one a Hugging Face config; needs transformers
  llama-3.1-70b, qwen3-30b-a3b   a common model by its name; an unknown one lists all names
  weights.safetensors            names, shapes and dtypes of the header, to check; also .safetensors.index.json

No GPU, no process group and no memory for weights is needed.

exit status: 0 good, 1 problems found, 2 wrong usage"""


# Codes of errors of the command line, not of a plan.
_ARGUMENTS = {
    "invalid-argument",
    "unsupported-dtype",
    "undeclared-axis",
    "unknown-axis",
    "does-not-divide",
    "conflicting-arguments",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = _parser().parse_args(argv)
    from shard_spec._shared.problems import PlanError
    from shard_spec.cli import commands  # imports torch: --help and errors of arguments stay fast

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names from files may hold letters that the terminal lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        status: int = getattr(commands, f"run_{arguments.command}")(arguments)
    except UsageError as error:
        print(f"shard-spec: {error}", file=sys.stderr)
        return 2
    except PlanError as error:
        if arguments.json:
            print(json.dumps({"problems": [vars(problem) for problem in error.problems]}, indent=1))
        typed = {problem.code for problem in error.problems} <= _ARGUMENTS
        print(f"shard-spec: {error}" if typed else error, file=sys.stderr)
        return 2 if typed else 1
    except BrokenPipeError:
        return 0  # the reader closed early, as head does
    return status


def _parser() -> argparse.ArgumentParser:
    from shard_spec.__about__ import __version__

    description = "Say, check and explain how a model's tensors lie on ranks."
    parser = argparse.ArgumentParser(prog="shard-spec", description=description)
    parser.add_argument("--version", action="version", version=f"shard-spec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    plan = _add(commands, "plan", "make a plan for a model and print its cost")
    plan.add_argument("model")
    plan.add_argument("--mesh", help="axes and sizes, for example dp=128,tp=8")
    planners = "stage, megatron, expert, fsdp, joined by +, or auto: by the axes pp, tp, ep, and fsdp or dp"
    plan.add_argument("--planner", default="auto", help=planners)
    plan.add_argument("--out", metavar="FILE", help="write the plan there, as JSON")
    _costs(plan)

    search = _add(commands, "search", "compare meshes and planners for a number of ranks, in one table")
    search.add_argument("model")
    search.add_argument("--ranks", type=int, required=True, help="number of ranks, for example 16")
    _costs(search, page=False)

    check = _add(commands, "check", "list every problem of a plan for a model")
    check.add_argument("model")
    check.add_argument("plan", help="a plan file (JSON)")
    _costs(check)

    explain = _add(commands, "explain", "explain a plan, or one tensor of it")
    explain.add_argument("plan", help="a plan file (JSON)")
    explain.add_argument("name", nargs="?", help="FQN of a parameter or buffer")
    explain.add_argument("--model", help="the model, for reasons and local shapes")

    diff = _add(commands, "diff", "compare two plans; exit status 1 when they differ")
    diff.add_argument("before")
    diff.add_argument("after")
    diff.add_argument("--model", help="the model, to compare tensors instead of rules")
    for each in (explain, diff):
        each.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _add(commands, name: str, text: str) -> argparse.ArgumentParser:  # type: ignore[no-untyped-def]  # argparse keeps the type private
    kind, description = argparse.RawDescriptionHelpFormatter, text[0].upper() + text[1:] + "."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, epilog=_MODELS, formatter_class=kind)
    parser.description = description
    return parser


def _costs(parser: argparse.ArgumentParser, *, page: bool = True) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    if page:
        parser.add_argument("--html", metavar="FILE", help="write a page with pictures there")
    names = (
        "adamw (default), sgd, mixed-adamw, whole-muon, none, ...; or PATTERN=NAME, once for each group of parameters"
    )
    parser.add_argument("--optimizer", action="append", metavar="NAME", help=names)
    parser.add_argument("--dtype", help="dtype of all floating tensors, for example bfloat16")
    plain = "count plain weights where a config has a quantization_config: a model that is dequantised for training"
    parser.add_argument("--dequantize", action="store_true", help=plain)
    parser.add_argument("--memory-limit", metavar="SIZE", help="memory one rank has, with a unit: 80GiB, 80GB, 512MiB")
    axes = "axes along which ranks see different samples, for example dp,fsdp; default: as planned, then by name"
    parser.add_argument("--data-axes", metavar="AXES", help=axes)
    parser.add_argument("--batch", metavar="SxL", help="sequences x length of a global step, for example 512x8192")
    parser.add_argument("--loss", help="causal-lm (default), vocab-parallel or none")
    parser.add_argument("--checkpointing", action="store_true", help="each repeated block is recomputed in backward")
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="batches before the optimizer's step, 1 by default; --batch is one of them",
    )
    parser.add_argument("--topology", help="machine to tell times for: h100-sxm, a100-sxm-80gb, ...")
