"""Decisions. Patterns and styles become a decision for every module. No process group is needed."""
