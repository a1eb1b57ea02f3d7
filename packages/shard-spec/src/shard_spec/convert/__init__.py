"""Conversions of a plan to other tools' terms. Each tool has a file. Inexpressible plans are refused."""
