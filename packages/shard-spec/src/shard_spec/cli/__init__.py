"""Command line: ``shard-spec plan|check|explain|diff``. Status 0: good, 1: problems, 2: wrong usage. ``--help`` is fast."""

from shard_spec.cli.main import main

__all__ = ["main"]
