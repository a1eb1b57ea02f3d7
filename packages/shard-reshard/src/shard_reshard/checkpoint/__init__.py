"""Checkpoint files as sources: headers that are checked, byte ranges that are planned, loads onto ranks.

Nothing in a file is executed, and every byte that is wanted is read once, by one rank.
"""
