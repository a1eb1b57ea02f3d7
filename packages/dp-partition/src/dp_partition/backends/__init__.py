"""Backends run the graph of a rank. `gloo` adapts it to CPU collectives. `inductor` compiles its stretches."""
