"""Command line: ``shard-spec plan|search|check|explain|diff``. Status 0 is good, 1 problems, 2 wrong usage."""

from shard_spec.cli.main import main

__all__ = ["main"]
