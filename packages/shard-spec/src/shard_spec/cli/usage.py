"""Errors of the command line's arguments."""

from __future__ import annotations


class UsageError(Exception):
    """Wrong arguments; the message names the right ones."""
