"""Modules of a model as planners see them. `linear` reads layers and heads; `block_simulator` runs a block's ranks."""
