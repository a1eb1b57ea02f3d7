"""Arguments that several commands share, as values."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from shard_spec.cli.sources import load_model
from shard_spec.cli.usage import UsageError
from shard_spec.estimate.cost import PRESETS, Topology, topology_preset
from shard_spec.formatting import bytes_of

if TYPE_CHECKING:
    from torch import nn

    from shard_spec.plan.metadata import ModelMetadata


def load(arguments: argparse.Namespace) -> nn.Module | ModelMetadata:
    """Return the model."""
    return load_model(arguments.model, dequantize=arguments.dequantize)


def data_axes_of(arguments: argparse.Namespace) -> list[str] | None:
    """Return the declared data axes; None: as planned, then by name."""
    return None if arguments.data_axes is None else [each.strip() for each in arguments.data_axes.split(",") if each]


def limit_of(arguments: argparse.Namespace) -> int | None:
    """Return the memory of a rank in bytes."""
    return None if arguments.memory_limit is None else bytes_of(arguments.memory_limit, "--memory-limit")


def batch_of(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """Return sequences and their length."""
    if arguments.batch is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", arguments.batch)
    if match is None:
        raise UsageError(f"--batch {arguments.batch!r}: write sequences x length, for example 512x8192")
    return int(match[1]), int(match[2])


def topology_of(arguments: argparse.Namespace) -> Topology | None:
    """Return the machine."""
    if not arguments.topology:
        return None
    if arguments.topology not in PRESETS:
        raise UsageError(f"--topology {arguments.topology!r}: one of {', '.join(sorted(PRESETS))}")
    return topology_preset(arguments.topology)


def step_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a step; those of no effect without a batch are refused."""
    given = ("--checkpointing", arguments.checkpointing), ("--loss", arguments.loss)
    useless = [name for name, value in (*given, ("--accumulate", arguments.accumulate != 1)) if value]
    if arguments.batch is None and useless:
        raise UsageError(f"{useless[0]} has no effect without --batch, for example --batch 512x8192")
    options: dict[str, Any] = {"dtype": arguments.dtype, "checkpointing": arguments.checkpointing}
    options["loss"] = None if arguments.loss == "none" else arguments.loss or "causal-lm"
    return options | {"data_axes": data_axes_of(arguments), "accumulate": arguments.accumulate}


def optimizer_of(arguments: argparse.Namespace) -> Any:
    """Return the optimizer: a name, or a mapping from patterns of parameters to names."""
    given: list[str] = arguments.optimizer or ["adamw"]
    pairs = [text.rpartition("=") for text in given]
    if len(given) == 1 and not pairs[0][1]:
        return given[0]
    if not all(pattern and name for pattern, _, name in pairs):
        raise UsageError("--optimizer: one NAME, or PATTERN=NAME for each group, for example '**.weight=whole-muon'")
    return {pattern: name for pattern, _, name in pairs}
