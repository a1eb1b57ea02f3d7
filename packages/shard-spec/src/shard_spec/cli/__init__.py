"""Command line: ``shard-spec plan|check|explain|diff``. Status 0 is good, 1 is problems. Status 2 is wrong usage."""

from shard_spec.cli.main import main

__all__ = ["main"]
