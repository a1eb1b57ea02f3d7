"""State of shards as global tensors: full tensors or DTensors in, and sectioned shards for checkpoints."""
