"""Lowering: what lies between collectives is compiled by inductor, the rest of a rank's graph runs as it is."""
