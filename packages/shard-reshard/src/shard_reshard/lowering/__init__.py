"""From a plan to bytes: steps, splits and places in memory, still without tensors."""
