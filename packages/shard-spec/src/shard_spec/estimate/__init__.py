"""Costs of a plan, bytes and seconds, computed without a tensor.

Units everywhere in this folder: bytes, seconds, bytes per second, floating point operations per second.
"""
