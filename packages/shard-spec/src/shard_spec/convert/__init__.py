"""Conversions: a plan in the terms of other tools. What a target cannot say is refused by name, never approximated."""
