"""Capture: run a train step on fakes, and record a graph of one device.

`state` finds the modules and optimizers among the arguments, `fakes` replaces their tensors, `tracer`
records. `fingerprint` and `inputs` have a graph's dependencies beside shapes.
"""
