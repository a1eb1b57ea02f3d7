"""Analysis of one rank's graph. Nothing is run. `comms` lists its collectives, `memory` its live tensors."""
