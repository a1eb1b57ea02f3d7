"""Backends: how a rank's graph runs, with adaptations for gloo and inductor."""
