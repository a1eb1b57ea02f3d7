"""Command line: ``shard-reshard explain``. ``--help`` imports neither torch nor a plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

_EPILOG = """layouts:
  "8: S(0)"                      8 ranks, each a shard of dim 0
  "2x4: S(1), R"                 a mesh of 2 by 4 ranks: shard dim 1 along the first axis, replicate along the second
  "dp=2, tp=4: tp:S(0)"          the same with names; axes that are not named replicate
  "4: S(0) on ranks 4..7"        other ranks of the union group
  "rank 0"                       everything on one rank
placements: R, S(dim), P(sum), U(dim,[sizes]), B(dim,block), I(dim,[sections])

exit status: 0 good, 1 the plan has problems, 2 wrong usage"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="shard-reshard", description="Plan how tensors change their layout.")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser(
        "explain",
        help="who sends what to whom, bytes against the lower bound, memory",
        description="Say what a reshard would do. Needs no process group and no tensor.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("--shape", required=True, help="global shape, for example 8192,8192")
    explain.add_argument("--src", required=True, help="where the tensor is, see below")
    explain.add_argument("--dst", required=True, help="where it is to be")
    explain.add_argument("--dtype", default="float32", help="dtype of the source (default: float32)")
    explain.add_argument("--out-dtype", default=None, help="dtype of the destination (default: the source's)")
    explain.add_argument("--max-workspace-bytes", type=int, default=None, help="bound of a rank's buffers")
    explain.add_argument("--hosts", type=int, default=None, help="ranks of a host (default: all links are alike)")
    arguments = parser.parse_args(argv)
    try:
        shape = tuple(int(size) for size in arguments.shape.split(",") if size.strip())
    except ValueError:
        print(f"shard-reshard: --shape {arguments.shape!r} is not a list of numbers like 8192,8192", file=sys.stderr)
        return 2
    from shard_reshard._shared.problems import PlanError
    from shard_reshard.planning import plan_reshard

    try:
        plan = plan_reshard(
            shape,
            arguments.dtype,
            arguments.src,
            arguments.dst,
            out_dtype=arguments.out_dtype,
            max_workspace_bytes=arguments.max_workspace_bytes,
            hosts=arguments.hosts,
        )
        print(plan.explain())
    except PlanError as error:
        print(error, file=sys.stderr)
        return 1  # the problems are on stderr
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
