"""What runs in the forward and backward pass: collectives with gradients, local compute, hooks."""
