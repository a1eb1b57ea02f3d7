"""Backends: how a rank's graph is run, and what gloo and inductor want otherwise."""
