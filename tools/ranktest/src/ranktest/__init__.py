"""Test bodies that run on many ranks."""
