"""Command line: ``shard-spec plan|check|explain|diff``. ``--help`` imports no torch."""

from shard_spec.cli.main import main

__all__ = ["main"]
