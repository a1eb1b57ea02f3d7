"""Capture: run a train step on fakes, and record it as one graph of one device.

`state` finds the modules and optimizers among the arguments, `fakes` puts stand-ins in their tensors' places, `tracer`
records. `fingerprint` and `hyperparameters` are what a graph depends on beside shapes.
"""
