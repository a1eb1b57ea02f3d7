"""Checkpoint files as sources: validated headers, planned byte ranges, loads onto ranks.

Nothing in a file is executed, and every needed byte is read once, by one rank.
"""
