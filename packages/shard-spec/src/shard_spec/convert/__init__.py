"""Conversions of a plan to other tools' terms; inexpressible plans are refused."""
