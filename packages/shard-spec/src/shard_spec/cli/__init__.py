"""Command line: ``shard-spec plan|check|explain|diff``. Exit status: 0 good, 1 problems, 2 usage. ``--help`` needs no torch."""

from shard_spec.cli.main import main

__all__ = ["main"]
