"""Conversions: a plan in the terms of other tools, refused by name where a target cannot express it."""
