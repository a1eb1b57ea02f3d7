"""From a plan to serving, on four ranks. Start it with torchrun:

    torchrun --standalone --nproc-per-node 4 main.py [--steps 120] [--dp 2 --tp 2] [--experts 8] [--report demo-report]

1. shard-spec plans the model; 2. tp-styles applies the plan, tp-ddp-bridge wraps it in DDP, it trains; 3. dp-partition
trains the same step as a data-parallel graph, and with `--experts` a mixture trains with Muon; 4. shard-reshard moves
the weights to a serving layout; 5. a report. The same step on one device is the reference throughout.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import corpus
import dp_partition
import experts
import steps
import world as worlds
from model import GPTConfig
from setting import Setting

GRAPH_STYLES = ("fully_shard", "replicate")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="training steps of the tensor-parallel run")
    parser.add_argument("--compared", type=int, default=20, help="steps that are compared with one device")
    parser.add_argument("--dp", type=int, default=2, help="data-parallel size")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size")
    parser.add_argument("--batch", type=int, default=16, help="windows in a global batch")
    parser.add_argument("--experts", type=int, default=0, help="train a mixture of so many experts with Muon as well")
    styles = [style.name.lower() for style in dp_partition.DataParallelStyle]
    parser.add_argument("--styles", nargs="+", choices=styles, default=GRAPH_STYLES, help="styles of the graph runs")
    parser.add_argument("--report", type=Path, default=Path("demo-report"), help="folder of the report")
    return parser.parse_args(argv)


def job(args: argparse.Namespace) -> None:
    world = worlds.start(args.dp, args.tp)
    if args.batch % world.size:
        raise worlds.Unfit(f"{args.batch} windows do not divide among {world.size} ranks: change --batch")
    world.say(f"{world.size} ranks on {world.device.type}: dp={args.dp} x tp={args.tp}")
    setting = Setting(
        world=world,
        config=GPTConfig(),
        text=corpus.standard_library(),
        dp=args.dp,
        tp=args.tp,
        batch=args.batch,
        num_steps=args.steps,
        num_compared=args.compared,
        styles=tuple(args.styles),
    )
    planned = steps.plan(setting)
    references = steps.train_on_one_device(setting)
    trained = steps.train_tensor_parallel(setting, planned, references)
    steps.train_as_graph(setting, references)
    if args.experts:
        experts.train_experts(setting, args.experts)
    steps.serve(setting, planned, trained)
    page = steps.write_report(setting, args.report)
    world.say(f"\nreport: {page}\n\n{setting.comparisons.table()}")


if __name__ == "__main__":
    parsed = arguments()
    code = worlds.run(lambda: job(parsed))
    # DTensor's caches hold the meshes, so gloo's worker threads outlive `destroy_process_group`. A thread that releases
    # its last tensor while the interpreter is torn down aborts a rank that has finished: end without tearing down.
    sys.stdout.flush()
    os._exit(code)
