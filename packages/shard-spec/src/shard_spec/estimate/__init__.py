"""Costs of a plan. They are computed without a tensor. Units: bytes, seconds, bytes or operations a second."""
