"""Copies of the sources in tools/shared; edit them there and run tools/sync_shared.py."""
